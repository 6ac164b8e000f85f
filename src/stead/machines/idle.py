"""Machines that nobody uses are put to sleep."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stead.errors import SteadError
from stead.host.network import Network
from stead.logs import get_logger
from stead.machines.lifecycle import Lifecycle

log = get_logger("stead.idle")


@dataclass
class Activity:
    """When a machine was last seen at work, judged from what is counted of it."""

    traffic: int
    active_at: float

    def observe(self, now: float, traffic: int, threshold: int, *, busy: bool, last_call: float) -> float:
        """Take in a new count; returns for how long the machine has been idle.

        Traffic counts when there is as much as the threshold since the last look. A call that is under way,
        such as a command that runs, counts whatever it does.
        """
        moved = traffic - self.traffic
        # A counter that went back belongs to a new tap: the machine was started since.
        if busy or moved < 0 or moved >= max(1, threshold):
            self.active_at = now
        self.traffic = traffic
        self.active_at = max(self.active_at, min(last_call, now))
        return now - self.active_at


class IdleWatch:
    """Looks at all running machines again and again and has the idle ones suspended."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        network: Network,
        suspend: Callable[[str], Awaitable[None]],
        interval: float,
    ) -> None:
        self._lifecycle = lifecycle
        self._network = network
        self._suspend = suspend
        self._interval = interval
        self._activities: dict[str, Activity] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                for machine_id in await self.look():
                    self._lifecycle.background(self._put_to_sleep(machine_id))
            except (SteadError, OSError) as error:
                log.warning("cannot look for idle machines", error=str(error))

    async def look(self) -> list[str]:
        """Count what moved; returns the machines that have been idle for as long as they may."""
        now = asyncio.get_running_loop().time()
        traffic = await self._network.traffic()
        idle = []
        seen: dict[str, Activity] = {}
        for row in await self._lifecycle.store.list():
            live = self._lifecycle.lives.get(row.id)
            if live is None or not live.running:
                continue
            count = traffic.get(row.slot, 0)
            activity = self._activities.get(row.id) or Activity(count, now)
            agent = live.agent
            resting = activity.observe(
                now, count, row.activity_threshold, busy=agent.in_flight > 0, last_call=agent.last_used
            )
            seen[row.id] = activity
            if row.idle_timeout is not None and resting >= row.idle_timeout:
                idle.append(row.id)
        self._activities = seen
        return idle

    async def _put_to_sleep(self, machine_id: str) -> None:
        try:
            await self._suspend(machine_id)
        except SteadError as error:
            log.warning("an idle machine could not be suspended", machine=machine_id, error=str(error))
            # Not again at once: trying has its price.
            if (activity := self._activities.get(machine_id)) is not None:
                activity.active_at = asyncio.get_running_loop().time()
