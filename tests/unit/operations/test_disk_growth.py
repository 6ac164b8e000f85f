"""VMs with larger disks than their template: disk and file system grow before the create is answered."""

from dataclasses import replace
from typing import Any

import pytest

from stead.builds.builder import Builder
from stead.builds.plan import Base
from stead.errors import HostError, StartFailed
from stead.machines import Machine, State
from stead.machines.records import Properties
from stead.settings import Size
from stead.store.builds import BuildStore
from support.builds import Lines
from support.engine import ALL, SIZE, audit, contents, installation, restart, run, used
from support.fake_host import ServerCrashed
from support.fake_server import FakeServer
from support.fake_world import FakeTemplate
from support.internals import inside

LARGER = replace(SIZE, disk_gib=40)


async def file_system(machine: Machine) -> str:
    """Its size in GiB; empty when it never grew."""
    return await run(machine, "read fs")


async def test_disks_of_all_sizes_have_one_template(server: FakeServer) -> None:
    for disk in (20, 21, 4096):
        machine = await server.machines.create(size=replace(SIZE, disk_gib=disk))
        assert (await machine.info()).size.disk_gib == disk
        assert await file_system(machine) == ("" if disk == 20 else str(disk))
    assert list(server.world.templates) == [f"template-{SIZE}"]
    assert server.host.calls.count("templates.ensure") == 1
    await audit(server)
    await restart(server)


async def test_a_disk_of_the_templates_size_costs_no_call(server: FakeServer) -> None:
    await server.machines.create()
    assert "vm.resize_disk" not in server.host.calls
    await server.machines.create(size=LARGER)
    assert server.host.calls.count("vm.resize_disk") == 1


async def test_a_grown_disk_stays_what_it_is(server: FakeServer) -> None:
    """Through a fork, a snapshot, a suspend, a stop and a crash of its VM."""
    machine = await used(server)
    await machine.delete()
    machine = await server.machines.create(size=LARGER)
    for command in ("remember program running", "cache draft text", "write file saved"):
        await run(machine, command)
    (child,) = await machine.fork()
    snapshot = await machine.snapshot()
    copy = await server.machines.create(Properties(snapshot=snapshot.id))
    largest = await server.machines.create(Properties(snapshot=snapshot.id), replace(SIZE, disk_gib=60))
    for each in (machine, child, copy):
        assert (await file_system(each), await contents(each)) == ("40", ALL)
        await each.suspend()
        await each.start()
        assert (await file_system(each), await contents(each)) == ("40", ALL)
        await each.stop()
        await each.start()
        assert await file_system(each) == "40"
    assert await file_system(largest) == "60"
    await restart(server)


@pytest.mark.parametrize("default", [20, 30])
async def test_a_vm_of_the_pool_gets_the_disk_of_its_create(default: int) -> None:
    size = replace(SIZE, disk_gib=default)
    async with installation(pool=1, default_size=size) as server:
        await server.machines.template()
        for wanted in (default, 40):
            assert await inside(server.machines).pool.filled(60)
            (prepared,) = await inside(server.machines).pool.prepared()
            assert prepared.size == size
            await audit(server)
            grown = server.host.calls.count("vm.resize_disk")
            machine = await server.machines.create(size=replace(size, disk_gib=wanted))
            assert machine.id == prepared.id
            assert (await machine.info()).size.disk_gib == wanted
            assert server.host.calls.count("vm.resize_disk") - grown == (wanted != default)
            assert await file_system(machine) == ("" if wanted == 20 else str(wanted))
        await restart(server)


async def test_a_vm_of_the_pool_with_a_larger_disk_is_not_taken() -> None:
    async with installation(pool=1, default_size=LARGER) as server:
        await server.machines.template()
        assert await inside(server.machines).pool.filled(60)
        (prepared,) = await inside(server.machines).pool.prepared()
        machine = await server.machines.create(size=SIZE)
        assert machine.id != prepared.id
        assert server.world.of(machine.id).layers[0].size_gib == SIZE.disk_gib
        await audit(server)


async def test_the_pool_replaces_vms_of_a_default_size_of_before() -> None:
    async with installation(pool=1) as server:
        await server.machines.template()
        assert await inside(server.machines).pool.filled(60)
        (before,) = await inside(server.machines).pool.prepared()
        await server.crash()
        server.settings = server.settings.replace(default_size=LARGER)
        await server.start()
        assert await inside(server.machines).pool.filled(60)
        (prepared,) = await inside(server.machines).pool.prepared()
        assert prepared.id != before.id and prepared.size == LARGER
        await audit(server)


@pytest.mark.parametrize("pool", [0, 1])
async def test_a_create_whose_disk_cannot_grow_leaves_nothing(pool: int) -> None:
    async with installation(pool=pool) as server:
        await server.machines.template()
        assert await inside(server.machines).pool.filled(60)
        server.host.fail("vm.resize_disk", HostError("no"))
        with pytest.raises(StartFailed, match="cannot create a VM: no"):
            await server.machines.create(size=LARGER)
        assert await server.machines.list() == []
        await inside(server.machines).pool.filled(60)
        await audit(server)


async def test_a_guest_that_is_not_notified_has_no_vm(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the file is not what the guest sees."""

    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr("support.fake_host.FakeVm.resize_disk", nothing)
    with pytest.raises(StartFailed, match="cannot grow the root file system: the guest's disk has"):
        await server.machines.create(size=LARGER)
    assert await server.machines.list() == []


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("pool", [0, 1])
async def test_a_create_that_is_cut_off_while_its_disk_grows_leaves_nothing(pool: int, when: Any) -> None:
    async with installation(pool=pool) as server:
        await server.machines.template()
        assert await inside(server.machines).pool.filled(60)

        def crash() -> None:
            server.host.dead = True
            raise ServerCrashed

        server.host.fail("vm.resize_disk", crash, when=when)
        with pytest.raises(ServerCrashed):
            await server.machines.create(size=LARGER)
        await server.crash()
        await server.start()
        assert await server.machines.list() == []
        await inside(server.machines).pool.filled(60)
        await audit(server)


async def test_a_vm_that_is_created_again_has_its_disk(server: FakeServer) -> None:
    machine = await server.machines.create(Properties(recreate=True), LARGER)
    await machine.delete()
    await machine.start()
    assert await file_system(machine) == "40"
    await audit(server)


async def test_vms_on_the_template_of_an_older_version_go_on(server: FakeServer) -> None:
    """It has the disk size of its VMs. New ones get another template."""
    machine = await server.machines.create(size=LARGER)
    old = FakeTemplate(f"template-{LARGER}", LARGER)
    server.world.templates[old.id] = old
    record = await inside(server.machines).journal.find(machine.id)
    await inside(server.machines).store.update(record.id, template=old.id)
    await machine.stop()
    await machine.start()
    assert await file_system(machine) == "40"
    (child,) = await machine.fork()
    assert (await inside(server.machines).journal.find(child.id)).template == old.id
    new = await server.machines.create(size=LARGER)
    assert (await inside(server.machines).journal.find(new.id)).template == f"template-{SIZE}"
    assert (await new.info()).state is State.RUNNING
    await restart(server)


async def test_builds_on_disks_of_different_sizes_are_not_shared(server: FakeServer) -> None:
    nothing: Any = None
    builder = Builder(server.machines, BuildStore(server.database), Lines(), nothing, linger=0)
    parents = [await builder.find_base(Base(disk_gb=disk), "account", None) for disk in (20, 40, 60, None)]
    await builder.close()
    assert len({parent.identity for parent in parents}) == 3
    # As in older versions, so that what they built is found.
    assert parents[0].identity == parents[3].identity == f"template template-{SIZE}"
    assert [parent.size.disk_gib for parent in parents] == [20, 40, 60, 20]


async def test_other_vcpus_and_memory_have_templates_of_their_own(server: FakeServer) -> None:
    for size in (SIZE, Size(2, 512, 40), Size(1, 1024, 40), LARGER):
        await server.machines.create(size=size)
    assert len(server.world.templates) == 3
