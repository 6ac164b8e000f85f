"""Snapshots: saved memory and disk from which any number of VMs can be created."""

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeVar, cast

from stead.errors import HostError, SnapshotExpired, SnapshotNotFound, WrongSnapshotState
from stead.host.interface import CapturedState
from stead.logs import get_logger
from stead.machines.capture import CaptureOperation, sync_guest
from stead.machines.engine import Engine
from stead.machines.lifetimes import FOREVER, Lifetime, utc
from stead.machines.locks import wrong_state
from stead.machines.persistence import (
    PERSISTENT,
    SnapshotPersistence,
    Sticky,
    snapshot_columns,
    snapshot_persistence,
)
from stead.machines.records import Record, new_id, size_of
from stead.machines.snapshot_journal import (
    USABLE,
    CapturingSnapshot,
    DeletedSnapshot,
    SnapshotJournal,
    SnapshotState,
    UsableSnapshot,
)
from stead.machines.states import Operation, Running, Stopped, Suspended
from stead.machines.unchanged import UNCHANGED, Unchanged
from stead.names import check_name
from stead.settings import Size
from stead.store.snapshots import SnapshotRow, SnapshotStore
from stead.tasks import finished

T = TypeVar("T")
SnapshotPurpose = Literal["use", "agent"]
"""`agent`: saved by a client of an agent framework, so that a session can be resumed."""
REMEMBERED = 30 * 24 * 3600 * 10**9
"""Retention of the rows of deleted snapshots, in nanoseconds."""

log = get_logger("stead.snapshots")


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot as recorded. Without memory, VMs created from it boot from its disk."""

    id: str
    name: str | None
    state: SnapshotState
    source_machine: str
    size: Size
    has_memory: bool
    persistence: SnapshotPersistence
    created_at: float
    account: str | None
    failure: str | None
    build: str | None
    template_hash: str | None
    deleted_at: float | None
    size_bytes: int | None
    """Disk space of its memory and of every disk layer above the template, as of the capture.

    Layers that it shares with other snapshots count in each. None while building and after deletion.
    """
    expires_at: float | None
    """When it is deleted by itself; None is never."""
    purpose: SnapshotPurpose

    def refuse_expired(self) -> None:
        """SnapshotExpired if its lifetime has ended, whether it is deleted already or not."""
        ended = time.time() if self.deleted_at is None else self.deleted_at
        if self.expires_at is not None and self.expires_at <= ended:
            raise SnapshotExpired(self.id, utc(self.expires_at))


def snapshot_info(row: SnapshotRow) -> SnapshotInfo:
    return SnapshotInfo(
        id=row.id,
        name=row.name,
        state=SnapshotState(row.state),
        source_machine=row.source_machine,
        size=size_of(row),
        has_memory=row.checkpoint is not None,
        persistence=snapshot_persistence(row.persistence, row.priority),
        created_at=row.created_at / 1e9,
        account=row.account,
        failure=row.failure,
        build=row.build,
        template_hash=row.template_hash,
        deleted_at=None if row.deleted_at is None else row.deleted_at / 1e9,
        size_bytes=row.size_bytes,
        expires_at=None if row.expires_at is None else row.expires_at / 1e9,
        purpose=cast(SnapshotPurpose, row.purpose),
    )


@dataclass(frozen=True)
class SnapshotProperties:
    """Properties of a new snapshot."""

    name: str | None = None
    persistence: SnapshotPersistence = PERSISTENT
    build: str | None = None
    template_hash: str | None = None
    failure: str | None = None
    lifetime: Lifetime = FOREVER
    """From the capture on."""
    purpose: SnapshotPurpose = "use"
    id: str | None = None


@dataclass(frozen=True)
class _CapturedVm:
    """What was captured of a running VM for a snapshot; its memory is not saved yet."""

    snapshot: SnapshotRow
    record: Record
    state: CapturedState


class Snapshots:
    """All snapshots of one installation."""

    def __init__(self, engine: Engine, *, store: SnapshotStore, capture: CaptureOperation) -> None:
        self._engine = engine
        self._store = store
        self._journal = SnapshotJournal(store)
        self._capture = capture
        self._sources: Counter[str] = Counter()
        """How many VMs are being created from each snapshot."""

    async def list(self, account: str | None = None, *, deleted: bool = False) -> list[SnapshotInfo]:
        """All snapshots, or those of an account; with `deleted`, also the rows of deleted ones."""
        if account is None:
            found = [snapshot_info(row) for row in await self._store.list()]
        else:
            found = await self._store.of_account(account, snapshot_info)
        return [info for info in found if deleted or info.deleted_at is None]

    async def get(self, snapshot_id: str, *, deleted: bool = False) -> SnapshotInfo:
        """A snapshot; with `deleted`, also a deleted one."""
        row = await self._store.get(snapshot_id) if deleted else await self.row(snapshot_id)
        if row is None:
            raise SnapshotNotFound(snapshot_id)
        return snapshot_info(row)

    async def find(self, account: str, template_hash: str) -> SnapshotInfo | None:
        """The newest ready snapshot of an account with this template hash (the build cache)."""
        row = await self._store.newest(account, template_hash, SnapshotState.READY, time.time_ns())
        return None if row is None else snapshot_info(row)

    async def update(
        self,
        snapshot_id: str,
        *,
        name: str | Unchanged | None = UNCHANGED,
        persistence: SnapshotPersistence | Unchanged = UNCHANGED,
        lifetime: Lifetime | Unchanged = UNCHANGED,
    ) -> SnapshotInfo:
        """Change a snapshot's name, its retention, or its lifetime, which is counted from now."""
        changes: dict[str, object] = {}
        if not isinstance(name, Unchanged):
            check_name(name)
            changes["name"] = name
        if not isinstance(persistence, Unchanged):
            changes.update(snapshot_columns(persistence))
        if not isinstance(lifetime, Unchanged):
            now = time.time_ns()
            lifetime.check(now)
            changes["expires_at"] = lifetime.end(now)
        if not changes:
            return await self.get(snapshot_id)
        return snapshot_info(await self._journal.change(snapshot_id, **changes))

    async def delete(self, snapshot_id: str) -> None:
        """Delete a snapshot; layers that VMs still need stay."""
        row = await self.ready(snapshot_id)
        await self._journal.transition(row, DeletedSnapshot(time.time_ns()))
        self._engine.layers.sweep()

    async def delete_expired(self) -> None:
        """Delete the snapshots whose lifetime has ended; one in use as a `source` stays until the next call.

        One that is being captured has to be complete before it can be deleted.
        """
        now = time.time_ns()
        for row in await self._store.expired(now, excluding=SnapshotState.BUILDING):
            if self._sources[row.id]:
                continue
            # The row decides: it may have been extended since.
            if await self._journal.expire(row, now):
                log.info("deleted a snapshot that has expired", snapshot=row.id, account=row.account)
                self._engine.layers.sweep()

    @contextlib.asynccontextmanager
    async def source(self, snapshot_id: str) -> AsyncIterator[SnapshotRow]:
        """A snapshot to create a VM from; inside the block it is not deleted for having expired."""
        self._sources[snapshot_id] += 1
        try:
            (await self.get(snapshot_id, deleted=True)).refuse_expired()
            row = await self.ready(snapshot_id)
            await self._journal.touch(snapshot_id)
            yield row
        finally:
            self._sources[snapshot_id] -= 1
            if not self._sources[snapshot_id]:
                del self._sources[snapshot_id]

    async def row(self, snapshot_id: str) -> SnapshotRow:
        row = await self._store.get(snapshot_id)
        if row is None or row.deleted_at is not None:
            raise SnapshotNotFound(snapshot_id)
        return row

    async def ready(self, snapshot_id: str) -> SnapshotRow:
        row = await self.row(snapshot_id)
        if row.state not in USABLE:
            raise WrongSnapshotState(snapshot_id, row.state)
        return row

    async def check_limit(self, account: str | None) -> None:
        """LimitExceeded if the account may not have another snapshot."""
        await self._engine.quotas.check_snapshot(account, self._store.count)

    async def sticky(self) -> Sequence[SnapshotRow]:
        rows = await self._store.list()
        kept = [row for row in rows if row.deleted_at is None and row.state in USABLE]
        return [row for row in kept if row.persistence == Sticky().type]

    # Capture

    async def create(self, machine_id: str, properties: SnapshotProperties) -> SnapshotInfo:
        """Capture a VM's memory and disk while it keeps running; of a stopped VM, the disk."""
        async with contextlib.AsyncExitStack() as place:
            async with self._engine.locks.operation(machine_id, Operation.SNAPSHOT) as record:
                await place.enter_async_context(self._engine.captures.hold(record.account))
                snapshot = await self._begin(record, properties)
                captured = await self._or_give_up(snapshot, self._capture_into(snapshot, record))
            if captured is not None:
                # The VM's lock is released: writing its memory to disk does not block it.
                await self._or_give_up(snapshot, self._save(captured))
        return await self.get(snapshot.id)

    async def _or_give_up(self, snapshot: SnapshotRow, work: Awaitable[T]) -> T:
        try:
            return await work
        except BaseException:
            await finished(self._journal.forget(snapshot))
            self._engine.layers.sweep()
            raise

    async def _begin(self, record: Record, properties: SnapshotProperties) -> SnapshotRow:
        row = SnapshotRow(
            id=properties.id or f"sc-{new_id()}",
            name=properties.name,
            state=SnapshotState.BUILDING,
            source_machine=record.id,
            **asdict(record.size),
            template=record.template,
            account=record.account,
            build=properties.build,
            template_hash=properties.template_hash,
            failure=properties.failure,
            expires_at=properties.lifetime.end(time.time_ns()),
            purpose=properties.purpose,
            **snapshot_columns(properties.persistence),
        )
        async with self._engine.quotas.keeping(record.account, self._store.count):
            return await self._journal.begin(row)

    async def _capture_into(self, snapshot: SnapshotRow, record: Record) -> _CapturedVm | None:
        """Capture what the snapshot will hold; `_save` then writes the memory of a running VM to disk."""
        match record.state:
            case Running():
                return await self._capture_running(snapshot, record)
            case Suspended(checkpoint=checkpoint):
                await self._copy_suspended(snapshot, record, checkpoint)
            case Stopped(top=str(), reason=reason):
                record = await self._engine.disks.freeze(record, Stopped(None, reason))
                await self._complete(snapshot, layer=record.layer, checkpoint=None)
            case _:
                await self._complete(snapshot, layer=record.layer, checkpoint=None)
        return None

    async def _capture_running(self, snapshot: SnapshotRow, record: Record) -> _CapturedVm:
        live = self._engine.processes.running(record.id)
        if live is None:
            raise wrong_state(record, Operation.SNAPSHOT)
        self._engine.processes.refuse_held(record.id)
        await sync_guest(live)
        record, state = await self._capture.capture(record, live)
        try:
            snapshot = await self._journal.transition(snapshot, CapturingSnapshot(record.layer))
        except BaseException:
            state.close()
            raise
        return _CapturedVm(snapshot, record, state)

    async def _copy_suspended(self, snapshot: SnapshotRow, record: Record, saved: str) -> None:
        checkpoint = new_id()
        with self._engine.layers.building(checkpoint):
            await self._engine.host.checkpoints.copy(saved, checkpoint)
            await self._complete(snapshot, layer=record.layer, checkpoint=checkpoint)

    async def _save(self, captured: _CapturedVm) -> None:
        """Make captured memory and the disk layer of the same instant durable."""
        record, state = captured.record, captured.state
        checkpoint = new_id()
        try:
            with self._engine.layers.building(checkpoint):
                async with self._engine.layers.reading():
                    (layer, *_) = await self._engine.layers.chain(record.layer)
                    await self._engine.host.layers.sync(layer)
                    await self._engine.host.checkpoints.save(state, checkpoint)
                await self._complete(captured.snapshot, layer=record.layer, checkpoint=checkpoint)
        finally:
            state.close()
        self._engine.layers.merge_in_background(record.layer, record.template)

    async def _complete(self, snapshot: SnapshotRow, *, layer: str | None, checkpoint: str | None) -> None:
        """Record what a snapshot holds and how large it is; from here on VMs can be made from it."""
        size = await self._engine.layers.size(layer, checkpoint)
        await self._journal.transition(snapshot, UsableSnapshot(layer, checkpoint, size))

    async def recover(self) -> None:
        """On start: drop snapshots that a crash left unfinished and rows of ones deleted long ago.

        Snapshots captured before sizes were recorded get theirs.
        """
        for row in await self._store.list():
            try:
                await self._recover(row)
            except Exception as error:
                log.error("cannot recover a snapshot", snapshot=row.id, state=row.state, error=repr(error))

    async def _recover(self, row: SnapshotRow) -> None:
        if row.state == SnapshotState.BUILDING or _long_gone(row):
            await self._journal.forget(row)
        elif row.size_bytes is None and row.deleted_at is None:
            with contextlib.suppress(HostError):
                size = await self._engine.layers.size(row.layer, row.checkpoint)
                await self._journal.transition(row, UsableSnapshot(row.layer, row.checkpoint, size))


def _long_gone(row: SnapshotRow) -> bool:
    return row.deleted_at is not None and row.deleted_at < time.time_ns() - REMEMBERED
