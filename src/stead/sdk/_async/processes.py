"""Background processes of a VM, which outlive their clients."""

import builtins
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.reconnecting import AsyncReconnecting, open_socket
from stead.sdk.arguments import as_bytes, checks_arguments, milliseconds, patience
from stead.sdk.errors import ProcessExited, WaitTimedOut
from stead.sdk.models import OutputChunk, ProcessEvent, ProcessInfo, ProcessOutput
from stead.sdk.parsing import parse, parse_list
from stead.sdk.process_events import ProcessEvents
from stead.sdk.requests import GRACE, LIFECYCLE_TIMEOUT, Request, request
from stead.sdk.sockets import Callback, pieces, text_frame

_LONGEST_POLL = 30.0
"""Seconds that one request waits for the end of a process; the server answers after 60 at the latest."""


@checks_arguments
class AsyncProcess:
    """A handle on a background process. The process continues when its clients leave.

    The VM holds the last MiB of its output; offsets count the bytes of both streams together, from its start.
    """

    def __init__(
        self, connection: AsyncConnection, vm_id: str, user: str | None, last_info: ProcessInfo
    ) -> None:
        self.id = last_info.id
        self.last_info = last_info
        """The process as the server last described it."""
        self._connection = connection
        self._vm_id = vm_id
        self._user = user

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, vm={self._vm_id!r})"

    @property
    def status(self) -> str:
        """ "running" or "exited", as the server last described it: `info()` asks again."""
        return self.last_info.status

    @property
    def running(self) -> bool:
        """Whether it runs, as the server last described it."""
        return self.last_info.running

    @property
    def command(self) -> Sequence[str]:
        """The program and its arguments."""
        return self.last_info.command

    @property
    def exit_code(self) -> int | None:
        """Its exit code as far as this handle knows it; None while it runs."""
        return self.last_info.exit_code

    async def info(self) -> ProcessInfo:
        """Its state, exit code, command and output offsets."""
        return self._update(await self._connection.call(self._request("GET")))

    async def wait(self, *, timeout: float | None = None) -> int:
        """Wait until it ends and return its exit code: 128 plus the signal number if a signal ended it.

        Raises `WaitTimedOut` after `timeout` seconds; the process continues.
        """
        timeout = patience("timeout", timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _LONGEST_POLL if deadline is None else max(0.0, deadline - time.monotonic())
            seconds = min(_LONGEST_POLL, left)
            query = {"timeoutMs": round(seconds * 1000)}
            call = self._request("GET", "/wait", query=query, timeout=seconds + GRACE)
            found = self._update(await self._connection.call(call))
            if not found.running and found.exit_code is not None:
                return found.exit_code
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimedOut(f"process {self.id} did not end within {timeout:g} seconds")

    async def output(self, *, offset: int = 0) -> ProcessOutput:
        """The output that the VM holds now, from an offset on. It does not wait for more."""
        chunks: list[OutputChunk] = []
        first: ProcessOutput | None = None
        while True:
            query = {"offset": offset}
            page = parse(
                ProcessOutput, await self._connection.call(self._request("GET", "/output", query=query))
            )
            first = first or page
            chunks += page.chunks
            offset = page.next_offset
            end = 0 if first.process is None else first.process.offset
            if not page.chunks or offset >= end:
                return ProcessOutput(tuple(chunks), offset, first.cut, page.process)

    async def stream(
        self,
        *,
        offset: int = 0,
        reconnect: bool = True,
        on_disconnect: Callback | None = None,
        on_reconnect: Callback | None = None,
    ) -> "AsyncProcessStream":
        """Attach to it: yields its output from an offset on, as it comes, then its end.

        If the connection breaks, the client connects again and continues where it was: no byte is lost or
        repeated, except what the VM no longer holds, which is an `OutputCut`.

        Args:
            offset: where to begin: the `offset` of an earlier stream, or 0.
            reconnect: connect again when the connection breaks.
            on_disconnect: called with a `Closed` when it broke; the client connects again when this returns.
            on_reconnect: called when the client has connected again.
        """
        events = ProcessEvents(offset)

        def attach() -> Request:
            return self._request("GET", "/attach", query={"offset": events.offset})

        link = AsyncReconnecting(
            self._connection,
            await open_socket(self._connection, attach()),
            attach,
            reconnect=reconnect,
            on_disconnect=on_disconnect,
            on_reconnect=on_reconnect,
        )
        return AsyncProcessStream(self, link, events)

    async def write(self, data: str | bytes, *, close: bool = False) -> None:
        """Write to its standard input, which `start(stdin=True)` opened; `close` ends it after that.

        It waits until the process has room for the data. A write that fails is not repeated: the process may
        have received a part.
        """
        content = as_bytes("data", data)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(content))}
        query = {"close": True if close else None}
        call = self._request("POST", "/stdin", query=query, headers=headers, timeout=None)
        await self._connection.call(call, lambda: _once(content))

    async def close_stdin(self) -> None:
        """End its standard input."""
        await self.write(b"", close=True)

    async def signal(self, name: str) -> None:
        """Send a signal, for example "SIGTERM", to the process and all processes of its group.

        Raises `ProcessExited` if it has ended.
        """
        await self._connection.call(self._request("POST", "/signal", json={"signal": name}))

    async def kill(self) -> None:
        """Send SIGKILL to the process and all processes of its group. Does nothing if it has ended."""
        with suppress(ProcessExited):
            await self.signal("SIGKILL")

    async def remove(self) -> None:
        """Kill it if it runs, and remove it with its output."""
        await self._connection.call(self._request("DELETE"))

    def _update(self, answer: object) -> ProcessInfo:
        self.last_info = parse(ProcessInfo, answer)
        return self.last_info

    def _request(self, method: str, path: str = "", **options: Any) -> Request:
        place = f"/v1/vms/{{}}/processes/{{}}{path}"
        return request(method, place, self._vm_id, self.id, user=self._user, **options)


@checks_arguments
class AsyncProcessStream:
    """The output of a process as it comes: `Output`, `OutputCut`, and `Exited` as the last event.

    Closing it, or leaving a `with` block, does not end the process.
    """

    def __init__(self, process: AsyncProcess, link: AsyncReconnecting, events: ProcessEvents) -> None:
        self.process = process
        self._link = link
        self._events = events
        self._decoded: deque[ProcessEvent] = deque()

    @property
    def offset(self) -> int:
        """Where the next client can continue: bytes of output that came so far, or were cut."""
        return self._events.offset

    async def write(self, data: str | bytes) -> None:
        """Write to its standard input or terminal. For a person who types: data that was sent right before
        the connection broke may be lost. `Process.write` says if the data arrived."""
        for piece in pieces(data):
            await self._link.send(piece)

    async def resize(self, cols: int, rows: int) -> None:
        """Change the size of its terminal, if it has one."""
        self._link.greeting = [text_frame("resize", cols=cols, rows=rows)]
        await self._link.send(self._link.greeting[0], keep=False)

    async def signal(self, name: str) -> None:
        """Send a signal to the process and all processes of its group."""
        await self._link.send(text_frame("signal", signal=name))

    async def close_stdin(self) -> None:
        """End its standard input."""
        await self._link.send(text_frame("closeStdin"))

    async def aclose(self) -> None:
        """Leave the process. It continues."""
        await self._link.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ProcessEvent:
        while not self._decoded:
            message = await self._link.receive()
            if message is None:
                raise StopAsyncIteration
            self._decoded += self._events.feed(message)
            if self._events.info is not None:
                self.process.last_info = self._events.info
            if self._events.finished:
                self._link.end()
        return self._decoded.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


@checks_arguments
class AsyncProcesses:
    """The background processes of a VM."""

    def __init__(self, connection: AsyncConnection, vm_id: str, user: str | None) -> None:
        self._connection = connection
        self._vm_id = vm_id
        self._user = user

    async def start(
        self,
        command: str | Sequence[str],
        *,
        id: str | None = None,  # noqa: A002
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
        pty: bool = False,
        cols: int | None = None,
        rows: int | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> AsyncProcess:
        """Start a command in the background and return a handle on it.

        Args:
            command: text, which `sh` runs, or a list of a program and its arguments.
            id: an id of your choice; `AlreadyExists` if it is taken. Default: `proc-1` and so on.
            cwd: the working directory.
            env: environment variables to add.
            stdin: open its standard input for `write`; otherwise it is empty.
            pty: run it in a terminal of `cols` and `rows`: its output is one stream.
            timeout: seconds after which the VM kills it.
            user: the Linux user; the handle's user if None.
        """
        body: dict[str, Any] = {
            "command": command if isinstance(command, str) else list(command),
            "id": id,
            "cwd": cwd,
            "env": None if env is None else dict(env),
            "stdin": stdin or None,
            "pty": pty or None,
            "cols": cols,
            "rows": rows,
            "timeoutMs": None if timeout is None else milliseconds("timeout", timeout),
        }
        body = {key: value for key, value in body.items() if value is not None}
        user = self._user if user is None else user
        call = request(
            "POST", "/v1/vms/{}/processes", self._vm_id, json=body, user=user, timeout=LIFECYCLE_TIMEOUT
        )
        return self._handle(parse(ProcessInfo, await self._connection.call(call)), user)

    async def get(self, process_id: str) -> AsyncProcess:
        """A handle on a process; `SessionNotFound` if there is none."""
        call = request("GET", "/v1/vms/{}/processes/{}", self._vm_id, process_id, user=self._user)
        return self._handle(parse(ProcessInfo, await self._connection.call(call)), self._user)

    async def attach(self, process_id: str, *, offset: int = 0, reconnect: bool = True) -> AsyncProcessStream:
        """Attach to a process: its output from an offset on, as it comes, then its end."""
        return await (await self.get(process_id)).stream(offset=offset, reconnect=reconnect)

    def _handle(self, info: ProcessInfo, user: str | None) -> AsyncProcess:
        return AsyncProcess(self._connection, self._vm_id, user, info)

    # Last: the name shadows the built-in `list` in annotations below it.
    async def list(self) -> builtins.list[AsyncProcess]:
        """The processes of the handle's Linux user, or all for the owner; ended ones too, up to a day."""
        call = request("GET", "/v1/vms/{}/processes", self._vm_id, user=self._user)
        found = parse_list(ProcessInfo, await self._connection.call(call), "processes")
        return [self._handle(info, self._user) for info in found]


async def _once(content: bytes) -> AsyncGenerator[bytes]:
    yield content
