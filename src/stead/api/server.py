"""The API server: uvicorn on listening sockets."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Generator, Sequence

import uvicorn
from starlette.types import ASGIApp

from stead.api.app import create_app, with_middleware
from stead.api.calls import Calls
from stead.api.protocol import Protocol
from stead.api.websocket_protocol import MAX_MESSAGE, PING_INTERVAL, PING_TIMEOUT, WebSocketProtocol
from stead.errors import HostError
from stead.installation_parts import Installation
from stead.settings import Settings
from stead.tasks import finished, in_background

STOP_GRACE = 10.0
"""Grace period: seconds that calls have to finish when the server stops before they are cancelled."""
_BACKLOG = 2048
_KEEP_ALIVE = 75


class ApiServer(uvicorn.Server):
    """Serves calls on its sockets until `stop`."""

    def __init__(self, config: uvicorn.Config, calls: Calls, sockets: Sequence[socket.socket]) -> None:
        super().__init__(config)
        self._calls = calls
        self._up = asyncio.Event()
        self._running = asyncio.create_task(self.serve(list(sockets)), name="API server")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are handled by `until_signal`, or by the program that this server is a part of."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new calls; let current ones finish within the grace period, then cancel them."""
        await asyncio.gather(super().shutdown(sockets), self._calls.stop(STOP_GRACE))
        await self._calls.close()

    def stop(self) -> None:
        """Let calls finish, then end. The second time the grace period is skipped."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def until_up(self) -> None:
        """Wait until calls are accepted, or the server has failed."""
        async with in_background(self._up.wait()) as up:
            await asyncio.wait({self._running, up}, return_when=asyncio.FIRST_COMPLETED)

    async def until_ended(self) -> None:
        await asyncio.shield(self._running)

    async def until_signal(self) -> None:
        """Serve until SIGINT or SIGTERM; a second signal skips the grace period of calls."""
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self.stop)
        try:
            await self.until_ended()
        finally:
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)


def bind(settings: Settings) -> socket.socket:
    """Bind the socket, before anything else is opened: a port in use fails at once."""
    return listen_on(*settings.address)


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket; on `::` for clients with IPv4 too."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(*info[:3])
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if listening.family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind(info[4])
            listening.listen(_BACKLOG)
        except OSError:
            listening.close()
            raise
    except OSError as error:
        raise HostError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listening


def url_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.asynccontextmanager
async def serving(installation: Installation, sockets: Sequence[socket.socket]) -> AsyncIterator[ApiServer]:
    """Serve the API of an open installation on listening sockets during a block."""
    async with _serving(*with_middleware(create_app(installation), installation), sockets) as server:
        yield server


@contextlib.asynccontextmanager
async def _serving(app: ASGIApp, calls: Calls, sockets: Sequence[socket.socket]) -> AsyncIterator[ApiServer]:
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws=WebSocketProtocol,
        ws_max_size=MAX_MESSAGE,
        ws_ping_interval=PING_INTERVAL,
        ws_ping_timeout=PING_TIMEOUT,
        ws_per_message_deflate=False,
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Any local program could claim another client's address.
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=int(STOP_GRACE) + 30,
    )
    server = ApiServer(config, calls, sockets)
    try:
        await server.until_up()
        yield server
    finally:
        server.should_exit = True
        await finished(server.until_ended())


@contextlib.asynccontextmanager
async def running(settings: Settings, installation: Installation) -> AsyncIterator[str]:
    """Serve the API alone on the address of `settings` during a block; yields its URL."""
    with bind(settings) as listening:
        async with serving(installation, [listening]):
            yield url_of(listening)


@contextlib.asynccontextmanager
async def running_app(settings: Settings, app: ASGIApp, calls: Calls) -> AsyncIterator[str]:
    with bind(settings) as listening:
        async with _serving(app, calls, [listening]):
            yield url_of(listening)
