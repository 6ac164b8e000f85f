"""Port forwarding: a local TCP listener whose connections lead to a port in a VM, through the API."""

import asyncio
import contextlib
import socket as sockets
import struct
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from stead.sdk.errors import SteadException
from stead.sdk.requests import ConnectionSettings, request
from stead.sdk.sockets import AsyncSocket, ConnectionClosed, async_socket, closed, parse_frame, text_frame

HOST = "127.0.0.1"
_CHUNK = 64 << 10
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER without time: closing sends RST, so that no client takes a cut stream for a complete one."""
T = TypeVar("T")


class AsyncForward:
    """Listens on a port of 127.0.0.1 and connects every client to a port in the VM, loopback included.

        async with vm.forward(3000, local=8080) as forward:
            print(forward.url)

    A suspended VM wakes with the first connection. Both directions can be half-closed.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        vm_id: str,
        user: str | None,
        port: int,
        local: int | None = None,
        on_error: Callable[[SteadException], object] | None = None,
    ) -> None:
        self.port = port
        """The port in the VM."""
        self.local_port = port if local is None else local
        """The port of the listener; if 0 was given, a free one from `start` on."""
        self._settings = settings
        self._request = request("GET", "/v1/vms/{}/forward/{}", vm_id, str(port), user=user)
        self._on_error = on_error
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The local address for HTTP clients."""
        return f"http://{HOST}:{self.local_port}"

    async def start(self) -> None:
        """Listen. `OSError` if the local port is taken."""
        self._server = await asyncio.start_server(self._serve, HOST, self.local_port)
        self.local_port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Stop listening and end the connections."""
        if self._server is None:
            return
        self._server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = asyncio.create_task(self._carry(reader, writer))
        self._clients.add(client)
        try:
            await asyncio.wait([client])
        finally:
            self._clients.discard(client)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry the bytes of one client. Its connection is reset unless both sides ended as they wished."""
        complete = False
        try:
            socket = await async_socket(self._settings, self._request, pings=False)
            up = asyncio.create_task(_up(reader, socket))
            try:
                complete = await _down(socket, writer)
            finally:
                up.cancel()
                await asyncio.wait([up])
                await socket.close(1000 if complete else 1011)
        except SteadException as error:
            if self._on_error is not None:
                self._on_error(error)
        finally:
            if not complete:
                listener = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):
                    listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _RESET)
                writer.transport.abort()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _up(reader: asyncio.StreamReader, socket: AsyncSocket) -> None:
    with contextlib.suppress(ConnectionClosed):
        try:
            while data := await reader.read(_CHUNK):
                await socket.send(data)
            await socket.send(text_frame("eof"))
        except OSError:
            await socket.close(1011, "reset by the local client")


async def _down(socket: AsyncSocket, writer: asyncio.StreamWriter) -> bool:
    """True if the VM's side ended the connection after both directions had ended."""
    try:
        while True:
            message = await socket.recv()
            if isinstance(message, bytes):
                writer.write(message)
                await writer.drain()
            elif parse_frame(message).get("type") == "eof":
                writer.write_eof()
    except ConnectionClosed as error:
        return closed(error).code == 1000
    except OSError:
        return False


class Forward:
    """The same for `Stead`: an event loop in a thread carries the connections.

    with vm.forward(3000, local=8080) as forward:
        print(forward.url)
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        vm_id: str,
        user: str | None,
        port: int,
        local: int | None = None,
        on_error: Callable[[SteadException], object] | None = None,
    ) -> None:
        self._forward = AsyncForward(settings, vm_id, user, port, local, on_error)
        self._thread: _LoopThread | None = None

    @property
    def port(self) -> int:
        """The port in the VM."""
        return self._forward.port

    @property
    def local_port(self) -> int:
        """The port of the listener; if 0 was given, a free one from `start` on."""
        return self._forward.local_port

    @property
    def url(self) -> str:
        """The local address for HTTP clients."""
        return self._forward.url

    def start(self) -> None:
        """Listen. `OSError` if the local port is taken."""
        self._thread = _LoopThread()
        try:
            self._thread.run(self._forward.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening and end the connections."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.run(self._forward.aclose())
            thread.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _LoopThread:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
