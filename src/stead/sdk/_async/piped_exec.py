"""A command whose standard input is written while it runs."""

import json
from collections import deque
from types import TracebackType
from typing import Any, Self

from stead.sdk.arguments import checks_arguments
from stead.sdk.blocking import async_event, async_wait
from stead.sdk.errors import ServerUnreachable, SessionClosed, SteadException
from stead.sdk.models import ExecEvent
from stead.sdk.piped_exec_events import PipedExecEvents
from stead.sdk.sockets import AsyncSocket, ConnectionClosed, closed, pieces, text_frame

_WINDOW = 256 << 10
"""Bytes that the server accepts before the command has taken them."""


@checks_arguments
class AsyncPipedCommand:
    """A running command: yields its output as `Output`, then its end as `Exited`.

    One task or thread iterates over it while another one writes. Closing it, or leaving a `with` block, kills
    the command.
    """

    def __init__(self, socket: AsyncSocket) -> None:
        self._socket = socket
        self._events = PipedExecEvents()
        self._decoded: deque[ExecEvent] = deque()
        self._sent = 0
        self._room = async_event()
        self._ended = False

    async def begin(self, command: dict[str, Any]) -> None:
        """Send the command. `vm.exec_piped` does this."""
        await self._send(json.dumps(command).encode())

    async def write(self, data: str | bytes) -> None:
        """Write to its standard input; waits while it does not read. `SessionClosed` when it has ended."""
        for piece in pieces(data):
            while True:
                self._room.clear()
                if self._ended:
                    raise SessionClosed("the command has ended: it takes no input")
                if self._sent + len(piece) - self._events.taken <= _WINDOW:
                    break
                await async_wait(self._room)
            self._sent += len(piece)
            await self._send(piece)

    async def close_stdin(self) -> None:
        """End its standard input."""
        if not self._ended:
            await self._send(text_frame("closeStdin"))

    async def aclose(self) -> None:
        """Kill the command, unless it has ended."""
        self._finish()
        await self._socket.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ExecEvent:
        while not self._decoded:
            if self._ended:
                raise StopAsyncIteration
            try:
                message = await self._socket.recv()
            except ConnectionClosed as error:
                self._finish()
                text = f"the connection was closed before the command ended: {closed(error)}"
                raise ServerUnreachable(text, sent=True) from None
            try:
                self._decoded += self._events.feed(message)
            except SteadException:
                self._finish()
                raise
            self._room.set()
            if self._events.finished:
                self._finish()
        return self._decoded.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _finish(self) -> None:
        self._ended = True
        self._room.set()

    async def _send(self, message: str | bytes) -> None:
        try:
            await self._socket.send(message)
        except ConnectionClosed as error:
            text = f"the connection was closed before the command ended: {closed(error)}"
            raise ServerUnreachable(text, sent=True) from None
