"""Capacity of the host: admission check, and eviction of sticky VMs and snapshots."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field

from stead.errors import CapacityExceeded, DiskSpaceExceeded, SnapshotNotFound, WrongSnapshotState
from stead.logs import get_logger
from stead.machines.deletion import DeleteOperation
from stead.machines.disk_usage import DiskUsage
from stead.machines.engine import Engine
from stead.machines.persistence import Evictable, EvictionScope, Sticky, eviction_order, sticky
from stead.machines.records import Record
from stead.machines.snapshots import Snapshots
from stead.machines.states import State, Stopped, Suspended
from stead.tasks import finished

log = get_logger("stead.disk_eviction")

Check = Callable[[], Awaitable[None]]


@dataclass(eq=False)
class DiskEviction:
    """Refuses requests that exceed the host's capacity, after evicting what may be evicted."""

    engine: Engine
    _: KW_ONLY
    deletion: DeleteOperation
    snapshots: Snapshots
    usage: DiskUsage
    paused: Mapping[str | None, str] = field(default_factory=dict, init=False)
    """Why the running VMs of these accounts are paused: until there is space, they get no others."""
    _evicting: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def ensure_free(
        self,
        account: str | None,
        scope: EvictionScope,
        *,
        keeping: str | None = None,
        check: Check | None = None,
    ) -> None:
        """Free disk space for one more VM of an account; CapacityExceeded when eviction is not enough.

        `keeping` is never evicted. Before anything is, `check` raises if the request would be refused anyway.
        Deadlock: never call this with a VM's lock, it takes those of others.
        """
        if (why := self.paused.get(account)) is not None:
            raise DiskSpaceExceeded(f"the running VMs of this account are paused: {why}")
        host = self.engine.host
        try:
            host.check_capacity()
            return
        except CapacityExceeded:
            if host.has_disk_room():
                raise
        if check is not None:
            await check()
        async with self._evicting:
            await self._evict(account, scope, keeping, host.has_disk_room)
        try:
            host.check_capacity()
        except DiskSpaceExceeded as error:
            raise DiskSpaceExceeded(f"{error}: delete VMs or snapshots") from error

    async def evict_own(self, account: str | None, enough: Callable[[], bool]) -> None:
        """Evict what an account may lose, until there is enough disk space or nothing of it is left."""
        async with self._evicting:
            await self._evict(account, EvictionScope.OWN, None, enough)

    async def _evict(
        self, account: str | None, scope: EvictionScope, keeping: str | None, enough: Callable[[], bool]
    ) -> None:
        """Delete one thing after the other until there is room, or nothing is left that may be deleted."""
        if scope is EvictionScope.NOTHING or enough():
            return
        candidates = [each for each in await self._evictable() if each.id != keeping]
        while not enough():
            candidate = await self._next(candidates, account, scope)
            if candidate is None:
                return
            candidates.remove(candidate)
            log.warning(
                "evicted to free disk space",
                id=candidate.id,
                account=candidate.account,
                priority=candidate.priority,
                requested_by=account,
            )
            with contextlib.suppress(SnapshotNotFound, WrongSnapshotState):
                await candidate.delete(candidate.id)
            await self.engine.layers.collect()

    async def _next(
        self, candidates: Collection[Evictable], account: str | None, scope: EvictionScope
    ) -> Evictable | None:
        # An account falls below its share while its things are evicted, so it is measured each time.
        only_own = scope is EvictionScope.OWN or any(each.account == account for each in candidates)
        usage = {} if only_own else await self.usage.by_account()
        return next(iter(eviction_order(candidates, account, scope, usage)), None)

    async def _evictable(self) -> list[Evictable]:
        machines = [
            Evictable(record.id, priority, record.active_at, self._delete_machine, record.account)
            for record in await self.engine.journal.list(State.STOPPED, State.SUSPENDED)
            if (priority := _evictable(record)) is not None
        ]
        snapshots = [
            Evictable(row.id, sticky(row.priority).priority, row.used_at, self.snapshots.delete, row.account)
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
