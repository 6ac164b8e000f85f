"""Capacity of the host: admission check, and eviction of sticky VMs and snapshots."""

import contextlib
from dataclasses import KW_ONLY, dataclass

from stead.errors import CapacityExceeded, SnapshotNotFound, WrongSnapshotState
from stead.logs import get_logger
from stead.machines.deletion import DeleteOperation
from stead.machines.engine import Engine
from stead.machines.persistence import Evictable, Sticky, eviction_order, sticky
from stead.machines.records import Record
from stead.machines.snapshots import Snapshots
from stead.machines.states import State, Stopped, Suspended
from stead.tasks import finished

log = get_logger("stead.disk_eviction")


@dataclass(eq=False)
class DiskEviction:
    """Refuses requests that exceed the host's capacity, after evicting what may be evicted."""

    engine: Engine
    _: KW_ONLY
    deletion: DeleteOperation
    snapshots: Snapshots

    async def ensure_free(self, keeping: str | None = None) -> None:
        """Free disk space for one more VM; CapacityExceeded when eviction is not enough.

        `keeping` is never evicted. Deadlock: never call this with a VM's lock, it takes those of others.
        """
        host = self.engine.host
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
            await self.engine.layers.collect()
            if host.has_disk_room():
                break
        host.check_capacity()

    async def _evictable(self) -> list[Evictable]:
        machines = [
            Evictable(record.id, priority, record.active_at, self._delete_machine)
            for record in await self.engine.journal.list(State.STOPPED, State.SUSPENDED)
            if (priority := _evictable(record)) is not None
        ]
        snapshots = [
            Evictable(row.id, sticky(row.priority).priority, row.used_at, self.snapshots.delete)
            for row in await self.snapshots.sticky()
        ]
        return machines + snapshots

    async def _delete_machine(self, machine_id: str) -> None:
        async with self.engine.locks.hold(machine_id):
            record = await self.engine.journal.get(machine_id)
            # It may have been woken while this waited for its lock.
            if record is not None and (priority := _evictable(record)) is not None:
                why = f"evicted to free disk space (sticky, priority {priority})"
                await finished(self.deletion.remove(record, why, forget=False))


def _evictable(record: Record) -> int | None:
    """The priority of a VM that may be evicted; None for any other."""
    kept = record.properties.persistence
    return (
        kept.priority if isinstance(kept, Sticky) and isinstance(record.state, Stopped | Suspended) else None
    )
