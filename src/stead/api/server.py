"""Serving the API on a socket until SIGINT or SIGTERM."""

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import uvicorn
from starlette.types import ASGIApp

from stead.api.app import create_app, with_middleware
from stead.api.calls import Calls
from stead.api.dependencies import Installation
from stead.api.protocol import Protocol
from stead.api.websocket_protocol import MAX_MESSAGE, PING_INTERVAL, PING_TIMEOUT, WebSocketProtocol
from stead.errors import HostError
from stead.guest.watchdog import watching_the_loop
from stead.settings import Settings
from stead.tasks import TaskSet, in_background

STOP_GRACE = 10.0
"""Grace period: seconds that calls have to finish when the server stops before they are cancelled."""
_BACKLOG = 2048
_KEEP_ALIVE = 75


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, calls: Calls) -> None:
        super().__init__(config)
        self._calls = calls
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new calls; let current ones finish within the grace period, then cancel them."""
        await asyncio.gather(super().shutdown(sockets), self._calls.stop(STOP_GRACE))
        await self._calls.close()


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


Front = Callable[[Installation], contextlib.AbstractAsyncContextManager[Sequence[socket.socket]]]
"""Opens what is in front of the API; yields further sockets on which the API answers."""


def no_front(installation: Installation) -> contextlib.AbstractAsyncContextManager[Sequence[socket.socket]]:
    return contextlib.nullcontext(())


async def serve(
    opening: contextlib.AbstractAsyncContextManager[Installation],
    listening: socket.socket,
    ready: Callable[[Installation, TaskSet], object] = lambda *_: None,
    front: Front = no_front,
) -> None:
    """Open an installation and serve until SIGINT or SIGTERM. VMs keep running.

    `ready` may start tasks that end with the server.
    """
    async with (
        watching_the_loop(),
        opening as installation,
        front(installation) as sockets,
        TaskSet() as tasks,
    ):
        server = _server(*with_middleware(create_app(installation), installation))
        loop = asyncio.get_running_loop()

        def stop() -> None:
            # The second signal skips the grace period.
            server.force_exit = server.should_exit
            server.should_exit = True

        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, stop)
        try:
            # Exclude loaded modules from garbage collection: scanning them blocks calls for 0.1 s.
            gc.collect()
            gc.freeze()
            ready(installation, tasks)
            await server._serve([listening, *sockets])
        finally:
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)


def _server(app: ASGIApp, calls: Calls) -> _Server:
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
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=int(STOP_GRACE) + 30,
    )
    return _Server(config, calls)


@contextlib.asynccontextmanager
async def running(
    settings: Settings, installation: Installation, sockets: Sequence[socket.socket] = ()
) -> AsyncIterator[str]:
    """A server inside this process for the duration of the block; yields its URL."""
    served = with_middleware(create_app(installation), installation)
    async with running_app(settings, *served, sockets) as url:
        yield url


@contextlib.asynccontextmanager
async def running_app(
    settings: Settings, app: ASGIApp, calls: Calls, sockets: Sequence[socket.socket] = ()
) -> AsyncIterator[str]:
    server = _server(app, calls)
    with bind(settings) as listening:
        serving = asyncio.create_task(server._serve([listening, *sockets]))
        try:
            async with in_background(server.up.wait()) as up:
                await asyncio.wait({serving, up}, return_when=asyncio.FIRST_COMPLETED)
            yield url_of(listening)
        finally:
            server.should_exit = True
            await serving
