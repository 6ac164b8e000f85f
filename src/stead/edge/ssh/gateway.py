"""The SSH gateway: listens for clients of all VMs."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import asyncssh

from stead.deadlines import scaled
from stead.edge.ssh.access import Access
from stead.edge.ssh.client import Client, GatewayLimits, TooManyConnections
from stead.edge.ssh.failures import ConnectionPlaces, FailureLimit
from stead.edge.ssh.host_key import load_host_key, public_line
from stead.edge.ssh.vm_login import VmLogins
from stead.identity.callers import Callers
from stead.identity.identities import Identities
from stead.machines import Machines
from stead.tasks import KeyedLimit

_LOGIN_TIMEOUT = scaled(30.0)
_KEEPALIVE = 60.0
"""Seconds without anything from a client after which it is asked for a sign of life."""
_KEEPALIVES = 4
_UNAUTHENTICATED = 200
_UNAUTHENTICATED_PER_ADDRESS = 20
_FAILURES_OF_ADDRESS = 20
_FAILURES_OF_VM = 100
_FAILURE_INTERVAL = 6.0


def default_limits(connections: int) -> GatewayLimits:
    share = max(1, connections // 2)
    return GatewayLimits(
        unauthenticated=ConnectionPlaces(_UNAUTHENTICATED, _UNAUTHENTICATED_PER_ADDRESS),
        by_address=FailureLimit(_FAILURES_OF_ADDRESS, _FAILURE_INTERVAL),
        by_vm=FailureLimit(_FAILURES_OF_VM, _FAILURE_INTERVAL),
        connections=KeyedLimit(connections, share, max_wait=0, busy=lambda: TooManyConnections(share)),
    )


class SshGateway:
    """One address for all VMs. Clients log in by tokens; VMs see only the gateway's own keys."""

    def __init__(
        self,
        folder: Path,
        callers: Callers,
        identities: Identities,
        machines: Machines,
        limits: GatewayLimits,
    ) -> None:
        """The host key is in `folder`."""
        self._key = load_host_key(folder)
        self._access = Access(callers, identities, machines)
        self._logins = VmLogins(machines)
        self._machines = machines
        self._limits = limits
        self._clients: set[Client] = set()
        # It logs user names, which may hold tokens.
        logging.getLogger("asyncssh").setLevel(logging.CRITICAL)

    @property
    def host_key(self) -> str:
        """The public host key, as in known_hosts."""
        return public_line(self._key)

    @contextlib.asynccontextmanager
    async def serving(self, listening: socket.socket) -> AsyncIterator[None]:
        """Serve on a bound socket during a block; then all connections are closed."""
        acceptor = await asyncssh.listen(
            sock=listening,
            server_factory=self._client,
            server_host_keys=[self._key],
            server_version="Stead",
            login_timeout=_LOGIN_TIMEOUT,
            keepalive_interval=_KEEPALIVE,
            keepalive_count_max=_KEEPALIVES,
            compression_algs=["none"],
            encoding=None,
            line_editor=False,
            allow_scp=False,
            agent_forwarding=False,
            x11_forwarding=False,
            gss_host=None,
        )
        try:
            yield
        finally:
            acceptor.close()
            for client in list(self._clients):
                client.end("the server is stopping")
            await asyncio.gather(*(client.closed() for client in list(self._clients)))
            await acceptor.wait_closed()

    def _client(self) -> Client:
        return Client(self._access, self._logins, self._machines, self._limits, self._clients)
