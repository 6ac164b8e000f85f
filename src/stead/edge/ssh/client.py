"""One client of the SSH gateway: its login, its connection into the VM, its channels."""

import asyncio
import contextlib
import secrets
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import asyncssh

from stead.edge.ssh.algorithms import limit_key_exchanges
from stead.edge.ssh.login_places import LoginPlaces, client_network
from stead.edge.ssh.messages import MAX_TOKEN, Authenticate, Refused
from stead.edge.ssh.relay import Flow, RelayedSession, Tunnel, VmUnavailable
from stead.edge.ssh.server_link import ServerLink, VmUnreachable
from stead.edge.ssh.user_names import UserName, parse_user_name
from stead.edge.ssh.vm_link import VmLink
from stead.edge.ssh.vm_login import log_in
from stead.tasks import TaskSet

T = TypeVar("T")

MAX_CHANNELS = 200
"""Channels of one connection: sessions and forwarded connections."""
MAX_LISTENERS = 20
"""Ports that one connection has the VM listen on (-R)."""
_ATTEMPTS = 3


@dataclass(frozen=True)
class VmAndUser:
    """An authenticated login."""

    vm: str
    user: str


class Client(asyncssh.SSHServer):
    """Callbacks of asyncssh for one connection."""

    def __init__(
        self,
        new_link: Callable[[], Awaitable[ServerLink]],
        places: LoginPlaces,
        vm_login_timeout: float,
        clients: "set[Client]",
    ) -> None:
        self._new_link = new_link
        self._places = places
        self._vm_login_timeout = vm_login_timeout
        self._clients = clients
        self.trace = secrets.token_hex(16)
        self._tasks = TaskSet()
        self._connection: Any = None
        self._address, self._port = "", 0
        self._leave_place: Callable[[], None] = lambda: None
        """Releases the place for connections that have not logged in."""
        self._attempts = 0
        self._server: ServerLink | None = None
        self._login: VmAndUser | None = None
        self._reason = ""
        self._lost = False
        self._vm: asyncio.Future[VmLink] = asyncio.get_running_loop().create_future()
        self._sessions: set[RelayedSession] = set()
        self._channels = self._listeners = 0
        self._flow, self._vm_flow = Flow(), Flow()
        self._gone = asyncio.Event()

    # Connection

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        self._flow.watch(conn)
        limit_key_exchanges(conn)
        self._address, self._port = (conn.get_extra_info("peername") or ("", 0))[:2]
        self._clients.add(self)
        network = client_network(self._address, self._port)
        self._leave_place = self._places.take(network, self._crowded_out)

    def _crowded_out(self) -> None:
        self._reason = "too many connections that have not logged in"
        self._connection.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._clients.discard(self)
        self._leave_place()
        self._vm.cancel()
        self._close_link()
        if self._server is not None:
            self._server.close(self._reason or (str(exc) if exc else "closed by the client"))
        self._closing = asyncio.create_task(self._close())

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
            raise asyncssh.PermissionDenied(self._told("unknown VM or token"))
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
        if len(token) > MAX_TOKEN:
            raise asyncssh.PermissionDenied(self._told("unknown VM or token"))
        try:
            server = self._server or await self._new_link()
            if self._lost:
                server.close("closed by the client")
            self._server, server.on_end = server, self.end
            answer = await server.authenticate(
                Authenticate(name.vm, name.user, token, self._address, self._port, self.trace)
            )
        except VmUnreachable as error:
            raise asyncssh.PermissionDenied(self._told(str(error))) from None
        if isinstance(answer, Refused):
            if answer.delay:
                self._attempts = _ATTEMPTS
                await asyncio.sleep(answer.delay)
            raise asyncssh.PermissionDenied(self._told(answer.reason))
        self._login = VmAndUser(name.vm, answer.user)

    def auth_completed(self) -> None:
        self._leave_place()
        if self._login is not None and self._server is not None:
            work = self._serve(self._login, self._server)
            self._tasks.start(work, f"SSH connection to VM {self._login.vm}")

    # The connection into the VM

    async def _serve(self, login: VmAndUser, server: ServerLink) -> None:
        """Log in to the VM and wait for the end of the connection into it."""
        try:
            connection = await log_in(server, login.vm, login.user, self._vm_login_timeout)
            link = VmLink(server, login.vm, connection, self._vm_flow, self._tasks, self.end)
            self._vm.set_result(link)
            await connection.wait_closed()
            server.catch_up()
            self.end("the VM has closed the connection")
        except VmUnreachable as error:
            self.end(str(error))
        except Exception as error:
            traceback.print_exception(error)
            self.end("internal error")

    async def _ask(self, request: Callable[[asyncssh.SSHClientConnection], Awaitable[T]]) -> T:
        """The answer of the VM's SSH server to a request; a suspended VM is woken for it."""
        link = await asyncio.shield(self._vm)
        try:
            return await link.ask(request)
        except VmUnreachable as error:
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
