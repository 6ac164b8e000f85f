"""One client of the SSH gateway: its login, its connection into the VM, its channels."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import asyncssh

from stead.deadlines import scaled
from stead.edge.ssh.access import Access, Login, LoginRefused
from stead.edge.ssh.failures import ConnectionPlaces, FailureLimit, network_of
from stead.edge.ssh.relay import Flow, RelayedSession, Tunnel, VmUnavailable
from stead.edge.ssh.user_names import UserName, parse_user_name
from stead.edge.ssh.vm_link import VmLink
from stead.edge.ssh.vm_login import VmLogins
from stead.errors import SteadError
from stead.logs import get_logger
from stead.machines import Machines
from stead.tasks import KeyedLimit, TaskSet

T = TypeVar("T")

log = get_logger("stead.ssh")

MAX_CHANNELS = 200
"""Channels of one connection: sessions and forwarded connections."""
MAX_LISTENERS = 20
"""Ports that one connection has the VM listen on (-R)."""
_ATTEMPTS = 3
_RECHECK = scaled(5.0)
"""Seconds between two checks that the login would still be accepted."""


class VmEnded(SteadError):
    """The VM has ended otherwise than by a suspend."""


class TooManyConnections(SteadError):
    def __init__(self, share: int) -> None:
        super().__init__(f"too many open SSH connections: max {share} for an account (STEAD_MAX_SSH)")


@dataclass(frozen=True)
class GatewayLimits:
    """Limits that all clients share."""

    unauthenticated: ConnectionPlaces
    by_address: FailureLimit
    by_vm: FailureLimit
    connections: KeyedLimit
    """Authenticated connections, by account."""


class Client(asyncssh.SSHServer):
    """Callbacks of asyncssh for one connection."""

    def __init__(
        self,
        access: Access,
        logins: VmLogins,
        machines: Machines,
        limits: GatewayLimits,
        clients: "set[Client]",
    ) -> None:
        self._access = access
        self._logins = logins
        self._machines = machines
        self._limits = limits
        self._clients = clients
        self.trace = secrets.token_hex(16)
        self._tasks = TaskSet()
        self._log = log.bind(trace=self.trace)
        self._started = time.monotonic()
        self._connection: Any = None
        self._address = ""
        self._place: str | None = None
        self._waiting = False
        """It has one of the places for connections that are not authenticated."""
        self._attempts = 0
        self._failed = False
        """A failed login of this connection was counted."""
        self._login: Login | None = None
        self._reason = ""
        self._vm: asyncio.Future[VmLink] = asyncio.get_running_loop().create_future()
        self._sessions: set[RelayedSession] = set()
        self._channels = self._listeners = 0
        self._flow, self._vm_flow = Flow(), Flow()
        self._gone = asyncio.Event()

    # Connection

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._flow.watch(conn)
        self._address = str(conn.get_extra_info("peername")[0])
        self._clients.add(self)
        network = network_of(self._address)
        # All clients of a loopback address may be behind one proxy.
        self._place = None if network in ("127.0.0.1", "::/64") else network
        if self._limits.by_address.wait(network) or not self._limits.unauthenticated.take(self._place):
            self._reason = "too many failed logins or connections"
            conn.abort()
            return
        self._waiting = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.discard(self)
        if self._waiting:
            self._release_place()
            if not self._failed:
                self._limits.by_address.failed(network_of(self._address))
        self._vm.cancel()
        self._close_link()
        self._closing = asyncio.create_task(self._close())
        self._log.info(
            "ssh connection ended",
            address=self._address,
            **_facts(self._login),
            seconds=round(time.monotonic() - self._started, 1),
            reason=self._reason or (str(exc) if exc else "closed by the client"),
        )

    async def _close(self) -> None:
        try:
            await self._tasks.close()
        finally:
            self._gone.set()

    async def closed(self) -> None:
        """Wait until the connection and everything that was done for it have ended."""
        await self._gone.wait()

    def end(self, reason: str) -> None:
        """Disconnect the client and say why."""
        if self._reason:
            return
        self._reason = reason
        for session in tuple(self._sessions):
            session.fail(self._told(reason))
        with contextlib.suppress(OSError):
            self._connection.disconnect(asyncssh.DISC_BY_APPLICATION, self._told(reason))
        self._close_link()

    def _close_link(self) -> None:
        if self._vm.done() and not self._vm.cancelled():
            self._vm.result().close()

    def _told(self, reason: str) -> str:
        return f"{reason} (trace {self.trace})"

    # Authentication

    async def begin_auth(self, username: str) -> bool:
        """A token in the user name needs no password."""
        name = self._named(username)
        if name.token is None:
            return True
        await self._authenticate(name, name.token)
        return False

    def password_auth_supported(self) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return False

    async def validate_password(self, username: str, password: str) -> bool:
        name = self._named(username)
        if name.token is not None:
            raise self._refusal(name, "unknown VM or token")
        self._attempts += 1
        try:
            await self._authenticate(name, password)
        except asyncssh.PermissionDenied:
            if self._attempts >= _ATTEMPTS:
                raise
            return False
        return True

    def _named(self, username: str) -> UserName:
        name = parse_user_name(username)
        if name is None:
            raise asyncssh.PermissionDenied(
                self._told(
                    "the user name must be VM, VM:TOKEN or VM+user:TOKEN (a comma may stand for the colon)"
                )
            )
        return name

    async def _authenticate(self, name: UserName, token: str) -> None:
        network = network_of(self._address)
        if wait := max(self._limits.by_address.wait(network), self._limits.by_vm.wait(name.vm)):
            raise self._refusal(name, f"too many failed logins: try again in {wait} s")
        try:
            self._login = await self._access.check(name.vm, name.user, token)
        except LoginRefused as error:
            self._failed = True
            self._limits.by_address.failed(network)
            self._limits.by_vm.failed(name.vm)
            raise self._refusal(name, str(error)) from None

    def _refusal(self, name: UserName, reason: str) -> asyncssh.PermissionDenied:
        self._log.warning(
            "ssh login refused", address=self._address, vm=name.vm, user=name.user, reason=reason
        )
        return asyncssh.PermissionDenied(self._told(reason))

    def auth_completed(self) -> None:
        self._release_place()
        if self._login is not None:
            self._tasks.start(self._serve(self._login), f"SSH connection to VM {self._login.vm}")

    def _release_place(self) -> None:
        if self._waiting:
            self._waiting = False
            self._limits.unauthenticated.release(self._place)

    # The connection into the VM

    async def _serve(self, login: Login) -> None:
        """Hold the connection into the VM until the login is not accepted any more or the VM ends."""
        try:
            async with self._limits.connections.hold(login.caller.account):
                self._log.info("ssh login", address=self._address, **_facts(login))
                opened = await self._logins.open(login.vm, login.user)
                link = VmLink(self._machines, login.vm, opened, self._vm_flow, self._tasks, self.end)
                self._vm.set_result(link)
                self._tasks.start(self._await_close(opened.connection), "end of an SSH connection")
                await self._watch(login, link)
        except (SteadError, LoginRefused) as error:
            self.end(str(error))
        except Exception as error:
            self._log.error("ssh connection failed", error=repr(error), exc_info=error)
            self.end("internal error")

    async def _await_close(self, connection: asyncssh.SSHClientConnection) -> None:
        await connection.wait_closed()
        self.end("the VM has closed the connection")

    async def _watch(self, login: Login, link: VmLink) -> None:
        """Raises once the login is not accepted any more, or the VM has ended otherwise than by a suspend."""
        while True:
            await asyncio.wait({link.ended}, timeout=_RECHECK)
            if link.ended.done():
                raise VmEnded(link.ended.result().reason)
            link.send_held()
            await self._access.recheck(login)

    async def _ask(self, request: Callable[[asyncssh.SSHClientConnection], Awaitable[T]]) -> T:
        """The answer of the VM's SSH server to a request; a suspended VM is woken for it."""
        link = await asyncio.shield(self._vm)
        try:
            return await link.ask(request)
        except SteadError as error:
            raise VmUnavailable(asyncssh.OPEN_CONNECT_FAILED, self._told(str(error))) from error

    # Channels

    def session_requested(self) -> RelayedSession | bool:
        if not self._has_room():
            return False

        def left() -> None:
            self._sessions.discard(session)
            self._left()

        session = RelayedSession(self._flow, self._vm_flow, self._ask, self._tasks.start, left)
        self._sessions.add(session)
        return session

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> Any:
        """-L and -D: a connection to somewhere, from the VM."""

        return self._to_vm(
            lambda upstream, far: upstream.create_connection(
                lambda: far, dest_host, dest_port, orig_host, orig_port
            )
        )

    def unix_connection_requested(self, dest_path: str) -> Any:
        """-L to a Unix socket in the VM."""

        return self._to_vm(lambda upstream, far: upstream.create_unix_connection(lambda: far, dest_path))

    def _to_vm(self, connect: Callable[[asyncssh.SSHClientConnection, Tunnel], Awaitable[object]]) -> Any:
        if not self._has_room():
            return False

        async def opened() -> Tunnel:
            near, far = Tunnel(self._flow, self._left), Tunnel(self._vm_flow)

            async def join(upstream: asyncssh.SSHClientConnection) -> None:
                await connect(upstream, far)
                near.join(far)

            try:
                await self._ask(join)
            except BaseException:
                self._left()
                raise
            return near

        return opened()

    async def server_requested(self, listen_host: str, listen_port: int) -> Any:
        """-R: the VM listens, and its connections go to the client."""

        async def listen(upstream: asyncssh.SSHClientConnection) -> Any:
            async def accepted(orig_host: str, orig_port: int) -> Tunnel:
                async def connect(near: Tunnel) -> None:
                    await self._connection.create_connection(
                        lambda: near, listen_host, listener.get_port(), orig_host, orig_port
                    )

                return await self._to_client(connect)

            listener = await upstream.create_server(accepted, listen_host, listen_port)
            return listener

        return await self._listen(listen)

    async def unix_server_requested(self, listen_path: str) -> Any:
        """-R with a Unix socket in the VM."""

        async def listen(upstream: asyncssh.SSHClientConnection) -> Any:
            async def accepted() -> Tunnel:
                async def connect(near: Tunnel) -> None:
                    await self._connection.create_unix_connection(lambda: near, listen_path)

                return await self._to_client(connect)

            return await upstream.create_unix_server(accepted, listen_path)

        return await self._listen(listen)

    async def _listen(self, listen: Callable[[asyncssh.SSHClientConnection], Awaitable[Any]]) -> Any:
        if self._listeners >= MAX_LISTENERS:
            return False
        self._listeners += 1
        try:
            listener = await self._ask(listen)
        except (asyncssh.ChannelListenError, VmUnavailable):
            self._listeners -= 1
            return False
        close = listener.close

        def closed() -> None:
            self._listeners -= 1
            close()

        listener.close = closed
        return listener

    async def _to_client(self, connect: Callable[[Tunnel], Awaitable[None]]) -> Tunnel:
        if not self._has_room():
            raise asyncssh.ChannelOpenError(asyncssh.OPEN_RESOURCE_SHORTAGE, "too many channels")
        near, far = Tunnel(self._flow, self._left), Tunnel(self._vm_flow)
        try:
            await connect(near)
        except BaseException:
            self._left()
            raise
        near.join(far)
        return far

    def _has_room(self) -> bool:
        if self._channels >= MAX_CHANNELS:
            return False
        self._channels += 1
        return True

    def _left(self) -> None:
        self._channels -= 1


def _facts(login: Login | None) -> dict[str, str | None]:
    if login is None:
        return {}
    return {"vm": login.vm, "user": login.user, "identity": login.caller.identity}
