"""Suspend: a VM's memory is saved and its process ends; the next use wakes it."""

import asyncio
import contextlib
from dataclasses import KW_ONLY, dataclass

from stead.errors import HostError
from stead.machines.capture import CaptureOperation, running, sync_guest
from stead.machines.deletion import DeleteOperation
from stead.machines.engine import Engine
from stead.machines.events import REQUESTED, EventKind, status
from stead.machines.locks import wrong_state
from stead.machines.persistence import ends_with
from stead.machines.processes import EvictionKind, RunningVm
from stead.machines.records import Record, new_id
from stead.machines.states import Operation, Running, Suspended, Suspending
from stead.machines.suspended_terminals import list_terminals
from stead.tasks import finished


@dataclass(eq=False)
class SuspendOperation:
    engine: Engine
    _: KW_ONLY
    capture: CaptureOperation
    deletion: DeleteOperation

    async def suspend(self, machine_id: str) -> None:
        """Save a VM's memory and end its process; the next use wakes it."""
        await self.engine.tasks.run(self._suspend(machine_id))

    async def _suspend(self, machine_id: str) -> None:
        async with self.engine.locks.unless_done(machine_id, Operation.SUSPEND) as record:
            if record is None:
                return
            live = self.engine.processes.running(machine_id)
            if live is None:
                raise wrong_state(record, Operation.SUSPEND)
            async with self.engine.captures.hold(record.account):
                # Its memory would take disk space.
                self.engine.processes.refuse_held(machine_id)
                await self._save(record, live, None)

    async def suspend_if_idle(self, machine_id: str, why: str | None = None) -> None:
        """Suspend an idle VM, unless its guest is in use again; `why` if not for its idle time-out.

        It waits for its turn without the VM's lock, which operations on the VM may need meanwhile.
        """
        known = await self.engine.journal.get(machine_id)
        if known is None:
            return
        async with self.engine.captures.hold(known.account):
            # The holder of the lock may wait for a capture: see `Engine.captures`.
            release = self.engine.locks.try_hold(machine_id)
            if release is None:
                return
            try:
                await self._suspend_unused(machine_id, why)
            finally:
                release()

    async def _suspend_unused(self, machine_id: str, why: str | None) -> None:
        record = await self.engine.journal.get(machine_id)
        live = self.engine.processes.running(machine_id)
        if record is None or not isinstance(record.state, Running) or live is None:
            return
        if not live.leases and live.held is None:
            await self._save(record, live, why or f"idle for {record.properties.idle_timeout} s")

    async def _save(self, record: Record, live: RunningVm, why: str | None) -> None:
        """Save a running VM's memory and end its process; a failure leaves it running.

        `why` is None on request. An ephemeral VM with `OnSuspend` is deleted instead.
        """
        # From here on, new leases wait for the VM's lock.
        live.running = False
        reason = status(EventKind.SUSPENDED, why)
        if ends_with(record.properties.persistence, suspended=True):
            await self.deletion.remove(record, f"ephemeral: {reason}", forget=False)
            return
        checkpoint, note = new_id(), record.reason
        live.evict(EvictionKind.SUSPENDED, f"the VM was {reason}")
        _, terminals = await asyncio.gather(sync_guest(live), list_terminals(live.agent))
        try:
            with self.engine.layers.building(checkpoint):
                record = await self.capture.settled(record, live)
                state = running(record, Operation.SUSPEND)
                saving = await self.engine.journal.transition(record, Suspending(state.top, state.run))
                await finished(live.vm.save_and_pause(record.size, state.run.memory_base, checkpoint))
                await self.engine.host.disks.sync_layer(record.id, state.top)
                # Point of no return: from here on the saved memory is the VM, not its process.
                live.ending = True
                self.engine.processes.suspended(record.id, checkpoint, live)
                suspended = await finished(
                    self.engine.disks.freeze(saving, Suspended(checkpoint, reason), terminals)
                )
        except BaseException:
            await finished(self._stay_awake(record.id, live, note))
            raise
        await finished(self.engine.processes.end(saving, reason, kind=EvictionKind.SUSPENDED))
        self.engine.host.tidy(record.id)
        self.engine.events.tell_exit(record.id, reason)
        self.engine.events.report(EventKind.SUSPENDED, record, why or REQUESTED)
        self.engine.layers.merge_in_background(suspended.layer, suspended.template)

    async def _stay_awake(self, machine_id: str, live: RunningVm, note: str | None) -> None:
        recorded = await self.engine.journal.get(machine_id)
        self.engine.layers.sweep()
        if recorded is None:
            return
        if isinstance(recorded.state, Suspended):
            # The suspend is recorded: finish it.
            await self.engine.processes.end(recorded, kind=EvictionKind.SUSPENDED)
            self.engine.host.tidy(machine_id)
            return
        live.ending = False
        if not live.vm.ended:
            with contextlib.suppress(HostError):
                await live.vm.resume_if_paused()
            live.running = not live.vm.ended
        # If its process has ended, the watcher records its end from this state.
        if isinstance(recorded.state, Suspending):
            saved = recorded.state
            await self.engine.journal.transition(recorded, Running(saved.top, saved.run, reason=note))
