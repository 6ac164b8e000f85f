"""Snapshots: kept checkpoints with a name, from which any number of machines can be made."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from stead.errors import InvalidRequest, SnapshotNotFound, WrongSnapshotState
from stead.host import checkpoints
from stead.host.checkpoints import Moment
from stead.machines.checkpointing import Checkpointing
from stead.machines.lifecycle import Lifecycle, new_id, size_of
from stead.machines.persistence import SnapshotPersistence, Sticky, columns, from_columns
from stead.machines.states import State
from stead.settings import Size
from stead.store.machines import MachineRow
from stead.store.snapshots import SnapshotRow, SnapshotStore
from stead.tasks import finished, in_thread

MAX_NAME = 200


class SnapshotState(StrEnum):
    BUILDING = "building"
    READY = "ready"


@dataclass(frozen=True)
class SnapshotInfo:
    """What is recorded of a snapshot. Without memory, machines that are made from it boot from its disk."""

    id: str
    name: str | None
    state: SnapshotState
    source_machine: str
    size: Size
    has_memory: bool
    persistence: SnapshotPersistence
    created_at: float


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
    )


def check_name(name: str | None) -> None:
    if name is not None and (not name.strip() or len(name) > MAX_NAME):
        raise InvalidRequest(f"a name has 1 to {MAX_NAME} characters")


@dataclass(frozen=True)
class Taken:
    """A running machine's moment, with the machine as it was right after it."""

    machine: MachineRow
    moment: Moment


class Snapshots:
    """All snapshots of one installation."""

    def __init__(self, store: SnapshotStore, lifecycle: Lifecycle, checkpointing: Checkpointing) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._checkpointing = checkpointing

    async def list(self) -> list[SnapshotInfo]:
        return [snapshot_info(row) for row in await self._store.list()]

    async def get(self, snapshot_id: str) -> SnapshotInfo:
        return snapshot_info(await self.row(snapshot_id))

    async def rename(self, snapshot_id: str, name: str | None) -> SnapshotInfo:
        check_name(name)
        row = await self._store.update(snapshot_id, name=name)
        if row is None:
            raise SnapshotNotFound(snapshot_id)
        return snapshot_info(row)

    async def delete(self, snapshot_id: str) -> None:
        """Forget a snapshot; machines that were made from it keep what they stand on."""
        await self.ready(snapshot_id)
        await self._store.delete(snapshot_id)
        self._lifecycle.sweep()

    async def row(self, snapshot_id: str) -> SnapshotRow:
        row = await self._store.get(snapshot_id)
        if row is None:
            raise SnapshotNotFound(snapshot_id)
        return row

    async def ready(self, snapshot_id: str) -> SnapshotRow:
        row = await self.row(snapshot_id)
        if row.state != SnapshotState.READY:
            raise WrongSnapshotState(snapshot_id, row.state)
        return row

    async def touch(self, snapshot_id: str) -> None:
        """It was used just now."""
        await self._store.update(snapshot_id, used_at=time.time_ns())

    async def sticky(self) -> Sequence[SnapshotRow]:
        rows = await self._store.list()
        return [row for row in rows if row.persistence == Sticky().type and row.state == SnapshotState.READY]

    # Taking: `begin` and `take` are called in the machine's turn, `keep` after it

    async def begin(
        self, machine: MachineRow, name: str | None, persistence: SnapshotPersistence
    ) -> SnapshotRow:
        kept: dict[str, Any] = columns(persistence)
        kept.pop("delete_event")
        return await self._store.insert(
            SnapshotRow(
                id=f"sc-{new_id()}",
                name=name,
                state=SnapshotState.BUILDING,
                source_machine=machine.id,
                vcpus=machine.vcpus,
                memory_mib=machine.memory_mib,
                disk_gib=machine.disk_gib,
                template=machine.template,
                **kept,
            )
        )

    async def take(self, snapshot: SnapshotRow, machine: MachineRow) -> Taken | None:
        """Freeze what a snapshot is to hold. Memory that is still to be written is for `keep`."""
        match State(machine.state):
            case State.RUNNING:
                return await self._take_running(snapshot, machine)
            case State.SUSPENDED:
                await self._take_suspended(snapshot, machine)
            case _:
                if machine.top is not None:
                    machine = await self._lifecycle.record_frozen(machine, top=None) or machine
                await self._store.update(snapshot.id, layer=machine.layer, state=SnapshotState.READY)
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
            await self._store.update(
                snapshot.id, layer=machine.layer, checkpoint=checkpoint, state=SnapshotState.READY
            )

    async def keep(self, snapshot: SnapshotRow, taken: Taken) -> None:
        """Make a snapshot of a running machine durable; the machine need not wait for it."""
        checkpoint = new_id()
        try:
            with self._lifecycle.layers.building(checkpoint):
                async with self._lifecycle.layers.reading():
                    (layer, *_) = await self._lifecycle.layers.chain(taken.machine.layer)
                    await self._checkpointing.keep(taken.moment, checkpoint, layer)
                await self._store.update(snapshot.id, checkpoint=checkpoint, state=SnapshotState.READY)
        finally:
            taken.moment.close()
        self._checkpointing.merge_if_long(taken.machine)

    async def give_up(self, snapshot: SnapshotRow) -> None:
        await finished(self._store.delete(snapshot.id))
        self._lifecycle.sweep()

    async def forget_unfinished(self) -> None:
        """After a crash: nobody was told of snapshots that were not ready."""
        for row in await self._store.list():
            if row.state != SnapshotState.READY:
                await self._store.delete(row.id)
