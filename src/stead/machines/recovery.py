"""Recovery at start: makes rows, processes and files consistent after a crash."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from stead.errors import SteadError
from stead.host.quarantine import Quarantine
from stead.host.template_builder import TEMPLATE_PREFIX
from stead.logs import get_logger
from stead.machines.checkpointing import Checkpointing
from stead.machines.events import EventKind, status
from stead.machines.lifecycle import Lifecycle, process_of
from stead.machines.live import Live
from stead.machines.states import Recovery, State, recover
from stead.processes import ProcessId, kill
from stead.store.machines import MachineRow
from stead.tasks import in_thread

log = get_logger("stead.recovery")


async def reconcile(lifecycle: Lifecycle, checkpointing: Checkpointing, quarantine: Quarantine) -> None:
    """Reconnect to running VMs, finish or undo interrupted operations, set orphaned files aside.

    What cannot be recovered is logged and left as it is, so that one VM does not keep all others down.
    """
    await lifecycle.layers.finish_adoptions()
    processes = lifecycle.host.inventory().processes
    for row in await lifecycle.store.list():
        try:
            await _recover(lifecycle, checkpointing, row, processes)
        except Exception as error:
            log.error("cannot recover a VM", vm=row.id, state=row.state, step=row.step, error=repr(error))
            # Its process, if there is one, keeps running without a connection until the next start.
            live = lifecycle.lives.pop(row.id, None)
            if live is not None:
                with contextlib.suppress(Exception):
                    await live.release()
    await _reap(lifecycle, quarantine)


async def _recover(
    lifecycle: Lifecycle, checkpointing: Checkpointing, row: MachineRow, processes: Mapping[int, str]
) -> None:
    if row.state not in list(State):
        # Nothing of it is touched but its state, which every list of VMs needs.
        log.error("unknown state of a VM", vm=row.id, state=row.state)
        reason = status(EventKind.LOST, f"unknown state {row.state!r} in the database")
        await lifecycle.store.update(row.id, state=State.LOST, reason=reason)
        return
    if row.purpose == "build":
        # The build runs again when it is requested again.
        await lifecycle.remove(row, "the build was interrupted")
        return
    process = process_of(row)
    alive = process is not None and process.alive() and processes.get(process.pid) == row.id
    if not alive:
        # The pid may be reused by another program: only processes that carry the VM's id are killed.
        row, process = replace(row, pid=None, pid_started=None), None
    action = recover(State(row.state), alive=alive, asleep=row.checkpoint is not None)
    if action is not Recovery.KEEP:
        log.info("recovering VM", vm=row.id, state=row.state, step=row.step, action=action.value)
    await _apply(lifecycle, checkpointing, row, action, process)


async def _apply(
    lifecycle: Lifecycle,
    checkpointing: Checkpointing,
    row: MachineRow,
    action: Recovery,
    process: ProcessId | None,
) -> None:
    match action:
        case Recovery.ADOPT:
            await _adopt(lifecycle, checkpointing, row, process)
        case Recovery.STOPPED:
            why = "QEMU ended while Stead was not running"
            await lifecycle.record_stopped(row, EventKind.CRASHED, why)
        case Recovery.FINISH_STOP:
            lifecycle.background(_finish_stop(lifecycle, row, process))
        case Recovery.END_AND_STOP:
            why = "the start was interrupted"
            await lifecycle.record_stopped(row, EventKind.START_FAILED, why, for_good=False)
        case Recovery.END_AND_SLEEP:
            await checkpointing.sleep_on(row)
        case Recovery.REMOVE:
            # A VM that was being created for the first time is not known to any caller.
            unknown = row.state == State.CREATING and row.reason is None
            cause = "the creation was interrupted" if row.state == State.CREATING else None
            await lifecycle.remove(row, cause, forget=unknown)
        case Recovery.KEEP:
            pass


async def _adopt(
    lifecycle: Lifecycle, checkpointing: Checkpointing, row: MachineRow, process: ProcessId | None
) -> None:
    assert process is not None  # noqa: S101  # only a live process is adopted
    try:
        live = await lifecycle.adopt(row, process)
        if row.state == State.PREPARED:
            return
        await _go_on(checkpointing, row, live)
    except (SteadError, ProcessLookupError) as error:
        if row.state == State.PREPARED:
            await lifecycle.remove(row)
        else:
            await lifecycle.record_stopped(row, EventKind.CRASHED, f"cannot reconnect to QEMU: {error}")
        return
    await lifecycle.store.update(row.id, state=State.RUNNING, step=None)
    live.running = True


async def _go_on(checkpointing: Checkpointing, row: MachineRow, live: Live) -> None:
    """Resume a VM whose capture was interrupted, on the layer that its QEMU really writes."""
    match (await live.vm.execute("query-status"))["status"]:
        case "io-error":
            live.vm.retry_disk()
        case "paused":
            await live.vm.resume()
    live.vm.files.drop_devices()
    if row.next_top is not None:
        await checkpointing.settle(row, live)


async def _finish_stop(lifecycle: Lifecycle, row: MachineRow, process: ProcessId | None) -> None:
    """Finish an interrupted stop: wait for the guest's shutdown, then record it."""
    async with lifecycle.turns.of(row.id):
        forced = None
        try:
            # A VM that was being killed is past the shutdown step: do not wait.
            if row.step == "shutdown" and process is not None and process.alive():
                live = await lifecycle.adopt(row, process)
                forced = await lifecycle.shut_down(row, live)
        except (SteadError, ProcessLookupError) as error:
            log.warning("interrupted stop finished with a kill", vm=row.id, error=str(error))
        kind = EventKind.STOPPED if forced is None else EventKind.KILLED
        await lifecycle.record_stopped(row, kind, forced)


async def _reap(lifecycle: Lifecycle, quarantine: Quarantine) -> None:
    """Kill QEMUs of this installation that no row accounts for, and move such files to the quarantine."""
    rows = {row.id: row for row in await lifecycle.store.list()}
    inventory = lifecycle.host.inventory()
    for pid, machine in inventory.processes.items():
        row = rows.get(machine)
        if row is None or row.pid != pid:
            orphan = ProcessId.of(pid)
            if orphan is not None:
                log.warning("killing an orphaned QEMU", vm=machine, pid=pid)
                with _logged("cannot kill an orphaned QEMU", machine):
                    await kill(orphan)
    for machine in inventory.machines - rows.keys():
        folder = lifecycle.host.files(machine).folder
        with _logged("cannot set files without a row aside", machine):
            if os.path.lexists(folder) and not machine.startswith(TEMPLATE_PREFIX):
                await in_thread(quarantine.keep, [folder])
            await lifecycle.host.discard(machine)
    for machine, row in rows.items():
        if row.pid is None:
            with _logged("cannot remove the runtime files of a VM", machine):
                lifecycle.host.tidy(machine)


@contextlib.contextmanager
def _logged(failure: str, machine: str) -> Iterator[None]:
    """Log a failure: it must not keep the server from starting."""
    try:
        yield
    except (SteadError, OSError) as error:
        log.error(failure, vm=machine, error=str(error))
