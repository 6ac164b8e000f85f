"""Answers of a guest agent that guest root has replaced: HTTP, frames, JSON, the journal."""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from stead.errors import GuestError, GuestUnreachable, StartFailed, SteadError
from stead.guest import recordings, sessions, systemd_journal
from stead.guest.agent import Agent, parse_object
from stead.guest.execution import ExecRequest, collect
from stead.guest.files import GuestFiles
from stead.guest.frames import Frames
from stead.guest.identity import GuestIdentity, confer
from stead.guest.ssh import admit_gateway
from stead.guest.watching import watch
from support.fuzzing.runs import Feed, Target, in_event_loop, unix_server

_IDENTITY = GuestIdentity("vm", "host", "0" * 32, IPv4Address("100.64.0.4"))
_SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: stead-session\r\n\r\n"
_MOST_EVENTS = 1000
_FRAME_LIMIT, _STREAMED_KIND, _STREAMED_LIMIT = 4096, 4, 1 << 20


async def _command(agent: Agent) -> None:
    await collect(agent, ExecRequest("true"), limit=1 << 16)


async def _watched(agent: Agent) -> None:
    async with watch(agent) as events:
        for _ in range(_MOST_EVENTS):
            await anext(events)


async def _attached(agent: Agent) -> None:
    async with sessions.attach(agent, "one", cols=80, rows=24) as attachment:
        async for _ in attachment.events():
            pass


async def _read(agent: Agent) -> None:
    async for _ in GuestFiles(lambda: contextlib.nullcontext(agent)).stream("/a", 1, 100):
        pass


def _files(agent: Agent) -> GuestFiles:
    return GuestFiles(lambda: contextlib.nullcontext(agent))


_CALLS: tuple[Callable[[Agent], Awaitable[object]], ...] = (
    lambda agent: agent.call("GET", "/v1/health"),
    _command,
    _watched,
    _attached,
    _read,
    lambda agent: _files(agent).list("/a"),
    lambda agent: _files(agent).stat("/a"),
    lambda agent: _files(agent).write("/a", b"x"),
    lambda agent: sessions.find(agent, "terminal"),
    lambda agent: sessions.output(agent, "one"),
    lambda agent: sessions.get(agent, "one"),
    lambda agent: recordings.find(agent),
    lambda agent: recordings.logs(agent, "one"),
    lambda agent: confer(agent, _IDENTITY, timeout=10),
    lambda agent: admit_gateway(agent, "vm", "ssh-ed25519 AAAA"),
)
"""The first byte of an input is an index of these."""


def _answers(data: bytes) -> list[bytes]:
    """What the agent sends, in pieces. The second byte of an input says how its rest is wrapped."""
    how, rest = data[1:2] or b"\0", data[2:]
    match how[0] % 4:
        case 0:
            pieces = [rest]
        case 1:
            pieces = [b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(rest), rest]
        case 2:
            size = max(1, how[0])
            cut = [rest[at : at + size] for at in range(0, len(rest), size)]
            chunked = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in cut]
            pieces = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *chunked, b"0\r\n\r\n"]
        case _:
            pieces = [_SWITCHED, rest]
    return pieces


@contextlib.asynccontextmanager
async def _agent() -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    current = b""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in _answers(current):
                writer.write(piece)
            await writer.drain()
        writer.close()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "agent"

        async def dial() -> tuple[socket.socket, Any]:
            link = socket.socket(socket.AF_UNIX)
            link.setblocking(False)
            return link, str(path)

        async def feed(data: bytes) -> None:
            nonlocal current
            current = data
            agent = Agent(dial, "vm")
            try:
                # Only what an API route turns into an answer: any other exception would be an internal error.
                with contextlib.suppress(GuestError, GuestUnreachable, StartFailed):
                    await _CALLS[(data or b"\0")[0] % len(_CALLS)](agent)
            finally:
                await agent.close()

        async with unix_server(path, serve):
            yield feed


async def _pieces(data: bytes, size: int) -> AsyncGenerator[bytes, None]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def _split(data: bytes, size: int) -> list[tuple[int, bytes]] | str:
    """The frames of a stream that arrives in pieces, or the name of the error that ends it."""
    frames = Frames(_pieces(data, size), "a test", _FRAME_LIMIT, {_STREAMED_KIND: _STREAMED_LIMIT})
    found: list[tuple[int, bytes]] = []
    try:
        while (frame := await frames.next()) is not None:
            kind, payload = frame
            if kind == _STREAMED_KIND and found and found[-1][0] == -1:
                found[-1] = (-1, found[-1][1] + payload)
            else:
                found.append((-1 if frames.unfinished else kind, payload))
            if kind == _STREAMED_KIND and not frames.unfinished:
                found[-1] = (kind, found[-1][1])
    except SteadError as error:
        return type(error).__name__
    return found


@contextlib.asynccontextmanager
async def _frames() -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Frames are the same however their bytes arrive."""

    async def feed(data: bytes) -> None:
        size = 1 + (data or b"\0")[0]
        if await _split(data[1:], size) != await _split(data[1:], 1 << 20):
            raise ValueError(f"other frames in pieces of {size} bytes")

    yield feed


@contextlib.contextmanager
def _json() -> Iterator[Feed]:
    def feed(data: bytes) -> None:
        with contextlib.suppress(GuestError):
            parse_object(data, "a test")
        for entry in systemd_journal.parse(data):
            assert entry.level
            entry.message.encode()

    yield feed


_TOKENS = (
    *(b"HTTP/1.1 200 OK\r\n", b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"\r\n", b"\r\n\r\n"),
    *(
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"Infinity",
        b"NaN",
        b"-1",
        b"1e999",
        b"9" * 40,
        b"null",
        b"{}",
        b"[]",
    ),
    *(b'"\\ud800"', b'"id"', b'"exit_code"', b'"duration_us"', b'"oom"', b'"size"', b'"mode"', b'"entries"'),
    *(b'"__REALTIME_TIMESTAMP"', b'"MESSAGE"', b'"PRIORITY"', b'"__CURSOR"', b"[" * 2000, b"},{"),
    *(bytes((kind, 0, 0, 0, 0, 0, 0, size)) for kind in range(6) for size in (0, 1, 255)),
    *(b"\0\0\0\0\xff\xff\xff\xff", b"\4\0\0\0\0\x10\0\0"),
)

ANSWERS = Target("agent-answers", in_event_loop(_agent), _TOKENS, inputs=2000, growth_mib=96)
FRAMES = Target("agent-frames", in_event_loop(_frames), _TOKENS, inputs=5000)
JSON = Target("agent-json", _json, _TOKENS, inputs=20_000)
