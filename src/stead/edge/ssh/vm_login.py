"""SSH connections into VMs: the gateway logs in to the VM's own OpenSSH server."""

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncssh

from stead.edge.ssh.algorithms import limit_key_exchanges, modern_algorithms
from stead.edge.ssh.server_link import OpenedVm, ServerLink, VmUnreachable
from stead.tasks import in_background

_ATTEMPTS = 3
"""Logins that may be interrupted by a suspend or the end of the VM."""
_HOST_KEY_KINDS = ("ssh-ed25519 ", "ecdsa-sha2-", "ssh-rsa ")
_KEY = b"ssh-ed25519"


class _ServerKey(asyncssh.SSHKeyPair):
    """A key that the server has: it signs."""

    def __init__(self, server: ServerLink, public_data: bytes) -> None:
        super().__init__(_KEY, _KEY, (_KEY,), (_KEY,), public_data, None)
        self._server = server

    async def sign_async(self, data: bytes) -> bytes:
        return await self._server.sign(data)


class _VmClient(asyncssh.SSHClient):
    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        # The SSH server of a VM is as hostile as a client.
        limit_key_exchanges(conn)


async def log_in(server: ServerLink, vm: str, user: str, timeout: float) -> asyncssh.SSHClientConnection:
    """Wake or start a VM and log in. Raises VmUnreachable."""
    for _ in range(_ATTEMPTS):
        opened = await server.open()
        async with in_background(_connect(server, opened, vm, user, timeout)) as login:
            either: set[asyncio.Future[Any]] = {login, server.suspended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            server.catch_up()
            if login.done() and not (server.suspended.done() and login.exception()):
                connection = login.result()
                server.logged_in()
                return connection
    raise VmUnreachable(f"{server.suspended.result()} during the login")


async def _connect(
    server: ServerLink, opened: OpenedVm, vm: str, user: str, timeout: float
) -> asyncssh.SSHClientConnection:
    try:
        return await asyncssh.connect(
            sock=opened.connection,
            config=None,
            username=user,
            client_factory=_VmClient,
            client_keys=[_ServerKey(server, opened.public_key)],
            known_hosts=(_trusted(vm, opened.host_keys), [], []),
            agent_path=None,
            preferred_auth="publickey",
            client_version="Stead",
            login_timeout=timeout,
            # A VM is not kept awake by them, and TCP would end a connection to one that sleeps.
            keepalive_interval=0,
            tcp_keepalive=False,
            **modern_algorithms(),
        )
    except asyncssh.PermissionDenied as error:
        raise VmUnreachable(
            f"VM {vm} does not let {user} log in: the account must exist and have a login shell, and sshd"
            " must have its AuthorizedKeysCommand /usr/local/bin/fetch-ssh-keys"
        ) from error
    except (asyncssh.Error, OSError) as error:
        opened.connection.close()
        raise VmUnreachable(f"the SSH server of VM {vm} failed: {error}") from error


def _trusted(vm: str, lines: Sequence[str]) -> list[asyncssh.SSHKey]:
    found = []
    for line in lines:
        if line.startswith(_HOST_KEY_KINDS):
            try:
                found.append(asyncssh.import_public_key(line))
            except asyncssh.KeyImportError as error:
                raise VmUnreachable(f"VM {vm} has an invalid SSH host key: {error}") from error
    if not found:
        raise VmUnreachable(f"VM {vm} has no SSH host key")
    return found
