"""Terminal sessions of a VM, which outlive their clients."""

import builtins
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Literal, Self, Unpack

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.reconnecting import AsyncReconnecting, open_socket
from stead.sdk.arguments import checks_arguments
from stead.sdk.blocking import async_event, async_notify, async_spawn, async_wait
from stead.sdk.errors import SteadException, WaitTimedOut
from stead.sdk.models import PtySessionInfo
from stead.sdk.parsing import parse_list, parse_object
from stead.sdk.pty_options import PtyCallbacks, PtyPlace
from stead.sdk.requests import request
from stead.sdk.sockets import DETACHED, AsyncSocket, Closed, async_first, parse_frame, pieces, text_frame


@checks_arguments
class AsyncPtySession:
    """A terminal session that this client is attached to. It continues when the client leaves.

    Iterate over it for the output as bytes, until the program ends. The first output after `attach`, and
    after each new connection, redraws the screen with its scrollback. If the connection breaks, the client
    attaches again, up to 5 times in a row; `write` queues its data meanwhile.

    With the callback `on_data`, a task (a thread in `Stead`) reads the output and calls it: do not iterate
    then.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        place: PtyPlace,
        socket: AsyncSocket,
        size: tuple[int, int],
        callbacks: PtyCallbacks,
        *,
        reconnect: bool,
        early: Iterable[bytes] = (),
    ) -> None:
        self.id = place.session_id
        self.cols, self.rows = size
        self.exit_code: int | None = None
        """The exit code of the program; None while it runs. 128 plus the signal number after a signal."""
        self._place = place
        self._callbacks = callbacks
        self._early = deque(early)
        self._finished = async_event()
        self._reported = False
        self._error: Exception | None = None
        self._link = AsyncReconnecting(
            connection,
            socket,
            lambda: place.request(cols=self.cols, rows=self.rows),
            reconnect=reconnect,
            on_disconnect=callbacks.get("on_disconnect"),
            on_reconnect=callbacks.get("on_reconnect"),
        )
        self._link.greeting = [self._size_frame()]
        self._reader = async_spawn(self._read) if "on_data" in callbacks else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, vm={self._place.vm_id!r})"

    @property
    def closed(self) -> Closed | None:
        """Why the connection ended: the close code and the reason; None while it is open."""
        return self._link.closed

    async def write(self, data: str | bytes) -> None:
        """Type into the terminal. While the connection is broken, the data is queued."""
        for piece in pieces(data):
            await self._link.send(piece)

    async def resize(self, cols: int, rows: int) -> None:
        """Change the size of this client's window. The smallest window of all attached clients counts."""
        self.cols, self.rows = cols, rows
        self._link.greeting = [self._size_frame()]
        await self._link.send(self._size_frame(), keep=False)

    async def interrupt(self) -> None:
        """Send SIGINT to the program in the foreground, like Ctrl-C."""
        await self._signal("SIGINT")

    async def kill(self) -> None:
        """Kill the programs of the session."""
        await self._signal("SIGKILL")

    async def detach(self) -> None:
        """Close the connection. The session continues; attach again with its id."""
        await self._link.aclose()
        if self._reader is None:
            await self._finish(None)

    async def wait(self, *, timeout: float | None = None) -> int | None:
        """Wait until the program ends and return its exit code; None if this client detached before.

        Output that comes meanwhile goes to `on_data`, or is dropped. Raises `WaitTimedOut` after `timeout`
        seconds.
        """
        if self._reader is None and not self._finished.is_set():
            self._reader = async_spawn(self._read)
        if not await async_wait(self._finished, timeout):
            raise WaitTimedOut(f"session {self.id} did not end within {timeout:g} seconds")
        if self._error is not None:
            raise self._error
        return self.exit_code

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        data = await self._next()
        if data is None:
            raise StopAsyncIteration
        return data

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.detach()

    async def _next(self) -> bytes | None:
        """The next output; None at the end."""
        if self._early:
            return self._early.popleft()
        try:
            while (message := await self._link.receive()) is not None:
                if isinstance(message, bytes):
                    return message
                await self._control(parse_frame(message))
        except SteadException as error:
            await self._finish(error)
            raise
        await self._finish(None)
        return None

    async def _control(self, frame: dict[str, Any]) -> None:
        code = frame.get("exitCode")
        if frame.get("type") == "exited":
            self.exit_code = code if isinstance(code, int) else -1
            self._link.end()
            await async_notify(self._callbacks.get("on_exit"), self.exit_code)

    async def _read(self) -> None:
        """Call `on_data` with the output, to the end."""
        try:
            while (data := await self._next()) is not None:
                await async_notify(self._callbacks.get("on_data"), data)
        except Exception as error:
            self._error = error
            await self._link.aclose()
        finally:
            self._finished.set()

    async def _finish(self, error: SteadException | None) -> None:
        if self._reported:
            return
        self._reported, self._error = True, error
        if error is not None:
            await async_notify(self._callbacks.get("on_error"), error)
        await async_notify(self._callbacks.get("on_close"), self._link.closed or DETACHED)
        self._finished.set()

    async def _signal(self, name: Literal["SIGINT", "SIGKILL"]) -> None:
        await self._link.send(text_frame("signal", signal=name), keep=False)

    def _size_frame(self) -> str:
        return text_frame("resize", cols=self.cols, rows=self.rows)


@checks_arguments
class AsyncPty:
    """The interactive terminals of a VM: programs with a screen, which outlive their clients."""

    def __init__(self, connection: AsyncConnection, vm_id: str, user: str | None) -> None:
        self._connection = connection
        self._vm_id = vm_id
        self._user = user

    async def open(
        self,
        *,
        cols: int = 80,
        rows: int = 24,
        exec: str | None = None,  # noqa: A002
        session_id: str | None = None,
        term: str | None = None,
        reconnect: bool = True,
        **callbacks: Unpack[PtyCallbacks],
    ) -> AsyncPtySession:
        """Open a terminal and attach to it.

        Args:
            cols, rows: the size of the window.
            exec: the program; the login shell of the Linux user if None.
            session_id: an id of your choice; `AlreadyExists` if it is taken. Default: `pty-1` and so on.
            term: the type of the terminal, the variable TERM; the server's default is "xterm-256color".
            reconnect: attach again when the connection breaks.
            callbacks: `on_data` and others, see `PtyCallbacks`.
        """
        query = {
            "cols": cols,
            "rows": rows,
            "exec": exec or None,
            "sessionId": session_id or None,
            "term": term,
        }
        call = request("GET", "/v1/vms/{}/pty", self._vm_id, query=query, user=self._user, idempotent=False)
        socket = await open_socket(self._connection, call)
        early: list[bytes] = []
        while True:
            message = await async_first(socket)
            if isinstance(message, bytes):
                early.append(message)
            elif (frame := parse_frame(message)).get("type") == "sessionInfo":
                break
        place = PtyPlace(self._vm_id, str(frame.get("sessionId")), self._user)
        return AsyncPtySession(
            self._connection, place, socket, (cols, rows), callbacks, reconnect=reconnect, early=early
        )

    async def attach(
        self,
        session_id: str,
        *,
        cols: int = 80,
        rows: int = 24,
        reconnect: bool = True,
        **callbacks: Unpack[PtyCallbacks],
    ) -> AsyncPtySession:
        """Attach to a terminal: its screen and scrollback come first, then what it prints.

        `SessionNotFound` if there is none. The arguments are those of `open`.
        """
        place = PtyPlace(self._vm_id, session_id, self._user)
        socket = await open_socket(self._connection, place.request(cols=cols, rows=rows))
        return AsyncPtySession(self._connection, place, socket, (cols, rows), callbacks, reconnect=reconnect)

    async def close(self, session_id: str) -> int | None:
        """Kill the programs of a session and remove it; returns the exit code if the program had ended."""
        place = PtyPlace(self._vm_id, session_id, self._user)
        code = parse_object(await self._connection.call(place.request("DELETE"))).get("exitCode")
        return code if isinstance(code, int) else None

    # Last: the name shadows the built-in `list` in annotations below it.
    async def list(self) -> builtins.list[PtySessionInfo]:
        """The sessions of the handle's Linux user, or all for the owner. Ended ones stay for a minute."""
        call = request("GET", "/v1/vms/{}/pty/sessions", self._vm_id, user=self._user)
        return parse_list(PtySessionInfo, await self._connection.call(call), "sessions")
