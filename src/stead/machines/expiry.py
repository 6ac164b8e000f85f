"""Expiry: deletes what has reached the end of its lifetime."""

from stead.machines.snapshots import Snapshots
from stead.supervision import repeat
from stead.tasks import TaskSet

INTERVAL = 15.0
"""Seconds between two checks."""


class ExpiryWatch:
    """Deletes expired snapshots at the start of the server and then every `INTERVAL` seconds.

    The end of a lifetime is a time of the wall clock: one that is set back postpones it.
    """

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._tasks = TaskSet()

    def start(self) -> None:
        work = repeat("expiry check", self._snapshots.delete_expired, INTERVAL, at_once=True)
        self._tasks.start(work, "expiry check")

    async def close(self) -> None:
        await self._tasks.close()
