"""Create: a new VM from a template or a snapshot, or again under the id of a deleted VM."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import KW_ONLY, dataclass

from stead.errors import (
    CapacityExceeded,
    CheckpointUnusable,
    HostError,
    InvalidRequest,
    StartFailed,
    SteadError,
)
from stead.guest.identity import confer
from stead.host.interface import CapturedState, Report, Template
from stead.logs import get_logger
from stead.machines.bring_up import CONFIRM_TIMEOUT, BringUp
from stead.machines.deletion import DeleteOperation
from stead.machines.engine import MAX_WAIT, RESTORE_DEADLINE, Engine
from stead.machines.events import EventKind
from stead.machines.nics import NicRequest, VpcAddresses
from stead.machines.pool import CANCELLED, Pool
from stead.machines.processes import RunningVm
from stead.machines.records import Properties, Record, size_of
from stead.machines.snapshots import Snapshots
from stead.machines.states import Creating
from stead.machines.templates import Templates
from stead.settings import Size
from stead.store.snapshots import SnapshotRow
from stead.tasks import finished, or_undo

log = get_logger("stead.machines")


@dataclass(frozen=True, eq=False)
class BroughtUp:
    """A new VM whose guest has its identity."""

    record: Record
    live: RunningVm
    note: str | None = None
    """How it came up, if not as usual."""


@dataclass(eq=False)
class CreateOperation:
    """Creates VMs, all or nothing: a failure removes everything that it made."""

    engine: Engine
    _: KW_ONLY
    bring_up: BringUp
    deletion: DeleteOperation
    pool: Pool
    templates: Templates
    snapshots: Snapshots
    addresses: VpcAddresses

    async def from_template(
        self, properties: Properties, size: Size, nic: NicRequest | None, report: Report
    ) -> Record:
        """Confer an identity on a VM of the pool; without one, restore the template."""
        async with self.templates.held(size, report, account=properties.account) as template:
            return await self._from_template(properties, size, nic, template)

    async def _from_template(
        self, properties: Properties, size: Size, nic: NicRequest | None, template: Template
    ) -> Record:
        with self.pool.paused_refill():
            claim = functools.partial(self.pool.claim, template, size)
            async with self.engine.quotas.admitting(properties.account, size):
                claimed = await (
                    claim(properties) if nic is None else self.addresses.claim(nic, properties, claim)
                )
            if claimed is None:
                record = await self.allocate(size, template.id, properties, None, nic)
                return await self._finish(record, self._restore(record, template))
            record, live = claimed.record, claimed.live
            async with self.engine.locks.hold(record.id), self._removed_on_failure(record):
                async with self.engine.slots.hold(record.account):
                    # The guest confirms its address over its other NIC meanwhile.
                    joining = asyncio.ensure_future(self.engine.host.nics.join(record.vm_slot))
                    try:
                        await live.vm.resume()
                        await confer(live.agent, record.identity, timeout=CONFIRM_TIMEOUT)
                    finally:
                        await finished(joining)
                    await self.bring_up.grow_disk(record, live, claimed.known_gib)
                return await self.bring_up.record_running(record, live, EventKind.CREATED, None)

    async def from_snapshot(
        self, properties: Properties, snapshot: SnapshotRow, size: Size | None, nic: NicRequest | None
    ) -> Record:
        """Restore the snapshot's memory when sizes match; else boot from its disk."""
        own = size_of(snapshot)
        size = size or own
        if size.disk_gib < own.disk_gib:
            raise InvalidRequest(
                f"cannot create a {size.disk_gib} GiB disk from snapshot {snapshot.id}:"
                f" its disk has {own.disk_gib} GiB, and disks cannot shrink"
            )
        with self.pool.paused_refill():
            record = await self.allocate(size, snapshot.template, properties, snapshot.layer, nic)
            work = self._from_snapshot(record, snapshot, size == own)
            return await self._finish(record, work, f"from snapshot {snapshot.id}")

    async def recreate(self, record: Record, why: str) -> Record:
        """Recreate a deleted VM under its id from its snapshot or template. Call with its lock held."""
        why = f"recreated for {why}"
        source = record.properties.snapshot
        if source is None:
            template = await self.templates.ensure(record.size, account=record.account, admitted=True)
            record = await self.engine.journal.recreate(record, template.id, None)
            return await self._finish_locked(record, self._restore(record, template), why, forget=False)
        async with self.snapshots.source(source) as snapshot:
            record = await self.engine.journal.recreate(record, snapshot.template, snapshot.layer)
            work = self._from_snapshot(record, snapshot, record.size == size_of(snapshot))
            return await self._finish_locked(record, work, why, forget=False)

    async def allocate(
        self,
        size: Size,
        template: str,
        properties: Properties,
        layer: str | None,
        nic: NicRequest | None = None,
    ) -> Record:
        """Record a new VM, if the limits of its account allow it; a cancelled caller leaves none."""

        async def write(own: Properties) -> Record:
            allocation = self.engine.journal.allocate(Creating, size, template, own, layer)
            return await or_undo(allocation, lambda record: self.deletion.remove(record, CANCELLED))

        async with self.engine.quotas.admitting(properties.account, size):
            return await (write(properties) if nic is None else self.addresses.claim(nic, properties, write))

    # Bringing a guest up

    async def _tried_twice(
        self,
        record: Record,
        bring_up: Callable[[Record], Awaitable[BroughtUp]],
        *,
        max_wait: float | None = None,
    ) -> BroughtUp:
        """Bring a new guest up in a restore slot, after a second check of the host's capacity.

        Retries once when the guest ends before the create is answered: emulated kernels panic now and then.
        """
        async with self.engine.slots.hold(record.account, max_wait=max_wait):
            self.engine.host.check_capacity()
            try:
                return await bring_up(record)
            except (StartFailed, HostError) as error:
                live = self.engine.processes.get(record.id)
                if live is None or not await live.vm.ends_now():
                    raise
                log.warning("new guest ended at once, retrying", vm=record.id, reason=str(error))
            record = await self.engine.journal.find(record.id)
            await self.engine.processes.end(record)
            await self.engine.host.discard(record.id)
            return await bring_up(record)

    async def _restore(self, record: Record, template: Template) -> BroughtUp:
        async def restore(record: Record) -> BroughtUp:
            record, live = await self.bring_up.restore(record, template)
            record = await self.bring_up.step(record, "identify")
            await confer(live.agent, record.identity, timeout=CONFIRM_TIMEOUT)
            await self.bring_up.grow_disk(record, live, template.size.disk_gib)
            return BroughtUp(record, live)

        return await self._tried_twice(record, restore)

    async def from_state(self, record: Record, state: CapturedState, why: str, siblings: int = 0) -> Record:
        """Bring up a VM with the captured memory of another one, in turn with `siblings` others."""
        max_wait = MAX_WAIT + siblings * RESTORE_DEADLINE

        async def restore(record: Record) -> BroughtUp:
            template = self.engine.disks.template_of(record)
            record = await self.bring_up.make_disk(record)
            return BroughtUp(*await self.bring_up.restore_state(record, template, state, new_keys=True))

        return await self._finish(record, self._tried_twice(record, restore, max_wait=max_wait), why)

    async def _from_snapshot(self, record: Record, snapshot: SnapshotRow, same_size: bool) -> BroughtUp:
        async def bring_up(record: Record) -> BroughtUp:
            template = self.engine.disks.template_of(record)
            record = await self.bring_up.make_disk(record)
            note = None
            if snapshot.checkpoint is not None and same_size:
                try:
                    return await self._with_memory(record, template, snapshot.checkpoint)
                except CheckpointUnusable as error:
                    note = f"saved memory of the snapshot was unusable, booted from disk: {error}"
                    log.warning(
                        "saved memory of a snapshot unusable", snapshot=snapshot.id, reason=str(error)
                    )
                    record = await self.engine.journal.find(record.id)
                    await self.engine.processes.end(record)
                    self.engine.host.tidy(record.id)
            return BroughtUp(*await self.bring_up.boot(record, template, new_keys=True), note)

        return await self._tried_twice(record, bring_up)

    async def _with_memory(self, record: Record, template: Template, checkpoint: str) -> BroughtUp:
        state = await self.engine.host.checkpoints.read(checkpoint, record.size)
        try:
            self.engine.host.check_memory(state.memory_bytes)
            return BroughtUp(*await self.bring_up.restore_state(record, template, state, new_keys=True))
        finally:
            state.close()

    # Recording the result

    async def _finish(self, record: Record, work: Awaitable[BroughtUp], why: str | None = None) -> Record:
        async with self.engine.locks.hold(record.id):
            return await self._finish_locked(record, work, why)

    async def _finish_locked(
        self, record: Record, work: Awaitable[BroughtUp], why: str | None, *, forget: bool = True
    ) -> Record:
        async with self._removed_on_failure(record, forget=forget):
            up = await work
            return await self.bring_up.record_running(up.record, up.live, EventKind.CREATED, why, up.note)

    @contextlib.asynccontextmanager
    async def _removed_on_failure(self, record: Record, *, forget: bool = True) -> AsyncIterator[None]:
        """Bring a new VM up in this block; it is deleted if that fails or is cancelled."""
        try:
            yield
        except BaseException as error:
            cause = _failure(error)
            await finished(self.deletion.remove(record, cause or CANCELLED, forget=forget))
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
