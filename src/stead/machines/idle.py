"""Idle timeouts: suspends VMs without network traffic and records when each had its last."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stead.errors import SteadError
from stead.logs import get_logger
from stead.machines.engine import Engine
from stead.machines.persistence import ends_with, from_columns
from stead.machines.suspend import SuspendOperation
from stead.store.machines import MachineRow
from stead.supervision import repeat
from stead.tasks import TaskSet

log = get_logger("stead.idle")

_SHORTEST_REST = 10.0
"""Seconds without activity before a VM is suspended for memory."""
_AT_ONCE = 2
"""VMs that one check suspends for memory: saving takes memory and disk bandwidth itself."""
_SHORT_OF_MEMORY = "idle, and the host is short of memory"


@dataclass
class Activity:
    """When a VM was last active, judged from its traffic counter and its calls."""

    traffic: int
    active_at: float

    def observe(self, now: float, traffic: int, threshold: int, *, busy: bool, last_call: float) -> float:
        """Compare with the previous counter; returns how long the VM has been idle, in seconds.

        Traffic counts when it reaches the threshold (in bytes) between two checks. A call in progress, such
        as a running command, always counts.
        """
        moved = traffic - self.traffic
        # A lower counter was reset, so that the traffic since is unknown.
        if busy or moved < 0 or moved >= max(1, threshold):
            self.active_at = now
        self.traffic = traffic
        self.active_at = max(self.active_at, min(last_call, now))
        return now - self.active_at


@dataclass(frozen=True)
class RestingVm:
    """A running VM without a call in progress, which a suspend does not delete."""

    id: str
    account: str | None
    memory_mib: int
    seconds: float
    """Since it was last active."""
    timed: bool = True
    """Whether it has an idle time-out."""


def suspended_first(
    resting: Sequence[RestingVm], running: Mapping[str | None, int], count: int
) -> list[RestingVm]:
    """Which VMs to suspend when memory is short; `running` has the memory of running VMs by account.

    Those of accounts above an equal share come first, from the account with the most, then those that have
    rested longest. Last are VMs of accounts above their share that have no time-out: otherwise, an account
    that sets none would have only the VMs of others suspended. A VM that was active moments ago is left
    alone: its client would wake it at once.
    """
    share = sum(running.values()) / len(running) if running else 0.0

    def above(each: RestingVm) -> bool:
        return running.get(each.account, 0) > share

    def order(each: RestingVm) -> tuple[bool, bool, int, float]:
        has = running.get(each.account, 0) if above(each) else 0
        return not each.timed, not above(each), -has, -each.seconds

    rested = [each for each in resting if each.seconds >= _SHORTEST_REST]
    return sorted((each for each in rested if each.timed or above(each)), key=order)[:count]


def _deleted_by_suspend(row: MachineRow) -> bool:
    return ends_with(from_columns(row.persistence, row.priority, row.delete_event), suspended=True)


class IdleWatch:
    """Checks all VMs every `interval` seconds, records their traffic and suspends the idle ones.

    When the host is short of memory, VMs are suspended before their time-out, a few with each check.
    """

    def __init__(self, engine: Engine, *, suspend: SuspendOperation, interval: float) -> None:
        self._engine = engine
        self._suspend = suspend
        self._interval = interval
        self._activities: dict[str, Activity] = {}
        self._counters: Mapping[int, int] = {}
        self._resting: list[RestingVm] = []
        self._running: Counter[str | None] = Counter()
        self._suspending: set[str] = set()
        """VMs that are being suspended, or wait for their turn."""
        self._tasks = TaskSet()

    def start(self) -> None:
        self._tasks.start(repeat("idle check", self._check, self._interval), "idle check")

    async def close(self) -> None:
        await self._tasks.close()

    async def _check(self) -> None:
        for machine_id in await self.find_idle():
            self._start_suspend(machine_id, None)
        for machine_id in self.find_expendable():
            self._start_suspend(machine_id, _SHORT_OF_MEMORY)

    def _start_suspend(self, machine_id: str, why: str | None) -> None:
        if machine_id not in self._suspending:
            self._suspending.add(machine_id)
            suspending = self._tasks.start(self._suspend_idle(machine_id, why), f"suspend of VM {machine_id}")
            suspending.add_done_callback(lambda _: self._suspending.discard(machine_id))

    async def find_idle(self) -> list[str]:
        """Read the traffic counters; returns the VMs whose idle timeout has passed."""
        now = asyncio.get_running_loop().time()
        counters = await self._engine.host.nics.traffic()
        before, self._counters = self._counters, counters
        idle = []
        with_traffic = []
        self._resting = []
        self._running = Counter()
        seen: dict[str, Activity] = {}
        for row in await self._engine.journal.rows():
            count, previous = counters.get(row.slot, 0), before.get(row.slot, 0)
            # Also of a VM that was suspended or stopped since the last check: the counter outlives its tap.
            if count != previous:
                with_traffic.append(row.id)
            live = self._engine.processes.running(row.id)
            if live is None:
                continue
            live.vm.bound_log()
            activity = self._activities.get(row.id) or Activity(count, now)
            resting = activity.observe(
                now, count, row.activity_threshold, busy=live.leases > 0, last_call=live.last_used
            )
            seen[row.id] = activity
            if live.held is not None:
                # It would be active if it could.
                activity.active_at = now
                continue
            self._running[row.account] += row.memory_mib
            timed = row.idle_timeout is not None
            if row.idle_timeout is not None and resting >= row.idle_timeout:
                idle.append(row.id)
            elif not live.leases and not _deleted_by_suspend(row):
                self._resting.append(RestingVm(row.id, row.account, row.memory_mib, resting, timed))
        self._activities = seen
        await self._engine.journal.record_traffic(with_traffic)
        return idle

    def find_expendable(self) -> list[str]:
        """VMs to suspend because memory is short, of those that the last check found resting."""
        if not self._resting or not self._engine.host.memory_is_short():
            return []
        return [each.id for each in suspended_first(self._resting, self._running, _AT_ONCE)]

    async def _suspend_idle(self, machine_id: str, why: str | None = None) -> None:
        try:
            await self._suspend.suspend_if_idle(machine_id, why)
        except SteadError as error:
            log.warning("idle suspend failed", vm=machine_id, error=str(error))
            # Back-off: wait a whole idle timeout before the next attempt.
            if (activity := self._activities.get(machine_id)) is not None:
                activity.active_at = asyncio.get_running_loop().time()
