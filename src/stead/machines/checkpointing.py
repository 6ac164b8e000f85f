"""Taking machines at one instant and bringing them back: for snapshots, forks, suspending and waking."""

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stead.errors import (
    CapacityExceeded,
    CheckpointUnusable,
    GuestError,
    GuestUnreachable,
    HostError,
    StartFailed,
    SteadError,
)
from stead.host import checkpoints
from stead.host.checkpoints import DiskSwitch, Moment, Pause
from stead.host.files import sync_file
from stead.host.memory import check_memory
from stead.host.qemu import Saved
from stead.host.templates import Template
from stead.logs import get_logger
from stead.machines.lifecycle import Lifecycle, new_id, persistence_of, place_of, size_of
from stead.machines.live import Live
from stead.machines.persistence import ends_with
from stead.machines.states import State
from stead.settings import Size
from stead.store.machines import MachineRow
from stead.tasks import finished, in_thread

_SYNC_TIMEOUT = 30.0
_NO_PROCESS: Mapping[str, None] = dict.fromkeys(("top", "step", "pid", "pid_started", "memory_base"))

log = get_logger("stead.checkpoints")


class Checkpointing:
    """Freezes running machines and revives frozen ones. Every call is made in the machine's turn."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._host = lifecycle.host
        self._layers = lifecycle.layers
        self._store = lifecycle.store
        self.last_pause: Pause | None = None
        """The most recent standstill of a machine that went on, for those who measure."""

    # Taking

    async def take(self, row: MachineRow, live: Live) -> tuple[MachineRow, Moment]:
        """A running machine's memory; its disk of the same instant is the layer it now stands on.

        The machine goes on. If anything fails it goes on too, on the disk that its QEMU really writes.
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
        """Bring the row in step with what a QEMU that may have been told to change its disk has done."""
        assert row.next_top is not None  # noqa: S101
        if live.vm.process.ended:
            # Whoever watches it records its end, and the disk with it.
            raise HostError("the machine ended while it was frozen")
        await self._go_on(live)
        if await live.vm.written_layer() == row.next_top:
            updated = await self._lifecycle.record_frozen(row, top=row.next_top, step=None)
        else:
            with contextlib.suppress(HostError):
                await live.vm.drop_layer(row.next_top)
            self._host.layer(row.id, row.next_top).unlink(missing_ok=True)
            updated = await self._store.update(row.id, next_top=None, step=None)
        if updated is None:
            raise HostError(f"machine {row.id} was removed while it was frozen")
        return updated

    async def _go_on(self, live: Live) -> None:
        if (await live.vm.execute("query-status"))["status"] == "paused":
            await live.vm.resume()

    async def sync_guest(self, live: Live) -> None:
        """Have the guest write what it holds back: a disk without its memory is as after a power cut."""
        try:
            await live.agent.call("POST", "/v1/sync", timeout=_SYNC_TIMEOUT)
        except (GuestUnreachable, GuestError) as error:
            log.warning("the guest did not sync before it was frozen", error=str(error))

    async def keep(self, moment: Moment, checkpoint: str, layer: Path) -> None:
        """Make a moment and the disk layer of its instant durable."""
        await in_thread(_sync, layer)
        await in_thread(checkpoints.save, moment, self._layers.checkpoint_folder(checkpoint))

    def merge_if_long(self, row: MachineRow) -> None:
        """A disk of many layers is slow to open: merge them in the background."""
        template = self._host.load_template(row.template)
        if row.layer is not None and template is not None:
            self._lifecycle.background(self._merge(row.layer, template))

    async def _merge(self, layer: str, template: Template) -> None:
        if await self._layers.merge_if_long(layer, template.layers):
            self._lifecycle.sweep()

    # Sleeping

    async def suspend(self, row: MachineRow, live: Live, reason: str) -> MachineRow | None:
        """Keep a running machine's memory and end its process; a failure leaves it running."""
        live.running = False
        if ends_with(persistence_of(row), suspended=True):
            await self._lifecycle.remove(row, forget=False)
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
                # From here on the kept memory is the machine, and its QEMU is not.
                live.ending = True
                updated = await finished(self._lifecycle.record_frozen(row, **asleep))
            except BaseException:
                await finished(self._stay_awake(row, live))
                raise
        await finished(self._lifecycle.end_process(row))
        self._host.tidy(row.id)
        self._lifecycle.tell_exit(row.id, reason)
        self._lifecycle.on_change(row, reason)
        if updated is not None:
            self.merge_if_long(updated)
        return updated

    async def _stay_awake(self, row: MachineRow, live: Live) -> None:
        recorded = await self._store.get(row.id)
        self._lifecycle.sweep()
        if recorded is None or recorded.state == State.SUSPENDED:
            # It is recorded as asleep, and so it is.
            await self._lifecycle.end_process(row)
            self._host.tidy(row.id)
            return
        live.ending = False
        if not live.vm.process.ended:
            with contextlib.suppress(HostError):
                await self._go_on(live)
            live.running = not live.vm.process.ended
        # If its QEMU has ended, whoever watches it finds a machine that was running and records its end.
        await self._store.update(row.id, state=State.RUNNING, step=None)

    async def wake(self, row: MachineRow) -> MachineRow:
        """Bring a suspended machine back as it was; a failure leaves it asleep.

        When its memory cannot be used any more it is started from its disk, and says so.
        """
        assert row.checkpoint is not None  # noqa: S101
        template = await self._lifecycle.whole_disk(row)
        try:
            moment, base = await self.read(row.checkpoint, size_of(row))
        except CheckpointUnusable as error:
            return await self._start_from_disk(row, error)
        row = replace(row, top=new_id())
        await self._store.update(row.id, state=State.STARTING, step="disk", top=row.top)
        try:
            check_memory(moment.memory.size)
            await self._lifecycle.make_top(row)
            live = await self.revive(row, template, moment, base, new_keys=False)
            updated = await self._lifecycle.record_running(row, live)
        except CheckpointUnusable as error:
            await finished(self.sleep_on(row))
            return await self._start_from_disk(row, error)
        except BaseException as error:
            await finished(self.sleep_on(row))
            if isinstance(error, SteadError) and not isinstance(error, StartFailed | CapacityExceeded):
                raise StartFailed(f"machine {row.id} did not wake: {error}") from error
            raise
        finally:
            moment.close()
        self._lifecycle.sweep()
        return updated

    async def sleep_on(self, row: MachineRow) -> None:
        """Undo a wake: memory and disk are still what they were when it fell asleep."""
        await self._lifecycle.end_process(row)
        self._host.tidy(row.id)
        recorded = await self._store.get(row.id)
        if recorded is not None and recorded.top is not None:
            self._host.layer(row.id, recorded.top).unlink(missing_ok=True)
        await self._store.update(row.id, state=State.SUSPENDED, **_NO_PROCESS)

    async def _start_from_disk(self, row: MachineRow, why: CheckpointUnusable) -> MachineRow:
        note = f"its memory could not be used, so it was started from its disk: {why}"
        log.warning("a suspended machine's memory cannot be used", machine=row.id, reason=str(why))
        stopped = await self._store.update(
            row.id, state=State.STOPPED, checkpoint=None, top=None, reason=note
        )
        self._lifecycle.sweep()
        return await self._lifecycle.start(stopped or row, note)

    # Reviving

    async def read(self, checkpoint: str, size: Size) -> tuple[Moment, Template | None]:
        """A kept moment and the template that it is the difference to; CheckpointUnusable says why not."""
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
            raise CheckpointUnusable("the template that its memory is based on is gone")
        return template

    async def revive(
        self, row: MachineRow, template: Template, moment: Moment, base: Template | None, *, new_keys: bool
    ) -> Live:
        """A process with the memory of a moment over a machine's disk; on failure the caller cleans up."""
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
            # Not one instruction runs on memory that is not what was kept.
            await finished(verifying)
        await live.vm.resume()
        await self._lifecycle.step(row, "identify")
        await self._lifecycle.identify(row, live, new_keys=new_keys)
        return live


def _sync(path: Path) -> None:
    try:
        sync_file(path)
    except OSError as error:
        raise HostError(f"cannot read the disk layer {path.name}: {error.strerror}") from error
