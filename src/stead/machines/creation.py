"""New machines: from a template, from a snapshot, from a running machine, or under an old name."""

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
from stead.machines.lifecycle import Lifecycle, new_id, size_of
from stead.machines.live import Live
from stead.machines.persistence import PERSISTENT, Persistence, columns
from stead.machines.pool import Pool
from stead.machines.states import State
from stead.settings import Size
from stead.store.machines import MachineRow
from stead.store.snapshots import SnapshotRow
from stead.tasks import finished, or_undo

_CHILD_OVERHEAD = 64 << 20
"""Memory that a QEMU takes for itself and its guest's first steps."""

log = get_logger("stead.machines")

Purpose = Literal["use", "build"]


@dataclass(frozen=True)
class Options:
    """What is decided of a machine when it is made."""

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
            raise InvalidRequest(f"an idle timeout is at least a second, not {self.idle_timeout}")
        if self.activity_threshold < 0:
            raise InvalidRequest("an activity threshold is a number of bytes, not negative")
        if self.workdir is not None and (not self.workdir.startswith("/") or "\0" in self.workdir):
            raise InvalidRequest(f"a working directory is an absolute path, not {self.workdir!r}")

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
    """Makes machines; each is there, running and sure of itself, or nothing of it is."""

    def __init__(self, lifecycle: Lifecycle, checkpointing: Checkpointing, pool: Pool) -> None:
        self._lifecycle = lifecycle
        self._checkpointing = checkpointing
        self._pool = pool
        # More restores at once than the host has cores only makes all of them late.
        self.restores = asyncio.Semaphore(max(2, os.cpu_count() or 2))

    async def from_template(self, template: Template, options: Options) -> MachineRow:
        with self._pool.giving_way():
            taken = await or_undo(self._take(template, options), self._give_up)
            if taken is not None:
                row, live = taken
                return await self._finish(row, self._resume(row, live))
            row = await self._allocate(template.size, template.id, options.columns())
            return await self._finish(row, self._restore(row, template))

    async def from_snapshot(self, snapshot: SnapshotRow, size: Size | None, options: Options) -> MachineRow:
        """With the snapshot's memory when it has one that fits; else it boots from the snapshot's disk."""
        own = size_of(snapshot)
        size = size or own
        if size.disk_gib < own.disk_gib:
            raise InvalidRequest(f"the disk of this snapshot has {own.disk_gib} GiB and cannot shrink")
        facts = options.columns() | {"layer": snapshot.layer, "snapshot": snapshot.id}
        with self._pool.giving_way():
            row = await self._allocate(size, snapshot.template, facts)
            return await self._finish(row, self._from_snapshot(row, snapshot, size == own))

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
        # What the children have in common with the template they share; what differs each has for itself.
        check_memory(len(names) * (moment.memory.size + _CHILD_OVERHEAD))
        rows: list[MachineRow] = []
        try:
            for name in names:
                rows.append(await self._allocate(moment.size, parent.template, facts | {"name": name}))
        except BaseException:
            await self.remove(rows)
            raise
        return rows

    async def bring_up(self, rows: list[MachineRow], moment: Moment) -> list[MachineRow]:
        """Start the children of a fork: all of them, or none."""
        base = self._checkpointing.base_of(moment)
        with self._pool.giving_way():
            work = [self._finish(row, self._child(row, moment, base)) for row in rows]
            results = await finished(asyncio.gather(*work, return_exceptions=True))
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self.remove([result for result in results if isinstance(result, MachineRow)])
            raise failures[0]
        return [result for result in results if isinstance(result, MachineRow)]

    async def again(
        self, row: MachineRow, template: Callable[[], Awaitable[Template]], snapshot: SnapshotRow | None
    ) -> MachineRow:
        """Make a deleted machine anew, from where it once came. Call in its turn."""
        # The reason tells a crash that this one is known: its name is kept.
        facts: dict[str, object] = {"state": State.CREATING, "step": "allocate", "top": new_id()}
        facts["reason"] = "it is made anew"
        if snapshot is not None:
            facts |= {"layer": snapshot.layer, "template": snapshot.template}
        else:
            found = await template()
            facts |= {"layer": None, "template": found.id}
        renewed = await self._lifecycle.store.update(row.id, **facts)
        if renewed is None:
            raise StartFailed(f"machine {row.id} was removed")
        if snapshot is None:
            return await self._finish_in_turn(renewed, self._restore(renewed, found), forget=False)
        work = self._from_snapshot(renewed, snapshot, size_of(renewed) == size_of(snapshot))
        return await self._finish_in_turn(renewed, work, forget=False)

    async def remove(self, rows: list[MachineRow]) -> None:
        for row in rows:
            await finished(self._lifecycle.remove(row))

    async def _allocate(self, size: Size, template: str, facts: dict[str, Any]) -> MachineRow:
        allocation = self._lifecycle.allocate(State.CREATING, size, template, **facts)
        return await or_undo(allocation, self._lifecycle.remove)

    async def _take(self, template: Template, options: Options) -> tuple[MachineRow, Live] | None:
        async with self._lifecycle.quotas.admitting(options.account, template.size):
            return await self._pool.take(template, **options.columns())

    async def _give_up(self, taken: tuple[MachineRow, Live] | None) -> None:
        if taken is not None:
            await self._lifecycle.remove(taken[0])

    # Ways to a running guest

    async def _tried_twice(
        self, row: MachineRow, bring_up: Callable[[], Awaitable[tuple[Live, str | None]]]
    ) -> tuple[Live, str | None]:
        """A new process, when it is its turn; what was room when it was asked for may be taken by then.

        Emulated kernels panic now and then. A guest that ends before it was anybody's is made once more.
        """
        async with self.restores:
            self._lifecycle.host.check_capacity()
            try:
                return await bring_up()
            except StartFailed as error:
                live = self._lifecycle.lives.get(row.id)
                if live is None or not await live.vm.process.ends_now():
                    raise
                log.warning("a new guest ended at once", machine=row.id, reason=str(error))
            await self._lifecycle.end_process(row)
            await self._lifecycle.host.discard(row.id)
            return await bring_up()

    async def _resume(self, row: MachineRow, live: Live) -> tuple[Live, str | None]:
        async with self.restores:
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
                    note = f"its snapshot's memory could not be used, so it was started from disk: {error}"
                    log.warning("a snapshot's memory cannot be used", snapshot=snapshot.id, reason=str(error))
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
            raise StartFailed("the template that its disk stands on is gone")
        return template

    # The end of every creation

    async def _finish(self, row: MachineRow, work: Awaitable[tuple[Live, str | None]]) -> MachineRow:
        async with self._lifecycle.turns.of(row.id):
            return await self._finish_in_turn(row, work, forget=True)

    async def _finish_in_turn(
        self, row: MachineRow, work: Awaitable[tuple[Live, str | None]], *, forget: bool
    ) -> MachineRow:
        try:
            live, note = await work
            return await self._lifecycle.record_running(row, live, note)
        except BaseException as error:
            await finished(self._lifecycle.remove(row, forget=forget))
            if isinstance(error, SteadError) and not isinstance(error, StartFailed | CapacityExceeded):
                raise StartFailed(f"no machine could be created: {error}") from error
            if isinstance(error, OSError):
                raise StartFailed(f"no machine could be created: {error.strerror}") from error
            raise
