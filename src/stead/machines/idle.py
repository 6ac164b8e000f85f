"""Idle timeouts: suspends VMs without network traffic and records when each had its last."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from stead.errors import SteadError
from stead.logs import get_logger
from stead.machines.engine import Engine
from stead.machines.suspend import SuspendOperation
from stead.tasks import TaskSet

log = get_logger("stead.idle")


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


class IdleWatch:
    """Checks all VMs every `interval` seconds, records their traffic and suspends the idle ones."""

    def __init__(self, engine: Engine, *, suspend: SuspendOperation, interval: float) -> None:
        self._engine = engine
        self._suspend = suspend
        self._interval = interval
        self._activities: dict[str, Activity] = {}
        self._counters: Mapping[int, int] = {}
        self._tasks = TaskSet()

    def start(self) -> None:
        self._tasks.start(self._run(), "idle check")

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                for machine_id in await self.find_idle():
                    self._tasks.start(self._suspend_idle(machine_id), f"idle suspend of VM {machine_id}")
            except (SteadError, OSError) as error:
                log.warning("idle check failed", error=str(error))

    async def find_idle(self) -> list[str]:
        """Read the traffic counters; returns the VMs whose idle timeout has passed."""
        now = asyncio.get_running_loop().time()
        counters = await self._engine.host.nics.traffic()
        before, self._counters = self._counters, counters
        idle = []
        with_traffic = []
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
            if row.idle_timeout is not None and resting >= row.idle_timeout:
                idle.append(row.id)
        self._activities = seen
        await self._engine.journal.record_traffic(with_traffic)
        return idle

    async def _suspend_idle(self, machine_id: str) -> None:
        try:
            await self._suspend.suspend_if_idle(machine_id)
        except SteadError as error:
            log.warning("idle suspend failed", vm=machine_id, error=str(error))
            # Back-off: wait a whole idle timeout before the next attempt.
            if (activity := self._activities.get(machine_id)) is not None:
                activity.active_at = asyncio.get_running_loop().time()
