"""Create, the pool, and VMs that cannot start, on a host in memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from stead.errors import HostError, InvalidRequest, MachineNotFound, StartFailed, SteadError, WrongState
from stead.machines import Machine, State, bring_up
from stead.machines.events import Use
from stead.machines.pool import Pool
from stead.machines.records import Properties
from stead.tasks import cancel_and_wait
from support.engine import ALL, CUT, DISK, SIZE, audit, contents, installation, restart, run, used
from support.fake_server import FakeServer
from support.internals import inside

# Create and pool


async def test_create_confers_an_identity_and_runs(server: FakeServer) -> None:
    machine = await used(server, name="one")
    info = await machine.info()
    process = server.world.of(machine.id)
    assert (info.state, info.reason, info.name) == (State.RUNNING, None, "one")
    assert process.identity["machine"] == machine.id and process.identity["address"] == str(info.address)
    assert await contents(machine) == ALL
    await audit(server)


CREATE_CALLS = ["disks.make_folder", "disks.make_layer", "restore", "connect", "vm.running", "check_capacity"]


@pytest.mark.parametrize("call", CREATE_CALLS)
async def test_a_create_that_fails_leaves_nothing(server: FakeServer, call: str) -> None:
    await server.machines.template()
    server.host.fail(call, HostError("no"), skip=1 if call == "check_capacity" else 0)
    with pytest.raises(StartFailed, match="cannot create a VM: no"):
        await server.machines.create()
    assert await inside(server.machines).journal.list() == []
    assert not server.world.folders
    await audit(server)


async def test_a_create_whose_caller_left_leaves_nothing(server: FakeServer) -> None:
    creating = asyncio.create_task(server.machines.create())
    server.host.fail("restore", lambda: creating.cancel(), when="after")
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert not server.world.folders
    await audit(server)


@pytest.mark.parametrize("ends", [1, 2])
async def test_a_create_is_tried_once_more_when_the_guest_ends_at_once(server: FakeServer, ends: int) -> None:
    def panic() -> None:
        for process in server.world.processes.values():
            process.end(cause="guest-panic")

    for number in range(ends):
        server.host.fail("vm.running", panic, when="after", skip=number)
    if ends == 1:
        machine = await server.machines.create()
        assert (await machine.info()).state is State.RUNNING
    else:
        with pytest.raises(StartFailed, match="did not confirm its identity"):
            await server.machines.create()
        assert await inside(server.machines).journal.list() == []
    assert server.host.calls.count("restore") == 2
    await audit(server)


async def test_a_create_is_tried_again_when_the_guest_ends_as_it_resumes(server: FakeServer) -> None:
    source = await used(server)
    snapshot = await source.snapshot()
    known = set(server.world.processes)

    def panic() -> None:
        for process in server.world.processes.keys() - known:
            server.world.processes[process].end(cause="guest-panic")

    server.host.fail("vm.resume", panic)
    machine = await server.machines.create(Properties(snapshot=snapshot.id))
    assert await contents(machine) == ALL
    assert server.host.calls.count("restore_state") == 2
    await audit(server)


async def test_guests_that_do_not_answer_do_not_block_the_creates_of_others(server: FakeServer) -> None:
    await server.machines.template()
    inside(server.machines).slots._total = 2
    inside(server.machines).slots._release_after = 0.05

    def hang() -> None:
        for process in server.world.processes.values():
            process.awake.clear()

    for number in range(2):
        server.host.fail("vm.running", hang, when="after", skip=number)
    stuck = [asyncio.create_task(server.machines.create(Properties(account="hostile"))) for _ in range(2)]
    async with asyncio.timeout(60):
        while server.host.calls.count("vm.running") < 2:  # noqa: ASYNC110  # the host in memory has no event
            await asyncio.sleep(0.001)
        other = await server.machines.create(Properties(account="other"))
    assert await run(other, "recall nothing") == ""
    assert not any(task.done() for task in stuck)
    await cancel_and_wait(*stuck)
    await audit(server)


async def test_wakes_by_strangers_leave_a_slot_to_the_owner(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests for mapped domains wake more VMs of an account at once than it has slots."""
    slots = inside(server.machines).slots
    slots._release_after = None
    asleep = [await used(server, account="owner") for _ in range(slots._total or 0)]
    for machine in asleep:
        await machine.suspend()
    restore_state, go_on = server.host.restore_state, asyncio.Event()

    @contextlib.asynccontextmanager
    async def restore_later(*arguments: Any) -> AsyncIterator[object]:
        await go_on.wait()
        async with restore_state(*arguments) as restore:
            yield restore

    monkeypatch.setattr(server.host, "restore_state", restore_later)
    async with asyncio.timeout(20):
        wakes = [asyncio.create_task(server.machines.attached(each.id, Use.DOMAIN)) for each in asleep]
        while not slots.waiting:  # noqa: ASYNC110  # the host in memory has no event
            await asyncio.sleep(0.001)
        created = await server.machines.create(Properties(account="owner"))
        assert (await created.info()).state is State.RUNNING
        assert not any(wake.done() for wake in wakes)
        go_on.set()
        await asyncio.gather(*wakes)
    await audit(server)


@pytest.mark.parametrize("name", ["", "   ", "n" * 201, "two\nlines", "\ud800"])
async def test_create_refuses_an_invalid_name(server: FakeServer, name: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 200 printable characters"):
        await server.machines.create(Properties(name=name))
    assert await inside(server.machines).journal.list() == []


async def test_every_operation_on_an_unknown_id_is_not_found(server: FakeServer) -> None:
    await not_found(Machine(server.machines, "x" * 20))


async def not_found(machine: Machine) -> None:
    asked: list[Callable[[], Awaitable[object]]] = [
        *(machine.info, machine.start, machine.stop, machine.kill, machine.suspend, machine.snapshot),
        *(machine.fork, machine.wait_for_exit, machine.delete),
        lambda: machine.resize(disk_gib=30),
        lambda: machine.exec("true"),
        lambda: machine.files().read("/etc/hostname"),
    ]
    for ask in asked:
        with pytest.raises(MachineNotFound, match=f"VM {machine.id} not found"):
            await ask()


# The pool


async def test_a_create_that_lasts_too_long_does_not_keep_the_pool_from_refilling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stead.machines.pool._LONGEST_WAIT", 0.05)
    monkeypatch.setattr("stead.machines.pool._QUIET", 0.0)
    nothing: Any = None
    pool = Pool(nothing, bring_up=nothing, deletion=nothing, target=1, size=SIZE)
    with pool.paused_refill():
        assert pool._busy == 1
        async with asyncio.timeout(60):
            await pool._wanted.wait()
        assert pool._busy == 0
    assert pool._busy == 0


async def test_a_create_takes_a_prepared_vm_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stead.machines.pool._QUIET", 0)
    async with installation(pool=1) as server:
        await server.machines.template()
        assert await inside(server.machines).pool.filled(10)
        (prepared,) = await inside(server.machines).pool.prepared()
        process = server.world.of(prepared.id)
        assert not process.awake.is_set() and process.identity["hostname"] == "prepared"
        assert await server.machines.list() == [], "prepared VMs are not listed"
        await not_found(Machine(server.machines, prepared.id))
        machine = await server.machines.create(Properties(name="mine"))
        assert machine.id == prepared.id and server.world.of(machine.id) is process
        assert process.identity["hostname"] == machine.id
        assert await inside(server.machines).pool.filled(10)
        # Its process ends unseen by anybody: the next create gets another VM.
        (prepared,) = await inside(server.machines).pool.prepared()
        server.world.of(prepared.id).end()
        other = await server.machines.create()
        assert other.id != prepared.id
        await restart(server)
        assert {info.id for info in await server.machines.list()} == {machine.id, other.id}


async def test_a_prepared_vm_that_does_not_confirm_its_identity_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with installation(pool=1) as server:
        await server.machines.template()
        assert await inside(server.machines).pool.filled(10)
        (prepared,) = await inside(server.machines).pool.prepared()
        monkeypatch.setattr("stead.guest.identity.CLOCK_TOLERANCE", -1.0)
        with pytest.raises(SteadError, match="the guest did not confirm its clock"):
            await server.machines.create()
        assert await inside(server.machines).journal.get(prepared.id) is None
        assert not server.world.alive(prepared.id)


async def closed_at(calls: int) -> bool:
    """Close the pool after so many calls of its first refill; whether there were as many."""
    async with installation(pool=1) as server:
        pool = inside(server.machines).pool
        closing: list[asyncio.Task[None]] = []
        server.host.fail(None, lambda: closing.append(asyncio.create_task(pool.close())), skip=calls)
        await server.machines.template()
        filling = asyncio.create_task(pool.filled(60))
        while not closing and not filling.done():  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0)
        await asyncio.gather(*closing)
        filling.cancel()
        if closing:
            assert await inside(server.machines).journal.list() == []
            await audit(server)
        return bool(closing)


async def test_a_pool_that_is_closed_at_any_call_of_a_refill_leaves_nothing() -> None:
    calls = 0
    while await closed_at(calls):
        calls += 1
    assert calls > 5


# VMs that cannot start


@pytest.mark.parametrize("hangs", [1, 2])
async def test_a_boot_that_hangs_is_tried_once_more(
    server: FakeServer, hangs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await used(server)
    await machine.kill()
    said: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(bring_up, "BOOT_TIMEOUTS", (0.05, 0.05, 60) if hangs == 2 else (0.05, 60))
    monkeypatch.setattr(bring_up.log, "warning", lambda text, **facts: said.append((text, facts)))
    for number in range(hangs):
        server.host.fail("boot", lambda: server.world.of(machine.id).awake.clear(), when="after", skip=number)
    if hangs == 1:
        await machine.start()
    else:
        with pytest.raises(StartFailed, match="did not answer"):
            await machine.start()
    assert server.host.calls.count("boot") == 2
    assert said == [("guest does not boot", {"vm": machine.id, "console": "console"})] * hangs
    await audit(server)
    assert await contents(machine) == CUT


@pytest.mark.parametrize("crashes", [1, 2])
async def test_a_boot_during_which_qemu_crashes_is_tried_once_more(
    server: FakeServer, crashes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await used(server)
    await machine.kill()
    said: list[tuple[str, dict[str, str]]] = []
    monkeypatch.setattr(bring_up.log, "warning", lambda text, **facts: said.append((text, facts)))

    def crash() -> None:
        process = server.world.of(machine.id)
        process.awake.clear()
        asyncio.get_running_loop().call_later(0.05, process.end, "ended by SIGSEGV")

    for number in range(crashes):
        server.host.fail("boot", crash, when="after", skip=number)
    if crashes == 1:
        await machine.start()
    else:
        with pytest.raises(StartFailed, match="QEMU ended by SIGSEGV"):
            await machine.start()
    assert server.host.calls.count("boot") == 2
    assert said == [("guest does not boot", {"vm": machine.id, "reason": "QEMU ended by SIGSEGV"})] * crashes
    await audit(server)
    assert await contents(machine) == CUT


async def test_a_guest_that_shuts_down_on_its_way_up_is_not_booted_again(server: FakeServer) -> None:
    machine = await used(server)
    await machine.kill()

    def shut_down() -> None:
        process = server.world.of(machine.id)
        process.awake.clear()
        asyncio.get_running_loop().call_later(0.05, process.end, "exited with status 0", "guest-shutdown")

    server.host.fail("boot", shut_down, when="after")
    with pytest.raises(StartFailed, match="guest shut down"):
        await machine.start()
    assert server.host.calls.count("boot") == 1
    await audit(server)


@pytest.mark.parametrize("state", [State.SUSPENDED, State.STOPPED])
async def test_a_vm_without_its_disk_is_lost_and_can_only_be_deleted(
    server: FakeServer, state: State
) -> None:
    machine = await used(server)
    await (machine.suspend() if state is State.SUSPENDED else machine.stop())
    server.world.files.clear()
    server.world.folders[machine.id].clear()
    with pytest.raises(StartFailed, match="is lost"):
        await machine.start()
    assert (await machine.info()).state is State.LOST
    with pytest.raises(WrongState):
        await machine.start()
    await machine.delete()
    assert await inside(server.machines).journal.list() == []


async def test_a_vm_is_not_lost_because_the_host_cannot_tell(server: FakeServer) -> None:
    machine = await used(server)
    await machine.stop()
    server.host.fail("disks.has_layer", HostError("too many open files"))
    with pytest.raises(HostError, match="too many open files"):
        await machine.start()
    assert (await machine.info()).state is State.STOPPED
    assert await contents(machine) == DISK
