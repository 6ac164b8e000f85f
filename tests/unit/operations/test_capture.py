"""Fork and snapshot, on a host in memory."""

import asyncio
import contextlib
from typing import Any

import pytest

from stead.errors import HostError, InvalidRequest, StartFailed, SteadError
from stead.machines import State
from stead.machines.records import Properties
from stead.settings import Size
from support.engine import ALL, DISK, audit, contents, restart, run, used
from support.fake_host import ServerCrashed
from support.fake_server import FakeServer
from support.internals import inside


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


@pytest.mark.parametrize("call", ["restore_state", "connect", "disks.make_folder", "load"])
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


@pytest.mark.parametrize("call", ["disks.make_layer", "vm.add_layer", "vm.capture", "vm.switch", "vm.resume"])
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
    new = await server.machines.create(Properties(snapshot=snapshot.id))
    assert await contents(new) == (DISK if state is State.STOPPED else ALL)
    larger = await server.machines.create(Properties(snapshot=snapshot.id), Size(1, 512, 40))
    assert await contents(larger) == DISK
    assert await run(larger, "read fs") == "40"
    await server.machines.snapshots.delete(snapshot.id)
    for each in (new, larger):
        await each.delete()
    await audit(server)
    assert not server.world.files and not server.world.saved


@pytest.mark.parametrize("call", ["layers.sync", "checkpoints.save"])
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
    machine = await server.machines.create(Properties(snapshot=snapshot.id))
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
        new = await server.machines.create(Properties(snapshot=snapshots[number]))
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
@pytest.mark.parametrize("call", ["disks.make_layer", "vm.add_layer", "vm.capture", "vm.switch", "vm.resume"])
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
        server.host.fail("disks.make_layer", HostError("no"), when="before" if when == "before" else "after")
        with pytest.raises(StartFailed, match="no"):
            await machine.start()
        assert (await machine.info()).state is State.STOPPED
        await audit(server)
    assert await contents(machine) == DISK


async def test_a_failed_adoption_does_not_block_snapshots_and_forks(server: FakeServer) -> None:
    machine = await used(server)
    server.host.fail("layers.adopt", HostError("no"))
    with pytest.raises(HostError, match="no"):
        await machine.snapshot()
    assert not server.world.files
    (child,) = await machine.fork()
    assert await contents(child) == ALL
    restored = await server.machines.create(Properties(snapshot=(await machine.snapshot()).id))
    assert await contents(restored) == ALL
    await audit(server)


async def test_a_capture_that_is_cancelled_closes_the_memory(server: FakeServer) -> None:
    machine = await used(server)
    machines = server.machines
    live = inside(machines).processes.get(machine.id)
    assert live is not None
    record = await inside(machines).journal.find(machine.id)
    taking = asyncio.create_task(inside(machines).capture.capture(record, live))
    server.host.fail("vm.switch", lambda: taking.cancel())
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert [state.closed for state in server.host.states] == [True]
    assert await contents(machine) == ALL
    await audit(server)
