"""Terminals over WebSockets, with a guest in memory: messages, errors, eviction, back-pressure."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from stead.api import server
from stead.api.server import running
from support.fake_api import USER, FakeApi, closed, fake_api, stands_still
from support.fake_sessions import SCREEN, frame
from support.internals import inside
from support.waiting import until


@pytest_asyncio.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path_factory.mktemp("site")) as api:
        yield api


@pytest_asyncio.fixture(autouse=True)
async def no_sessions(api: FakeApi) -> AsyncIterator[None]:
    yield
    for process in api.world.alive(api.vm):
        process.sessions.table.clear()


async def opened(socket: ClientConnection) -> str:
    """The session id of a terminal that was opened; its screen has arrived."""
    info = json.loads(await socket.recv())
    assert info["type"] == "sessionInfo"
    assert isinstance(await socket.recv(), bytes)
    return str(info["sessionId"])


async def test_open_write_resize_and_exit(api: FakeApi) -> None:
    async with api.socket("/pty?cols=120&rows=30&exec=cat") as terminal:
        session = api.session(await opened(terminal))
        assert (session.argv, session.cols, session.rows) == (["/bin/sh", "-c", "cat"], 120, 30)
        await terminal.send(b"hello")
        assert await terminal.recv() == b"hello"
        await terminal.send(json.dumps({"type": "resize", "cols": 200, "rows": 60}))
        await terminal.send(b"exit 7")
        assert json.loads(await terminal.recv()) == {"type": "exited", "exitCode": 7}
        assert (await closed(terminal))[0] == 1000
    assert (session.cols, session.rows) == (200, 60)


async def test_no_program_is_the_login_shell(api: FakeApi) -> None:
    async with api.socket("/pty?cols=80&rows=24") as terminal:
        assert api.session(await opened(terminal)).argv == []


@pytest.mark.parametrize(("signal", "code"), [("SIGKILL", 137), ("SIGINT", 130)])
async def test_signals_and_exit_codes_of_signals(api: FakeApi, signal: str, code: int) -> None:
    async with api.socket("/pty?exec=cat") as terminal:
        await opened(terminal)
        await terminal.send(json.dumps({"type": "signal", "signal": signal}))
        assert json.loads(await terminal.recv()) == {"type": "exited", "exitCode": code}


async def test_sizes_out_of_range_are_clamped(api: FakeApi) -> None:
    async with api.socket("/pty?cols=0&rows=99999&exec=cat") as terminal:
        session = api.session(await opened(terminal))
        assert (session.cols, session.rows) == (1, 1000)


async def test_detached_sessions_keep_running_and_replay_their_screen(api: FakeApi) -> None:
    async with api.socket("/pty?exec=cat&sessionId=mine") as terminal:
        await opened(terminal)
        await terminal.send(b"before")
        assert await terminal.recv() == b"before"
    assert not api.session("mine").ended.is_set()
    async with api.socket("/pty/sessions/mine?cols=10&rows=5") as first:
        assert json.loads(await first.recv()) == {"type": "sessionInfo", "sessionId": "mine"}
        assert await first.recv() == b"screen:before"
        async with api.socket("/pty/sessions/mine") as second:
            await opened(second)
            await second.send(b"both")
            assert await first.recv() == await second.recv() == b"both"
            async with api.http() as http:
                (listed,) = (await http.get("/pty/sessions")).json()["sessions"]
            assert listed["attachedCount"] == 2


async def test_replay_is_one_message_of_many_frames(api: FakeApi) -> None:
    async with api.socket("/pty?exec=cat&sessionId=long") as terminal:
        await opened(terminal)
    session = api.session("long")
    session.output += b"0123456789abcdef" * (3 << 16)
    async with api.socket("/pty/sessions/long") as terminal:
        await terminal.recv()
        frames = [each async for each in terminal.recv_streaming()]
        assert len(frames) > 2
        assert b"".join(each for each in frames if isinstance(each, bytes)) == b"screen:" + session.output
        await terminal.send(b"live")
        assert await terminal.recv() == b"live"
    async with api.socket("/pty/sessions/long") as terminal:
        await terminal.recv()
        assert await terminal.recv() == b"screen:" + session.output


async def test_client_is_told_why_it_is_evicted_in_the_middle_of_a_replay(tmp_path: Path) -> None:
    async with fake_api(tmp_path) as api, api.socket("/pty?exec=cat") as terminal:
        session = api.session(await opened(terminal))
        (guest,) = session.clients
        guest.write(frame(SCREEN, bytes(1 << 20))[: 1 << 19])
        arriving = terminal.recv_streaming()
        assert await anext(arriving)
        await api.installation.machines.suspend(api.vm)
        with pytest.raises(ConnectionClosed):
            async for _ in arriving:
                pass
        assert (terminal.close_code, terminal.close_reason) == (1001, "the VM was suspended")


async def test_late_clients_of_an_exited_session_get_its_exit_code(api: FakeApi) -> None:
    async with api.socket("/pty?exec=exit+5&sessionId=done") as terminal:
        await opened(terminal)
        assert json.loads(await terminal.recv()) == {"type": "exited", "exitCode": 5}
    async with api.socket("/pty/sessions/done") as terminal:
        await opened(terminal)
        assert json.loads(await terminal.recv()) == {"type": "exited", "exitCode": 5}
        assert (await closed(terminal))[0] == 1000
    # The guest drops it after a minute.
    del api.sessions.table["done"]
    status, body = await api.refusal("/pty/sessions/done")
    assert (status, body["code"], body["sessionId"]) == (410, "SESSION_EXPIRED", "done")


async def test_list_and_close(api: FakeApi) -> None:
    async with api.socket("/pty?exec=cat&sessionId=one") as terminal, api.http() as http:
        await opened(terminal)
        assert (await http.get("/pty/sessions")).json() == {
            "sessions": [
                {
                    "sessionId": "one",
                    "running": True,
                    "cols": 80,
                    "rows": 24,
                    "createdAtMs": 1_700_000_000_000,
                    "attachedCount": 1,
                    "exitCode": None,
                    "exitedAtMs": None,
                    "exec": "cat",
                    "user": None,
                    "suspended": False,
                    "title": "",
                }
            ]
        }
        gone = await http.delete("/pty/sessions/one")
        assert gone.json() == {"sessionId": "one", "exitCode": 137}
        assert json.loads(await terminal.recv()) == {"type": "exited", "exitCode": 137}
        again = await http.delete("/pty/sessions/one")
        assert (again.status_code, again.json()["code"]) == (404, "SESSION_NOT_FOUND")


async def test_refusals_before_the_upgrade(api: FakeApi) -> None:
    async with api.socket("/pty?exec=cat&sessionId=taken", headers={USER: "alice"}) as terminal:
        await opened(terminal)
        vm = api.vm
        cases: list[tuple[str, dict[str, str], int, dict[str, Any]]] = [
            ("/pty?sessionId=a%2Fb", {}, 400, {"code": "INVALID_SESSION_ID", "sessionId": "a/b"}),
            ("/pty/sessions/a%20b", {}, 400, {"code": "INVALID_SESSION_ID", "sessionId": "a b"}),
            ("/pty?sessionId=taken", {}, 409, {"code": "SESSION_ALREADY_EXISTS", "sessionId": "taken"}),
            ("/pty/sessions/no", {}, 404, {"code": "SESSION_NOT_FOUND", "vmId": vm, "sessionId": "no"}),
            (
                "/pty/sessions/taken",
                {USER: "bob"},
                403,
                {"code": "SESSION_USER_MISMATCH", "vmId": vm, "sessionId": "taken"},
            ),
            ("/pty?cols=many", {}, 400, {"code": "INVALID_REQUEST"}),
        ]
        for path, headers, status, wanted in cases:
            refused, body = await api.refusal(path, headers=headers)
            assert (refused, {name: body.get(name) for name in wanted}) == (status, wanted), path
        async with api.http(**{USER: "bob"}) as http:
            assert (await http.get("/pty/sessions")).json() == {"sessions": []}
            assert (await http.delete("/pty/sessions/taken")).json()["code"] == "SESSION_USER_MISMATCH"
        async with api.http() as http:
            assert (await http.get("/pty/sessions")).json()["sessions"][0]["user"] == "alice"


async def test_session_cap(api: FakeApi) -> None:
    async with api.socket("/pty?exec=cat&sessionId=first") as terminal:
        await opened(terminal)
        first = api.session("first")
        api.sessions.table.update({f"s{n}": replace(first, id=f"s{n}") for n in range(127)})
        status, body = await api.refusal("/pty?exec=cat")
        assert (status, body["code"], body["limit"]) == (429, "SESSION_CAP_REACHED", 128)


# The VM's life


@pytest.mark.parametrize(
    ("end", "reason"),
    [("suspend", "suspended"), ("stop", "stopped"), ("kill", "killed"), ("delete", "deleted")],
)
async def test_end_of_a_run_evicts_clients_and_says_why(tmp_path: Path, end: str, reason: str) -> None:
    async with fake_api(tmp_path) as api, api.socket("/pty?exec=cat&sessionId=one") as terminal:
        await opened(terminal)
        await getattr(api.installation.machines, end)(api.vm)
        assert await closed(terminal) == (1001, f"the VM was {reason}")


async def test_crash_of_the_vm_evicts_clients(tmp_path: Path) -> None:
    async with fake_api(tmp_path) as api, api.socket("/pty?exec=cat") as terminal:
        await opened(terminal)
        api.world.of(api.vm).end("ended by SIGSEGV")
        code, reason = await closed(terminal)
        assert code == 1001
        assert reason.startswith("the VM ended: ")


async def test_attached_terminal_does_not_hold_its_vm_awake(tmp_path: Path) -> None:
    """Bytes count as activity, an open WebSocket does not; the next attach wakes the VM."""
    async with fake_api(tmp_path, idle_timeout=1, idle_check=3600) as api:
        machines = api.installation.machines
        async with api.socket("/pty?exec=cat") as terminal:
            await opened(terminal)
            assert await inside(machines).idle.find_idle() == []
            await asyncio.sleep(1.2)

            async def typed_before_a_check() -> bool:
                """On a busy host the check may come more than a second after the byte."""
                await terminal.send(b"x")
                assert await terminal.recv() == b"x"
                return await inside(machines).idle.find_idle() == []

            await until(typed_before_a_check, 60)
            await asyncio.sleep(1.2)
            await terminal.send(json.dumps({"type": "resize", "cols": 33, "rows": 9}))

            async def resized() -> bool:
                return any(each.cols == 33 for each in api.sessions.table.values())

            await until(resized, 60)
            assert await inside(machines).idle.find_idle() == [api.vm]
            await machines.suspend(api.vm)
            assert await closed(terminal) == (1001, "the VM was suspended")
        async with api.socket("/pty?exec=cat") as terminal:
            await opened(terminal)
        assert inside(machines).processes.running(api.vm) is not None


async def test_lost_connection_to_a_running_vm_is_an_internal_error(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stead.api.sockets._EVICTION_GRACE", 0.1)
    async with api.socket("/pty?exec=cat") as terminal:
        session = api.session(await opened(terminal))
        for client in session.clients:
            client.transport.abort()
        assert (await closed(terminal))[0] == 1011


async def test_stop_of_the_server_closes_clients_and_leaves_sessions(api: FakeApi) -> None:
    async with running(api.installation.settings, api.installation) as url:
        there = replace(api, url=url)
        terminal = await there.socket("/pty?exec=cat&sessionId=stays")
        await opened(terminal)
    assert await closed(terminal) == (1001, "the server is stopping; retry when it is back")
    assert not api.session("stays").ended.is_set()
    async with api.socket("/pty/sessions/stays") as again:
        await opened(again)


async def test_session_of_a_client_that_left_during_the_open_is_closed(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never learned the id."""
    entered, leave = asyncio.Event(), asyncio.Event()
    attached = api.sessions._attach

    async def slow(*arguments: Any) -> None:
        entered.set()
        await leave.wait()
        await attached(*arguments)

    monkeypatch.setattr(api.sessions, "_attach", slow)
    opening = asyncio.ensure_future(api.socket("/pty?exec=cat&sessionId=lost").__aenter__())
    await entered.wait()
    assert "lost" in api.sessions.table
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)

    async def gone() -> bool:
        return "lost" not in api.sessions.table

    await until(gone, 60)
    leave.set()


# Back-pressure


async def test_client_that_does_not_read_stops_the_output(api: FakeApi) -> None:
    """Nothing is queued: the guest is not read either, and others are served meanwhile."""
    async with api.socket("/pty?exec=flood&sessionId=flood", max_queue=1) as slow:
        await opened(slow)
        slow.transport.pause_reading()
        session = api.session("flood")
        await stands_still(session)
        held = session.printed
        assert held < 32 << 20
        async with api.socket("/pty?exec=cat") as other:
            await opened(other)
            await other.send(b"quick")
            assert await other.recv() == b"quick"
        assert session.printed == held
        slow.transport.resume_reading()
        async with asyncio.timeout(60):
            while session.printed == held:
                await slow.recv()
        slow.transport.abort()


async def test_endless_output_leaves_the_loop_to_others(api: FakeApi) -> None:
    async with (
        api.socket("/pty?exec=flood&sessionId=flood") as flood,
        api.socket("/pty?exec=cat") as other,
        api.http() as http,
    ):
        await opened(flood)
        await opened(other)

        async def read() -> None:
            while True:
                await flood.recv()

        reading = asyncio.create_task(read())
        try:
            for _ in range(20):
                await other.send(b"x")
                assert await other.recv() == b"x"
                assert (await http.get("/pty/sessions")).status_code == 200
            assert api.session("flood").printed > 1 << 20
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def test_program_that_does_not_read_stops_the_client(api: FakeApi) -> None:
    async with api.socket("/pty?exec=wait&sessionId=deaf") as terminal:
        await opened(terminal)
        session = api.session("deaf")
        session.reads.clear()
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 64 << 20:
                async with asyncio.timeout(2):
                    await terminal.send(b"x" * (256 << 10))
                sent += 256 << 10
        assert 0 < sent < 64 << 20
        session.reads.set()

        async def taken() -> bool:
            return len(session.received) >= sent

        await until(taken, 60)


# Keep-alive


async def test_dead_client_is_disconnected(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not answer pings, with output waiting for it; one that answers stays."""
    monkeypatch.setattr(server, "PING_INTERVAL", 0.2)
    monkeypatch.setattr(server, "PING_TIMEOUT", 0.5)
    async with running(api.installation.settings, api.installation) as url:
        there = replace(api, url=url)
        async with (
            there.socket("/pty?exec=flood&sessionId=flood") as dead,
            there.socket("/pty?exec=cat&sessionId=alive") as alive,
        ):
            await opened(dead)
            await opened(alive)
            dead.transport.pause_reading()
            assert len(api.session("flood").clients) == 1

            async def left() -> bool:
                return not api.session("flood").clients

            await until(left, 60)
            await alive.send(b"here")
            assert await alive.recv() == b"here"
            dead.transport.abort()


async def test_client_whose_input_waits_is_not_taken_for_dead(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers to pings wait behind the input that the program does not read."""
    monkeypatch.setattr(server, "PING_INTERVAL", 0.2)
    monkeypatch.setattr(server, "PING_TIMEOUT", 3.0)
    async with (
        running(api.installation.settings, api.installation) as url,
        replace(api, url=url).socket("/pty?exec=wait&sessionId=deaf") as terminal,
    ):
        await opened(terminal)
        session = api.session("deaf")
        session.reads.clear()
        sending = [asyncio.create_task(terminal.send(b"x" * (1 << 20))) for _ in range(20)]
        await asyncio.sleep(5)
        assert not all(task.done() for task in sending)
        session.reads.set()
        await asyncio.gather(*sending)

        async def taken() -> bool:
            return len(session.received) == 20 << 20

        await until(taken, 60)


async def test_terminals_of_a_suspended_vm_are_listed_without_waking_it(tmp_path: Path) -> None:
    async with fake_api(tmp_path) as api, api.http() as http:
        for name in ("alice", "bob"):
            async with api.socket(f"/pty?exec=cat&sessionId={name}s", headers={USER: name}) as terminal:
                await opened(terminal)
        machines = api.installation.machines
        await machines.suspend(api.vm)
        listed = (await http.get("/pty/sessions")).json()["sessions"]
        facts = [(each["sessionId"], each["running"], each["suspended"], each["exitCode"]) for each in listed]
        assert facts == [("alices", False, True, None), ("bobs", False, True, None)]
        (own,) = (await http.get("/pty/sessions", headers={USER: "bob"})).json()["sessions"]
        assert own["sessionId"] == "bobs"
        assert inside(machines).processes.running(api.vm) is None
        # The guest in memory has no terminals after a wake.
        await machines.start(api.vm)
        assert (await http.get("/pty/sessions")).json() == {"sessions": []}
