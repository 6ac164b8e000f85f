"""Room on the host: what is refused for want of it, and what goes before that."""

import contextlib
from collections.abc import Awaitable, Callable

from stead.errors import CapacityExceeded, MachineNotFound, SnapshotNotFound, WrongState
from stead.logs import get_logger
from stead.machines.lifecycle import Lifecycle, persistence_of
from stead.machines.persistence import DEFAULT_PRIORITY, Evictable, Sticky, eviction_order
from stead.machines.snapshots import Snapshots
from stead.machines.states import State

log = get_logger("stead.room")


class Room:
    """Refuses what the host cannot bear; sticky things that nobody uses make way first."""

    def __init__(
        self, lifecycle: Lifecycle, snapshots: Snapshots, delete_machine: Callable[[str], Awaitable[None]]
    ) -> None:
        self._lifecycle = lifecycle
        self._snapshots = snapshots
        self._delete_machine = delete_machine

    async def make(self) -> None:
        """CapacityExceeded when there is no room for one more, even without what may be evicted."""
        host = self._lifecycle.host
        try:
            host.check_capacity()
            return
        except CapacityExceeded:
            if host.has_disk_room():
                raise
        for candidate in eviction_order(await self._evictable()):
            log.warning("evicted for want of disk space", id=candidate.id, priority=candidate.priority)
            with contextlib.suppress(MachineNotFound, SnapshotNotFound, WrongState):
                await candidate.delete(candidate.id)
            await self._lifecycle.layers.collect()
            if host.has_disk_room():
                break
        host.check_capacity()

    async def _evictable(self) -> list[Evictable]:
        machines = [
            Evictable(row.id, _priority(row.priority), row.active_at, self._delete_machine)
            for row in await self._lifecycle.store.list()
            if isinstance(persistence_of(row), Sticky) and row.state in (State.STOPPED, State.SUSPENDED)
        ]
        snapshots = [
            Evictable(row.id, _priority(row.priority), row.used_at, self._snapshots.delete)
            for row in await self._snapshots.sticky()
        ]
        return machines + snapshots


def _priority(recorded: int | None) -> int:
    return DEFAULT_PRIORITY if recorded is None else recorded
