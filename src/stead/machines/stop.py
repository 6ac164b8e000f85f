"""Stop and kill: a VM's process ends, its disk stays."""

import asyncio
import contextlib
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from stead.deadlines import scaled
from stead.errors import GuestError, GuestUnreachable, HostError
from stead.machines.deletion import DeleteOperation
from stead.machines.engine import Engine
from stead.machines.events import FAILURES, REQUESTED, EventKind, status
from stead.machines.persistence import ends_with
from stead.machines.processes import EvictionKind, RunningVm
from stead.machines.records import Record
from stead.machines.states import Operation, Stopped, Stopping, next_top_of, top_of

STOP_TIMEOUT = scaled(60.0)
_SHUTDOWN_TIMEOUT = scaled(5.0)
_KEPT_CONSOLE = 16 << 10
"""Characters of the console that are kept of a run that failed."""


@dataclass(eq=False)
class StopOperation:
    engine: Engine
    _: KW_ONLY
    deletion: DeleteOperation

    async def kill(self, machine_id: str) -> None:
        """End a VM at once, like a power cut; its disk stays."""
        await self.engine.tasks.run(self._kill(machine_id))

    async def _kill(self, machine_id: str) -> None:
        await self.interrupt_shutdown(machine_id)
        async with self.engine.locks.unless_done(machine_id, Operation.KILL) as record:
            if record is not None:
                await self.record_stopped(await self._stopping(record, "clean"), EventKind.KILLED)
                self.engine.layers.sweep()

    async def interrupt_shutdown(self, machine_id: str) -> None:
        """Kill a VM that is shutting down instead of waiting for it."""
        record = await self.engine.journal.find(machine_id)
        live = self.engine.processes.get(machine_id)
        if isinstance(record.state, Stopping) and live is not None:
            await live.vm.kill()

    async def _stopping(self, record: Record, step: Literal["shutdown", "clean"]) -> Record:
        state = record.state
        stopping = Stopping(step, top_of(state), record.run, next_top_of(state))
        return await self.engine.journal.transition(record, stopping)

    async def shut_down(
        self, record: Record, timeout: float, why: str | None = None, *, for_good: bool = True
    ) -> Record | None:
        """Shut a running VM down and record it as stopped. Call with its lock held."""
        live = self.engine.processes.get(record.id)
        record = await self._stopping(record, "shutdown")
        forced = None if live is None else await self.power_off(live, timeout)
        record = await self._stopping(record, "clean")
        kind = EventKind.STOPPED if forced is None else EventKind.KILLED
        return await self.record_stopped(record, kind, forced or why, for_good=for_good)

    async def power_off(self, live: RunningVm, timeout: float = STOP_TIMEOUT) -> str | None:
        """Ask the guest to power off and wait; returns why the caller has to kill it, None when it ended."""
        live.running, live.ending = False, True
        live.evict(EvictionKind.ENDED, "the VM was stopped")
        try:
            await live.agent.call(
                "POST", "/v1/shutdown", timeout=_SHUTDOWN_TIMEOUT, connect_timeout=_SHUTDOWN_TIMEOUT
            )
        except (GuestUnreachable, GuestError):
            # Never both: the agent would take the refusal of a second shutdown for a broken guest.
            with contextlib.suppress(HostError):
                await live.vm.power_down()
        try:
            async with asyncio.timeout(timeout):
                await live.vm.wait()
        except TimeoutError:
            return f"did not shut down within {timeout:g} s"
        return None

    async def _console(self, machine_id: str) -> str | None:
        live = self.engine.processes.get(machine_id)
        if live is not None:
            with contextlib.suppress(HostError):
                return (await live.vm.console()).strip("\n")[-_KEPT_CONSOLE:]
        return None

    async def record_stopped(
        self, record: Record, kind: EventKind, why: str | None = None, *, for_good: bool = True
    ) -> Record | None:
        """The process has ended: remove what only a running VM has and record why; None is on request.

        An ephemeral VM is deleted, unless it is started again at once (`for_good=False`).
        """
        reason = status(kind, why)
        console = await self._console(record.id) if kind in FAILURES else None
        await self.engine.processes.end(record, reason)
        self.engine.events.report(kind, record, why or REQUESTED, console=console)
        self.engine.host.tidy(record.id)
        record = await self.engine.disks.reconcile_top_layer(record)
        if for_good and ends_with(record.properties.persistence, suspended=False):
            self.engine.events.tell_exit(record.id, reason)
            await self.deletion.remove(record, f"ephemeral: {reason}", forget=False)
            return None
        stopped = await self.engine.journal.transition(
            record, Stopped(self.engine.disks.left_by_start(record), reason)
        )
        if for_good:
            # After the row: a caller that reads the old state before this then still gets the exit.
            self.engine.events.tell_exit(record.id, reason)
        return stopped
