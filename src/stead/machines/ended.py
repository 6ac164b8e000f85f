"""What follows when a VM's process ends and no operation ended it: a shutdown, a reboot or a crash."""

import contextlib
from dataclasses import KW_ONLY, dataclass

from stead.errors import SteadError
from stead.logs import get_logger
from stead.machines.boot import BootOperation
from stead.machines.deletion import DeleteOperation
from stead.machines.engine import Engine
from stead.machines.events import EventKind
from stead.machines.pool import Pool
from stead.machines.processes import RunningVm
from stead.machines.states import Prepared, Running, unexpected_end
from stead.machines.stop import StopOperation

log = get_logger("stead.machines")


@dataclass(eq=False)
class UnexpectedEnds:
    engine: Engine
    _: KW_ONLY
    deletion: DeleteOperation
    stop: StopOperation
    boot: BootOperation
    pool: Pool

    async def record(self, machine_id: str, live: RunningVm, how: str) -> None:
        async with self.engine.locks.hold(machine_id):
            record = await self.engine.journal.get(machine_id)
            if record is None or self.engine.processes.get(machine_id) is not live:
                return
            if isinstance(record.state, Prepared):
                await self.deletion.remove(record)
                self.pool.refill()
                return
            if not isinstance(record.state, Running):
                # The operation under way sees the same end and handles it.
                return
            end = unexpected_end(live.vm.stop_cause, how)
            log.warning("VM ended", vm=machine_id, reason=end.reason)
            kind = EventKind.CRASHED if end.crashed else EventKind.STOPPED
            stopped = await self.stop.record_stopped(record, kind, end.reason, for_good=not end.restart)
            if end.restart and stopped is not None:
                with contextlib.suppress(SteadError):
                    async with self.engine.slots.hold(record.account):
                        await self.boot.boot(stopped, end.reason)
