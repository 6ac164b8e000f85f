"""Pauses VMs that fill the host's disk while there is still space for everybody else."""

import asyncio
import time
from collections.abc import Mapping

from stead.disk_marks import DiskMarks, DiskSpace
from stead.errors import HostError
from stead.logs import get_logger
from stead.machines.disk_eviction import DiskEviction
from stead.machines.disk_shares import Account, DiskObservation, PauseCause, accounts_to_pause
from stead.machines.disk_usage import DiskUsage
from stead.machines.engine import Engine
from stead.machines.events import EventKind
from stead.machines.processes import RunningVm
from stead.machines.records import record_of
from stead.machines.states import UNOWNED, State
from stead.store.machines import MachineRow
from stead.supervision import repeat
from stead.tasks import TaskSet, in_thread

_FASTEST = 2 << 30
"""Bytes that VMs write in a second on a fast disk: between two checks none of the marks is skipped."""
_LONGEST = 2.0
_SHORTEST = 0.1
_MEASURING = 10
"""A check waits so many times as long as the measurement of usage took: it may walk thousands of files."""
_ANSWER = 1.0
"""Seconds in which a QEMU pauses its guest. One that does not does not delay the checks of others."""

log = get_logger("stead.disk_watch")


class DiskWatch:
    """Pauses the VMs of accounts that fill the disk, and lets them continue when there is space again.

    A pause is of a process, not a state: rows say `running`, as they do while QEMU has paused a guest whose
    write failed. So no crash leaves a row that lies; after a restart VMs continue until the next check.
    """

    def __init__(self, engine: Engine, *, usage: DiskUsage, eviction: DiskEviction) -> None:
        self._engine = engine
        self._usage = usage
        self._eviction = eviction
        self._paused: dict[Account, PauseCause] = {}
        self._before: DiskObservation | None = None
        self._changing: set[str] = set()
        """VMs that are being paused or continued."""
        self._delay = _SHORTEST
        self._tasks = TaskSet()

    def start(self) -> None:
        work = repeat("disk check", self.check, _LONGEST, at_once=True, sleep=self._rest)
        self._tasks.start(work, "disk check")

    async def close(self) -> None:
        """End the checks. Paused VMs stay paused: nothing would pause them while the server is down."""
        await self._tasks.close()

    async def _rest(self, _: float) -> None:
        await asyncio.sleep(self._delay)

    async def check(self) -> None:
        """Compare the free space with the marks, and pause VMs or let them continue."""
        space = await in_thread(self._engine.host.disk_space)
        marks = DiskMarks.of(space.total)
        self._delay = _until_next_mark(space.free, marks)
        held = [machine_id for machine_id, live in self._engine.processes.connected() if live.held]
        if space.free >= marks.enough and not self._paused and not held:
            self._before = None
            return
        started = time.monotonic()
        now = DiskObservation(started, space.free, await self._usage.by_account())
        self._delay = max(self._delay, _MEASURING * (time.monotonic() - started))
        rows = {row.id: row for row in await self._engine.journal.rows() if row.state not in UNOWNED}
        running = {rows[each].account for each, _ in self._engine.processes.connected() if each in rows}
        paused = accounts_to_pause(self._paused, now, self._before, running, marks)
        self._log(paused, space)
        share = sum(now.usage.values()) / max(1, len(now.usage))
        large = [each for each in paused.keys() - self._paused.keys() if now.usage.get(each, 0) >= share]
        self._paused, self._before = paused, now
        self._eviction.paused = {
            each: _reason(cause, now.usage.get(each, 0)) for each, cause in paused.items()
        }
        await self._apply(rows)
        for account in large:
            self._tasks.start(self._evict(account, marks), f"eviction of what account {account} may lose")

    def _log(self, paused: Mapping[Account, PauseCause], space: DiskSpace) -> None:
        free = space.free >> 20
        for account in paused.keys() - self._paused.keys():
            log.error(
                "disk nearly full: VMs of an account are paused",
                account=account,
                cause=paused[account].value,
                free_mib=free,
            )
        for account in self._paused.keys() - paused.keys():
            log.info("VMs of an account continue: the disk has space again", account=account, free_mib=free)

    async def _evict(self, account: Account, marks: DiskMarks) -> None:
        """Evict sticky things of an account that is not below its share, so that its VMs can continue."""

        def enough() -> bool:
            return account not in self._paused or self._engine.host.disk_space().free >= marks.enough

        await self._eviction.evict_own(account, enough)

    async def _apply(self, rows: Mapping[str, MachineRow]) -> None:
        """Pause all VMs of paused accounts, whatever operation is under way on them, and no others."""
        changes = []
        for machine_id, live in self._engine.processes.connected():
            row = rows.get(machine_id)
            if row is None or live.vm.ended or machine_id in self._changing:
                continue
            why = self._eviction.paused.get(row.account)
            if (why is None) != (live.held is None):
                self._changing.add(machine_id)
                work = self._change(row, live, why)
                changes.append(self._tasks.start(work, f"pause of VM {machine_id} for the disk"))
        if changes:
            await asyncio.wait(changes, timeout=_ANSWER)

    async def _change(self, row: MachineRow, live: RunningVm, why: str | None) -> None:
        try:
            if why is not None:
                # From here on calls are refused instead of waiting for a guest that does not answer.
                live.held = why
                await live.vm.hold()
            else:
                await live.vm.end_hold()
                live.held = None
        except HostError as error:
            if why is not None:
                live.held = None
            if not live.vm.ended:
                log.error("cannot pause or continue a VM", vm=row.id, error=str(error))
            return
        finally:
            self._changing.discard(row.id)
        if row.state == State.RUNNING:
            kind = EventKind.CONTINUED if why is None else EventKind.PAUSED
            self._engine.events.report(kind, record_of(row), why or "the disk of the host has space again")


def _reason(cause: PauseCause, used: int) -> str:
    why = f"this account uses {used / (1 << 30):.1f} GiB of it, more than its share"
    if cause is PauseCause.WRITES:
        why = "VMs of this account write to it"
    return f"the disk of the host is nearly full and {why}: delete VMs, snapshots or repositories, or wait"


def _until_next_mark(free: int, marks: DiskMarks) -> float:
    """Seconds in which even fast writers do not get from `free` to the next lower mark."""
    below = max(mark for mark in (marks.low, marks.critical, 0) if mark <= free)
    return min(_LONGEST, max(_SHORTEST, (free - below) / _FASTEST))
