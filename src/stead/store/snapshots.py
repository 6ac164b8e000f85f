"""Snapshots as rows."""

import dataclasses
import time
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.rows import Rows
from stead.store.tables import snapshots


@dataclass(frozen=True)
class SnapshotRow:
    """One snapshot as it is recorded. Without `checkpoint` it holds the disk only."""

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


class SnapshotStore(Rows[SnapshotRow]):
    table = snapshots
    row = SnapshotRow

    async def insert(self, row: SnapshotRow) -> SnapshotRow:
        now = time.time_ns()
        return await super().insert(dataclasses.replace(row, created_at=now, used_at=now))

    async def list(self) -> list[SnapshotRow]:
        return await self._select(sa.select(snapshots).order_by(snapshots.c.created_at))
