"""Runs commands in a guest: starts them, streams their input and output, waits for their end."""

import asyncio
import base64
import contextlib
import io
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from stead.deadlines import scaled
from stead.errors import GuestUnreachable, InvalidRequest, SteadError
from stead.guest.agent import Agent, parse_object, parsing, small
from stead.guest.frames import Frames
from stead.shares import MemoryReservation, Reserve, unlimited

DEFAULT_OUTPUT_LIMIT = 16 << 20
SMALL_OUTPUT = 64 << 10
"""Bytes of output that are kept of a command whose messages alone are of interest."""
MAX_SHELL_COMMAND = 1 << 20
"""Bytes of a shell command. Linux takes 2 MiB of arguments and environment, of at most 128 KiB each."""
_PART = 30_000
"""Characters of an argument that carries a part of a long command: at most 120,000 bytes."""
_INLINE_STDIN = 64 << 10
_MAX_FRAME = 1 << 20
_COMMAND = re.compile(r"[0-9A-Za-z_-]{1,64}")
_FINISH_TIMEOUT = scaled(1.0)
_END_TIMEOUT = scaled(5.0)
_GRACE = scaled(15.0)
"""Grace period after the command's own timeout, which the agent enforces."""


@dataclass(frozen=True)
class OutOfMemory:
    """The OOM killer of the guest's kernel killed a process."""

    process: str
    pid: int
    rss_kib: int
    scope: str
    message: str


@dataclass(frozen=True)
class Output:
    """A chunk of a command's output."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True)
class Ended:
    """How a command ended; exactly one of exit_code and signal is set."""

    exit_code: int | None
    signal: str | None
    timed_out: bool
    duration: float
    out_of_memory: OutOfMemory | None


@dataclass(frozen=True)
class ExecResult:
    """The result of a command, with its output up to a limit."""

    exit_code: int | None
    signal: str | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    duration: float
    out_of_memory: OutOfMemory | None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True)
class ExecRequest:
    """A command: a shell string (run by `/bin/sh -c`) or an argument list."""

    command: str | Sequence[str]
    cwd: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes | AsyncIterator[bytes] | None = None
    user: str | None = None
    timeout: float | None = None
    terminal: str | None = None
    """The guest also records the output, under this name."""

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            raise InvalidRequest("command is empty")
        if self.timeout is not None and self.timeout <= 0:
            raise InvalidRequest(f"timeout must be positive, not {self.timeout:g}")
        for what, texts in (
            ("command", self.argv),
            ("working directory", (self.cwd,)),
            ("environment", (*self.env, *self.env.values())),
        ):
            for text in texts:
                check_text(what, text)
        for name in self.env:
            if not name or "=" in name:
                raise InvalidRequest(f"invalid environment variable name {name!r}")

    @property
    def argv(self) -> list[str]:
        return shell(self.command) if isinstance(self.command, str) else list(self.command)

    def body(self) -> bytes:
        request: dict[str, object] = {
            "argv": self.argv,
            "cwd": self.cwd,
            "env": dict(self.env),
            "stdin": "none",
        }
        try:
            "".join((*self.argv, self.cwd, *self.env, *self.env.values())).encode()
        except UnicodeEncodeError:
            # JSON cannot carry names that are not UTF-8, so here each character stands for one byte.
            request |= {
                "encoding": "latin1",
                "argv": [latin1(word) for word in self.argv],
                "cwd": latin1(self.cwd),
                "env": {latin1(name): latin1(value) for name, value in self.env.items()},
            }
        if self.streams_stdin:
            request["stdin"] = "stream"
        elif isinstance(self.stdin, bytes):
            request |= {"stdin": "inline", "stdin_b64": base64.b64encode(self.stdin).decode()}
        if self.timeout is not None:
            request["timeout_ms"] = max(1, round(self.timeout * 1000))
        if self.terminal is not None:
            request["terminal"] = self.terminal
        return json.dumps(request).encode()

    @property
    def streams_stdin(self) -> bool:
        return self.stdin is not None and (
            not isinstance(self.stdin, bytes) or len(self.stdin) > _INLINE_STDIN
        )


def shell(command: str) -> list[str]:
    """The arguments of `sh -c` for a command line.

    A long one is split, and joined by the shell: an argument has at most 128 KiB. `$0`, the positional
    parameters, standard input and line numbers are as with a short one.
    """
    if len(command) <= _PART:
        return ["/bin/sh", "-c", command]
    size = len(command.encode(errors="surrogatepass"))
    if size > MAX_SHELL_COMMAND:
        text = f"shell command of {size} bytes (max {MAX_SHELL_COMMAND})"
        raise InvalidRequest(f"{text}: write it to a file in the VM and run that")
    parts = [command[start : start + _PART] for start in range(0, len(command), _PART)]
    joined = "".join(f"${{{number}}}" for number in range(1, len(parts) + 1))
    return ["/bin/sh", "-c", f'eval "set --; {joined}"', "/bin/sh", *parts]


def check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise InvalidRequest(f"{what} contains a NUL character (at offset {text.index(chr(0))})")
    try:
        text.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{what} must be valid UTF-8 (lone surrogate at offset {error.start})") from None


def latin1(text: str) -> str:
    return text.encode(errors="surrogateescape").decode("latin-1")


class _Answer(Frames):
    """The frames of a command."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        super().__init__(chunks, "a command", _MAX_FRAME)

    async def finish(self) -> None:
        """Read to the end of the answer, so that its connection can serve the next command."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINISH_TIMEOUT):
                async for _ in self._chunks:
                    pass


class _Input:
    """Streams standard input to a command. Input that the command does not read is dropped."""

    def __init__(self, agent: Agent, command: str, request: ExecRequest) -> None:
        self.failure: Exception | None = None
        """The exception of the input source, for which the command was killed."""
        self._agent = agent
        self._command = command
        self._task = asyncio.create_task(self._send(request))

    async def _send(self, request: ExecRequest) -> None:
        source = request.stdin
        body = source if source is None or isinstance(source, bytes) else self._chunks(source)
        with contextlib.suppress(SteadError):
            await self._agent.call(
                "POST",
                f"/v1/exec/{self._command}/stdin",
                body=body,
                timeout=None,
                # Answered when the command has read its input. The end of the command ends this call.
                header_timeout=None,
                user=request.user,
            )

    async def _chunks(self, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        try:
            async for chunk in source:
                yield chunk
        except Exception as error:
            # Kill the command first, or it would take the broken-off input for complete.
            self.failure = error
            await _end(self._agent, self._command)
            raise

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def follow(agent: Agent, request: ExecRequest) -> AsyncGenerator[Output | Ended, None]:
    """Run a command; yields its output as it arrives, then its result.

    A consumer that stops early (or is cancelled) ends the command; a lost connection does not.
    """
    given: _Input | None = None
    command: str | None = None
    finished = False
    try:
        async with contextlib.AsyncExitStack() as connection:
            command, frames = await _start(agent, request, connection)
            if request.streams_stdin:
                given = _Input(agent, command, request)
            while not finished:
                kind, payload = await frames.expect()
                if kind == 3:
                    finished = True
                    await frames.finish()
                    if given is not None and given.failure is not None:
                        raise given.failure
                    yield _ended(payload)
                else:
                    yield Output("stdout" if kind == 1 else "stderr", payload)
    except GuestUnreachable:
        command = None
        raise
    finally:
        try:
            if command is not None and not finished:
                await _end(agent, command)
        finally:
            if given is not None:
                await given.stop()


async def _start(
    agent: Agent, request: ExecRequest, connection: contextlib.AsyncExitStack
) -> tuple[str, _Answer]:
    """Start a command; its answer is held open by `connection`.

    A cancelled caller still waits for the start: without its id, the command could not be killed.
    """
    starting = asyncio.create_task(_open(agent, request, connection))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(SteadError, TimeoutError):
            async with asyncio.timeout(_END_TIMEOUT):
                command, _ = await starting
            await _end(agent, command)
        raise


async def _open(
    agent: Agent, request: ExecRequest, connection: contextlib.AsyncExitStack
) -> tuple[str, _Answer]:
    deadline = None if request.timeout is None else request.timeout + _GRACE
    response = await connection.enter_async_context(
        agent.stream("POST", "/v1/exec", user=request.user, body=request.body(), read_timeout=deadline)
    )
    frames = _Answer(response.chunks())
    _, payload = await frames.expect()
    with parsing("POST /v1/exec"):
        command = str(parse_object(payload, "POST /v1/exec")["id"])
        if not _COMMAND.fullmatch(command):
            raise ValueError
        return command, frames


async def _end(agent: Agent, command: str) -> None:
    ending = asyncio.ensure_future(agent.call("DELETE", f"/v1/exec/{command}", timeout=_END_TIMEOUT))
    # Retrieve the exception so asyncio does not log it as never retrieved.
    ending.add_done_callback(lambda done: done.cancelled() or done.exception())
    with contextlib.suppress(SteadError):
        await asyncio.shield(ending)


def _ended(payload: bytes) -> Ended:
    with parsing("POST /v1/exec"):
        result = parse_object(payload, "POST /v1/exec")
        code, signal, oom = result.get("exit_code"), result.get("signal"), result.get("oom")
        return Ended(
            exit_code=None if code is None else small(code),
            signal=None if signal is None else str(signal),
            timed_out=bool(result.get("timed_out")),
            duration=small(result.get("duration_us", 0)) / 1e6,
            out_of_memory=None if oom is None else parse_oom(oom),
        )


def parse_oom(event: Mapping[str, object]) -> OutOfMemory:
    return OutOfMemory(
        process=str(event.get("process", "")),
        pid=small(event.get("pid", 0)),
        rss_kib=small(event.get("rss_kib", 0)),
        scope=str(event.get("scope", "")),
        message=str(event.get("message", "")),
    )


async def collect(
    agent: Agent, request: ExecRequest, limit: int = DEFAULT_OUTPUT_LIMIT, reserve: Reserve = unlimited
) -> ExecResult:
    """Run a command and collect up to `limit` bytes of each stream; the result says what was truncated.

    Memory for the output is reserved as it arrives. While `reserve` waits, the output is not read, which
    stops the command; if it answers False, the rest of the output is dropped.
    """
    kept = {"stdout": io.BytesIO(), "stderr": io.BytesIO()}
    cut = {"stdout": False, "stderr": False}
    memory, full = MemoryReservation(reserve), False
    async with contextlib.aclosing(follow(agent, request)) as events:
        async for event in events:
            if isinstance(event, Ended):
                return ExecResult(
                    exit_code=event.exit_code,
                    signal=event.signal,
                    stdout=kept["stdout"].getvalue(),
                    stderr=kept["stderr"].getvalue(),
                    stdout_truncated=cut["stdout"],
                    stderr_truncated=cut["stderr"],
                    timed_out=event.timed_out,
                    duration=event.duration,
                    out_of_memory=event.out_of_memory,
                )
            # BytesIO gives its bytes away without a copy.
            buffer = kept[event.stream]
            data = b"" if full else event.data[: limit - buffer.tell()]
            if data and not await memory.add(len(data)):
                full, data = True, b""
            buffer.write(data)
            cut[event.stream] |= len(event.data) > len(data)
    raise GuestUnreachable("lost the connection to the guest agent during a command")
