"""Delete, recreate and retention, on a host in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from stead.errors import (
    CapacityExceeded,
    HostError,
    MachineNotFound,
    SnapshotNotFound,
    StartFailed,
    WrongSnapshotState,
    WrongState,
)
from stead.limits import LimitExceeded, Limits
from stead.machines import Ephemeral, Machine, State, Sticky
from stead.machines.events import EventKind, MachineEvent
from stead.machines.records import Properties
from support.engine import ALL, DISK, audit, contents, run, state_of, used
from support.fake_server import FakeServer


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


async def test_a_vm_that_was_made_from_a_snapshot_is_recreated_from_it(
    server: FakeServer, events: list[MachineEvent]
) -> None:
    snapshot = await (await used(server)).snapshot()
    machine = await server.machines.create(Properties(snapshot=snapshot.id, name="again", recreate=True))
    await run(machine, "write file changed")
    identity = server.world.of(machine.id).identity
    await machine.delete()
    assert await state_of(machine) == (State.DELETED, "deleted")
    assert machine.id not in [info.id for info in await server.machines.list()]
    assert await contents(machine) == ALL
    assert server.world.of(machine.id).identity["machine_id"] == identity["machine_id"]
    assert (await machine.info()).name == "again"
    await machine.delete()
    await server.machines.snapshots.delete(snapshot.id)
    with pytest.raises(SnapshotNotFound):
        await machine.exec("true")
    assert (await machine.info()).state is State.DELETED
    await machine.delete()
    with pytest.raises(MachineNotFound):
        await machine.info()
    await audit(server)
    about = [event for event in events if event.record.id == machine.id]
    assert [event.message.removeprefix(f"VM {machine.id} ") for event in about] == [
        f"created: from snapshot {snapshot.id}",
        "deleted: requested",
        "created: recreated for command",
        "deleted: requested",
        "deleted: requested",
    ]
    assert [event.row_removed for event in about if event.kind is EventKind.DELETED] == [False, False, True]


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
    machine = await server.machines.create(Properties(account="a", recreate=True))
    await machine.delete()
    other = await server.machines.create(Properties(account="a"))
    with pytest.raises(LimitExceeded):
        await machine.start()
    assert (await machine.info()).state is State.DELETED
    await other.delete()
    await machine.start()
    await audit(server)


@pytest.mark.parametrize("persistence", [Ephemeral(), Ephemeral("OnStop")])
@pytest.mark.parametrize("end", [Machine.stop, Machine.kill])
async def test_an_ephemeral_vm_is_deleted_when_it_stops(
    server: FakeServer, persistence: Ephemeral, end: Callable[[Machine], Awaitable[object]]
) -> None:
    (machine,) = await (await used(server)).fork(persistence=persistence)
    await end(machine)
    with pytest.raises(MachineNotFound):
        await machine.info()
    await audit(server)


@pytest.mark.parametrize("event", ["OnStop", "OnSuspend"])
async def test_an_ephemeral_vm_is_deleted_at_its_event(
    server: FakeServer, events: list[MachineEvent], event: Any
) -> None:
    parent = await used(server)
    (machine,) = await parent.fork(persistence=Ephemeral(event))
    assert (await machine.info()).persistence == Ephemeral(event)
    waiting = asyncio.create_task(machine.wait_for_exit())
    await machine.suspend()
    if event == "OnStop":
        assert await contents(machine) == ALL
        await machine.resize(vcpus=2)
        assert await contents(machine) == DISK
        await machine.suspend()
        await machine.kill()
    assert await waiting == ("suspended" if event == "OnStop" else "deleted: ephemeral: suspended")
    with pytest.raises(MachineNotFound):
        await machine.info()
    await audit(server)
    how = "killed" if event == "OnStop" else "suspended"
    assert events[-1].message == f"VM {machine.id} deleted: ephemeral: {how}"


async def test_an_ephemeral_vm_whose_guest_shuts_down_is_deleted(
    server: FakeServer, events: list[MachineEvent]
) -> None:
    machine = await used(server, persistence=Ephemeral("OnStop"))
    server.world.of(machine.id).shut_down()
    assert await machine.wait_for_exit() == "stopped: guest shut down"
    await server.quiet()
    assert await server.machines.list() == []
    assert events[-1].message == f"VM {machine.id} deleted: ephemeral: stopped: guest shut down"
    await audit(server)


async def test_sticky_vms_are_evicted_when_the_disk_is_full(
    server: FakeServer, events: list[MachineEvent]
) -> None:
    kept = await used(server)
    first, second, up = [await used(server, persistence=Sticky(priority)) for priority in (3, 1, 0)]
    for machine in (kept, first, second):
        await machine.stop()
    server.world.full_at = len(server.world.folders)
    new = await server.machines.create()
    assert {info.id for info in await server.machines.list()} == {kept.id, first.id, up.id, new.id}
    evicted = f"VM {second.id} deleted: evicted to free disk space (sticky, priority 1)"
    assert evicted in [event.message for event in events]
    server.world.full_at = 1
    with pytest.raises(CapacityExceeded):
        await first.start()
    assert (await first.info()).state is State.STOPPED, "a VM is not evicted for its own start"
    with pytest.raises(CapacityExceeded):
        await server.machines.create()
    assert {info.id for info in await server.machines.list()} == {kept.id, up.id, new.id}
    await audit(server)


async def test_of_two_deletions_of_a_snapshot_one_finds_none(server: FakeServer) -> None:
    snapshots, snapshot = server.machines.snapshots, await (await used(server)).snapshot()
    both = (snapshots.delete(snapshot.id), snapshots.delete(snapshot.id))
    done, late = await asyncio.gather(*both, return_exceptions=True)
    assert done is None and isinstance(late, SnapshotNotFound)
    await audit(server)


async def test_a_snapshot_is_not_deleted_while_it_is_captured(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, snapshots = await used(server), server.machines.snapshots
    refused: list[object] = []

    async def delete() -> None:
        (building,) = await snapshots.list()
        refused.extend(await asyncio.gather(snapshots.delete(building.id), return_exceptions=True))

    save = server.host.checkpoints.save

    async def delete_first(*arguments: Any) -> None:
        await delete()
        await save(*arguments)

    monkeypatch.setattr(server.host.checkpoints, "save", delete_first)
    snapshot = await machine.snapshot()
    assert [type(each) for each in refused] == [WrongSnapshotState]
    assert [each.id for each in await snapshots.list()] == [snapshot.id]
    await audit(server)
