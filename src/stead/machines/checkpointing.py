"""Capture and restore of running VMs: for snapshots, forks, suspend and wake."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stead.deadlines import scaled
from stead.errors import (
    CapacityExceeded,
    CheckpointUnusable,
    GuestError,
    GuestUnreachable,
    HostError,
    StartFailed,
    SteadError,
)
from stead.files import exists, sync_file
from stead.host import checkpoints
from stead.host.checkpoints import DiskSwitch, Moment, Pause
from stead.host.memory import check_memory
from stead.host.qemu import Saved
from stead.host.quarantine import Quarantine
from stead.host.templates import Template
from stead.logs import get_logger
from stead.machines.events import REQUESTED, EventKind, status
from stead.machines.lifecycle import Lifecycle, new_id, persistence_of, place_of, size_of
from stead.machines.live import Live
from stead.machines.persistence import ends_with
from stead.machines.states import State
from stead.settings import Size
from stead.store.machines import MachineRow
from stead.tasks import finished, in_thread

_SYNC_TIMEOUT = scaled(30.0)
_NO_PROCESS: Mapping[str, None] = dict.fromkeys(("top", "step", "pid", "pid_started", "memory_base"))

log = get_logger("stead.checkpoints")


class Checkpointing:
    """Captures running VMs and restores saved ones. Every call needs the VM's lock."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._host = lifecycle.host
        self._layers = lifecycle.layers
        self._store = lifecycle.store
        self._quarantine = Quarantine(lifecycle.host.settings.data)
        self.last_pause: Pause | None = None
        """The pause of the last capture, for benchmarks."""

    # Capture

    async def take(self, row: MachineRow, live: Live) -> tuple[MachineRow, Moment]:
        """Capture a running VM's memory; its disk of the same instant becomes its read-only layer.

        The VM keeps running, also after a failure, on the layer that its QEMU really writes.
        """
        assert row.top is not None  # noqa: S101
        to = new_id()
        switch = DiskSwitch(row.top, to)
        row = replace(row, next_top=to)
        await self._lifecycle.step(row, "freeze", next_top=to)
        try:
            await self._host.make_layer(place_of(row), to, row.disk_gib)
            await live.vm.add_layer(to)
            moment, pause = await finished(
                checkpoints.take(
                    live.vm,
                    size_of(row),
                    row.memory_base,
                    await self._host.platform(),
                    switch,
                )
            )
        except BaseException:
            await finished(self.settle(row, live))
            raise
        self.last_pause = pause
        return await finished(self.settle(row, live)), moment

    async def settle(self, row: MachineRow, live: Live) -> MachineRow:
        """Make the row agree with the layer that QEMU writes after a switch that may have failed."""
        assert row.next_top is not None  # noqa: S101
        if live.vm.process.ended:
            # The watcher of the process records its end and its disk.
            raise HostError("the VM ended while its state was captured")
        await self._go_on(live)
        if await live.vm.written_layer() == row.next_top:
            updated = await self._lifecycle.record_frozen(row, top=row.next_top, step=None)
        else:
            with contextlib.suppress(HostError):
                await live.vm.drop_layer(row.next_top)
            self._host.layer(row.id, row.next_top).unlink(missing_ok=True)
            updated = await self._store.update(row.id, next_top=None, step=None)
        if updated is None:
            raise HostError(f"VM {row.id} was removed while its state was captured")
        return updated

    async def _go_on(self, live: Live) -> None:
        if (await live.vm.execute("query-status"))["status"] == "paused":
            await live.vm.resume()

    async def sync_guest(self, live: Live) -> None:
        """Flush the guest's page cache: a disk without its memory is like one after a power cut."""
        try:
            await live.agent.call("POST", "/v1/sync", timeout=_SYNC_TIMEOUT)
        except (GuestUnreachable, GuestError) as error:
            log.warning("guest did not sync its disk before the capture", error=str(error))

    async def keep(self, moment: Moment, checkpoint: str, layer: Path) -> None:
        """Make captured memory and the disk layer of the same instant durable."""
        await in_thread(_sync, layer)
        await in_thread(checkpoints.save, moment, self._layers.checkpoint_folder(checkpoint))

    def merge_if_long(self, row: MachineRow) -> None:
        """Merge a long chain of layers in the background: each layer makes a disk slower to open."""
        template = self._host.load_template(row.template)
        if row.layer is not None and template is not None:
            self._lifecycle.background(self._merge(row.layer, template))

    async def _merge(self, layer: str, template: Template) -> None:
        if await self._layers.merge_if_long(layer, template.layers):
            self._lifecycle.sweep()

    # Suspend and wake

    async def suspend(self, row: MachineRow, live: Live, why: str | None) -> MachineRow | None:
        """Save a running VM's memory and end its process; a failure leaves it running.

        `why` is None on request. An ephemeral VM with `OnSuspend` is deleted instead.
        """
        live.running = False
        reason = status(EventKind.SUSPENDED, why)
        if ends_with(persistence_of(row), suspended=True):
            await self._lifecycle.remove(row, f"ephemeral: {reason}", forget=False)
            return None
        assert row.top is not None  # noqa: S101
        checkpoint = new_id()
        await self.sync_guest(live)
        with self._layers.building(checkpoint):
            try:
                await self._store.update(row.id, state=State.SUSPENDING, step="freeze")
                platform = await self._host.platform()
                folder = self._layers.checkpoint_folder(checkpoint)
                await finished(checkpoints.keep(live.vm, size_of(row), row.memory_base, platform, folder))
                await in_thread(_sync, self._host.layer(row.id, row.top))
                asleep: dict[str, object] = {"state": State.SUSPENDED, "checkpoint": checkpoint}
                asleep |= {"reason": reason, "active_at": time.time_ns(), **_NO_PROCESS}
                # Point of no return: from here on the saved memory is the VM, not its QEMU.
                live.ending = True
                updated = await finished(self._lifecycle.record_frozen(row, **asleep))
            except BaseException:
                await finished(self._stay_awake(row, live))
                raise
        await finished(self._lifecycle.end_process(row))
        self._host.tidy(row.id)
        self._lifecycle.tell_exit(row.id, reason)
        self._lifecycle.report(EventKind.SUSPENDED, row, why or REQUESTED)
        if updated is not None:
            self.merge_if_long(updated)
        return updated

    async def _stay_awake(self, row: MachineRow, live: Live) -> None:
        recorded = await self._store.get(row.id)
        self._lifecycle.sweep()
        if recorded is None or recorded.state == State.SUSPENDED:
            # The suspend is recorded: finish it.
            await self._lifecycle.end_process(row)
            self._host.tidy(row.id)
            return
        live.ending = False
        if not live.vm.process.ended:
            with contextlib.suppress(HostError):
                await self._go_on(live)
            live.running = not live.vm.process.ended
        # If its QEMU has ended, the watcher of the process records its end from this state.
        await self._store.update(row.id, state=State.RUNNING, step=None)

    async def wake(self, row: MachineRow, why: str) -> MachineRow:
        """Restore a suspended VM as it was; a failure leaves it suspended.

        When its saved memory is unusable it boots from its disk, and its reason says so.
        """
        assert row.checkpoint is not None  # noqa: S101
        template = await self._lifecycle.whole_disk(row)
        try:
            moment, base = await self.read(row.checkpoint, size_of(row))
        except CheckpointUnusable as error:
            return await self._start_from_disk(row, why, error)
        row = replace(row, top=new_id())
        await self._store.update(row.id, state=State.STARTING, step="disk", top=row.top)
        try:
            check_memory(moment.memory.size)
            await self._lifecycle.make_top(row)
            live = await self.revive(row, template, moment, base, new_keys=False)
            updated = await self._lifecycle.record_running(row, live, EventKind.WOKEN, why)
        except CheckpointUnusable as error:
            await finished(self.sleep_on(row))
            return await self._start_from_disk(row, why, error)
        except BaseException as error:
            await finished(self.sleep_on(row))
            cause = str(error) if isinstance(error, SteadError) else "the wake was interrupted"
            self._lifecycle.report(EventKind.START_FAILED, row, f"still suspended: {cause}")
            if isinstance(error, SteadError) and not isinstance(error, StartFailed | CapacityExceeded):
                raise StartFailed(f"VM {row.id} did not wake: {error}") from error
            raise
        finally:
            moment.close()
        self._lifecycle.sweep()
        return updated

    async def sleep_on(self, row: MachineRow) -> None:
        """Undo a wake: saved memory and disk are unchanged."""
        await self._lifecycle.end_process(row)
        self._host.tidy(row.id)
        recorded = await self._store.get(row.id)
        if recorded is not None and recorded.top is not None:
            self._host.layer(row.id, recorded.top).unlink(missing_ok=True)
        await self._store.update(row.id, state=State.SUSPENDED, **_NO_PROCESS)

    async def _start_from_disk(self, row: MachineRow, why: str, error: CheckpointUnusable) -> MachineRow:
        note = f"saved memory was unusable, booted from disk: {error}"
        log.warning("saved memory unusable, booting from disk", vm=row.id, reason=str(error))
        await self._set_aside(row)
        stopped = await self._store.update(
            row.id, state=State.STOPPED, checkpoint=None, top=None, reason=note
        )
        self._lifecycle.sweep()
        return await self._lifecycle.start(stopped or row, why, note)

    async def _set_aside(self, row: MachineRow) -> None:
        """Move saved memory to the quarantine: with the QEMU or CPU that it fits, it could still be used."""
        assert row.checkpoint is not None  # noqa: S101
        folder = self._layers.checkpoint_folder(row.checkpoint)
        if exists(folder):
            await in_thread(self._quarantine.keep, [folder])
            await in_thread(self._quarantine.prune)
            # The disk of the same instant is this layer, which the VM's disk is based on from now on.
            log.warning("saved memory set aside", vm=row.id, checkpoint=row.checkpoint, layer=row.layer)

    # Restore

    async def read(self, checkpoint: str, size: Size) -> tuple[Moment, Template | None]:
        """Saved memory and the template that it is a delta to; CheckpointUnusable when it cannot be used."""
        folder = self._layers.checkpoint_folder(checkpoint)
        moment = await in_thread(checkpoints.read, folder, await self._host.platform(), size)
        try:
            return moment, self.base_of(moment)
        except BaseException:
            moment.close()
            raise

    def base_of(self, moment: Moment) -> Template | None:
        if moment.base is None:
            return None
        template = self._host.load_template(moment.base)
        if template is None:
            raise CheckpointUnusable("the template that its memory is based on is missing")
        return template

    async def revive(
        self, row: MachineRow, template: Template, moment: Moment, base: Template | None, *, new_keys: bool
    ) -> Live:
        """Start a QEMU with captured memory on a VM's disk; on failure the caller cleans up."""
        verifying = asyncio.ensure_future(in_thread(moment.memory.verify))
        try:
            async with checkpoints.device_state(moment.devices) as descriptor:
                saved = Saved(descriptor, deferred=True)
                await self._lifecycle.step(row, "process")
                async with self._lifecycle.disk(row, template) as layers:
                    process = await self._host.wake(place_of(row), moment.size, base, layers, saved)
                    live = await self._lifecycle.hold(row, process, "restore", memory_base=moment.base)
                loading = checkpoints.load(live.vm, moment, saved, copied=base is not None)
                await self._lifecycle.while_alive(live, loading)
        finally:
            # The guest resumes only after the checksum of its memory is verified.
            await finished(verifying)
        await live.vm.resume()
        await self._lifecycle.step(row, "identify")
        await self._lifecycle.identify(row, live, new_keys=new_keys)
        return live


def _sync(path: Path) -> None:
    try:
        sync_file(path)
    except OSError as error:
        raise HostError(f"cannot sync the disk layer {path.name}: {error.strerror}") from error
