"""Expiry: deletes what has reached the end of its lifetime."""

import asyncio

from stead.logs import get_logger
from stead.machines.snapshots import Snapshots
from stead.tasks import TaskSet

INTERVAL = 15.0
"""Seconds between two checks."""

log = get_logger("stead.expiry")


class ExpiryWatch:
    """Deletes expired snapshots at the start of the server and then every `INTERVAL` seconds.

    The end of a lifetime is a time of the wall clock: one that is set back postpones it.
    """

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._tasks = TaskSet()

    def start(self) -> None:
        self._tasks.start(self._run(), "expiry check")

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._snapshots.delete_expired()
            except Exception as error:
                # Whatever failed, the next check tries again: an expired snapshot must not stay for ever.
                log.error("expiry check failed", error=repr(error))
            await asyncio.sleep(INTERVAL)
