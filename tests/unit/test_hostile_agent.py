"""A guest agent that guest root has replaced: whatever it answers, the call ends and the event loop turns."""

import asyncio
import base64
import contextlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Address
from typing import Any, NoReturn

import pytest

from stead import installation
from stead.errors import GuestError, GuestUnreachable, HostError, StartFailed, SteadError
from stead.guest import recordings
from stead.guest.agent import Agent
from stead.guest.execution import ExecRequest, collect, follow
from stead.guest.files import GuestFiles
from stead.guest.identity import GuestIdentity, confer
from stead.guest.ssh import admit_gateway
from stead.guest.watchdog import Watchdog, parsing
from stead.guest.watching import watch
from stead.settings import Settings
from support.hostile_agent import chunks, frame, hostile, turning, whole
from support.waiting import until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

STARTED = frame(0, b'{"id": "one", "pid": 1}')


def endless(piece: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.repeat(piece)


FLOODS = {
    "one-byte chunks": lambda: chunks(itertools.repeat(b"x")),
    "informational responses": endless(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"a: b\r\n")),
    "empty lines": endless(b"\r\n"),
    "a large body": lambda: chunks(itertools.repeat(bytes(65536))),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_the_call_and_leaves_the_loop_to_others(flood: str) -> None:
    async with hostile(FLOODS[flood]) as agent, turning() as turns:
        with pytest.raises((GuestError, GuestUnreachable)):
            await agent.call("GET", "/v1/health", timeout=2)
    assert max(turns) < 1.5  # they take below 0.1 s


@pytest.mark.parametrize("payload", [b"", b"x"])
async def test_endless_frames_of_a_command_leave_the_loop_to_others(payload: bytes) -> None:
    body = itertools.chain([STARTED], itertools.repeat(frame(1, payload) * 1000))
    async with hostile(lambda: chunks(body)) as agent, turning() as turns:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await collect(agent, ExecRequest("true"))
    assert max(turns) < 1.5


async def test_a_command_ends_although_its_answer_does_not() -> None:
    ended = frame(3, b'{"exit_code": 0, "duration_us": 5}')
    body = lambda: chunks(itertools.chain([STARTED, ended], itertools.repeat(bytes(1000))))  # noqa: E731
    async with hostile(body) as agent:
        result = await collect(agent, ExecRequest("true"))
    assert result.ok


MALFORMED = {
    "empty list": b"[]",
    "text": b"not JSON",
    "null": b"null",
    "deep": b"[" * 100_000,
    "wrong types": json.dumps(
        {
            "entries": 5,
            "events": [7],
            "terminals": [{"name": []}],
            "size": [],
            "files": {},
            "ssh_host_keys": 5,
            "host_keys": [7],
            "time_ns": "x",
            "type": [],
        }
    ).encode(),
    "long number": b'{"size": ' + b"1" * 5000 + b"}",
    "half a character": b'{"size": "\xff"}',
    "huge time": b'{"terminals": [{"name": "a", "user": "b", "running": true, "created_ms": 1e300}]}',
}


async def _ask_everything(agent: Agent) -> list[object]:
    files = GuestFiles(lambda: contextlib.nullcontext(agent))
    identity = GuestIdentity("vm", "host", "0" * 32, IPv4Address("100.64.0.4"))

    async def first_event() -> None:
        async with watch(agent) as events:
            await anext(events)

    async def command() -> None:
        await collect(agent, ExecRequest("true"))

    return await asyncio.gather(
        files.stat("/a"),
        files.list("/a"),
        files.write("/a", b"x"),
        files.upload_tar("/a", b""),
        confer(agent, identity, timeout=5),
        admit_gateway(agent, "vm", "ssh-ed25519 AAAA"),
        first_event(),
        command(),
        return_exceptions=True,
    )


@pytest.mark.parametrize("malformed", MALFORMED)
async def test_a_malformed_answer_is_an_error_of_the_guest(malformed: str) -> None:
    async with hostile(lambda: whole(MALFORMED[malformed])) as agent:
        outcomes = await _ask_everything(agent)
    for outcome in outcomes:
        assert isinstance(outcome, GuestError | GuestUnreachable | StartFailed), repr(outcome)


@pytest.mark.parametrize(
    "frames",
    [
        frame(0, b"[]"),
        frame(0, b"{}"),
        STARTED + frame(3, b"7"),
        STARTED + frame(3, b'{"exit_code": {}}'),
        STARTED + frame(3, b'{"exit_code": 0, "duration_us": "long"}'),
        STARTED + frame(3, b'{"exit_code": 1e400}'),
        STARTED + frame(3, b'{"exit_code": 0, "duration_us": 1e400}'),
        STARTED + frame(3, b'{"exit_code": 0, "duration_us": NaN}'),
        STARTED + frame(3, b'{"exit_code": 0, "oom": []}'),
        STARTED + frame(3, b'{"signal": "\\ud800"}'),
        frame(0, b'{"id": "../a b"}'),
        STARTED + struct.pack(">B3xI", 1, 0xFFFFFFFF),
    ],
)
async def test_malformed_frames_are_an_error_of_the_guest(frames: bytes) -> None:
    async with hostile(lambda: chunks([frames, frames])) as agent:
        with pytest.raises((GuestError, GuestUnreachable)):
            async for _ in follow(agent, ExecRequest("true")):
                pass


SILENT: list[bytes] = []
TRICKLE = [b"HTTP/1.1 404 Not Found\r\nContent-Length: 100\r\n\r\n{"]


async def _pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@pytest.mark.parametrize("body", [None, b"x", _pieces(b"x", b"y")])
@pytest.mark.parametrize("answer", [SILENT, TRICKLE])
async def test_an_agent_that_never_answers_is_given_up(
    answer: list[bytes], body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time starts after the body, so that a long upload is not cut."""
    monkeypatch.setattr("stead.guest.agent._ERROR_TIMEOUT", 0.1)
    async with hostile(lambda: itertools.chain(answer, _never())) as agent:
        with pytest.raises(GuestUnreachable):
            async with agent.stream("PUT", "/v1/file", body=body, connect_timeout=0.1, header_timeout=0.1):
                pass


async def test_a_call_may_have_a_longer_time_out_than_the_headers() -> None:
    """To remove a large tree takes longer than any answer without a time-out of its own may take."""
    slow = lambda: itertools.chain(_pause(0.5), whole(b"{}"))  # noqa: E731
    async with hostile(slow) as agent:
        assert await agent.call("DELETE", "/v1/file", timeout=50, header_timeout=0.1) == {}


async def test_input_that_a_command_does_not_read_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent answers the input's call when the command has read it."""
    asked: list[Any] = []
    call = Agent.call

    async def recorded(self: Agent, method: str, target: str, **options: Any) -> dict[str, Any]:
        asked.append(options)
        return await call(self, method, target, **options)

    monkeypatch.setattr(Agent, "call", recorded)
    ended = frame(3, b'{"exit_code": 0, "duration_us": 5}')
    async with hostile(lambda: chunks([STARTED, ended])) as agent:
        await collect(agent, ExecRequest("true", stdin=bytes(100_000)))
    assert asked[0]["timeout"] is None and asked[0]["header_timeout"] is None


def _pause(seconds: float) -> Iterator[bytes]:
    time.sleep(seconds)
    yield from ()


def _never() -> Iterator[bytes]:
    time.sleep(0.4)
    yield b""


async def test_a_listing_is_parsed_entry_by_entry() -> None:
    entry = {"name_b64": "YQ==", "type": "file", "size": 1, "mode": "0644", "uid": 0, "gid": 0, "mtime_ns": 5}
    body = json.dumps({"entries": [entry] * 5000}, separators=(",", ":")).encode()
    async with hostile(lambda: whole(body)) as agent, turning() as turns:
        found = await GuestFiles(lambda: contextlib.nullcontext(agent)).list("/")
    assert len(found) == 5000 and found[0].name == "a"
    assert len(turns) > 50


async def test_a_listing_with_too_many_entries_is_refused() -> None:
    entry = b'{"name_b64":"","type":"file","size":1,"mode":"0","uid":0,"gid":0,"mtime_ns":5},'
    body = itertools.chain([b'{"entries":['], itertools.repeat(entry * 1000))
    async with hostile(lambda: chunks(body)) as agent, turning() as turns:
        with pytest.raises(GuestError, match="more than 250000 entries"):
            await GuestFiles(lambda: contextlib.nullcontext(agent)).list("/")
    assert max(turns) < 0.15


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'{"entries":[{}',
        b'{"entries":[{}},{{}]}',
        b'{"other":[]}',
        b'{"entries":[{"a":1},{' + b'"b":' * 40_000 + b"}]}",
        b'{"entries":[7]}',
        b'{"entries":[{"name_b64":"\\ud800"}]}',
        b'{"entries":[' + b"[" * 100_000,
    ],
)
async def test_a_malformed_listing_is_an_error_of_the_guest(body: bytes) -> None:
    async with hostile(lambda: whole(body)) as agent:
        with pytest.raises(GuestError) as error:
            await GuestFiles(lambda: contextlib.nullcontext(agent)).list("/")
    assert error.value.code == "malformed_answer"


@pytest.mark.parametrize("count", [0, 1, 2, 3000])
async def test_a_listing_has_all_entries_however_it_is_cut(count: int) -> None:
    entry = {"type": "file", "size": 1, "mode": "0644", "uid": 0, "gid": 0, "mtime_ns": 5}
    names = [f"file {number}" for number in range(count)]
    entries = [{"name_b64": base64.b64encode(name.encode()).decode(), **entry} for name in names]
    body = json.dumps({"entries": entries}, separators=(",", ":")).encode()
    pieces = [*(body[at : at + 977] for at in range(0, len(body), 977)), b""]
    async with hostile(lambda: chunks(pieces)) as agent:
        found = await GuestFiles(lambda: contextlib.nullcontext(agent)).list("/")
    assert [each.name for each in found] == names


async def test_more_of_a_file_than_was_asked_for_is_refused() -> None:
    async with hostile(lambda: chunks(itertools.repeat(bytes(65536)))) as agent:
        files = GuestFiles(lambda: contextlib.nullcontext(agent))
        with pytest.raises(GuestError) as error:
            await files.read("/a", length=1 << 20)
    assert error.value.code == "answer_too_large"


async def test_lines_of_a_recording_span_its_pieces() -> None:
    pieces = [(1, b"one\r\ntw"), (2, b""), (3, b"o\n\nthr"), (4, b"ee")]
    body = b"".join(
        json.dumps({"at_ms": at * 1000, "data_b64": base64.b64encode(data).decode()}).encode() + b"\n"
        for at, data in pieces
    )
    async with hostile(lambda: whole(body)) as agent:
        lines = await recordings.logs(agent, "main")
        assert [(line.text, line.at) for line in lines] == [("one", 1), ("two", 1), ("", 3), ("three", 3)]
        assert lines.most == 4
        assert await recordings.output(agent, "main") == b"one\r\ntwo\n\nthree"


async def test_a_long_line_of_a_watch_is_refused() -> None:
    async with hostile(lambda: chunks(itertools.repeat(b"x" * 1000))) as agent, watch(agent) as events:
        with pytest.raises(SteadError):
            await anext(events)


async def test_the_watchdog_closes_the_connection_that_holds_the_loop() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        watchdog = Watchdog(stuck_after=3)  # more than a busy host takes from a loop
        watchdog.start()
        try:
            parsing("testvm", ours)
            parsed_at = watchdog._turned
            await until(lambda: watchdog._turned > parsed_at, 60)
            theirs.setblocking(False)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)  # a loop that turns is left alone
            parsing("testvm", ours)
            await asyncio.sleep(0)
            theirs.settimeout(60)
            assert theirs.recv(1) == b"", "this holds the loop, as a parser would"
        finally:
            await watchdog.close()


async def test_the_server_watches_its_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def watching() -> bool:
        return any(thread.name == "stead-watchdog" for thread in threading.enumerate())

    class Opening(contextlib.AsyncExitStack):
        async def __aenter__(self) -> NoReturn:
            assert watching()
            raise HostError("seen")

    monkeypatch.setattr(installation, "open_installation", lambda _: Opening())
    local = "127.0.0.1:0"
    settings = Settings(listen=local, https_listen=local, http_listen=local, ssh_listen=local)
    with installation.bind(settings) as listeners, pytest.raises(HostError, match="seen"):
        async with installation.open_server(settings, listeners):
            pass
    assert not watching()
