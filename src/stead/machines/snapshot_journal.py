"""Journal of snapshots: the only writer of their rows, with conditional changes of state."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stead.errors import SnapshotNotFound
from stead.machines.states import IllegalTransition
from stead.store.snapshots import SnapshotRow, SnapshotStore


class SnapshotState(StrEnum):
    BUILDING = "building"
    READY = "ready"
    FAILED = "failed"
    """The state of a failed build; VMs can be created from it for inspection."""


USABLE = (SnapshotState.READY, SnapshotState.FAILED)


# What a snapshot holds in each state


@dataclass(frozen=True)
class CapturingSnapshot:
    layer: str | None = None
    """The disk of a running VM, once it is captured; its memory is being saved."""


@dataclass(frozen=True)
class UsableSnapshot:
    """VMs can be created from it."""

    layer: str | None
    checkpoint: str | None
    size_bytes: int | None


@dataclass(frozen=True)
class DeletedSnapshot:
    """Its row stays for a while, without what it held."""

    at: int


SnapshotContents = CapturingSnapshot | UsableSnapshot | DeletedSnapshot

_NEXT: Mapping[type[SnapshotContents], tuple[type[SnapshotContents], ...]] = {
    CapturingSnapshot: (CapturingSnapshot, UsableSnapshot),
    UsableSnapshot: (UsableSnapshot, DeletedSnapshot),
    DeletedSnapshot: (),
}


def contents_of(row: SnapshotRow) -> SnapshotContents:
    if row.deleted_at is not None:
        return DeletedSnapshot(row.deleted_at)
    if row.state in USABLE:
        return UsableSnapshot(row.layer, row.checkpoint, row.size_bytes)
    return CapturingSnapshot(row.layer)


def check_snapshot_transition(before: SnapshotContents, after: SnapshotContents) -> None:
    """IllegalTransition unless `after` may be recorded when `before` is."""
    legal = type(after) in _NEXT[type(before)]
    if isinstance(before, CapturingSnapshot) and isinstance(after, CapturingSnapshot | UsableSnapshot):
        # A captured disk belongs to the memory that is being saved.
        legal = before.layer in (None, after.layer)
    elif isinstance(before, UsableSnapshot) and isinstance(after, UsableSnapshot):
        legal = (before.layer, before.checkpoint) == (after.layer, after.checkpoint)
    if not legal:
        raise IllegalTransition(f"{before} -> {after}")


def _columns(row: SnapshotRow, to: SnapshotContents) -> dict[str, Any]:
    gone = dict.fromkeys(("layer", "checkpoint", "size_bytes"))
    match to:
        case CapturingSnapshot(layer):
            return gone | {"state": SnapshotState.BUILDING, "layer": layer}
        case UsableSnapshot(layer, checkpoint, size_bytes):
            state = SnapshotState.READY if row.failure is None else SnapshotState.FAILED
            held = {"layer": layer, "checkpoint": checkpoint, "size_bytes": size_bytes}
            return {"state": state, **held}
        case DeletedSnapshot(at):
            return gone | {"deleted_at": at}


class SnapshotJournal:
    """Writes every change of snapshots' rows."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store

    async def begin(self, row: SnapshotRow) -> SnapshotRow:
        """Insert a snapshot that is being captured."""
        if contents_of(row) != CapturingSnapshot():
            raise IllegalTransition(f"no row -> {contents_of(row)}")
        return await self._store.insert(row)

    async def transition(self, before: SnapshotRow, to: SnapshotContents) -> SnapshotRow:
        """Record what a snapshot holds next if it is as `before`; durable when it returns.

        SnapshotNotFound when it was deleted meanwhile.
        """
        check_snapshot_transition(contents_of(before), to)
        expected = {name: getattr(before, name) for name in ("state", "layer", "checkpoint", "deleted_at")}
        return await self._write(before, expected, _columns(before, to))

    async def expire(self, before: SnapshotRow, now: int) -> bool:
        """Delete a snapshot that has expired; False when it was extended or deleted meanwhile."""
        check_snapshot_transition(contents_of(before), DeletedSnapshot(now))
        expected = {"state": before.state, "deleted_at": None, "expires_at": before.expires_at}
        gone = _columns(before, DeletedSnapshot(now))
        return await self._store.transition(before.id, expected, gone) is not None

    async def forget(self, before: SnapshotRow) -> None:
        """Delete the row of a capture that failed, or of a snapshot that was deleted long ago."""
        if isinstance(contents_of(before), UsableSnapshot):
            raise IllegalTransition(f"{contents_of(before)} -> no row")
        await self._store.delete(before.id)

    async def _write(
        self, before: SnapshotRow, expected: Mapping[str, object], changes: Mapping[str, object]
    ) -> SnapshotRow:
        row = await self._store.transition(before.id, expected, changes)
        if row is None:
            found = await self._store.get(before.id)
            if found is None or found.deleted_at is not None:
                raise SnapshotNotFound(before.id)
            raise IllegalTransition(f"snapshot {before.id} is not {contents_of(before)} any more")
        return row

    # Properties

    async def change(self, snapshot_id: str, **changes: object) -> SnapshotRow:
        """Change properties of a snapshot that is not deleted."""
        row = await self._store.change(snapshot_id, **changes)
        if row is None:
            raise SnapshotNotFound(snapshot_id)
        return row

    async def touch(self, snapshot_id: str) -> None:
        """Record a use, for the order of eviction."""
        await self._store.change(snapshot_id, used_at=time.time_ns())
