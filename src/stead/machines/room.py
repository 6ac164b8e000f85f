"""Capacity of the host: admission check, and eviction of sticky VMs and snapshots."""

import contextlib

from stead.errors import CapacityExceeded, SnapshotNotFound, WrongSnapshotState
from stead.logs import get_logger
from stead.machines.lifecycle import Lifecycle, persistence_of
from stead.machines.persistence import DEFAULT_PRIORITY, Evictable, Sticky, eviction_order
from stead.machines.snapshots import Snapshots
from stead.machines.states import State
from stead.store.machines import MachineRow
from stead.tasks import finished

log = get_logger("stead.room")


class Room:
    """Refuses requests that exceed the host's capacity, after evicting what may be evicted."""

    def __init__(self, lifecycle: Lifecycle, snapshots: Snapshots) -> None:
        self._lifecycle = lifecycle
        self._snapshots = snapshots

    async def make(self, keeping: str | None = None) -> None:
        """Free disk space for one more VM; CapacityExceeded when eviction is not enough.

        `keeping` is never evicted. Deadlock: never call this with a VM's lock, it takes those of others.
        """
        host = self._lifecycle.host
        try:
            host.check_capacity()
            return
        except CapacityExceeded:
            if host.has_disk_room():
                raise
        for candidate in eviction_order(await self._evictable()):
            if candidate.id == keeping:
                continue
            log.warning("evicted to free disk space", id=candidate.id, priority=candidate.priority)
            with contextlib.suppress(SnapshotNotFound, WrongSnapshotState):
                await candidate.delete(candidate.id)
            await self._lifecycle.layers.collect()
            if host.has_disk_room():
                break
        host.check_capacity()

    async def _evictable(self) -> list[Evictable]:
        machines = [
            Evictable(row.id, _priority(row.priority), row.active_at, self._delete_machine)
            for row in await self._lifecycle.store.list()
            if _can_go(row)
        ]
        snapshots = [
            Evictable(row.id, _priority(row.priority), row.used_at, self._snapshots.delete)
            for row in await self._snapshots.sticky()
        ]
        return machines + snapshots

    async def _delete_machine(self, machine_id: str) -> None:
        async with self._lifecycle.turns.of(machine_id):
            row = await self._lifecycle.store.get(machine_id)
            # It may have been woken while this waited for its lock.
            if row is not None and _can_go(row):
                why = f"evicted to free disk space (sticky, priority {_priority(row.priority)})"
                await finished(self._lifecycle.remove(row, why, forget=False))


def _can_go(row: MachineRow) -> bool:
    return isinstance(persistence_of(row), Sticky) and row.state in (State.STOPPED, State.SUSPENDED)


def _priority(recorded: int | None) -> int:
    return DEFAULT_PRIORITY if recorded is None else recorded
