"""Wake: a suspended VM is restored from its saved memory, or booted from its disk when that is unusable."""

from dataclasses import KW_ONLY, dataclass

from stead.errors import CapacityExceeded, CheckpointUnusable, GuestRestarted, StartFailed, SteadError
from stead.logs import get_logger
from stead.machines.boot import BootOperation
from stead.machines.bring_up import BringUp
from stead.machines.engine import Engine
from stead.machines.events import EventKind
from stead.machines.processes import EvictionKind
from stead.machines.records import Record, new_id
from stead.machines.states import Stopped, Suspended, Waking
from stead.tasks import finished

log = get_logger("stead.checkpoints")


@dataclass(eq=False)
class WakeOperation:
    """Every call needs the VM's lock."""

    engine: Engine
    _: KW_ONLY
    bring_up: BringUp
    boot: BootOperation

    async def wake(self, record: Record, suspended: Suspended, why: str) -> Record:
        """Restore a suspended VM as it was; a failure leaves it suspended.

        When its saved memory is unusable it boots from its disk, and its reason says so.
        """
        try:
            template = await self.engine.disks.whole(record)
        except StartFailed as error:
            self.engine.processes.end_suspended(record.id, str(error))
            raise
        try:
            state = await self.engine.host.checkpoints.read(suspended.checkpoint, record.size)
        except CheckpointUnusable as error:
            return await self._boot_from_disk(record, suspended, why, error)
        waking = Waking("disk", new_id(), suspended.checkpoint, suspended.reason)
        try:
            self.engine.host.check_memory(state.memory_bytes)
            record = await self.engine.journal.transition(record, waking)
            await self.engine.disks.make_top(record, waking.top)
            up, live = await self.bring_up.restore_state(record, template, state, new_keys=False)
            self.engine.processes.woken(record.id, suspended.checkpoint, live)
            woken = await self.bring_up.record_running(up, live, EventKind.WOKEN, why)
        except CheckpointUnusable as error:
            record = await finished(self.return_to_suspended(record))
            return await self._boot_from_disk(record, suspended, why, error)
        except BaseException as error:
            record = await finished(self.return_to_suspended(record))
            cause = str(error) if isinstance(error, SteadError) else "the wake was interrupted"
            self.engine.events.report(EventKind.START_FAILED, record, f"still suspended: {cause}")
            if isinstance(error, SteadError) and not isinstance(error, StartFailed | CapacityExceeded):
                raise StartFailed(f"VM {record.id} did not wake: {error}") from error
            raise
        finally:
            state.close()
        self.engine.layers.sweep()
        return woken

    async def return_to_suspended(self, record: Record) -> Record:
        """Undo a wake: saved memory and disk are unchanged."""
        recorded = await self.engine.journal.get(record.id) or record
        await self.engine.processes.end(recorded, kind=EvictionKind.SUSPENDED)
        self.engine.host.tidy(record.id)
        if not isinstance(recorded.state, Waking):
            return recorded
        self.engine.host.disks.remove_layer(record.id, recorded.state.top)
        suspended = Suspended(recorded.state.checkpoint, recorded.state.reason)
        return await self.engine.journal.transition(recorded, suspended)

    async def _boot_from_disk(
        self, record: Record, suspended: Suspended, why: str, error: CheckpointUnusable
    ) -> Record:
        note = f"saved memory was unusable, booted from disk: {error}"
        log.warning("saved memory unusable, booting from disk", vm=record.id, reason=str(error))
        if await self.engine.host.checkpoints.set_aside(suspended.checkpoint):
            # The disk of the same instant is this layer, which the VM's disk is based on from now on.
            log.warning(
                "saved memory set aside", vm=record.id, checkpoint=suspended.checkpoint, layer=record.layer
            )
        stopped = await self.engine.journal.transition(record, Stopped(None, note))
        self.engine.layers.sweep()
        try:
            return await self.boot.boot(stopped, why, note)
        finally:
            self.engine.processes.end_suspended(record.id, str(GuestRestarted(record.id, note)))
