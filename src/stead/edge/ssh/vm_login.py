"""SSH connections into VMs: the gateway logs in to the VM's own OpenSSH server."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import asyncssh

from stead.deadlines import scaled
from stead.edge.ssh.host_key import public_line
from stead.errors import GuestError, SteadError
from stead.guest.agent import Agent
from stead.guest.ssh import admit_gateway
from stead.machines import Machines
from stead.machines.events import Use
from stead.machines.start import Attached
from stead.tasks import in_background

_PORT = 22
_LISTEN_TIMEOUT = scaled(30.0)
"""Seconds to wait for the SSH server: after a boot it listens later than the agent answers."""
_POLL = 0.1
_ATTEMPTS = 3
"""Logins that may be interrupted by a suspend or the end of the VM."""
_LOGIN_TIMEOUT = scaled(60.0)
_HOST_KEY_KINDS = ("ssh-ed25519 ", "ecdsa-sha2-", "ssh-rsa ")


class VmLoginFailed(SteadError):
    """The VM cannot be logged in to; the message is for the client, who may use this VM."""


@dataclass(frozen=True)
class VmLogin:
    attached: Attached
    connection: asyncssh.SSHClientConnection


class VmLogins:
    """Logs in to VMs, by a key for each run of a VM that only this object knows.

    A copy of a VM does not accept the key of the original: its agent forgets it with the old identity.
    """

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._keys: WeakKeyDictionary[Agent, asyncssh.SSHKey] = WeakKeyDictionary()

    async def open(self, vm: str, user: str) -> VmLogin:
        """Wake or start a VM and log in. Raises SteadError."""
        for _ in range(_ATTEMPTS):
            attached = await self._machines.attached(vm, Use.SSH)
            with attached.lease():
                async with in_background(self._log_in(vm, user, attached)) as login:
                    either: set[asyncio.Future[Any]] = {login, attached.eviction}
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    if login.done() and not (attached.eviction.done() and login.exception()):
                        return login.result()
        raise VmLoginFailed(f"{attached.eviction.result().reason} during the login")

    async def _log_in(self, vm: str, user: str, attached: Attached) -> VmLogin:
        key = self._key(attached.agent)
        try:
            host_keys = await admit_gateway(attached.agent, vm, public_line(key))
        except GuestError as error:
            raise VmLoginFailed(f"VM {vm} does not prepare SSH: {error}") from error
        try:
            async with asyncio.timeout(_LISTEN_TIMEOUT):
                link = await self._dial(vm)
        except TimeoutError as error:
            raise VmLoginFailed(
                f"nothing listens on port {_PORT} of VM {vm}: run `systemctl start ssh.socket` in it"
            ) from error
        try:
            connection = await asyncssh.connect(
                sock=link,
                config=None,
                username=user,
                client_keys=[key],
                known_hosts=(_trusted(vm, host_keys), [], []),
                agent_path=None,
                preferred_auth="publickey",
                client_version="Stead",
                compression_algs=["none"],
                login_timeout=_LOGIN_TIMEOUT,
                # A VM is not kept awake by them, and TCP would end a connection to one that sleeps.
                keepalive_interval=0,
                tcp_keepalive=False,
            )
        except asyncssh.PermissionDenied as error:
            raise VmLoginFailed(
                f"VM {vm} does not let {user} log in: the account must exist and have a login shell, and sshd"
                " must have its AuthorizedKeysCommand /usr/local/bin/fetch-ssh-keys"
            ) from error
        except (asyncssh.Error, OSError) as error:
            link.close()
            raise VmLoginFailed(f"the SSH server of VM {vm} failed: {error}") from error
        return VmLogin(attached, connection)

    async def _dial(self, vm: str) -> socket.socket:
        while True:
            try:
                return await self._machines.dial(vm, _PORT)
            except OSError:
                await asyncio.sleep(_POLL)

    def _key(self, agent: Agent) -> asyncssh.SSHKey:
        key = self._keys.get(agent)
        if key is None:
            key = self._keys[agent] = asyncssh.generate_private_key("ssh-ed25519", comment="stead-gateway")
        return key


def _trusted(vm: str, lines: Sequence[str]) -> list[asyncssh.SSHKey]:
    found = []
    for line in lines:
        if line.startswith(_HOST_KEY_KINDS):
            try:
                found.append(asyncssh.import_public_key(line))
            except asyncssh.KeyImportError as error:
                raise VmLoginFailed(f"VM {vm} has an invalid SSH host key: {error}") from error
    if not found:
        raise VmLoginFailed(f"VM {vm} has no SSH host key")
    return found
