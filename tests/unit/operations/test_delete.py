"""Delete, recreate and retention, on a host in memory."""

from typing import Any

import pytest

from stead.errors import (
    CapacityExceeded,
    HostError,
    LimitExceeded,
    MachineNotFound,
    SnapshotNotFound,
    StartFailed,
    WrongState,
)
from stead.limits import Limits
from stead.machines import Ephemeral, State, Sticky
from support.engine import ALL, DISK, audit, contents, run, used
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
