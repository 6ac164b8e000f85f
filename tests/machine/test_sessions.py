"""Terminals, processes and ports of a real VM: suspend, wake and fork carry them."""

import asyncio
import contextlib
import time

import pytest

from stead.deadlines import scaled
from stead.errors import GuestError, GuestUnreachable
from stead.guest import sessions
from stead.guest.agent import Agent
from stead.guest.sessions import Attachment, Screen, Session, SessionExited, SessionOutput, SessionRequest
from stead.machines import Machine
from support.waiting import until


async def read_until(attachment: Attachment, text: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(scaled(60)), contextlib.aclosing(attachment.events()) as events:
        async for event in events:
            assert isinstance(event, SessionOutput | Screen), event
            seen += event.data
            if text in seen:
                return seen
    raise AssertionError(seen)


async def shows(agent: Agent, session: str, text: bytes) -> None:
    async with sessions.attach(agent, session) as attachment:
        await read_until(attachment, text)


async def type_line(machine: Machine, session: str, line: bytes, answer: bytes) -> bytes:
    """The screen, and what follows it until the answer."""
    async with machine.using() as agent, sessions.attach(agent, session, cols=80, rows=24) as attachment:
        await attachment.write(line + b"\r")
        return await read_until(attachment, answer)


async def offset_of(machine: Machine, session: str) -> int:
    async with machine.using() as agent:
        return (await sessions.get(agent, session)).offset


async def test_suspend_wake_and_fork_carry_sessions(shared: Machine) -> None:
    counting = SessionRequest(
        "process", id="counter", argv=["sh", "-c", "while :; do echo tick; sleep 0.05; done"]
    )
    async with shared.using() as agent:
        await sessions.start(agent, SessionRequest("terminal", id="main"))
        await sessions.start(agent, counting)
    await type_line(shared, "main", b"kept=before; echo is $((40+2))", b"is 42\r\n")
    async with shared.using() as agent, sessions.attach(agent, "main", cols=80, rows=24) as attached:
        await shared.suspend()
        with pytest.raises(GuestUnreachable):
            async for _ in attached.events():
                pass

    async with shared.using() as agent:  # wakes it

        async def dropped() -> bool:
            return (await sessions.get(agent, "main")).attached == 0

        await until(dropped, 60)
        await shows(agent, "main", b"is 42")
    await type_line(shared, "main", b"echo $kept suspend", b"before suspend\r\n")
    before = await offset_of(shared, "counter")

    async def goes_on() -> bool:
        return await offset_of(shared, "counter") > before

    await until(goes_on, 60)
    (child,) = await shared.fork()
    try:
        for machine in (shared, child):
            async with machine.using() as agent:
                assert {"main", "counter"} <= {
                    each.id for kind in ("terminal", "process") for each in await sessions.find(agent, kind)
                }
                await shows(agent, "main", b"before suspend")
        await type_line(child, "main", b"kept=child; echo $kept now", b"child now\r\n")
        seen = await type_line(shared, "main", b"echo $kept here", b"before here\r\n")
        assert b"before suspend" in seen and b"child now" not in seen
        async with shared.using() as agent:
            await sessions.close(agent, "counter")
            await sessions.close(agent, "main")
        async with child.using() as agent:
            assert not (await sessions.get(agent, "counter")).exited
    finally:
        await child.delete()


async def test_the_shell_passes_control_caret_on(shared: Machine) -> None:
    """The Claude Code guide types it as a delimiter; readline drops it by default."""
    async with shared.using() as agent:
        begun = await sessions.start(agent, SessionRequest("terminal"))
        assert begun.argv == ("-bash",)
        async with sessions.attach(agent, begun.id, cols=80, rows=24) as attachment:
            await attachment.write(b"printf '\x1e%s' mark | od -c\r")
            assert b"036   m   a   r   k" in await read_until(attachment, b"0000005")
        await sessions.close(agent, begun.id)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_128_terminals_of_users_at_once(shared: Machine) -> None:
    assert (await shared.exec("useradd --create-home --shell /bin/sh terry")).ok
    few = asyncio.Semaphore(8)  # programs start and are killed slowly under emulation
    async with shared.using() as agent:

        def user_of(number: int) -> str | None:
            return "terry" if number % 2 else None

        async def open_one(number: int) -> Session:
            user = user_of(number)
            async with few:
                argv = ["sh", "-c", "id -un; cat"]
                session = await sessions.start(agent, SessionRequest("terminal", argv=argv, user=user))
                await shows(agent, session.id, b"terry" if user else b"root")
            return session

        async def answers(number: int, session: Session) -> None:
            user = user_of(number)
            async with sessions.attach(agent, session.id, cols=80, rows=24, user=user) as attachment:
                await attachment.write(b"to %d\r" % number)
                await read_until(attachment, b"to %d\r\nto %d\r\n" % (number, number))

        async def close_one(session: Session) -> None:
            async with few:
                await sessions.close(agent, session.id)

        try:
            opened = await asyncio.gather(*(open_one(number) for number in range(128)))
            await asyncio.gather(*(answers(number, session) for number, session in enumerate(opened)))
            with pytest.raises(GuestError) as error:
                await sessions.start(agent, SessionRequest("terminal"))
            assert error.value.code == "session_cap"
            assert len(await sessions.find(agent, "terminal", "terry")) == 64
            with pytest.raises(GuestError) as error:
                await sessions.close(agent, opened[0].id, "terry")
            assert error.value.code == "permission_denied"
        finally:
            left = await sessions.find(agent, "terminal")
            await asyncio.gather(*(close_one(session) for session in left))
        assert await sessions.find(agent, "terminal") == []
    assert (await shared.exec("pgrep -u terry")).exit_code == 1


async def test_a_port_of_the_loopback_interface_is_reached(shared: Machine) -> None:
    server = "exec python3 -m http.server --bind 127.0.0.1 --directory /usr/share/common-licenses 8123"
    async with shared.using() as agent:
        begun = await sessions.start(agent, SessionRequest("process", argv=["sh", "-c", server]))

        async def fetched() -> bytes:
            try:
                async with sessions.connect(agent, 8123) as stream:
                    await stream.write(b"GET /GPL-3 HTTP/1.0\r\n\r\n")
                    received = b""
                    while piece := await stream.read():
                        received += piece
                    return received
            except GuestError as error:
                assert error.code == "connection_refused"
                return b""

        assert b"GNU GENERAL PUBLIC LICENSE" in await until(fetched, 60)
        await sessions.close(agent, begun.id)
        with pytest.raises(GuestError) as error:
            async with sessions.connect(agent, 8123):
                pass
        assert error.value.code == "connection_refused"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["terminal", "process"])
async def test_a_gibibyte_of_output_takes_bounded_memory(shared: Machine, kind: sessions.Kind) -> None:
    size = 1 << 30
    script = f"stty raw -echo 2>/dev/null; read go; yes {'0123456789' * 7} | head -c {size}"
    async with shared.using() as agent:
        pid = (await agent.call("GET", "/v1/health"))["pid"]

        async def resident() -> int:
            status = await shared.exec(f"grep VmHWM /proc/{pid}/status")
            return int(status.stdout.split()[1]) >> 10

        request = SessionRequest(kind, argv=["sh", "-c", script], stdin=True)
        begun, received, left_out, ended = await sessions.start(agent, request), 0, 0, None
        async with sessions.attach(agent, begun.id, cols=80, rows=24) as attachment:
            began = time.monotonic()
            await attachment.write(b"\r\n\n")
            async for event in attachment.events():
                if isinstance(event, SessionOutput):
                    received += len(event.data)
                elif isinstance(event, SessionExited):
                    ended = event.session
                else:
                    left_out += 1
        rate = size / (time.monotonic() - began) / 1e6
        most = await resident()
        print(f"{kind}: {received} bytes, {left_out} screens or cuts, {rate:.1f} MB/s, agent {most} MiB")
        assert ended is not None and ended.offset >= size and ended.exit_code == 0
        assert received > size // 2 and most < 120
        await sessions.close(agent, begun.id)
