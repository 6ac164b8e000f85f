"""Operations of the VM engine on a host in memory: their rules, failures at every host call, crashes."""

import asyncio
import contextlib
import tempfile
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stead.errors import (
    CapacityExceeded,
    HostError,
    InvalidRequest,
    LimitExceeded,
    MachineNotFound,
    SnapshotNotFound,
    StartFailed,
    SteadError,
    WrongState,
)
from stead.limits import Limits
from stead.machines import Ephemeral, Machine, Machines, State, Sticky
from stead.machines.records import Record
from stead.machines.states import PASSING, Deleted, Prepared, Running, Suspended
from stead.settings import Settings, Size
from stead.store.layers import LayerStore
from support.fake_host import FakeServer, ServerCrashed, World

T = TypeVar("T")
SIZE = Size(1, 512, 20)
SETTINGS = Settings(default_size=SIZE, pool=0, idle_timeout=None)


@contextlib.asynccontextmanager
async def installation(**changes: Any) -> AsyncIterator[FakeServer]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        async with World() as world:
            server = FakeServer(world, SETTINGS.replace(data=Path(folder), **changes))
            await server.start()
            try:
                yield server
            finally:
                await server.stop()
            assert world.violations == []


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with installation() as server:
        yield server


async def run(machine: Machine, command: str) -> str:
    result = await machine.exec(command)
    assert result.ok
    return result.stdout.decode()


async def state_of(machine: Machine) -> tuple[State, str | None]:
    info = await machine.info()
    return info.state, info.reason


async def used(server: FakeServer, **options: Any) -> Machine:
    """A VM with something in memory, something in its page cache and something on its disk."""
    machine = await server.machines.create(**options)
    for command in ("remember program running", "cache draft text", "write file saved"):
        await run(machine, command)
    return machine


async def contents(machine: Machine) -> tuple[str, str, str]:
    """What is in its memory, and what its file system shows of its page cache and its disk."""
    recalled, draft, file = [
        await run(machine, each) for each in ("recall program", "read draft", "read file")
    ]
    return recalled, draft, file


ALL = "running", "text", "saved"
DISK = "", "text", "saved"
"""After a shutdown or a sync."""
CUT = "", "", "saved"
"""After a power cut."""


# What must be true of rows, processes and files


async def disk_of(server: FakeServer, record: Record) -> dict[str, str]:
    """What a VM's disk holds, read from the files that its row names."""
    chain = [] if record.layer is None else await LayerStore(server.machines.database).lineage(record.layer)
    folder = server.world.folders.get(record.id, {})
    # After an error, a frozen layer stays in the VM's folder until the next start.
    layers = [(server.world.files.get(row.file) or folder[row.id]).data for row in chain]
    tops = [getattr(record.state, name, None) for name in ("next_top", "top")]
    own = [folder[top].data for top in tops if top in folder]
    return dict(ChainMap(*own, *layers))


async def audit(server: FakeServer) -> None:
    """Rows are stable, and the host has exactly what they say: no process, layer or memory more or less."""
    await server.quiet()
    world, machines = server.world, server.machines
    records = await machines.journal.list()
    assert [record for record in records if record.state.name in PASSING] == []
    processes = {each.place.machine: each for each in world.processes.values() if each.how is None}
    assert {machine: process.id for machine, process in processes.items()} == {
        record.id: record.run.process for record in records if record.run is not None
    }
    for record in records:
        if isinstance(record.state, Running | Prepared):
            assert processes[record.id].awake.is_set() == isinstance(record.state, Running)
            assert processes[record.id].layers[0].name == record.state.top
            assert processes[record.id].disk == await disk_of(server, record)
        if isinstance(record.state, Suspended):
            assert world.saved[record.state.checkpoint].disk == await disk_of(server, record)
    tops = {record.id: getattr(record.state, "top", None) for record in records}
    assert {machine: set(layers) for machine, layers in world.folders.items()} == {
        record.id: {tops[record.id]} - {None} for record in records if not isinstance(record.state, Deleted)
    }
    assert world.runtime == set(processes)
    store = LayerStore(machines.database)
    assert set(world.files) == {row.file for row in await store.list()}
    assert set(world.saved) == await store.checkpoints()
    assert world.violations == []
    assert [state for state in server.host.states if not state.closed] == []


async def restart(server: FakeServer, *, crash: bool = True) -> None:
    await (server.crash() if crash else server.stop())
    await server.start()
    await audit(server)


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


# Stop and kill


async def test_stop_flushes_the_page_cache_and_keeps_the_disk(server: FakeServer) -> None:
    machine = await used(server)
    await machine.stop()
    assert await state_of(machine) == (State.STOPPED, "stopped")
    await machine.stop()
    await audit(server)
    assert await contents(machine) == DISK


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
    async with asyncio.timeout(30):
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
    server: FakeServer, cause: str | None, state: State, reason: str | None
) -> None:
    machine = await used(server)
    process = server.world.of(machine.id)
    process.end(cause=cause)
    await server.watched()
    assert await state_of(machine) == (state, reason)
    assert not server.world.alive(machine.id) or server.world.of(machine.id) is not process
    await audit(server)
    assert await contents(machine) == CUT


# Suspend and wake


async def test_a_suspended_vm_wakes_as_it_was(server: FakeServer) -> None:
    machine = await used(server)
    before = (await machine.info()).instance
    await machine.suspend()
    assert await state_of(machine) == (State.SUSPENDED, "suspended")
    await machine.suspend()
    await audit(server)
    assert await contents(machine) == ALL
    assert (await machine.info()).instance not in (None, before)
    await audit(server)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", ["vm.pause", "vm.save_and_pause", "sync_layer"])
async def test_a_suspend_that_fails_leaves_the_vm_running(server: FakeServer, call: str, when: Any) -> None:
    machine = await used(server)
    server.host.fail(call, HostError("no"), when=when)
    with pytest.raises(HostError, match="no"):
        await machine.suspend()
    assert await state_of(machine) == (State.RUNNING, None)
    await audit(server)
    assert await contents(machine) == ALL
    await machine.suspend()
    assert await contents(machine) == ALL


async def test_a_suspend_is_finished_once_it_is_recorded(server: FakeServer) -> None:
    machine = await used(server)
    server.host.fail("layers.adopt", HostError("no"))
    with pytest.raises(HostError, match="no"):
        await machine.suspend()
    assert (await machine.info()).state is State.SUSPENDED
    assert not server.world.alive(machine.id)
    assert await contents(machine) == ALL
    await audit(server)


@pytest.mark.parametrize(
    "call", ["checkpoints.read", "make_layer", "restore_state", "connect", "load", "vm.resume"]
)
async def test_a_wake_that_fails_leaves_the_vm_suspended(server: FakeServer, call: str) -> None:
    machine = await used(server)
    await machine.suspend()
    server.host.fail(call, HostError("no"))
    with pytest.raises(SteadError, match="no"):
        await machine.start()
    assert await state_of(machine) == (State.SUSPENDED, "suspended")
    await audit(server)
    assert await contents(machine) == ALL


async def test_a_wake_without_enough_memory_leaves_the_vm_suspended(server: FakeServer) -> None:
    machine = await used(server)
    await machine.suspend()
    server.world.free_memory = 1
    with pytest.raises(CapacityExceeded):
        await machine.start()
    server.world.free_memory = 1 << 30
    assert await contents(machine) == ALL


@pytest.mark.parametrize("found", ["when it is read", "when it is loaded"])
async def test_a_vm_boots_from_its_disk_when_its_memory_is_unusable(server: FakeServer, found: str) -> None:
    machine = await used(server)
    await machine.suspend()
    (checkpoint,) = server.world.saved
    if found == "when it is read":
        server.world.unusable.add(checkpoint)
    else:
        server.world.saved[checkpoint].corrupt = True
    assert await contents(machine) == DISK
    state, reason = await state_of(machine)
    assert state is State.RUNNING
    assert reason is not None and reason.startswith("saved memory was unusable, booted from disk")
    assert server.world.quarantine == [checkpoint]
    await audit(server)


async def test_stop_of_a_suspended_vm_flushes_what_its_guest_had_not_written(server: FakeServer) -> None:
    machine = await used(server)
    await machine.suspend()
    await machine.stop()
    assert await state_of(machine) == (State.STOPPED, "stopped")
    assert await contents(machine) == DISK


# Leases


async def test_a_lease_holds_off_the_idle_suspend(server: FakeServer) -> None:
    machine = await used(server, idle_timeout=1)
    suspend = server.machines.idle._suspend
    async with machine.using():
        await suspend.suspend_if_idle(machine.id)
        assert (await machine.info()).state is State.RUNNING
    await suspend.suspend_if_idle(machine.id)
    assert await state_of(machine) == (State.SUSPENDED, "suspended: idle for 1 s")
    await suspend.suspend_if_idle(machine.id)
    assert await contents(machine) == ALL


async def test_a_lease_taken_during_a_suspend_waits_for_it_and_wakes_the_vm(server: FakeServer) -> None:
    machine = await used(server)
    process = server.world.of(machine.id)
    uses: list[asyncio.Task[str]] = []

    def use() -> None:
        uses.append(asyncio.create_task(run(machine, "recall program")))

    server.host.fail("vm.save_and_pause", use)
    await server.machines.idle._suspend.suspend_if_idle(machine.id)
    assert process.how is not None
    assert [await each for each in uses] == ["running"]
    assert server.world.of(machine.id) is not process
    await audit(server)


# Fork and snapshot


async def test_forks_have_the_memory_and_disk_of_their_parent_and_then_their_own(server: FakeServer) -> None:
    parent = await used(server, name="parent")
    first, second = await parent.fork(2, name="child")
    await run(first, "write file changed")
    await run(parent, "remember program ended")
    assert await contents(first) == ("running", "text", "changed")
    assert await contents(second) == ALL
    assert await contents(parent) == ("ended", "text", "saved")
    identities = [server.world.of(each.id).identity for each in (parent, first, second)]
    for part in ("machine", "hostname", "machine_id", "address"):
        assert len({identity[part] for identity in identities}) == 3
    assert [(await each.info()).name for each in (first, second)] == ["child-1", "child-2"]
    await audit(server)


@pytest.mark.parametrize("call", ["restore_state", "connect", "make_folder", "load"])
async def test_a_fork_makes_all_children_or_none(server: FakeServer, call: str) -> None:
    parent = await used(server)
    server.host.fail(call, HostError("no"), skip=1)
    with pytest.raises(StartFailed, match="no"):
        await parent.fork(3)
    assert [info.id for info in await server.machines.list()] == [parent.id]
    await audit(server)
    assert await contents(parent) == ALL


async def test_a_fork_wakes_its_parent(server: FakeServer) -> None:
    parent = await used(server)
    await parent.suspend()
    (child,) = await parent.fork()
    assert await contents(child) == ALL
    with pytest.raises(InvalidRequest, match="cannot fork 0 VMs"):
        await parent.fork(0)


@pytest.mark.parametrize("call", ["make_layer", "vm.add_layer", "vm.capture", "vm.switch", "vm.resume"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_capture_that_fails_leaves_the_vm_running_on_the_layer_it_writes(
    server: FakeServer, call: str, when: Any
) -> None:
    machine = await used(server)
    server.host.fail(call, HostError("no"), when=when)
    with pytest.raises(HostError, match="no"):
        await machine.snapshot()
    assert await server.machines.snapshots.list() == []
    await audit(server)
    await run(machine, "write file again")
    await machine.suspend()
    assert await contents(machine) == ("running", "text", "again")


@pytest.mark.parametrize("state", [State.RUNNING, State.SUSPENDED, State.STOPPED])
async def test_a_snapshot_holds_what_the_vm_had_then(server: FakeServer, state: State) -> None:
    machine = await used(server)
    if state is State.SUSPENDED:
        await machine.suspend()
    elif state is State.STOPPED:
        await machine.stop()
    snapshot = await machine.snapshot("kept")
    assert (await machine.info()).state is state
    assert snapshot.has_memory == (state is not State.STOPPED)
    await audit(server)
    await run(machine, "write file later")
    await machine.delete()
    await audit(server)
    new = await server.machines.create(snapshot=snapshot.id)
    assert await contents(new) == (DISK if state is State.STOPPED else ALL)
    larger = await server.machines.create(Size(1, 512, 40), snapshot=snapshot.id)
    assert await contents(larger) == DISK
    assert await run(larger, "read fs") == "40"
    await server.machines.snapshots.delete(snapshot.id)
    for each in (new, larger):
        await each.delete()
    await audit(server)
    assert not server.world.files and not server.world.saved


@pytest.mark.parametrize("call", ["sync_frozen", "checkpoints.save"])
async def test_a_snapshot_that_fails_leaves_nothing(server: FakeServer, call: str) -> None:
    machine = await used(server)
    server.host.fail(call, HostError("no"))
    with pytest.raises(HostError, match="no"):
        await machine.snapshot()
    assert await server.machines.snapshots.list() == []
    await audit(server)
    assert await contents(machine) == ALL


async def test_a_vm_from_a_snapshot_with_unusable_memory_boots_from_its_disk(server: FakeServer) -> None:
    snapshot = await (await used(server)).snapshot()
    for state in server.world.saved.values():
        state.corrupt = True
    machine = await server.machines.create(snapshot=snapshot.id)
    assert await contents(machine) == DISK
    assert "saved memory of the snapshot was unusable" in str((await machine.info()).reason)
    await audit(server)


async def test_many_snapshots_are_merged_without_a_change_of_their_content(server: FakeServer) -> None:
    machine = await used(server)
    snapshots = []
    for number in range(10):
        await run(machine, f"write file {number}")
        snapshots.append((await machine.snapshot()).id)
    await audit(server)
    assert "layers.merge" in server.host.calls
    for number in (0, 5, 9):
        new = await server.machines.create(snapshot=snapshots[number])
        assert await run(new, "read file") == str(number)


@pytest.mark.parametrize("then", ["snapshot", "fork", "suspend", "stop", "kill"])
@pytest.mark.parametrize("call", ["vm.resume_if_paused", "vm.written_layer"])
async def test_an_operation_after_a_capture_that_could_not_tell_the_written_layer(
    server: FakeServer, call: str, then: str
) -> None:
    machine = await used(server)
    server.host.fail(call, HostError("no"))
    with pytest.raises(HostError, match="no"):
        await machine.snapshot()
    await run(machine, "write file later")
    await getattr(machine, then)()
    await audit(server)
    assert await run(machine, "read file") == "later"


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("call", ["make_layer", "vm.add_layer", "vm.capture", "vm.switch", "vm.resume"])
async def test_a_vm_that_ends_during_a_capture_keeps_its_disk(
    server: FakeServer, call: str, crash: bool
) -> None:
    machine = await used(server)

    def end() -> None:
        server.world.of(machine.id).layers[0].data["file"] = "last"
        server.world.of(machine.id).end()
        if crash:
            server.host.crash_after(1)

    server.host.fail(call, end, when="after")
    with pytest.raises((SteadError, ServerCrashed)):
        await machine.snapshot()
    with contextlib.suppress(ServerCrashed):
        await server.watched()
    if crash:
        await restart(server)
        machine = await server.machines.get(machine.id)
    assert (await machine.info()).state is State.STOPPED
    await audit(server)
    assert await run(machine, "read file") == "last"


async def test_a_boot_that_cannot_make_a_layer_leaves_the_disk_as_it_was(server: FakeServer) -> None:
    machine = await used(server)
    await machine.stop()
    await machine.snapshot()
    for when in ("before", "after"):
        server.host.fail("make_layer", HostError("no"), when="before" if when == "before" else "after")
        with pytest.raises(StartFailed, match="no"):
            await machine.start()
        assert (await machine.info()).state is State.STOPPED
        await audit(server)
    assert await contents(machine) == DISK


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


# Delete, recreate, retention


async def test_delete_removes_everything(server: FakeServer) -> None:
    machine = await used(server)
    await machine.suspend()
    await machine.delete()
    with pytest.raises(MachineNotFound):
        await machine.info()
    await audit(server)
    assert not server.world.files and not server.world.saved


async def test_a_deleted_vm_with_recreate_comes_back_empty_under_its_id(server: FakeServer) -> None:
    machine = await used(server, recreate=True)
    await machine.delete()
    assert (await machine.info()).state is State.DELETED
    await audit(server)
    with pytest.raises(WrongState):
        await machine.snapshot()
    assert await contents(machine) == ("", "", "")
    await machine.delete()
    await machine.delete()
    with pytest.raises(MachineNotFound):
        await machine.info()
    await audit(server)


async def test_a_vm_that_was_made_from_a_snapshot_is_recreated_from_it(server: FakeServer) -> None:
    snapshot = await (await used(server)).snapshot()
    machine = await server.machines.create(snapshot=snapshot.id, recreate=True)
    await run(machine, "write file changed")
    await machine.delete()
    assert await contents(machine) == ALL
    await machine.delete()
    await server.machines.snapshots.delete(snapshot.id)
    with pytest.raises(SnapshotNotFound):
        await machine.start()
    assert (await machine.info()).state is State.DELETED
    await audit(server)


async def test_a_recreate_that_fails_leaves_the_vm_deleted(server: FakeServer) -> None:
    machine = await used(server, recreate=True)
    await machine.delete()
    server.host.fail("restore", HostError("no"))
    with pytest.raises(StartFailed, match="no"):
        await machine.start()
    assert (await machine.info()).state is State.DELETED
    await audit(server)
    await machine.start()
    assert (await machine.info()).state is State.RUNNING


@pytest.mark.parametrize(("limit", "value"), [("vms", 1), ("running", 1), ("total_disk_gib", 39)])
async def test_a_recreated_vm_counts_as_a_new_one(server: FakeServer, limit: str, value: int) -> None:
    async def limits_of(_: str) -> Limits:
        return Limits(**{limit: value})

    server.machines.limit(limits_of)
    machine = await server.machines.create(account="a", recreate=True)
    await machine.delete()
    other = await server.machines.create(account="a")
    with pytest.raises(LimitExceeded):
        await machine.start()
    assert (await machine.info()).state is State.DELETED
    await other.delete()
    await machine.start()
    await audit(server)


@pytest.mark.parametrize("event", ["OnStop", "OnSuspend"])
async def test_an_ephemeral_vm_is_deleted_at_its_event(server: FakeServer, event: Any) -> None:
    machine = await used(server, persistence=Ephemeral(event))
    await machine.suspend()
    if event == "OnStop":
        assert await contents(machine) == ALL
        await machine.resize(vcpus=2)
        assert await contents(machine) == DISK
        await machine.stop()
    with pytest.raises(MachineNotFound):
        await machine.info()
    await audit(server)


async def test_an_ephemeral_vm_whose_guest_shuts_down_is_deleted(server: FakeServer) -> None:
    machine = await used(server, persistence=Ephemeral("OnStop"))
    server.world.of(machine.id).shut_down()
    assert await machine.wait_for_exit() == "stopped: guest shut down"
    await server.quiet()
    assert await server.machines.list() == []
    await audit(server)


async def test_sticky_vms_are_evicted_when_the_disk_is_full(server: FakeServer) -> None:
    kept = await used(server)
    first, second, up = [await used(server, persistence=Sticky(priority)) for priority in (3, 1, 0)]
    for machine in (kept, first, second):
        await machine.stop()
    server.world.full_at = len(server.world.folders)
    new = await server.machines.create()
    assert {info.id for info in await server.machines.list()} == {kept.id, first.id, up.id, new.id}
    server.world.full_at = 1
    with pytest.raises(CapacityExceeded):
        await server.machines.create()
    assert {info.id for info in await server.machines.list()} == {kept.id, up.id, new.id}
    await audit(server)


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


# Crashes and failures at every call

Operation = Callable[[Machine, Machines], Awaitable[object]]
OPERATIONS: dict[str, Operation] = {
    "create": lambda _, machines: machines.create(),
    "stop": lambda machine, _: machine.stop(),
    "kill": lambda machine, _: machine.kill(),
    "suspend": lambda machine, _: machine.suspend(),
    "wake": lambda machine, _: machine.start(),
    "boot": lambda machine, _: machine.start(),
    "snapshot": lambda machine, _: machine.snapshot(),
    "fork": lambda machine, _: machine.fork(),
    "resize": lambda machine, _: machine.resize(disk_gib=30),
    "delete": lambda machine, _: machine.delete(),
    "recreate": lambda machine, _: machine.start(),
}
REMAINS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "stop": (ALL, DISK),
    "kill": (ALL, CUT),
    "boot": (DISK,),
    "resize": (ALL, DISK),
    "delete": (ALL, ("", "", "")),
    "recreate": (("", "", ""),),
}
"""What a VM may hold after an operation that was interrupted; after any other it is as before."""


async def prepared_for(server: FakeServer, operation: str) -> Machine:
    machine = await used(server, recreate=operation in ("delete", "recreate"))
    if operation == "wake":
        await machine.suspend()
    elif operation == "boot":
        await machine.stop()
    elif operation == "recreate":
        await machine.delete()
    await server.quiet()
    return machine


async def interrupted(server: FakeServer, operation: str, inject: Callable[[], None]) -> bool:
    """Run an operation with a fault, then restart the server and check all; whether the fault came."""
    machine = await prepared_for(server, operation)
    inject()
    with contextlib.suppress(SteadError, ServerCrashed):
        await OPERATIONS[operation](machine, server.machines)
    with contextlib.suppress(ServerCrashed):
        await server.watched()
    came = not server.host.has_faults
    await restart(server)
    left = await contents(await server.machines.get(machine.id))
    assert left in REMAINS.get(operation, (ALL,))
    for info in await server.machines.list():
        await server.machines.delete(info.id, forget=True)
    for snapshot in await server.machines.snapshots.list():
        await server.machines.snapshots.delete(snapshot.id)
    return came


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_a_crash_after_any_call_loses_nothing(server: FakeServer, operation: str, every: int) -> None:
    def crash() -> None:
        server.host.crash_after(calls)

    calls = 1
    while await interrupted(server, operation, crash):
        calls += every
    assert calls > 5


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
async def test_an_error_of_any_call_loses_nothing(server: FakeServer, operation: str) -> None:
    def fail() -> None:
        server.host.fail(None, HostError("no"), skip=calls)

    calls = 0
    while await interrupted(server, operation, fail):
        calls += 1
    assert calls > 2


# Random histories


@dataclass
class Expected:
    """What a VM holds; `program` is None when its memory may be lost."""

    file: str | None = None
    program: str | None = None
    writing: str | None = None
    """What was being written to the file when the write was interrupted."""
    deleted: bool = False
    """Perhaps: a delete was interrupted."""


FAULTS = st.none() | st.tuples(st.sampled_from(["error", "crash", "death", "leave"]), st.integers(0, 20))
Fault = tuple[str, int] | None
WHICH = st.integers(0, 3)


class Histories(RuleBasedStateMachine):
    """Random operations with errors, ends of processes, callers that leave and crashes of the server."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = contextlib.ExitStack()
        folder = self.exits.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self.runner = self.exits.enter_context(asyncio.Runner())
        self.expected: dict[str, Expected] = {}
        self.snapshots: dict[str, Expected] = {}
        self.number = 0
        self.faulty = False
        self.world = World()
        self.server = FakeServer(self.world, SETTINGS.replace(data=Path(folder)))
        self.run(self.begin())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    async def begin(self) -> None:
        await self.world.__aenter__()
        await self.server.start()

    def teardown(self) -> None:
        with self.exits:
            self.run(self.end())

    async def end(self) -> None:
        try:
            await self.restart()
        finally:
            await self.server.crash()
            await self.world.__aexit__()

    # Faults

    async def attempt(
        self, work: Coroutine[Any, Any, T], fault: Fault, machine: str | None = None
    ) -> T | None:
        """The result of an operation; None when the fault made it fail."""
        task = asyncio.ensure_future(work)
        if fault is not None:
            kind, calls = fault
            self.faulty = True
            match kind:
                case "error":
                    self.server.host.fail(None, HostError("injected"), skip=calls)
                case "crash":
                    self.server.host.crash_after(calls + 1)
                case "leave":
                    self.server.host.fail(None, lambda: task.cancel(), skip=calls)
                case "death":
                    self.server.host.fail(None, lambda: self.kill_process(machine), skip=calls)
        try:
            result = await task
        except (SteadError, ServerCrashed, asyncio.CancelledError):
            if fault is None and not self.faulty:
                raise
            result = None
        with contextlib.suppress(ServerCrashed):
            await self.server.watched()
        if self.server.host.dead:
            await self.restart()
            return None
        self.server.host.forget_faults()
        return result

    def kill_process(self, machine: str | None) -> None:
        for process in self.world.processes.values():
            if machine in (None, process.place.machine):
                self.lose_memory(process.place.machine)
                process.end()

    def lose_memory(self, machine: str) -> None:
        if machine in self.expected:
            self.expected[machine].program = None

    async def restart(self, *, crash: bool = True) -> None:
        await restart(self.server, crash=crash)
        self.faulty = False
        records = {record.id: record for record in await self.server.machines.journal.list()}
        for machine, expected in list(self.expected.items()):
            if expected.deleted and machine not in records:
                del self.expected[machine]
            else:
                expected.deleted = False
        for machine in records.keys() - self.expected.keys():
            # Its caller did not learn of it, as with a crash right after it was made.
            disk = await disk_of(self.server, records[machine])
            self.expected[machine] = Expected(disk.get("file"))
        known = {info.id for info in await self.server.machines.snapshots.list()}
        assert self.snapshots.keys() <= known
        for snapshot in known - self.snapshots.keys():
            await self.server.machines.snapshots.delete(snapshot)
        await self.server.quiet()

    def pick(self, which: int) -> tuple[Machine, Expected]:
        machine = list(self.expected)[which % len(self.expected)]
        return Machine(self.server.machines, machine), self.expected[machine]

    # Operations. What is drawn never depends on the state: which call comes first is not the same every time.

    @rule(fault=FAULTS)
    def create(self, fault: Fault) -> None:
        if len(self.expected) < 4:
            created = self.run(self.attempt(self.server.machines.create(), fault))
            if created is not None:
                self.expected[created.id] = Expected()

    @rule(which=WHICH, fault=FAULTS)
    def create_from_snapshot(self, which: int, fault: Fault) -> None:
        if self.snapshots and len(self.expected) < 4:
            snapshot = list(self.snapshots)[which % len(self.snapshots)]
            created = self.run(self.attempt(self.server.machines.create(snapshot=snapshot), fault))
            if created is not None:
                self.expected[created.id] = replace(self.snapshots[snapshot])

    @rule(which=WHICH, fault=FAULTS)
    def use(self, which: int, fault: Fault) -> None:
        """Also wakes and boots it."""
        if not self.expected:
            return
        machine, expected = self.pick(which)

        async def write() -> None:
            if expected.program is not None:
                assert await run(machine, "recall program") == expected.program
            assert await run(machine, "read file") == (expected.file or "")
            self.number += 1
            expected.writing, expected.program = str(self.number), None
            await run(machine, f"write file {self.number}")
            expected.file = str(self.number)
            await run(machine, f"remember program {self.number}")
            expected.program = str(self.number)

        self.run(self.attempt(write(), fault, machine.id))

    @rule(which=WHICH, fault=FAULTS, operation=st.sampled_from(["stop", "kill", "resize", "suspend", "fork"]))
    def change(self, which: int, fault: Fault, operation: str) -> None:
        if not self.expected:
            return
        machine, expected = self.pick(which)
        match operation:
            case "stop" | "kill":
                self.lose_memory(machine.id)
                work: Coroutine[Any, Any, Any] = machine.stop() if operation == "stop" else machine.kill()
            case "resize":
                self.lose_memory(machine.id)
                work = machine.resize(vcpus=2 << which % 2)
            case "suspend":
                work = self.suspend(machine)
            case _:
                work = machine.fork()
        result = self.run(self.attempt(work, fault, machine.id))
        if operation == "fork" and result:
            self.expected[result[0].id] = replace(expected)

    async def suspend(self, machine: Machine) -> None:
        with contextlib.suppress(WrongState):
            await machine.suspend()

    @rule(which=WHICH, fault=FAULTS)
    def snapshot(self, which: int, fault: Fault) -> None:
        if not self.expected:
            return
        machine, expected = self.pick(which)
        before = replace(expected)
        snapshot = self.run(self.attempt(machine.snapshot(), fault, machine.id))
        if snapshot is not None:
            memory = before.program if snapshot.has_memory else None
            self.snapshots[snapshot.id] = replace(before, program=memory)

    @rule(which=WHICH)
    def delete_snapshot(self, which: int) -> None:
        if self.snapshots:
            snapshot = list(self.snapshots)[which % len(self.snapshots)]
            del self.snapshots[snapshot]
            self.run(self.attempt(self.server.machines.snapshots.delete(snapshot), None))

    @rule(which=WHICH, fault=FAULTS)
    def delete(self, which: int, fault: Fault) -> None:
        if self.expected:
            machine, expected = self.pick(which)
            expected.deleted = True
            self.run(self.delete_and_forget(machine, fault))

    async def delete_and_forget(self, machine: Machine, fault: Fault) -> None:
        await self.attempt(machine.delete(), fault, machine.id)
        if self.faulty:
            await self.restart(crash=False)
        elif await self.server.machines.journal.get(machine.id) is None:
            self.expected.pop(machine.id, None)

    @rule(crash=st.booleans())
    def restart_server(self, crash: bool) -> None:
        self.run(self.restart(crash=crash))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.run(self.check())

    async def check(self) -> None:
        assert self.world.violations == []
        if not self.faulty:
            await audit(self.server)
        for machine, expected in self.expected.items():
            record = await self.server.machines.journal.get(machine)
            assert record is not None
            if not expected.deleted:
                found = (await disk_of(self.server, record)).get("file")
                assert found in (expected.file, expected.writing)
                expected.file, expected.writing = found, None
            if isinstance(record.state, Suspended) and expected.program is not None:
                saved = self.world.saved[record.state.checkpoint]
                assert saved.memory["program"] == expected.program


BOUNDED = settings(
    max_examples=10,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking would take minutes: which call comes first is not the same every time.
    phases=[Phase.reuse, Phase.generate],
)
Histories.TestCase.settings = BOUNDED
TestHistories = Histories.TestCase


@pytest.mark.slow
class TestManyHistories(Histories.TestCase):  # type: ignore[misc, valid-type]  # made by Hypothesis
    settings = settings(BOUNDED, max_examples=300, stateful_step_count=40)
