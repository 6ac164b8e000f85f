"""After a crash: make rows and reality agree again."""

from dataclasses import replace

from stead.errors import SteadError
from stead.host.processes import ProcessId, kill
from stead.logs import get_logger
from stead.machines.checkpointing import Checkpointing
from stead.machines.lifecycle import Lifecycle, process_of
from stead.machines.live import Live
from stead.machines.states import Recovery, State, recover
from stead.store.machines import MachineRow

log = get_logger("stead.recovery")


async def reconcile(lifecycle: Lifecycle, checkpointing: Checkpointing) -> None:
    """Adopt what runs, finish or undo what was half done, reap what nobody owns."""
    await lifecycle.layers.finish_adoptions()
    rows = await lifecycle.store.list()
    processes = lifecycle.host.inventory().processes
    for row in rows:
        if row.purpose == "build":
            # What was being built is begun anew by whoever asks for it again.
            await lifecycle.remove(row)
            continue
        process = process_of(row)
        alive = process is not None and process.alive() and processes.get(process.pid) == row.id
        if not alive:
            # By now the pid may be somebody else's: what is ended is only what carries the machine's name.
            row, process = replace(row, pid=None, pid_started=None), None
        action = recover(State(row.state), alive=alive, asleep=row.checkpoint is not None)
        if action is not Recovery.KEEP:
            log.info("recovering", machine=row.id, state=row.state, step=row.step, action=action.value)
        await _apply(lifecycle, checkpointing, row, action, process)
    await _reap(lifecycle)


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
            await lifecycle.record_stopped(row, "its QEMU ended while Stead was not running")
        case Recovery.FINISH_STOP:
            lifecycle.background(_finish_stop(lifecycle, row, process))
        case Recovery.END_AND_STOP:
            await lifecycle.record_stopped(row, "its start was interrupted", for_good=False)
        case Recovery.END_AND_SLEEP:
            await checkpointing.sleep_on(row)
        case Recovery.REMOVE:
            # Of a machine that was being created for the first time nobody was told.
            unknown = row.state == State.CREATING and row.reason is None
            await lifecycle.remove(row, forget=unknown)
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
            await lifecycle.record_stopped(row, f"its QEMU could not be adopted: {error}")
        return
    await lifecycle.store.update(row.id, state=State.RUNNING, step=None)
    live.running = True


async def _go_on(checkpointing: Checkpointing, row: MachineRow, live: Live) -> None:
    """A machine that was being frozen is let go on, on the disk that its QEMU really writes."""
    match (await live.vm.execute("query-status"))["status"]:
        case "io-error":
            live.vm.retry_disk()
        case "paused":
            await live.vm.resume()
    live.vm.files.drop_devices()
    if row.next_top is not None:
        await checkpointing.settle(row, live)


async def _finish_stop(lifecycle: Lifecycle, row: MachineRow, process: ProcessId | None) -> None:
    """The guest was asked to shut down: give it its time, as if nothing had happened in between."""
    async with lifecycle.turns.of(row.id):
        reason = "stopped"
        try:
            # The shutdown of a machine that was being killed is not waited for.
            if row.step == "shutdown" and process is not None and process.alive():
                live = await lifecycle.adopt(row, process)
                forced = await lifecycle.shut_down(row, live)
                reason = forced or reason
        except (SteadError, ProcessLookupError) as error:
            log.warning("could not finish a stop in good order", machine=row.id, error=str(error))
        await lifecycle.record_stopped(row, reason)


async def _reap(lifecycle: Lifecycle) -> None:
    """End and remove what carries this installation's name but has no row, or no business to run."""
    rows = {row.id: row for row in await lifecycle.store.list()}
    inventory = lifecycle.host.inventory()
    for pid, machine in inventory.processes.items():
        row = rows.get(machine)
        if row is None or row.pid != pid:
            orphan = ProcessId.of(pid)
            if orphan is not None:
                log.warning("reaping a process", machine=machine, pid=pid)
                await kill(orphan)
    for machine in inventory.machines - rows.keys():
        log.warning("reaping files", machine=machine)
        await lifecycle.host.discard(machine)
    for machine, row in rows.items():
        if row.pid is None:
            lifecycle.host.tidy(machine)
