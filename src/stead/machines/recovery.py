"""Recovery at start: makes rows, processes and files consistent after a crash."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass

from stead.errors import SteadError
from stead.logs import get_logger
from stead.machines.capture import CaptureOperation
from stead.machines.deletion import DeleteOperation
from stead.machines.engine import Engine
from stead.machines.events import EventKind
from stead.machines.records import Record
from stead.machines.states import (
    Creating,
    Prepared,
    Recovery,
    Run,
    Running,
    Stopping,
    Suspending,
    recover,
    unexpected_end,
)
from stead.machines.stop import StopOperation
from stead.machines.wake import WakeOperation
from stead.processes import ProcessId

log = get_logger("stead.recovery")


@dataclass(eq=False)
class Reconciliation:
    """Reconnects to running VMs, finishes or undoes interrupted operations, sets orphaned files aside."""

    engine: Engine
    _: KW_ONLY
    capture: CaptureOperation
    deletion: DeleteOperation
    stop: StopOperation
    wake: WakeOperation

    async def run(self) -> None:
        """What cannot be recovered is logged and left as it is: one VM does not keep all others down."""
        await self.engine.layers.finish_adoptions()
        processes = self.engine.host.inventory().processes
        for record in await self.engine.journal.repair():
            try:
                await self._recover(record, processes)
            except Exception as error:
                log.error("cannot recover a VM", vm=record.id, state=record.state, error=repr(error))
                # Its process, if there is one, keeps running without a connection until the next start.
                with contextlib.suppress(Exception):
                    await self.engine.processes.forget(record.id)
        await self._reap()

    async def _recover(self, record: Record, processes: Mapping[ProcessId, str]) -> None:
        if record.properties.purpose == "build":
            # The build runs again when it is requested again.
            await self.deletion.remove(record, "the build was interrupted")
            return
        # The pid may be reused by another program: only a process that carries the VM's id is its own.
        run = (
            record.run if record.run is not None and processes.get(record.run.process) == record.id else None
        )
        action = recover(record.state, alive=run is not None)
        if action is not Recovery.KEEP:
            log.info("recovering VM", vm=record.id, state=record.state, action=action.value)
        await self._apply(record, action, run)

    async def _apply(self, record: Record, action: Recovery, run: Run | None) -> None:
        match action:
            case Recovery.ADOPT if run is not None:
                await self._adopt(record, run)
            case Recovery.STOPPED | Recovery.ADOPT:
                why = "QEMU ended while Stead was not running"
                await self.stop.record_stopped(record, EventKind.CRASHED, why)
            case Recovery.FINISH_STOP:
                self.engine.tasks.start(self._finish_stop(record.id, run), f"stop of VM {record.id}")
            case Recovery.END_AND_STOP:
                why = "the start was interrupted"
                await self.stop.record_stopped(record, EventKind.START_FAILED, why, for_good=False)
            case Recovery.END_AND_SLEEP:
                await self.wake.return_to_suspended(record)
            case Recovery.REMOVE:
                # A VM that was being created for the first time is not known to any caller.
                creating = record.state if isinstance(record.state, Creating) else None
                cause = None if creating is None else "the creation was interrupted"
                unknown = creating is not None and not creating.recreated
                await self.deletion.remove(record, cause, forget=unknown)
            case Recovery.KEEP:
                pass

    async def _adopt(self, record: Record, run: Run) -> None:
        try:
            live = await self.engine.processes.adopt(record, run.process)
            if isinstance(record.state, Prepared):
                return
            live.ending = True
            if await live.vm.end_if_panicked():
                why = unexpected_end(live.vm.stop_cause, "").reason
                await self.stop.record_stopped(record, EventKind.CRASHED, why)
                return
            live.ending = False
            await live.vm.resume_after_crash()
            if isinstance(record.state, Running):
                record = await self.capture.reconcile_top_layer(record, live)
            elif isinstance(record.state, Suspending):
                record = await self.engine.journal.transition(record, Running(record.state.top, run))
        except (SteadError, ProcessLookupError) as error:
            if isinstance(record.state, Prepared):
                await self.deletion.remove(record)
            else:
                why = f"cannot reconnect to QEMU: {error}"
                await self.stop.record_stopped(record, EventKind.CRASHED, why)
            return
        live.running = True

    async def _finish_stop(self, machine_id: str, run: Run | None) -> None:
        """Finish an interrupted stop: wait for the guest's shutdown, then record it."""
        async with self.engine.locks.hold(machine_id):
            record = await self.engine.journal.get(machine_id)
            if record is None or not isinstance(record.state, Stopping):
                return
            forced = None
            try:
                # A VM that was being killed is past the shutdown step: do not wait.
                if record.state.step == "shutdown" and run is not None:
                    live = await self.engine.processes.adopt(record, run.process)
                    await live.vm.end_if_panicked()
                    forced = await self.stop.power_off(live)
            except (SteadError, ProcessLookupError) as error:
                log.warning("interrupted stop finished with a kill", vm=machine_id, error=str(error))
            kind = EventKind.STOPPED if forced is None else EventKind.KILLED
            await self.stop.record_stopped(record, kind, forced)

    async def _reap(self) -> None:
        """Kill QEMUs of this installation that no row accounts for, and move such files to the quarantine."""
        records = {record.id: record for record in await self.engine.journal.list()}
        inventory = self.engine.host.inventory()
        for process, machine in inventory.processes.items():
            known = records.get(machine)
            if known is None or known.run is None or known.run.process != process:
                log.warning("killing an orphaned QEMU", vm=machine, pid=process.pid)
                with _logged("cannot kill an orphaned QEMU", machine):
                    await self.engine.host.kill(process)
        for machine in inventory.machines - records.keys():
            with _logged("cannot set files without a row aside", machine):
                await self.engine.host.set_aside(machine)
        for machine, record in records.items():
            if record.run is None:
                with _logged("cannot remove the runtime files of a VM", machine):
                    self.engine.host.tidy(machine)


@contextlib.contextmanager
def _logged(failure: str, machine: str) -> Iterator[None]:
    """Log a failure: it must not keep the server from starting."""
    try:
        yield
    except (SteadError, OSError) as error:
        log.error(failure, vm=machine, error=str(error))
