"""Capture of a running VM: its memory, and its disk of the same instant as a read-only layer."""

import contextlib
from dataclasses import dataclass, field

from stead.deadlines import scaled
from stead.errors import GuestError, GuestUnreachable, HostError
from stead.host.interface import CapturedState, Pause
from stead.logs import get_logger
from stead.machines.engine import Engine
from stead.machines.locks import wrong_state
from stead.machines.processes import RunningVm
from stead.machines.records import Record, new_id
from stead.machines.states import Operation, Running
from stead.tasks import finished, or_undo

_SYNC_TIMEOUT = scaled(30.0)

log = get_logger("stead.checkpoints")


def running(record: Record, operation: Operation) -> Running:
    if not isinstance(record.state, Running):
        raise wrong_state(record, operation)
    return record.state


@dataclass(eq=False)
class CaptureOperation:
    """Every call needs the VM's lock."""

    engine: Engine
    last_pause: Pause | None = field(default=None, init=False)
    """The pause of the last capture, for benchmarks."""

    async def capture(self, record: Record, live: RunningVm) -> tuple[Record, CapturedState]:
        """Capture a running VM's memory; its disk of the same instant becomes its read-only layer.

        The VM keeps running, also after a failure, on the layer that its process really writes.
        """
        record = await self.settled(record, live)
        before = running(record, Operation.SNAPSHOT)
        to = new_id()
        state = Running(before.top, before.run, to, before.reason)
        record = await self.engine.journal.transition(record, state)
        try:
            await self.engine.host.disks.make_layer(record.vm_slot, to, record.size.disk_gib)
            await live.vm.add_layer(to)
            capture = live.vm.capture(record.size, before.run.memory_base, layer=before.top, to=to)
            captured, pause = await or_undo(capture, _close)
        except BaseException:
            await finished(self.reconcile_top_layer(record, live))
            raise
        self.last_pause = pause
        try:
            return await finished(self.reconcile_top_layer(record, live)), captured
        except BaseException:
            captured.close()
            raise

    async def settled(self, record: Record, live: RunningVm) -> Record:
        """A failed capture may have left open which layer the process writes: find out first."""
        unsettled = isinstance(record.state, Running) and record.state.next_top is not None
        return await self.reconcile_top_layer(record, live) if unsettled else record

    async def reconcile_top_layer(self, record: Record, live: RunningVm) -> Record:
        """Make the row agree with the layer that the process writes after a switch that may have failed."""
        state = running(record, Operation.SNAPSHOT)
        if live.vm.ended:
            # The watcher of the process records its end and its disk.
            raise HostError("the VM ended while its state was captured")
        await live.vm.resume_if_paused()
        if state.next_top is None:
            return record
        if await live.vm.written_layer() == state.next_top:
            return await self.engine.disks.freeze(
                record, Running(state.next_top, state.run, None, state.reason)
            )
        with contextlib.suppress(HostError):
            await live.vm.drop_layer(state.next_top)
        self.engine.host.disks.remove_layer(record.id, state.next_top)
        return await self.engine.journal.transition(record, Running(state.top, state.run, None, state.reason))


async def _close(captured: tuple[CapturedState, Pause]) -> None:
    captured[0].close()


async def sync_guest(live: RunningVm) -> None:
    """Flush the guest's page cache: a disk without its memory is like one after a power cut."""
    try:
        await live.agent.call("POST", "/v1/sync", timeout=_SYNC_TIMEOUT)
    except (GuestUnreachable, GuestError) as error:
        log.warning("guest did not sync its disk before the capture", error=str(error))
