"""VMs that fill the disk of the host: the real watch and reserve on a small disk, with VMs in memory."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from stead.disk_marks import DiskMarks, DiskSpace, writable
from stead.errors import DiskSpaceExceeded
from stead.host.disk_reserve import DiskReserve
from stead.machines import Machine, Properties, State
from stead.machines.events import EventKind, MachineEvent
from stead.tasks import in_background
from support.engine import installation, run, used
from support.fake_server import FakeServer
from support.fake_world import Process
from support.installations import small_ext4
from support.internals import inside
from support.waiting import until

pytestmark = pytest.mark.heavy
ALICE, BOB = "alice", "bob"
_DISK_MIB = 1024
_PIECE = os.urandom(64 << 10)
_PAUSE = 0.004
"""Seconds between two pieces: 16 MiB a second, for a disk on which 100 MiB are nearly full."""


class Writer:
    """A guest that writes to a real file while it is not paused, until the disk is full."""

    def __init__(self, file: Path, process: Process, held: int, piece: bytes) -> None:
        self.file = file
        self.written = 0
        self.full = False
        self._process = process
        self._piece = piece
        self._stop = threading.Event()
        with file.open("wb") as opened:
            if held:
                os.posix_fallocate(opened.fileno(), 0, held)
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        with self.file.open("ab", buffering=0) as file:
            while not self._stop.wait(_PAUSE):
                if not self._process.awake.is_set():
                    self._stop.wait(0.01)
                    continue
                try:
                    self.written += file.write(self._piece)
                except OSError:
                    self.full = True
                    return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@dataclass
class Scene:
    """A server whose database, disks of VMs and reserve are on one small disk."""

    disk: Path
    server: FakeServer
    marks: DiskMarks
    events: list[MachineEvent]
    exits: contextlib.ExitStack

    @property
    def free(self) -> int:
        return DiskSpace.of(self.disk).free

    @property
    def reserve(self) -> Path:
        return self.disk / "reserve"

    def measure(self) -> None:
        """Measure the disks of VMs as real files."""
        fake = self.server.host.disks.allocated

        def allocated(machine: str) -> int:
            file = self.disk / machine
            return fake(machine) + (file.stat().st_blocks * 512 if file.exists() else 0)

        self.server.host.disks.allocated = allocated  # type: ignore[method-assign]

    def write(self, machine: Machine, *, held: int = 0, piece: bytes = _PIECE) -> Writer:
        """Let a VM that has `held` bytes on its disk write more."""
        writer = Writer(self.disk / machine.id, self.server.world.of(machine.id), held, piece)
        self.exits.callback(writer.stop)
        return writer

    async def paused(self, machine: Machine) -> bool:
        return ((await machine.info()).reason or "").startswith("paused: the disk of the host is nearly full")

    def reported(self, machine: Machine) -> list[EventKind]:
        kinds = (EventKind.PAUSED, EventKind.CONTINUED)
        return [each.kind for each in self.events if each.record.id == machine.id and each.kind in kinds]


@pytest_asyncio.fixture
async def scene(root: None) -> AsyncIterator[Scene]:
    with small_ext4(_DISK_MIB) as disk:
        async with installation(disk) as server:
            server.world.disk_space = lambda: DiskSpace.of(disk)
            reserve = DiskReserve(disk)
            reserve.adjust()
            events: list[MachineEvent] = []
            server.machines.watch(events.append)
            with contextlib.ExitStack() as exits:
                opened = Scene(disk, server, DiskMarks.of(DiskSpace.of(disk).total), events, exits)
                opened.measure()
                async with in_background(reserve.watch(), "disk reserve"):
                    yield opened


async def test_a_vm_that_fills_the_disk_is_paused_and_others_go_on(scene: Scene) -> None:
    large, small = await used(scene.server, account=ALICE), await used(scene.server, account=BOB)
    given = scene.reserve.stat().st_ino
    slow = scene.write(small, piece=b"x" * 4096)
    writer = scene.write(large, held=scene.free - scene.marks.low * 5 // 4)
    await until(lambda: scene.paused(large), 60)
    stopped_at, slowly = writer.written, slow.written
    assert stopped_at > scene.marks.low // 8, "it was writing before"
    assert scene.free > scene.marks.floor
    await until(lambda: slow.written > slowly, 60)
    await asyncio.sleep(1)
    assert writer.written - stopped_at <= 1 << 20 and not writer.full and not slow.full
    # The reserve was never given up, and the server writes to its database.
    assert scene.reserve.stat().st_ino == given
    assert (await small.rename("still-here")).name == "still-here"
    assert await run(small, "recall program") == "running"
    assert not await scene.paused(small) and scene.reported(small) == []
    assert scene.reported(large) == [EventKind.PAUSED]
    assert (await large.info()).state is State.RUNNING
    for work in (
        run(large, "recall program"),
        large.suspend(),
        large.stop(),
        large.fork(),
        large.resize(disk_gib=30),
        scene.server.machines.create(Properties(account=ALICE)),
    ):
        with pytest.raises(DiskSpaceExceeded, match="paused: the disk of the host is nearly full"):
            await work
    await scene.server.machines.create(Properties(account=BOB))
    # What the account deletes lets its other VMs go on.
    writer.stop()
    writer.file.unlink()
    await until(lambda: scene.reported(large) == [EventKind.PAUSED, EventKind.CONTINUED], 60)
    assert await run(large, "recall program") == "running"
    assert (await large.info()).reason is None


async def test_accounts_with_equal_shares_do_not_take_the_reserve(scene: Scene) -> None:
    """None of them is above its share, and all of them write."""
    machines = [await used(scene.server, account=account) for account in (ALICE, BOB, None)]
    given = scene.reserve.stat().st_ino
    held = (scene.free - scene.marks.critical * 5 // 4) // len(machines)
    writers = [scene.write(machine, held=held) for machine in machines]

    async def all_paused() -> bool:
        return all([await scene.paused(machine) for machine in machines])

    await until(all_paused, 60)
    assert all(each.written > 1 << 20 for each in writers)
    assert not any(each.full for each in writers)
    assert scene.reserve.stat().st_ino == given and scene.free > 0
    await machines[0].rename("written")


async def test_a_crash_leaves_no_row_that_says_paused(scene: Scene) -> None:
    """The next server lets VMs go on, and pauses them again by what it measures itself."""
    large, small = await used(scene.server, account=ALICE), await used(scene.server, account=BOB)
    writer = scene.write(large, held=scene.free - scene.marks.low * 5 // 4)
    await until(lambda: scene.paused(large), 60)
    row = await scene.server.store.get(large.id)
    assert row is not None and row.state == State.RUNNING and row.reason is None
    await scene.server.crash()
    await scene.server.start()
    scene.measure()
    large, small = [await scene.server.machines.get(each.id) for each in (large, small)]
    await until(lambda: scene.paused(large), 60)
    assert not scene.server.world.of(large.id).awake.is_set()
    await run(small, "recall program")
    assert not writer.full
    await large.kill()
    writer.stop()
    writer.file.unlink()
    await until(lambda: not inside(scene.server.machines).eviction.paused, 60)
    await large.start()
    assert (await large.info()).reason is None


async def test_git_stops_above_the_reserve(scene: Scene) -> None:
    filler = scene.disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, scene.free - scene.marks.floor)
    assert writable(scene.disk) == 0 < scene.free
    filler.unlink()
    assert writable(scene.disk) > 0


async def test_the_reserve_is_given_up_for_the_database_and_made_again(scene: Scene) -> None:
    """Something else on the host's disk has filled it: VMs are paused, and the server goes on."""
    machine = await used(scene.server, account=ALICE)
    filler = scene.disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, scene.free - (64 << 10))
    await until(lambda: not scene.reserve.exists(), 60)
    await machine.rename("written")
    writer = scene.write(machine)
    await until(lambda: scene.paused(machine), 60)
    assert not writer.full, "what the reserve gave back is not the VM's"
    os.truncate(filler, filler.stat().st_size - 3 * scene.marks.reserve)
    await until(scene.reserve.exists, 60)
