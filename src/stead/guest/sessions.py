"""Sessions of a guest: terminals and background processes, and connections to its ports.

Sessions live in the guest agent, so suspend, snapshot and fork carry them. A client attaches to one by an
upgraded connection and may leave it at any time.
"""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import quote, urlencode

from stead.deadlines import scaled
from stead.errors import GuestError, GuestUnreachable, InvalidRequest
from stead.guest.agent import Agent, Upgraded, parse_object, parsing, small
from stead.guest.execution import check_text, latin1
from stead.guest.frames import Frames, encode
from stead.guest.recordings import moment

Kind = Literal["terminal", "process"]
StreamName = Literal["stdout", "stderr"]

MAX_TERMINALS = 128
MAX_SIZE = 1000
"""Columns and rows of a terminal."""
_MAX_SESSIONS = 1024
_MAX_LIST = 4 << 20
DEFAULT_TERM = "xterm-256color"
"""The terminal type of sessions whose client does not name one; the screen of the agent is one."""
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_FRAME = 64 << 10
_MAX_SCREEN = 16 << 20
_MAX_OUTPUT = 1 << 20
"""Bytes of a page of output; the agent holds about as many for a process."""
_STARTED, _STDOUT, _STDERR, _RESULT, _SCREEN, _CUT = range(6)
_INPUT, _RESIZE, _SIGNAL, _CLOSE_STDIN = range(16, 20)
_STREAMS: dict[int, StreamName] = {_STDOUT: "stdout", _STDERR: "stderr"}
_ANSWER_GRACE = scaled(30.0)
_STARTED_TIMEOUT = scaled(30.0)


@dataclass(frozen=True)
class Session:
    """A terminal or process of a guest; exactly one of exit_code and signal is set when it has exited."""

    id: str
    kind: Kind
    user: str
    pid: int
    argv: tuple[str, ...]
    pty: bool
    cols: int
    rows: int
    title: str
    created_at: float
    exited_at: float | None
    exit_code: int | None
    signal: str | None
    timed_out: bool
    attached: int
    offset: int
    """Bytes of output so far, both streams together."""
    start: int
    """Offset of the oldest byte of output that is still held."""

    @property
    def exited(self) -> bool:
        return self.exited_at is not None


@dataclass(frozen=True)
class SessionRequest:
    """A session to start. A terminal without `argv` is the login shell of its user, in the home folder."""

    kind: Kind
    id: str | None = None
    argv: Sequence[str] | None = None
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    pty: bool = False
    stdin: bool = False
    cols: int = 80
    rows: int = 24
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.id is not None and not _ID.fullmatch(self.id):
            raise InvalidRequest(
                f"invalid session id {self.id!r}: must be 1 to 64 letters, digits, '.', '_' or '-'"
            )
        if not (self.argv and self.argv[0]) and (self.kind == "process" or self.argv is not None):
            raise InvalidRequest("command is empty")
        if self.timeout is not None and self.timeout <= 0:
            raise InvalidRequest(f"timeout must be positive, not {self.timeout:g}")
        check_size(self.cols, self.rows)
        for what, texts in (
            ("command", self.argv or ()),
            ("working directory", (self.cwd or "/",)),
            ("environment", (*self.env, *self.env.values())),
        ):
            for text in texts:
                check_text(what, text)
        for name in self.env:
            if not name or "=" in name:
                raise InvalidRequest(f"invalid environment variable name {name!r}")

    def body(self) -> bytes:
        # Without TERM, shells take their terminal for a dumb one, and editors refuse to start.
        terminal = {"TERM": DEFAULT_TERM} if self.pty or self.kind == "terminal" else {}
        # JSON cannot carry names that are not UTF-8, so here each character stands for one byte.
        request: dict[str, object] = {
            "kind": self.kind,
            "encoding": "latin1",
            "argv": [latin1(word) for word in self.argv or ()],
            "cwd": latin1(self.cwd or ""),
            "env": {latin1(name): latin1(value) for name, value in (terminal | dict(self.env)).items()},
            "cols": self.cols,
            "rows": self.rows,
            "pty": self.pty,
            "stdin": self.stdin,
        }
        if self.id is not None:
            request["id"] = self.id
        if self.timeout is not None:
            request["timeout_ms"] = max(1, round(self.timeout * 1000))
        return json.dumps(request).encode()


@dataclass(frozen=True)
class Chunk:
    """Output of one stream, and the offset of its first byte."""

    stream: StreamName
    offset: int
    data: bytes


@dataclass(frozen=True)
class OutputPage:
    """Output that the guest holds from an offset on; `cut` is what it no longer holds."""

    chunks: list[Chunk]
    cut: tuple[int, int] | None
    session: Session

    @property
    def next_offset(self) -> int:
        if self.chunks:
            return self.chunks[-1].offset + len(self.chunks[-1].data)
        return self.session.offset


@dataclass(frozen=True)
class Screen:
    """Terminal: bytes that redraw it, in pieces as they arrive; `more` is False for the last.

    Comes first, and again after output was dropped for this client.
    """

    data: bytes
    more: bool = False


@dataclass(frozen=True)
class SessionOutput:
    """Output as it arrives; that of a terminal is all stdout."""

    stream: StreamName
    data: bytes


@dataclass(frozen=True)
class Cut:
    """Process: the output between these offsets is no longer held."""

    start: int
    end: int


@dataclass(frozen=True)
class SessionExited:
    """The session has exited and all of its output was sent."""

    session: Session


Event = Screen | SessionOutput | Cut | SessionExited


class Attachment:
    """A connection to one session. One task iterates over the events while others write."""

    def __init__(self, session: Session, stream: Upgraded, frames: Frames) -> None:
        self.session = session
        """The session at the time of attaching."""
        self._stream = stream
        self._frames = frames

    async def events(self) -> AsyncGenerator[Event, None]:
        """Output as it arrives, `SessionExited` last; GuestUnreachable if the connection ends before it."""
        while True:
            kind, payload = await self._frames.expect()
            if kind in _STREAMS:
                yield SessionOutput(_STREAMS[kind], payload)
            elif kind == _SCREEN:
                yield Screen(payload, more=self._frames.unfinished)
            elif kind == _CUT:
                yield Cut(*_cut(payload))
            elif kind == _RESULT:
                yield SessionExited(_session(payload))
                return
            else:
                raise GuestError("malformed_answer", f"the guest agent sent a frame of type {kind}")

    async def write(self, data: bytes) -> None:
        """Send input; waits while the program does not read it."""
        for start in range(0, len(data), _MAX_FRAME):
            await self._stream.write(encode(_INPUT, data[start : start + _MAX_FRAME]))

    async def resize(self, cols: int, rows: int) -> None:
        check_size(cols, rows)
        await self._stream.write(encode(_RESIZE, json.dumps({"cols": cols, "rows": rows}).encode()))

    async def signal(self, name: str) -> None:
        await self._stream.write(encode(_SIGNAL, json.dumps({"signal": name}).encode()))

    async def close_stdin(self) -> None:
        await self._stream.write(encode(_CLOSE_STDIN))


class TcpStream:
    """A connection to a port of the guest."""

    def __init__(self, stream: Upgraded) -> None:
        self.read = stream.read
        """The next bytes; b"" when the guest's program has sent all."""
        self.write = stream.write
        self.write_eof = stream.write_eof


def check_size(cols: int, rows: int) -> None:
    if not (1 <= cols <= MAX_SIZE and 1 <= rows <= MAX_SIZE):
        raise InvalidRequest(f"a terminal has 1 to {MAX_SIZE} columns and rows, not {cols} x {rows}")


async def start(agent: Agent, request: SessionRequest) -> Session:
    """Start a session; GuestError `exists` for a taken id, `session_cap` for too many terminals."""
    body = request.body()
    return _parsed(
        await agent.call("POST", "/v1/sessions", user=request.user, body=body), "POST /v1/sessions"
    )


async def find(agent: Agent, kind: Kind, user: str | None = None) -> list[Session]:
    """The sessions that a Linux user may see (None: all), oldest first."""
    what = "GET /v1/sessions"
    async with agent.stream("GET", f"/v1/sessions?kind={kind}", user=user) as answer:
        body = await answer.read(_MAX_LIST)
    with parsing(what):
        entries = parse_object(body, what)["sessions"]
        if len(entries) > _MAX_SESSIONS:
            raise ValueError
    return [_parsed(entry, what) for entry in entries]


async def get(agent: Agent, session: str, user: str | None = None) -> Session:
    return await _call(agent, "GET", session, "", user)


async def wait(agent: Agent, session: str, timeout: float, user: str | None = None) -> Session:
    """The session once it has exited, or as it is after `timeout` seconds."""
    target = f"/wait?timeout_ms={max(0, round(timeout * 1000))}"
    return await _call(agent, "GET", session, target, user, timeout=timeout + _ANSWER_GRACE)


async def signal(agent: Agent, session: str, name: str, user: str | None = None) -> Session:
    """Signal the process group. In a terminal SIGINT is Control-C and SIGKILL ends everything in it."""
    return await _call(agent, "POST", session, "/signal", user, body=json.dumps({"signal": name}).encode())


async def close(agent: Agent, session: str, user: str | None = None) -> Session:
    """Kill everything of a session and forget it."""
    return await _call(agent, "DELETE", session, "", user)


async def write(
    agent: Agent, session: str, data: bytes, user: str | None = None, *, close: bool = False
) -> None:
    """Send input; returns when the program, or the pipe to it, has taken all of it."""
    what = f"{_path(session)}/input?close={int(close)}"
    await agent.call("POST", what, user=user, body=data, timeout=None, header_timeout=None)


async def output(
    agent: Agent, session: str, offset: int = 0, limit: int = _MAX_OUTPUT, user: str | None = None
) -> OutputPage:
    """What a process printed from an offset on: up to `limit` bytes, at most 1 MiB. Does not wait."""
    limit = max(1, min(limit, _MAX_OUTPUT))
    what = f"GET {_path(session)}/output"
    query = urlencode({"offset": max(0, offset), "limit": limit})
    async with agent.stream("GET", f"{_path(session)}/output?{query}", user=user) as answer:
        frames = Frames(answer.chunks(), what, _MAX_FRAME)
        told, cut, chunks = await _started(frames), None, list[Chunk]()
        position, size = min(offset, told.offset), 0
        while (frame := await frames.next()) is not None:
            kind, payload = frame
            if kind == _CUT and cut is None and not chunks:
                cut = _cut(payload)
                position = cut[1]
            elif kind in _STREAMS and payload:
                size += len(payload)
                if size > limit:
                    raise GuestError(
                        "answer_too_large", f"the guest agent answered {what} with more than {limit} bytes"
                    )
                chunks.append(Chunk(_STREAMS[kind], position, payload))
                position += len(payload)
            else:
                raise GuestError("malformed_answer", f"the guest agent sent a frame of type {kind}")
    return OutputPage(chunks, cut, told)


@contextlib.asynccontextmanager
async def attach(
    agent: Agent,
    session: str,
    *,
    cols: int | None = None,
    rows: int | None = None,
    offset: int | None = None,
    user: str | None = None,
) -> AsyncIterator[Attachment]:
    """Attach to a session for the length of the block.

    A terminal has the size of its smallest client. The output of a process begins at `offset`, by default
    with the oldest that is held.
    """
    if cols is not None and rows is not None:
        check_size(cols, rows)
    given = {"cols": cols, "rows": rows, "offset": offset}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    async with agent.upgrade(f"{_path(session)}/attach?{query}", "stead-session", user=user) as stream:
        chunks = stream.chunks()
        async with contextlib.aclosing(chunks):
            frames = Frames(chunks, "a session", _MAX_FRAME, streamed={_SCREEN: _MAX_SCREEN})
            yield Attachment(await _started(frames), stream, frames)


@contextlib.asynccontextmanager
async def connect(agent: Agent, port: int) -> AsyncIterator[TcpStream]:
    """Connect to a TCP port of the guest's loopback interface; GuestError `connection_refused`."""
    async with agent.upgrade(f"/v1/connect?port={port}", "stead-tcp") as stream:
        yield TcpStream(stream)


def _path(session: str) -> str:
    if not _ID.fullmatch(session):
        raise GuestError("not_found", f"session {session!r} not found")
    return f"/v1/sessions/{quote(session, safe='')}"


async def _call(
    agent: Agent, method: str, session: str, rest: str, user: str | None, **options: Any
) -> Session:
    path = _path(session)
    answer = await agent.call(method, path + rest, user=user, **options)
    return _parsed(answer, f"{method} {path}")


async def _started(frames: Frames) -> Session:
    try:
        async with asyncio.timeout(_STARTED_TIMEOUT):
            kind, payload = await frames.expect()
    except TimeoutError as error:
        raise GuestUnreachable(
            f"the guest agent did not describe the session within {_STARTED_TIMEOUT:g} s"
        ) from error
    if kind != _STARTED:
        raise GuestError("malformed_answer", f"the guest agent sent a frame of type {kind} first")
    return _session(payload)


def _session(payload: bytes) -> Session:
    return _parsed(parse_object(payload, "a session"), "a session")


def _parsed(entry: Mapping[str, Any], what: str) -> Session:
    with parsing(what):
        exited, code, ending = entry["exited_ms"], entry["exit_code"], entry["signal"]
        parsed = Session(
            id=str(entry["id"]),
            kind=entry["kind"],
            user=str(entry["user"]),
            pid=small(entry["pid"]),
            argv=tuple(str(word) for word in entry["argv"]),
            pty=bool(entry["pty"]),
            cols=small(entry["cols"]),
            rows=small(entry["rows"]),
            title=str(entry["title"]),
            created_at=moment(entry["created_ms"]),
            exited_at=None if exited is None else moment(exited),
            exit_code=None if code is None else small(code),
            signal=None if ending is None else str(ending),
            timed_out=bool(entry.get("timed_out")),
            attached=small(entry["attached"]),
            offset=small(entry["offset"]),
            start=small(entry["start"]),
        )
        if parsed.kind not in get_args(Kind) or not _ID.fullmatch(parsed.id):
            raise ValueError
        if not 0 <= parsed.start <= parsed.offset:
            raise ValueError
        return parsed


def _cut(payload: bytes) -> tuple[int, int]:
    with parsing("a session"):
        told = parse_object(payload, "a session")
        start, end = small(told["from"]), small(told["to"])
        if not 0 <= start <= end:
            raise ValueError
        return start, end
