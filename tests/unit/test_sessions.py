"""Sessions and ports through the real guest agent, which runs on this machine instead of in a VM."""

import asyncio
import contextlib
import hashlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from stead.errors import GuestError, GuestUnreachable, InvalidRequest
from stead.guest import sessions
from stead.guest.agent import Agent
from stead.guest.sessions import (
    Attachment,
    Cut,
    Screen,
    Session,
    SessionExited,
    SessionOutput,
    SessionRequest,
)
from support.native_agent import native_agent, resident_mib
from support.waiting import until

pytestmark = pytest.mark.timeout(120)


@pytest_asyncio.fixture(scope="module")
async def agent() -> AsyncIterator[Agent]:
    async with native_agent() as (agent, _):
        yield agent


async def process(agent: Agent, script: str, **options: object) -> Session:
    return await sessions.start(agent, SessionRequest("process", argv=["sh", "-c", script], **options))  # type: ignore[arg-type]


async def terminal(agent: Agent, script: str) -> Session:
    return await sessions.start(agent, SessionRequest("terminal", argv=["sh", "-c", script]))


async def read_until(attachment: Attachment, text: bytes) -> bytes:
    seen = b""
    async with contextlib.aclosing(attachment.events()) as events:
        async for event in events:
            assert isinstance(event, SessionOutput | Screen), event
            seen += event.data
            if text in seen:
                return seen
    raise AssertionError(seen)


@pytest.mark.parametrize(
    ("options", "term"),
    [
        ({"kind": "terminal"}, "xterm-256color"),
        ({"kind": "process", "pty": True}, "xterm-256color"),
        ({"kind": "terminal", "env": {"TERM": "vt100"}}, "vt100"),
        ({"kind": "process"}, "none"),
    ],
)
async def test_a_terminal_has_a_type_and_a_command_without_one_has_none(
    agent: Agent, options: dict[str, Any], term: str
) -> None:
    request = SessionRequest(argv=["sh", "-c", "echo type-${TERM-none}-end; sleep 1000"], **options)
    started = await sessions.start(agent, request)
    async with sessions.attach(agent, started.id) as attached:
        assert f"type-{term}-end".encode() in await read_until(attached, b"-end")
    await sessions.close(agent, started.id)


async def test_a_process_is_started_followed_and_listed(agent: Agent) -> None:
    before = time.time()
    begun = await process(agent, "printf out; printf err >&2; read line; echo got $line; exit 3", stdin=True)
    assert (begun.kind, begun.pty, begun.exited, begun.argv[:2]) == ("process", False, False, ("sh", "-c"))
    assert before - 1 < begun.created_at < time.time() + 1
    assert begun.id in [each.id for each in await sessions.find(agent, "process")]
    async with sessions.attach(agent, begun.id) as attachment:
        assert attachment.session.id == begun.id and attachment.session.attached == 1

        async def printed() -> bool:
            return (await sessions.get(agent, begun.id)).offset == 6

        await until(printed, 60)
        await attachment.write(b"input\n")
        events = [event async for event in attachment.events()]
    text = {"stdout": b"", "stderr": b""}
    for event in events[:-1]:
        assert isinstance(event, SessionOutput)
        text[event.stream] += event.data
    assert text == {"stdout": b"outgot input\n", "stderr": b"err"}
    assert isinstance(events[-1], SessionExited)
    ended = events[-1].session
    assert (ended.exit_code, ended.signal, ended.offset, ended.start) == (3, None, 16, 0)
    assert ended.exited_at is not None and ended.exited_at >= begun.created_at
    page = await sessions.output(agent, begun.id)
    assert b"".join(chunk.data for chunk in page.chunks) in (b"outerrgot input\n", b"errout" + b"got input\n")
    assert page.chunks[0].offset == 0 and page.next_offset == 16 and page.cut is None
    page = await sessions.output(agent, begun.id, offset=6, limit=3)
    assert (page.chunks[0].data, page.chunks[0].offset, page.next_offset) == (b"got", 6, 9)
    page = await sessions.output(agent, begun.id, offset=99)
    assert page.chunks == [] and page.next_offset == 16
    assert (await sessions.close(agent, begun.id)).exit_code == 3
    with pytest.raises(GuestError) as error:
        await sessions.get(agent, begun.id)
    assert error.value.code == "not_found"


async def test_input_signals_and_waiting(agent: Agent) -> None:
    begun = await process(
        agent, "cat; trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done", stdin=True
    )
    assert not (await sessions.wait(agent, begun.id, 0.01)).exited
    await sessions.write(agent, begun.id, bytes(200_000), close=True)
    async with sessions.attach(agent, begun.id, offset=200_000) as attachment:
        await read_until(attachment, b"ready")
        assert (await sessions.signal(agent, begun.id, "SIGTERM")).id == begun.id
        assert (await sessions.wait(agent, begun.id, 20)).exit_code == 7
    killed = await process(agent, "sleep 1000", timeout=0.05)
    ended = await sessions.wait(agent, killed.id, 20)
    assert (ended.exit_code, ended.signal, ended.timed_out) == (None, "SIGTERM", True)


async def test_output_that_is_no_longer_held_is_cut(agent: Agent) -> None:
    begun = await process(agent, "yes 0123456789 | head -c 5000000")
    ended = await sessions.wait(agent, begun.id, 20)
    assert ended.offset == 5_000_000 and ended.start > 3_000_000
    page = await sessions.output(agent, begun.id, offset=10)
    assert page.cut == (10, ended.start) and page.chunks[0].offset == ended.start
    assert page.next_offset == 5_000_000
    async with sessions.attach(agent, begun.id, offset=10) as attachment:
        events = [event async for event in attachment.events()]
    assert events[0] == Cut(10, ended.start)
    assert (
        sum(len(event.data) for event in events if isinstance(event, SessionOutput))
        == 5_000_000 - ended.start
    )


async def test_a_terminal_shows_its_screen_to_every_client(agent: Agent) -> None:
    begun = await sessions.start(
        agent, SessionRequest("terminal", argv=["cat"], cols=90, rows=30, env={"TERM": "xterm-256color"})
    )
    async with sessions.attach(agent, begun.id, cols=90, rows=30) as one:
        await one.write(b"\x1b]0;the title\x07h\xc3\xa9llo\n")
        # cat prints the line after the terminal has echoed it, with control characters as ^X.
        await read_until(one, b"\x1b]0;the title\x07h\xc3\xa9llo\r\n")
        async with sessions.attach(agent, begun.id, cols=70, rows=40) as two:
            assert (two.session.cols, two.session.rows, two.session.attached) == (70, 30, 2)
            assert two.session.title == "the title"
            screen = await anext(two.events())
            assert isinstance(screen, Screen) and "héllo" in screen.data.decode()
            await one.resize(60, 20)

            async def shrunk() -> bool:
                found = await sessions.get(agent, begun.id)
                return (found.cols, found.rows) == (60, 20)

            await until(shrunk, 60)
            await two.signal("SIGINT")
            async with contextlib.aclosing(two.events()) as events:
                last = [event async for event in events][-1]
    assert isinstance(last, SessionExited) and last.session.signal == "SIGINT"


async def test_queries_are_answered_when_nobody_is_attached(agent: Agent) -> None:
    script = "stty raw -echo; printf '\\033[6n'; dd bs=1 count=6 2>/dev/null | tr '\\033' E; echo end"
    begun = await terminal(agent, script)
    ended = await sessions.wait(agent, begun.id, 20)
    assert ended.exit_code == 0
    async with sessions.attach(agent, begun.id) as attachment:
        screen = await anext(attachment.events())
    assert isinstance(screen, Screen) and b"E[1;1R" in screen.data


async def test_errors_of_sessions(agent: Agent) -> None:
    begun = await process(agent, "sleep 1000")
    with pytest.raises(GuestError) as error:
        await sessions.start(agent, SessionRequest("terminal", id=begun.id))
    assert error.value.code == "exists"
    with pytest.raises(GuestError) as error:
        async with sessions.attach(agent, "no-such-session"):
            pass
    assert error.value.code == "not_found"
    with pytest.raises(GuestError) as error:
        await sessions.get(agent, "../../v1/health")
    assert error.value.code == "not_found"
    with pytest.raises(GuestError) as error:
        await sessions.write(agent, begun.id, b"x")
    assert error.value.code == "invalid_request"
    await sessions.close(agent, begun.id)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda: SessionRequest("process"),
        lambda: SessionRequest("terminal", argv=[]),
        lambda: SessionRequest("process", argv=["a\0b"]),
        lambda: SessionRequest("process", argv=["a"], env={"": "b"}),
        lambda: SessionRequest("terminal", id="a/b"),
        lambda: SessionRequest("terminal", cols=0),
        lambda: SessionRequest("terminal", timeout=-1),
    ],
)
def test_invalid_requests_are_not_sent(request_of: Callable[[], SessionRequest]) -> None:
    with pytest.raises(InvalidRequest):
        request_of()


async def test_an_aborted_agent_ends_its_attachments() -> None:
    async with native_agent() as (agent, _):
        begun = await terminal(agent, "sleep 1000")
        async with sessions.attach(agent, begun.id) as attachment:
            events = attachment.events()
            assert isinstance(await anext(events), Screen)
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            agent.abort("the VM was suspended")
            with pytest.raises(GuestUnreachable, match="the VM was suspended"):
                await waiting


async def test_bytes_go_both_ways_through_a_port(agent: Agent) -> None:
    data = bytes(range(256)) * 8000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received = await reader.read()  # to the half-close of the client
        writer.write(hashlib.sha256(received).digest() + data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def exchange() -> bytes:
        async with sessions.connect(agent, port) as stream:
            await stream.write(data)
            await stream.write_eof()
            received = b""
            while piece := await stream.read():
                received += piece
            return received

    async with server:
        answers = await asyncio.gather(*(exchange() for _ in range(20)))
    assert set(answers) == {hashlib.sha256(data).digest() + data}
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(GuestError) as error:
            async with sessions.connect(agent, unused.getsockname()[1]):
                pass
    assert error.value.code == "connection_refused"


async def test_128_terminals_at_once() -> None:
    async with native_agent() as (agent, pid):
        begun = await asyncio.gather(*(terminal(agent, f"echo ready {n}; cat") for n in range(128)))
        with pytest.raises(GuestError) as error:
            await terminal(agent, "true")
        assert error.value.code == "session_cap"

        async def talk(number: int, session: Session) -> None:
            async with sessions.attach(agent, session.id, cols=80, rows=24) as attachment:
                await read_until(attachment, b"ready %d" % number)
                await attachment.write(b"to %d\n" % number)
                await read_until(attachment, b"to %d\r\nto %d\r\n" % (number, number))

        await asyncio.gather(*(talk(number, session) for number, session in enumerate(begun)))
        assert len(await sessions.find(agent, "terminal")) == 128
        assert resident_mib(pid) < 100
        await asyncio.gather(*(sessions.close(agent, session.id) for session in begun))
        assert await sessions.find(agent, "terminal") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["terminal", "process"])
async def test_a_gibibyte_of_output_takes_bounded_memory(kind: sessions.Kind) -> None:
    """A client that reads as fast as it can gets every byte."""
    size = 1 << 30
    script = f"read go; yes {'0123456789' * 7} | head -c {size}"
    async with native_agent() as (agent, pid):
        request = SessionRequest(kind, argv=["sh", "-c", f"stty raw -echo 2>/dev/null; {script}"], stdin=True)
        begun = await sessions.start(agent, request)
        most, received, screens, began = 0.0, 0, 0, time.monotonic()
        async with sessions.attach(agent, begun.id, cols=80, rows=24) as attachment:
            await attachment.write(b"\r\n\n")
            async with contextlib.aclosing(attachment.events()) as events:
                async for event in events:
                    if isinstance(event, SessionOutput):
                        received += len(event.data)
                        most = max(most, resident_mib(pid) if received % 97 == 0 else 0)
                    screens += isinstance(event, Screen | Cut)
        print(f"{kind}: {size / (time.monotonic() - began) / 1e6:.0f} MB/s, agent at most {most:.0f} MiB")
        assert received >= size and screens == (kind == "terminal")
        assert resident_mib(pid) < 100
