"""Boot of a stopped VM from its disk."""

from dataclasses import KW_ONLY, dataclass

from stead.errors import StartFailed, SteadError
from stead.machines.bring_up import BringUp
from stead.machines.engine import Engine
from stead.machines.events import EventKind, status
from stead.machines.records import Record, new_id
from stead.machines.states import Starting, Stopped
from stead.machines.stop import StopOperation
from stead.tasks import finished


@dataclass(eq=False)
class BootOperation:
    engine: Engine
    _: KW_ONLY
    bring_up: BringUp
    stop: StopOperation

    async def boot(self, record: Record, why: str, note: str | None = None) -> Record:
        """Boot a stopped VM; a failure leaves it stopped with the reason. Call with its lock held."""
        template = await self.engine.disks.whole(record)
        top = record.state.top if isinstance(record.state, Stopped) else None
        starting = Starting("disk", new_id()) if top is None else Starting("process", top)
        record = await self.engine.journal.transition(record, starting)
        try:
            if top is None:
                await self.engine.disks.make_top(record, starting.top)
            up, live = await self.bring_up.boot(record, template, new_keys=False)
            return await self.bring_up.record_running(up, live, EventKind.STARTED, why, note)
        except BaseException as error:
            cause = str(error) if isinstance(error, SteadError) else "the start was interrupted"
            await finished(self._record_failure(record, cause))
            if isinstance(error, SteadError) and not isinstance(error, StartFailed):
                raise StartFailed(f"VM {record.id} did not start: {error}") from error
            raise

    async def _record_failure(self, record: Record, cause: str) -> None:
        recorded = await self.engine.journal.get(record.id)
        if recorded is not None:
            await self.stop.record_stopped(recorded, EventKind.START_FAILED, cause, for_good=False)
        self.engine.events.tell_exit(record.id, status(EventKind.START_FAILED, cause))
