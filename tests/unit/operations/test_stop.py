"""Stop, kill and processes that end by themselves, on a host in memory."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from stead.machines import State
from stead.machines.events import MachineEvent
from stead.store.machines import Transitioned
from support.engine import CUT, DISK, audit, contents, state_of, used
from support.fake_server import FakeServer
from support.internals import inside


async def test_stop_flushes_the_page_cache_and_keeps_the_disk(
    server: FakeServer, events: list[MachineEvent]
) -> None:
    machine = await used(server)
    await machine.stop()
    assert await state_of(machine) == (State.STOPPED, "stopped")
    await machine.stop()
    await audit(server)
    await machine.start()
    assert await contents(machine) == DISK
    assert [event.message.removeprefix(f"VM {machine.id} ") for event in events][1:] == [
        "stopped: requested",
        "started: start request",
    ]


async def test_a_guest_that_does_not_shut_down_is_killed(server: FakeServer) -> None:
    machine = await used(server)
    server.world.of(machine.id).obeys = False
    await machine.stop(timeout=0.01)
    assert await state_of(machine) == (State.STOPPED, "killed: did not shut down within 0.01 s")
    assert await contents(machine) == CUT


async def test_kill_is_a_power_cut(server: FakeServer) -> None:
    machine = await used(server)
    await machine.kill()
    assert await state_of(machine) == (State.STOPPED, "killed")
    await audit(server)
    assert await contents(machine) == CUT


async def test_kill_ends_a_shutdown_that_is_under_way(server: FakeServer) -> None:
    machine = await used(server)
    server.world.of(machine.id).obeys = False
    stopping = asyncio.create_task(machine.stop(timeout=3600))
    async with asyncio.timeout(60):
        while (await machine.info()).state is not State.STOPPING:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0)
    await machine.kill()
    await stopping
    assert (await machine.info()).state is State.STOPPED
    await audit(server)


@pytest.mark.parametrize(
    ("cause", "state", "reason"),
    [
        ("guest-shutdown", State.STOPPED, "stopped: guest shut down"),
        ("guest-panic", State.STOPPED, "crashed: guest kernel panicked"),
        (None, State.STOPPED, "crashed: QEMU ended by SIGKILL"),
        ("guest-reset", State.RUNNING, None),
    ],
)
async def test_a_process_that_ends_by_itself(
    server: FakeServer, events: list[MachineEvent], cause: str | None, state: State, reason: str | None
) -> None:
    machine = await used(server)
    process = server.world.of(machine.id)
    events.clear()
    process.end(cause=cause)
    await server.watched()
    # The console is kept only of what went wrong.
    assert events[0].console == ("console" if events[0].failed else None)
    assert await state_of(machine) == (state, reason)
    assert not server.world.alive(machine.id) or server.world.of(machine.id) is not process
    await audit(server)
    assert await contents(machine) == CUT


async def test_kill_of_a_suspended_vm_drops_its_memory(server: FakeServer) -> None:
    machine = await used(server)
    await machine.suspend()
    await machine.kill()
    assert await state_of(machine) == (State.STOPPED, "killed")
    await audit(server)
    assert not server.world.saved
    assert await contents(machine) == DISK


# Waiting for the end


async def test_wait_for_exit_returns_the_reason(server: FakeServer) -> None:
    machine = await used(server)
    waiting = asyncio.create_task(machine.wait_for_exit())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await machine.kill()
    assert await waiting == await machine.wait_for_exit() == "killed"


async def test_wait_for_exit_sees_an_exit_during_the_call(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await used(server)
    store = inside(server.machines).store
    transition = store.transition
    asked: list[asyncio.Task[str]] = []

    async def write_after_a_question(
        row_id: str, expected: Mapping[str, object], changes: Mapping[str, object], *rest: Any
    ) -> Transitioned | None:
        if changes["state"] == State.STOPPED:
            asked.append(asyncio.create_task(machine.wait_for_exit()))
            await asyncio.sleep(0.01)
        return await transition(row_id, expected, changes, *rest)

    monkeypatch.setattr(store, "transition", write_after_a_question)
    await machine.kill()
    async with asyncio.timeout(60):
        assert await asyncio.gather(*asked) == ["killed"]
