"""Resize, on a host in memory."""

import pytest

from stead.errors import HostError, InvalidRequest, StartFailed
from stead.machines import State
from stead.settings import Size
from support.engine import ALL, DISK, audit, contents, run, state_of, used
from support.fake_server import FakeServer


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
    await machine.resize(memory_mib=1024, disk_gib=23)
    assert (await machine.info()).state is (State.RUNNING if state is State.SUSPENDED else State.STOPPED)
    assert await contents(machine) == DISK
    assert server.world.of(machine.id).size == Size(1, 1024, 23)
    assert await run(machine, "read fs") == "23"
    await audit(server)


async def test_a_resize_that_cannot_boot_leaves_the_vm_stopped(server: FakeServer) -> None:
    machine = await used(server)
    server.host.fail("boot", HostError("no"))
    with pytest.raises(StartFailed, match="no"):
        await machine.resize(vcpus=2)
    assert await state_of(machine) == (State.STOPPED, "failed to start: no")
    await audit(server)
    assert await contents(machine) == DISK


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vcpus": 3}, "vcpus must be a power of two"),
        ({"memory_mib": 1000}, "memory must be a power of two"),
        ({"disk_gib": 19}, "disk must be from 20"),
        ({"vcpus": 128}, "up to 64"),
    ],
)
async def test_resize_refuses_an_invalid_size(server: FakeServer, change: dict[str, int], words: str) -> None:
    machine = await used(server)
    with pytest.raises(InvalidRequest, match=words):
        await machine.resize(**change)
    assert await contents(machine) == ALL
