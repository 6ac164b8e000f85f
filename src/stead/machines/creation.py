"""Creation of VMs: from a template, a snapshot, a running VM (fork), or again under a deleted VM's id."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stead.errors import CapacityExceeded, CheckpointUnusable, InvalidRequest, StartFailed, SteadError
from stead.host.checkpoints import Moment
from stead.host.memory import check_memory
from stead.host.templates import Template
from stead.logs import get_logger
from stead.machines.checkpointing import Checkpointing
from stead.machines.events import EventKind
from stead.machines.lifecycle import Lifecycle, new_id, size_of
from stead.machines.live import Live
from stead.machines.persistence import PERSISTENT, Persistence, columns
from stead.machines.pool import Pool
from stead.machines.restore_slots import RestoreSlots
from stead.machines.states import State
from stead.settings import Size
from stead.store.machines import MachineRow
from stead.store.snapshots import SnapshotRow
from stead.tasks import finished, or_undo

_CHILD_OVERHEAD = 64 << 20
"""Memory of a QEMU process itself and of its guest's first writes."""
_CANCELLED = "the creation was cancelled"

log = get_logger("stead.machines")

Purpose = Literal["use", "build"]


@dataclass(frozen=True)
class Options:
    """Properties of a new VM."""

    name: str | None = None
    persistence: Persistence = PERSISTENT
    idle_timeout: int | None = None
    """Seconds without activity after which it is suspended; None is never."""
    activity_threshold: int = 0
    recreate: bool = False
    account: str | None = None
    purpose: Purpose = "use"
    workdir: str | None = None
    build: str | None = None
    request: str | None = None

    def __post_init__(self) -> None:
        if self.idle_timeout is not None and self.idle_timeout <= 0:
            raise InvalidRequest(f"idle timeout must be at least 1 s, not {self.idle_timeout}")
        if self.activity_threshold < 0:
            raise InvalidRequest(
                f"activity threshold must be at least 0 bytes, not {self.activity_threshold}"
            )
        if self.workdir is not None and (not self.workdir.startswith("/") or "\0" in self.workdir):
            raise InvalidRequest(f"workdir must be an absolute path, not {self.workdir!r}")

    def columns(self) -> dict[str, Any]:
        return columns(self.persistence) | {
            "name": self.name,
            "idle_timeout": self.idle_timeout,
            "activity_threshold": self.activity_threshold,
            "recreate": self.recreate,
            "account": self.account,
            "purpose": self.purpose,
            "workdir": self.workdir,
            "build": self.build,
            "request": self.request,
        }


class Creation:
    """Creates VMs, all or nothing: a failure removes everything that it made."""

    def __init__(self, lifecycle: Lifecycle, checkpointing: Checkpointing, pool: Pool) -> None:
        self._lifecycle = lifecycle
        self._checkpointing = checkpointing
        self._pool = pool
        # More concurrent restores than cores would make all of them slow.
        self.slots = RestoreSlots(max(2, os.cpu_count() or 2))

    async def from_template(self, template: Template, options: Options) -> MachineRow:
        with self._pool.giving_way():
            taken = await or_undo(self._take(template, options), self._give_up)
            if taken is not None:
                row, live = taken
                return await self._finish(row, self._resume(row, live))
            row = await self._allocate(template.size, template.id, options.columns())
            return await self._finish(row, self._restore(row, template))

    async def from_snapshot(self, snapshot: SnapshotRow, size: Size | None, options: Options) -> MachineRow:
        """Restore the snapshot's memory when sizes match; else boot from its disk."""
        own = size_of(snapshot)
        size = size or own
        if size.disk_gib < own.disk_gib:
            raise InvalidRequest(
                f"cannot create a {size.disk_gib} GiB disk from snapshot {snapshot.id}:"
                f" its disk has {own.disk_gib} GiB, and disks cannot shrink"
            )
        facts = options.columns() | {"layer": snapshot.layer, "snapshot": snapshot.id}
        with self._pool.giving_way():
            row = await self._allocate(size, snapshot.template, facts)
            work = self._from_snapshot(row, snapshot, size == own)
            return await self._finish(row, work, f"from snapshot {snapshot.id}")

    async def children(
        self, parent: MachineRow, moment: Moment, names: Sequence[str | None], persistence: Persistence
    ) -> list[MachineRow]:
        """Rows for VMs that get a running VM's memory and disk, one for each name."""
        facts = {
            "layer": parent.layer,
            "snapshot": parent.snapshot,
            "account": parent.account,
            "workdir": parent.workdir,
            "build": parent.build,
            "idle_timeout": parent.idle_timeout,
            "activity_threshold": parent.activity_threshold,
        } | columns(persistence)
        # Pages of the template are shared copy-on-write; each child needs its own copy of the others.
        check_memory(len(names) * (moment.memory.size + _CHILD_OVERHEAD))
        rows: list[MachineRow] = []
        try:
            for name in names:
                rows.append(await self._allocate(moment.size, parent.template, facts | {"name": name}))
        except BaseException:
            await self._remove_children(rows)
            raise
        return rows

    async def bring_up(self, rows: list[MachineRow], moment: Moment, parent: str) -> list[MachineRow]:
        """Start the children of a fork: all of them, or none."""
        base = self._checkpointing.base_of(moment)
        with self._pool.giving_way():
            why = f"forked from {parent}"
            work = [self._finish(row, self._child(row, moment, base), why) for row in rows]
            results = await finished(asyncio.gather(*work, return_exceptions=True))
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self._remove_children([result for result in results if isinstance(result, MachineRow)])
            raise failures[0]
        return [result for result in results if isinstance(result, MachineRow)]

    async def again(
        self,
        row: MachineRow,
        why: str,
        template: Callable[[], Awaitable[Template]],
        snapshot: SnapshotRow | None,
    ) -> MachineRow:
        """Recreate a deleted VM under its id from its snapshot or template. Call with its lock held."""
        # Recovery keeps the row of an interrupted creation that has a reason: callers know its id.
        facts: dict[str, object] = {"state": State.CREATING, "step": "allocate", "top": new_id()}
        facts["reason"] = "being recreated"
        if snapshot is not None:
            facts |= {"layer": snapshot.layer, "template": snapshot.template}
        else:
            found = await template()
            facts |= {"layer": None, "template": found.id}
        renewed = await self._lifecycle.store.update(row.id, **facts)
        if renewed is None:
            raise StartFailed(f"VM {row.id} was removed")
        why = f"recreated for {why}"
        if snapshot is None:
            return await self._finish_in_turn(renewed, self._restore(renewed, found), why, forget=False)
        work = self._from_snapshot(renewed, snapshot, size_of(renewed) == size_of(snapshot))
        return await self._finish_in_turn(renewed, work, why, forget=False)

    async def _remove_children(self, rows: list[MachineRow]) -> None:
        for row in rows:
            await finished(self._lifecycle.remove(row, "the fork failed"))

    async def _undo(self, row: MachineRow) -> None:
        await self._lifecycle.remove(row, _CANCELLED)

    async def _allocate(self, size: Size, template: str, facts: dict[str, Any]) -> MachineRow:
        allocation = self._lifecycle.allocate(State.CREATING, size, template, **facts)
        return await or_undo(allocation, self._undo)

    async def _take(self, template: Template, options: Options) -> tuple[MachineRow, Live] | None:
        async with self._lifecycle.quotas.admitting(options.account, template.size):
            return await self._pool.take(template, **options.columns())

    async def _give_up(self, taken: tuple[MachineRow, Live] | None) -> None:
        if taken is not None:
            await self._undo(taken[0])

    # Bringing a guest up

    async def _tried_twice(
        self, row: MachineRow, bring_up: Callable[[], Awaitable[tuple[Live, str | None]]]
    ) -> tuple[Live, str | None]:
        """Bring a new guest up in a restore slot, after a second check of the host's capacity.

        Retries once when the guest ends before the create is answered: emulated kernels panic now and then.
        """
        async with self.slots.held(row.account):
            self._lifecycle.host.check_capacity()
            try:
                return await bring_up()
            except StartFailed as error:
                live = self._lifecycle.lives.get(row.id)
                if live is None or not await live.vm.process.ends_now():
                    raise
                log.warning("new guest ended at once, retrying", vm=row.id, reason=str(error))
            await self._lifecycle.end_process(row)
            await self._lifecycle.host.discard(row.id)
            return await bring_up()

    async def _resume(self, row: MachineRow, live: Live) -> tuple[Live, str | None]:
        async with self.slots.held(row.account):
            await live.vm.resume()
            await self._lifecycle.identify(row, live, new_keys=True)
        return live, None

    async def _restore(self, row: MachineRow, template: Template) -> tuple[Live, str | None]:
        async def restore() -> tuple[Live, str | None]:
            live = await self._lifecycle.restore(row, template)
            await self._lifecycle.step(row, "identify")
            await self._lifecycle.identify(row, live, new_keys=True)
            return live, None

        return await self._tried_twice(row, restore)

    async def _child(self, row: MachineRow, moment: Moment, base: Template | None) -> tuple[Live, str | None]:
        async def revive() -> tuple[Live, str | None]:
            template = self._template_of(row)
            await self._lifecycle.make_disk(row)
            return await self._checkpointing.revive(row, template, moment, base, new_keys=True), None

        return await self._tried_twice(row, revive)

    async def _from_snapshot(
        self, row: MachineRow, snapshot: SnapshotRow, same_size: bool
    ) -> tuple[Live, str | None]:
        async def bring_up() -> tuple[Live, str | None]:
            template = self._template_of(row)
            await self._lifecycle.make_disk(row)
            note = None
            if snapshot.checkpoint is not None and same_size:
                try:
                    return await self._with_memory(row, template, snapshot.checkpoint), None
                except CheckpointUnusable as error:
                    note = f"saved memory of the snapshot was unusable, booted from disk: {error}"
                    log.warning(
                        "saved memory of a snapshot unusable", snapshot=snapshot.id, reason=str(error)
                    )
                    await self._lifecycle.end_process(row)
                    self._lifecycle.host.tidy(row.id)
            return await self._lifecycle.bring_up_from_disk(row, template, new_keys=True), note

        return await self._tried_twice(row, bring_up)

    async def _with_memory(self, row: MachineRow, template: Template, checkpoint: str) -> Live:
        moment, base = await self._checkpointing.read(checkpoint, size_of(row))
        try:
            check_memory(moment.memory.size)
            return await self._checkpointing.revive(row, template, moment, base, new_keys=True)
        finally:
            moment.close()

    def _template_of(self, row: MachineRow) -> Template:
        template = self._lifecycle.host.load_template(row.template)
        if template is None:
            raise StartFailed("the template below its disk is missing")
        return template

    # Recording the result

    async def _finish(
        self, row: MachineRow, work: Awaitable[tuple[Live, str | None]], why: str | None = None
    ) -> MachineRow:
        async with self._lifecycle.turns.of(row.id):
            return await self._finish_in_turn(row, work, why, forget=True)

    async def _finish_in_turn(
        self, row: MachineRow, work: Awaitable[tuple[Live, str | None]], why: str | None, *, forget: bool
    ) -> MachineRow:
        try:
            live, note = await work
            return await self._lifecycle.record_running(row, live, EventKind.CREATED, why, note)
        except BaseException as error:
            cause = _failure(error)
            await finished(self._lifecycle.remove(row, cause or _CANCELLED, forget=forget))
            if cause is None or isinstance(error, StartFailed | CapacityExceeded):
                raise
            raise StartFailed(cause) from error


def _failure(error: BaseException) -> str | None:
    """Why a creation failed, in words for its caller and the log; None when it was cancelled or is a bug."""
    if isinstance(error, SteadError):
        return f"cannot create a VM: {error}"
    if isinstance(error, OSError):
        return f"cannot create a VM: {error.strerror}"
    return None
