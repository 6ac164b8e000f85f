"""Sessions of a guest agent that guest root has replaced: the frames of an upgraded connection."""

import asyncio
import itertools
import json
import socket
import struct
from typing import Any

import pytest

from stead.errors import GuestError, GuestUnreachable
from stead.guest import sessions
from stead.guest.agent import Agent
from support.hostile_agent import chunks, frame, hostile, turning, whole

pytestmark = pytest.mark.timeout(300)

UPGRADED = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: stead-session\r\n\r\n"
SESSION = {
    "id": "one",
    "kind": "process",
    "user": "root",
    "pid": 7,
    "argv": ["a"],
    "pty": False,
    "cols": 80,
    "rows": 24,
    "title": "",
    "created_ms": 1,
    "exited_ms": None,
    "exit_code": None,
    "signal": None,
    "timed_out": False,
    "attached": 1,
    "offset": 10,
    "start": 5,
}


def described(**changes: object) -> bytes:
    return json.dumps({**SESSION, **changes}).encode()


STARTED = frame(0, described())


def upgraded(frames: bytes) -> list[bytes]:
    return [UPGRADED + frames]


async def follow(agent: Agent) -> list[sessions.Event]:
    async with sessions.attach(agent, "one") as attachment:
        return [event async for event in attachment.events()]


async def test_frames_are_understood() -> None:
    frames = (
        STARTED
        + frame(5, b'{"from":0,"to":5}')
        + frame(1, b"out")
        + frame(2, b"")
        + frame(4, b"x" * (1 << 20))
    )
    ended = described(exited_ms=5000, exit_code=3)
    async with hostile(lambda: upgraded(frames + frame(3, ended))) as agent:
        events = await follow(agent)
    assert events[:3] == [
        sessions.Cut(0, 5),
        sessions.SessionOutput("stdout", b"out"),
        sessions.SessionOutput("stderr", b""),
    ]
    *screens, last = events[3:]
    assert all(isinstance(each, sessions.Screen) and len(each.data) <= 256 << 10 for each in screens)
    assert b"".join(each.data for each in screens if isinstance(each, sessions.Screen)) == b"x" * (1 << 20)
    assert isinstance(last, sessions.SessionExited) and last.session.exited_at == 5


@pytest.mark.parametrize(
    "frames",
    [
        frame(1, b"output before the session"),
        frame(0, b"[]"),
        frame(0, b"{}"),
        frame(0, described(id="../a b")),
        frame(0, described(kind="other")),
        frame(0, described(kind=[])),
        frame(0, described(argv=5)),
        frame(0, described(created_ms=1e300)),
        frame(0, described(exited_ms=-1)),
        frame(0, described(offset=4)),
        frame(0, described(pid="x")),
        frame(0, described(title="\ud800")),
        frame(0, b'{"offset": ' + b"1" * 5000 + b"}"),
        STARTED + frame(3, b"7"),
        STARTED + frame(3, described(exit_code={})),
        STARTED + frame(5, b'{"from":5,"to":1}'),
        STARTED + frame(5, b'{"from":5}'),
        STARTED + frame(99),
        STARTED + frame(16, b"x"),
        STARTED + b"\1\0\0\1\0\0\0\1x",
        STARTED + struct.pack(">B3xI", 1, (64 << 10) + 1),
        STARTED + struct.pack(">B3xI", 4, (16 << 20) + 1),
        STARTED + struct.pack(">B3xI", 3, 0xFFFFFFFF),
    ],
)
async def test_malformed_frames_are_an_error_of_the_guest(frames: bytes) -> None:
    """The connection stays open after them: nothing waits for the rest of a frame that is too long."""
    async with hostile(lambda: upgraded(frames)) as agent:
        with pytest.raises(GuestError) as error:
            async with asyncio.timeout(60):
                await follow(agent)
    assert error.value.code == "malformed_answer"


@pytest.mark.parametrize("frames", [b"", STARTED[:5], STARTED[:-1], STARTED + frame(1, b"output")[:-1]])
async def test_a_connection_that_ends_early_is_lost(frames: bytes) -> None:
    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(UPGRADED + frames)
        writer.close()

    async def dial() -> tuple[socket.socket, tuple[Any, ...]]:
        link = socket.socket()
        link.setblocking(False)
        return link, server.sockets[0].getsockname()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    async with server:
        agent = Agent(dial, "testvm")
        with pytest.raises(GuestUnreachable):
            await follow(agent)
        await agent.close()


async def test_a_session_that_is_never_described_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_STARTED_TIMEOUT", 0.1)
    async with hostile(lambda: upgraded(b"")) as agent:
        with pytest.raises(GuestUnreachable, match="did not describe"):
            await follow(agent)


@pytest.mark.parametrize("payload", [b"", b"x"])
async def test_endless_small_frames_leave_the_loop_to_others(payload: bytes) -> None:
    endless = itertools.chain(upgraded(STARTED), itertools.repeat(frame(1, payload) * 1000))
    async with hostile(lambda: endless) as agent, turning() as turns:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2), sessions.attach(agent, "one") as attachment:
                async for _ in attachment.events():
                    pass
    assert max(turns) < 1.5  # they take below 0.1 s


async def test_an_answer_that_does_not_upgrade_is_refused() -> None:
    async with hostile(lambda: whole(described())) as agent:
        with pytest.raises(GuestError, match="refused to upgrade"):
            await follow(agent)
        with pytest.raises(GuestError, match="refused to upgrade"):
            async with sessions.connect(agent, 80):
                pass


@pytest.mark.parametrize(
    "frames",
    [
        STARTED + frame(1, bytes(60_000)) * 20,
        STARTED + frame(3, described()),
        STARTED + frame(5, b'{"from":0,"to":1}') * 2,
        STARTED + frame(1),
        frame(1, b"x"),
        STARTED + struct.pack(">B3xI", 4, 1 << 20),
    ],
)
async def test_malformed_pages_of_output_are_an_error_of_the_guest(frames: bytes) -> None:
    async with hostile(lambda: chunks([frames])) as agent:
        with pytest.raises(GuestError):
            await sessions.output(agent, "one")


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"sessions": 5}',
        b'{"sessions": [5]}',
        b'{"sessions": [{}]}',
        b'{"sessions": {"a": "b"}}',
        json.dumps({"sessions": [SESSION] * 1025}).encode(),
        b" " * (5 << 20),
    ],
)
async def test_malformed_lists_are_an_error_of_the_guest(body: bytes) -> None:
    async with hostile(lambda: whole(body)) as agent:
        with pytest.raises(GuestError):
            await sessions.find(agent, "process")
