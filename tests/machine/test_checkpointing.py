"""Failing captures: QEMU dies, or the disk is full. The VM loses nothing."""

import os
import select
import signal
from pathlib import Path

import pytest

from stead.errors import DiskSpaceExceeded, HostError
from stead.host import checkpoints
from stead.host.memory_delta import Delta, save_pages
from stead.host.page_scan import Region, Runs
from stead.machines import Machine, Machines, SnapshotState, State
from stead.settings import Settings
from support.guests import sh
from support.installations import another_installation, fill_up, small_disk
from support.internals import inside
from support.waiting import until

FILL = """
echo kept > /root/data; sync; echo memory > /run/data
setsid sleep 100000 > /dev/null 2>&1 & echo $! > /run/pid
"""


async def it_is_all_there(machine: Machine) -> None:
    assert await sh(machine, "cat /root/data /run/data && kill -0 $(cat /run/pid)") == "kept\nmemory"


async def kept(machines: Machines) -> list[set[str]]:
    """Layers and checkpoints: file names and rows."""
    await inside(machines).layers.collect()
    folders = (inside(machines).settings.data / name for name in ("layers", "checkpoints"))
    return [
        *({path.name for path in folder.iterdir()} for folder in folders),
        {info.id for info in await machines.list()},
        {info.id for info in await machines.snapshots.list()},
    ]


def end(pid: int) -> None:
    """Kill a process and wait for its end."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        ended, _, _ = select.select([descriptor], [], [], 20)
        assert ended
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "operation",
    ["suspend", *(pytest.param(each, marks=pytest.mark.slow) for each in ("snapshot", "fork"))],
)
async def test_a_qemu_that_dies_during_a_capture(
    machines: Machines, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation fails, the VM is stopped, and the next use boots it from its disk."""
    before = await kept(machines)
    machine = await machines.create()
    await sh(machine, FILL)
    copy = Delta.copy_from

    def copy_from_the_dead(delta: Delta, pid: int, region: Region, runs: Runs) -> None:
        end(pid)
        copy(delta, pid, region, runs)

    def save_the_dead(pid: int, region: Region, runs: Runs, folder: Path) -> dict[str, object]:
        end(pid)
        return save_pages(pid, region, runs, folder)

    monkeypatch.setattr(Delta, "copy_from", copy_from_the_dead)
    monkeypatch.setattr(checkpoints, "save_pages", save_the_dead)
    with pytest.raises(HostError, match=r"^the VM ended while|: the process has exited$"):
        await getattr(machine, operation)()
    monkeypatch.undo()

    async def stopped() -> bool:
        return (await machine.info()).state is State.STOPPED

    await until(stopped, 60)
    assert (await machine.info()).reason == "crashed: QEMU ended by SIGKILL"
    assert await sh(machine, "cat /root/data") == "kept"
    row = await machines._row(machine.id)
    assert (row.state, row.step, row.next_top, row.checkpoint) == (State.RUNNING, None, None, None)
    await machine.delete()
    assert await kept(machines) == before


async def test_a_capture_on_a_full_disk_leaves_the_vm_running(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture is refused and leaves nothing; it works once there is space."""
    monkeypatch.setattr("stead.host.local._DISK_FLOOR", 0)
    with small_disk(800) as disk:
        async with another_installation(settings, data=disk / "data") as installation:
            machines = installation.machines
            # The VM would be paused before.
            await inside(machines).disk_watch.close()
            machine = await machines.create()
            await sh(machine, FILL)
            await sh(machine, "head -c 48M /dev/urandom > /dev/shm/ballast")
            filler = fill_up(disk, 16 << 20)
            for freeze in (machine.suspend, machine.snapshot):
                with pytest.raises(DiskSpaceExceeded, match=r"^cannot save memory: the disk of the host"):
                    await freeze()
                assert (await machine.info()).state is State.RUNNING
                await it_is_all_there(machine)
                _, memory, _, snapshots = await kept(machines)
                assert (memory, snapshots) == (set(), set())
            filler.unlink()
            assert (await machine.snapshot()).state is SnapshotState.READY
            await machine.suspend()
            assert (await machine.info()).state is State.SUSPENDED
            await it_is_all_there(machine)
