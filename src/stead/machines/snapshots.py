"""Snapshots: saved memory and disk from which any number of VMs can be created."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stead.errors import HostError, InvalidRequest, SnapshotNotFound, WrongSnapshotState
from stead.host import checkpoints
from stead.host.checkpoints import Moment
from stead.logs import get_logger
from stead.machines.checkpointing import Checkpointing
from stead.machines.lifecycle import Lifecycle, new_id, size_of
from stead.machines.persistence import PERSISTENT, SnapshotPersistence, Sticky, columns, from_columns
from stead.machines.states import State
from stead.settings import Size
from stead.store.machines import MachineRow
from stead.store.snapshots import SnapshotRow, SnapshotStore
from stead.tasks import finished, in_thread

MAX_NAME = 200
REMEMBERED = 30 * 24 * 3600 * 10**9
"""Retention of the rows of deleted snapshots, in nanoseconds."""

log = get_logger("stead.snapshots")


class SnapshotState(StrEnum):
    BUILDING = "building"
    READY = "ready"
    FAILED = "failed"
    """The state of a failed build; VMs can be created from it for inspection."""


USABLE = (SnapshotState.READY, SnapshotState.FAILED)


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


def snapshot_info(row: SnapshotRow) -> SnapshotInfo:
    persistence = from_columns(row.persistence, row.priority, None)
    assert isinstance(persistence, SnapshotPersistence)  # noqa: S101  # no other is ever recorded
    return SnapshotInfo(
        id=row.id,
        name=row.name,
        state=SnapshotState(row.state),
        source_machine=row.source_machine,
        size=size_of(row),
        has_memory=row.checkpoint is not None,
        persistence=persistence,
        created_at=row.created_at / 1e9,
        account=row.account,
        failure=row.failure,
        build=row.build,
        template_hash=row.template_hash,
        deleted_at=None if row.deleted_at is None else row.deleted_at / 1e9,
        size_bytes=row.size_bytes,
    )


def check_name(name: str | None) -> None:
    if name is not None and (not name.strip() or len(name) > MAX_NAME or not name.isprintable()):
        raise InvalidRequest(
            f"invalid name {name[:MAX_NAME]!r}: must be 1 to {MAX_NAME} printable characters"
        )


@dataclass(frozen=True)
class About:
    """Properties of a new snapshot."""

    name: str | None = None
    persistence: SnapshotPersistence = PERSISTENT
    build: str | None = None
    template_hash: str | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Taken:
    """A running VM's captured memory, and its row right after the capture."""

    machine: MachineRow
    moment: Moment


class Snapshots:
    """All snapshots of one installation."""

    def __init__(self, store: SnapshotStore, lifecycle: Lifecycle, checkpointing: Checkpointing) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._checkpointing = checkpointing

    async def list(self, account: str | None = None, *, deleted: bool = False) -> list[SnapshotInfo]:
        """All snapshots, or those of an account; with `deleted`, also the rows of deleted ones."""
        rows = await self._store.list(account)
        return [snapshot_info(row) for row in rows if deleted or row.deleted_at is None]

    async def get(self, snapshot_id: str, *, deleted: bool = False) -> SnapshotInfo:
        """A snapshot; with `deleted`, also a deleted one."""
        row = await self._store.get(snapshot_id) if deleted else await self.row(snapshot_id)
        if row is None:
            raise SnapshotNotFound(snapshot_id)
        return snapshot_info(row)

    async def find(self, account: str, template_hash: str) -> SnapshotInfo | None:
        """The newest ready snapshot of an account with this template hash (the build cache)."""
        row = await self._store.newest(account, template_hash, SnapshotState.READY)
        return None if row is None else snapshot_info(row)

    async def rename(self, snapshot_id: str, name: str | None) -> SnapshotInfo:
        check_name(name)
        await self.row(snapshot_id)
        row = await self._store.update(snapshot_id, name=name)
        if row is None:
            raise SnapshotNotFound(snapshot_id)
        return snapshot_info(row)

    async def set_persistence(self, snapshot_id: str, persistence: SnapshotPersistence) -> SnapshotInfo:
        """Change a snapshot's retention."""
        await self.row(snapshot_id)
        kept = columns(persistence)
        kept.pop("delete_event")
        row = await self._store.update(snapshot_id, **kept)
        if row is None:
            raise SnapshotNotFound(snapshot_id)
        return snapshot_info(row)

    async def delete(self, snapshot_id: str) -> None:
        """Delete a snapshot; layers that VMs still need stay."""
        await self.ready(snapshot_id)
        gone: dict[str, object] = dict.fromkeys(("layer", "checkpoint", "size_bytes"))
        await self._store.update(snapshot_id, deleted_at=time.time_ns(), **gone)
        self._lifecycle.sweep()

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

    async def touch(self, snapshot_id: str) -> None:
        """Record a use, for the order of eviction."""
        await self._store.update(snapshot_id, used_at=time.time_ns())

    async def sticky(self) -> Sequence[SnapshotRow]:
        rows = await self._store.list()
        kept = [row for row in rows if row.deleted_at is None and row.state in USABLE]
        return [row for row in kept if row.persistence == Sticky().type]

    # Capture: `begin` and `take` with the VM's lock, `keep` after it is released

    async def begin(self, machine: MachineRow, about: About) -> SnapshotRow:
        kept: dict[str, Any] = columns(about.persistence)
        kept.pop("delete_event")
        row = SnapshotRow(
            id=f"sc-{new_id()}",
            name=about.name,
            state=SnapshotState.BUILDING,
            source_machine=machine.id,
            vcpus=machine.vcpus,
            memory_mib=machine.memory_mib,
            disk_gib=machine.disk_gib,
            template=machine.template,
            account=machine.account,
            build=about.build,
            template_hash=about.template_hash,
            failure=about.failure,
            **kept,
        )
        async with self._lifecycle.quotas.keeping(machine.account, self._store.count):
            return await self._store.insert(row)

    async def take(self, snapshot: SnapshotRow, machine: MachineRow) -> Taken | None:
        """Capture what the snapshot will hold; `keep` then writes the memory of a running VM to disk."""
        match State(machine.state):
            case State.RUNNING:
                return await self._take_running(snapshot, machine)
            case State.SUSPENDED:
                await self._take_suspended(snapshot, machine)
            case _:
                if machine.top is not None:
                    machine = await self._lifecycle.record_frozen(machine, top=None) or machine
                await self._complete(snapshot, layer=machine.layer, checkpoint=None)
        return None

    async def _take_running(self, snapshot: SnapshotRow, machine: MachineRow) -> Taken:
        live = self._lifecycle.lives[machine.id]
        await self._checkpointing.sync_guest(live)
        machine, moment = await self._checkpointing.take(machine, live)
        try:
            await self._store.update(snapshot.id, layer=machine.layer)
        except BaseException:
            moment.close()
            raise
        return Taken(machine, moment)

    async def _take_suspended(self, snapshot: SnapshotRow, machine: MachineRow) -> None:
        assert machine.checkpoint is not None  # noqa: S101
        checkpoint = new_id()
        folder = self._lifecycle.layers.checkpoint_folder
        with self._lifecycle.layers.building(checkpoint):
            await in_thread(checkpoints.copy, folder(machine.checkpoint), folder(checkpoint))
            await self._complete(snapshot, layer=machine.layer, checkpoint=checkpoint)

    async def keep(self, snapshot: SnapshotRow, taken: Taken) -> None:
        """Write the captured memory of a running VM to disk; the VM is not blocked meanwhile."""
        checkpoint = new_id()
        try:
            with self._lifecycle.layers.building(checkpoint):
                async with self._lifecycle.layers.reading():
                    (layer, *_) = await self._lifecycle.layers.chain(taken.machine.layer)
                    await self._checkpointing.keep(taken.moment, checkpoint, layer)
                await self._complete(snapshot, layer=taken.machine.layer, checkpoint=checkpoint)
        finally:
            taken.moment.close()
        self._checkpointing.merge_if_long(taken.machine)

    async def _complete(self, snapshot: SnapshotRow, *, layer: str | None, checkpoint: str | None) -> None:
        """Record what a snapshot holds and how large it is; from here on VMs can be made from it."""
        size = await self._lifecycle.layers.size(layer, checkpoint)
        state = SnapshotState.READY if snapshot.failure is None else SnapshotState.FAILED
        await self._store.update(
            snapshot.id, layer=layer, checkpoint=checkpoint, state=state, size_bytes=size
        )

    async def give_up(self, snapshot: SnapshotRow) -> None:
        await finished(self._store.delete(snapshot.id))
        self._lifecycle.sweep()

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
            await self._store.delete(row.id)
        elif row.size_bytes is None and row.deleted_at is None:
            with contextlib.suppress(HostError):
                size = await self._lifecycle.layers.size(row.layer, row.checkpoint)
                await self._store.update(row.id, size_bytes=size)


def _long_gone(row: SnapshotRow) -> bool:
    return row.deleted_at is not None and row.deleted_at < time.time_ns() - REMEMBERED
