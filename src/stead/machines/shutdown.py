"""Shutdown on request; a suspended VM is woken first, so that its page cache reaches the disk."""

from dataclasses import dataclass

from stead.machines.events import Use
from stead.machines.locks import Locks
from stead.machines.start import StartOperation
from stead.machines.states import Operation
from stead.machines.stop import STOP_TIMEOUT, StopOperation
from stead.tasks import TaskSet


@dataclass(eq=False)
class ShutdownOperation:
    starts: StartOperation
    stops: StopOperation
    locks: Locks
    tasks: TaskSet

    async def stop(self, machine_id: str, timeout: float = STOP_TIMEOUT) -> None:
        """Shut a VM down; after `timeout` seconds it is killed, and its reason says so."""
        await self.tasks.run(self._shut_down(machine_id, timeout))

    async def _shut_down(self, machine_id: str, timeout: float) -> None:
        await self.starts.ensure_up(machine_id, Use.STOP, Operation.STOP)
        async with self.locks.unless_done(machine_id, Operation.STOP) as record:
            if record is not None:
                await self.stops.shut_down(record, timeout)
