"""Create, the pool, resize and disks that are lost, on a host in memory."""

import asyncio
from typing import Any

import pytest

from stead.errors import HostError, InvalidRequest, StartFailed, WrongState
from stead.machines import State
from stead.machines.pool import Pool
from stead.settings import Size
from stead.tasks import cancel_and_wait
from support.engine import ALL, DISK, audit, contents, installation, restart, run, state_of, used
from support.fake_server import FakeServer

# Create and pool


async def test_create_confers_an_identity_and_runs(server: FakeServer) -> None:
    machine = await used(server, name="one")
    info = await machine.info()
    process = server.world.of(machine.id)
    assert (info.state, info.reason, info.name) == (State.RUNNING, None, "one")
    assert process.identity["machine"] == machine.id and process.identity["address"] == str(info.address)
    assert await contents(machine) == ALL
    await audit(server)


CREATE_CALLS = ["make_folder", "make_layer", "restore", "connect", "vm.running", "check_capacity"]


@pytest.mark.parametrize("call", CREATE_CALLS)
async def test_a_create_that_fails_leaves_nothing(server: FakeServer, call: str) -> None:
    await server.machines.template()
    server.host.fail(call, HostError("no"), skip=1 if call == "check_capacity" else 0)
    with pytest.raises(StartFailed, match="cannot create a VM: no"):
        await server.machines.create()
    assert await server.machines.journal.list() == []
    assert not server.world.folders
    await audit(server)


async def test_a_create_whose_caller_left_leaves_nothing(server: FakeServer) -> None:
    creating = asyncio.create_task(server.machines.create())
    server.host.fail("restore", lambda: creating.cancel(), when="after")
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert not server.world.folders
    await audit(server)


async def test_a_create_is_tried_again_when_the_guest_ends_at_once(server: FakeServer) -> None:
    def panic() -> None:
        for process in server.world.processes.values():
            process.end(cause="guest-panic")

    server.host.fail("vm.running", panic, when="after")
    machine = await server.machines.create()
    assert (await machine.info()).state is State.RUNNING
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
    machine = await server.machines.create(snapshot=snapshot.id)
    assert await contents(machine) == ALL
    assert server.host.calls.count("restore_state") == 2
    await audit(server)


async def test_guests_that_do_not_answer_do_not_block_the_creates_of_others(server: FakeServer) -> None:
    await server.machines.template()
    server.machines.slots._total = 2
    server.machines.slots._release_after = 0.05

    def hang() -> None:
        for process in server.world.processes.values():
            process.awake.clear()

    for _ in range(2):
        server.host.fail("vm.running", hang, when="after")
    stuck = [asyncio.create_task(server.machines.create(account="hostile")) for _ in range(2)]
    async with asyncio.timeout(30):
        while server.host.calls.count("vm.running") < 2:  # noqa: ASYNC110  # the host in memory has no event
            await asyncio.sleep(0.001)
        other = await server.machines.create(account="other")
    assert await run(other, "recall nothing") == ""
    assert not any(task.done() for task in stuck)
    await cancel_and_wait(*stuck)
    await audit(server)


async def test_a_create_that_lasts_too_long_does_not_keep_the_pool_from_refilling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stead.machines.pool._LONGEST_WAIT", 0.05)
    monkeypatch.setattr("stead.machines.pool._QUIET", 0.0)
    nothing: Any = None
    pool = Pool(nothing, nothing, nothing, nothing, nothing, 1)
    with pool.giving_way():
        assert pool._busy == 1
        async with asyncio.timeout(30):
            await pool._wanted.wait()
        assert pool._busy == 0
    assert pool._busy == 0


async def test_a_create_takes_a_prepared_vm_from_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stead.machines.pool._QUIET", 0)
    async with installation(pool=1) as server:
        await server.machines.template()
        assert await server.machines.pool.filled(10)
        (prepared,) = await server.machines.pool.prepared()
        process = server.world.of(prepared.id)
        assert not process.awake.is_set() and process.identity["hostname"] == "prepared"
        machine = await server.machines.create(name="mine")
        assert machine.id == prepared.id and server.world.of(machine.id) is process
        assert process.identity["hostname"] == machine.id
        assert await server.machines.pool.filled(10)
        # Its process ends unseen by anybody: the next create gets another VM.
        (prepared,) = await server.machines.pool.prepared()
        server.world.of(prepared.id).end()
        other = await server.machines.create()
        assert other.id != prepared.id
        await restart(server)
        assert {info.id for info in await server.machines.list()} == {machine.id, other.id}


# Resize


async def test_resize_restarts_a_running_vm_and_grows_its_disk(server: FakeServer) -> None:
    machine = await used(server)
    await machine.resize(vcpus=2, disk_gib=30)
    assert (await machine.info()).size == Size(2, 512, 30)
    assert await contents(machine) == DISK
    assert await run(machine, "read fs") == "30"
    process = server.world.of(machine.id)
    await machine.resize(vcpus=2, disk_gib=30)
    assert server.world.of(machine.id) is process
    with pytest.raises(InvalidRequest, match="cannot shrink the disk from 30 to 20 GiB"):
        await machine.resize(disk_gib=20)
    await audit(server)


@pytest.mark.parametrize("state", [State.SUSPENDED, State.STOPPED])
async def test_resize_of_a_vm_that_is_down(server: FakeServer, state: State) -> None:
    machine = await used(server)
    await (machine.suspend() if state is State.SUSPENDED else machine.stop())
    await machine.resize(memory_mib=1024)
    assert (await machine.info()).state is (State.RUNNING if state is State.SUSPENDED else State.STOPPED)
    assert await contents(machine) == DISK
    assert server.world.of(machine.id).size == Size(1, 1024, 20)
    await audit(server)


async def test_a_resize_that_cannot_boot_leaves_the_vm_stopped(server: FakeServer) -> None:
    machine = await used(server)
    server.host.fail("boot", HostError("no"))
    with pytest.raises(StartFailed, match="no"):
        await machine.resize(vcpus=2)
    assert await state_of(machine) == (State.STOPPED, "failed to start: no")
    await audit(server)
    assert await contents(machine) == DISK


# Lost disks


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
    assert await server.machines.journal.list() == []


async def test_a_vm_is_not_lost_because_the_host_cannot_tell(server: FakeServer) -> None:
    machine = await used(server)
    await machine.stop()
    server.host.fail("has_layer", HostError("too many open files"))
    with pytest.raises(HostError, match="too many open files"):
        await machine.start()
    assert (await machine.info()).state is State.STOPPED
    assert await contents(machine) == DISK
