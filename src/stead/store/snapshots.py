"""Rows of snapshots."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa

from stead.store.rows import Rows, table_of

T = TypeVar("T")


@dataclass(frozen=True)
class SnapshotRow:
    """One snapshot as recorded. Without `checkpoint` it holds the disk only."""

    id: str
    name: str | None
    state: str
    source_machine: str
    vcpus: int
    memory_mib: int
    disk_gib: int
    template: str
    layer: str | None = None
    checkpoint: str | None = None
    persistence: str = "persistent"
    priority: int | None = None
    created_at: int = 0
    used_at: int = 0
    account: str | None = None
    failure: str | None = None
    """Why its build failed; it holds the state at that time."""
    build: str | None = None
    template_hash: str | None = None
    """Cache key of its build; the newest snapshot of a hash is reused."""
    deleted_at: int | None = None
    size_bytes: int | None = None
    """Disk space of its memory and disk layers when it was captured; None before that and once deleted."""
    expires_at: int | None = None
    """The end of its lifetime; None is never."""
    purpose: str = "use"


snapshots = table_of("snapshots", SnapshotRow)


class SnapshotStore(Rows[SnapshotRow]):
    table = snapshots
    row = SnapshotRow
    stamps = ("created_at", "used_at")

    async def of_account(self, account: str, convert: Callable[[SnapshotRow], T]) -> list[T]:
        """What the snapshots of an account are converted to, oldest first."""
        statement = sa.select(snapshots).where(snapshots.c.account == account)
        return await self._select_many(account, statement.order_by(snapshots.c.created_at), convert)

    async def list(self) -> list[SnapshotRow]:
        return await self._select(sa.select(snapshots).order_by(snapshots.c.created_at))

    async def change(self, snapshot_id: str, **changes: object) -> SnapshotRow | None:
        """Change a snapshot and return it; None when there is none, or it is deleted."""
        there = snapshots.c.id == snapshot_id, snapshots.c.deleted_at.is_(None)
        return await self._update_returning(snapshots.update().where(*there).values(**changes))

    async def expired(self, now: int, *, excluding: str) -> Sequence[SnapshotRow]:
        """Snapshots that have expired and are not in this state."""
        there = snapshots.c.deleted_at.is_(None), snapshots.c.state != excluding
        return await self._select(sa.select(snapshots).where(snapshots.c.expires_at <= now, *there))

    async def transition(
        self, snapshot_id: str, expected: Mapping[str, object], changes: Mapping[str, object]
    ) -> SnapshotRow | None:
        """Change a snapshot if its row is as expected, and return it; None when there is no such row."""
        same = [snapshots.c[name].is_not_distinct_from(value) for name, value in expected.items()]
        changed = snapshots.update().where(snapshots.c.id == snapshot_id, *same)
        return await self._update_returning(changed.values(**changes))

    async def newest(self, account: str, template_hash: str, state: str, now: int) -> SnapshotRow | None:
        """The newest snapshot of an account with this hash that is neither deleted nor expired."""
        same = (
            snapshots.c.account == account,
            snapshots.c.template_hash == template_hash,
            snapshots.c.state == state,
            snapshots.c.deleted_at.is_(None),
            sa.or_(snapshots.c.expires_at.is_(None), snapshots.c.expires_at > now),
        )
        statement = sa.select(snapshots).where(*same).order_by(snapshots.c.created_at.desc()).limit(1)
        return next(iter(await self._select(statement)), None)

    async def count(self, account: str) -> int:
        statement = sa.select(sa.func.count()).where(
            snapshots.c.account == account, snapshots.c.deleted_at.is_(None)
        )
        return await self.database.read(lambda connection: connection.execute(statement).scalar_one())
