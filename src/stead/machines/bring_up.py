"""How a guest comes up: restored from a template, restored from captured memory, or booted from its disk.

Each way works in the states `creating` and, as far as it applies, `preparing`, `starting` and `waking`; it
records every step before it takes it. On failure the caller cleans up.
"""

from dataclasses import dataclass, replace

from stead.deadlines import scaled
from stead.errors import GuestUnreachable, HostError, StartFailed
from stead.guest.execution import SMALL_OUTPUT, ExecRequest, collect
from stead.guest.identity import confer
from stead.host.interface import CapturedState, Template, Vm
from stead.logs import get_logger
from stead.machines.engine import Engine
from stead.machines.events import EventKind
from stead.machines.processes import RunningVm
from stead.machines.records import Record
from stead.machines.states import Creating, Preparing, Run, Running, Starting, Waking, steps, unexpected_end
from stead.processes import ProcessId

CONFIRM_TIMEOUT = scaled(60.0)
BOOT_TIMEOUTS = (scaled(120.0), scaled(240.0), scaled(240.0))
"""Seconds that each attempt of a boot may take."""
_GROW_TIMEOUT = scaled(300.0)
_GROW_ROOT = """tries=0
until read -r sectors < /sys/class/block/vda/size && [ "$sectors" -ge {sectors} ]; do
    tries=$((tries + 1))
    if [ $tries = 300 ]; then
        echo "the guest's disk has $sectors sectors, fewer than {sectors}" >&2
        exit 1
    fi
    sleep 0.1
done
resize2fs /dev/vda && exit
set -- $(stat -f -c '%b %S' /)
[ $(($1 * $2 / 512 * 100)) -ge $(({sectors} * 97)) ]"""
"""The kernel of a restored guest learns of a larger disk by an interrupt, which it handles a moment later.

A guest without resize2fs, or with another file system, can still be started if that fills the disk. Tables
of ext4 take 2 % of it.
"""
_CONSOLE_END = 2000

log = get_logger("stead.machines")

ComingUp = Preparing | Creating | Starting | Waking


def coming_up(record: Record) -> ComingUp:
    if not isinstance(record.state, ComingUp):
        raise StartFailed(f"VM {record.id} is {record.state.name}")
    return record.state


def _at(record: Record, step: str, run: Run | None = None) -> ComingUp:
    """The state of a VM at another step. An attempt that is repeated has no process yet."""
    state = coming_up(record)
    if step not in steps(type(state)):
        raise ValueError(f"{state} has no step {step!r}")
    kept = None if step in ("disk", "process") else run or state.run
    return replace(state, step=step, run=kept)  # type: ignore[arg-type]  # the step is checked above


@dataclass(eq=False)
class BringUp:
    engine: Engine

    async def step(self, record: Record, step: str) -> Record:
        """Journal a step before its side effects."""
        return await self.engine.journal.transition(record, _at(record, step))

    async def make_disk(self, record: Record) -> Record:
        """Make the folder and the top disk layer of a new VM."""
        record = await self.step(record, "disk")
        await self.engine.host.disks.make_folder(record.vm_slot)
        await self.engine.disks.make_top(record, coming_up(record).top)
        return record

    async def restore(self, record: Record, template: Template) -> tuple[Record, RunningVm]:
        """Restore a new VM from its template."""
        record = await self.step(await self.make_disk(record), "process")
        async with self.engine.disks.opened(record, coming_up(record).top, template) as disk:
            process = await self.engine.host.restore(record.vm_slot, disk)
            record, live = await self._hold(record, process, "restore", template.id)
        await live.while_alive(live.vm.running())
        return record, live

    async def restore_state(
        self, record: Record, template: Template, state: CapturedState, *, new_keys: bool
    ) -> tuple[Record, RunningVm]:
        """Restore captured memory on a VM's disk, and confer its identity."""
        record = await self.step(record, "process")
        async with (
            self.engine.disks.opened(record, coming_up(record).top, template) as disk,
            self.engine.host.restore_state(record.vm_slot, state, disk) as restore,
        ):
            record, live = await self._hold(record, restore.process, "restore", state.base)
            await live.while_alive(restore.load(live.vm))
        await live.vm.resume()
        record = await self.step(record, "identify")
        await confer(live.agent, record.identity, timeout=CONFIRM_TIMEOUT, new_keys=new_keys)
        return record, live

    async def boot(self, record: Record, template: Template, *, new_keys: bool) -> tuple[Record, RunningVm]:
        """Boot a VM, confer its identity and grow its file system to the size of its disk."""
        record, live = await self._boot(record, template)
        record = await self.step(record, "identify")
        await confer(live.agent, record.identity, timeout=CONFIRM_TIMEOUT, new_keys=new_keys)
        if record.size.disk_gib > template.size.disk_gib:
            await _grow_root(live, record.size.disk_gib)
        return record, live

    async def grow_disk(self, record: Record, live: RunningVm, known_gib: int) -> None:
        """Grow the disk of a guest that was restored with one of `known_gib`, and its file system.

        Nothing is sent to a guest whose disk has its size already.
        """
        if record.size.disk_gib > known_gib:
            top = coming_up(record).top
            await live.while_alive(live.vm.resize_disk(top, record.size.disk_gib))
            await _grow_root(live, record.size.disk_gib)

    async def _boot(self, record: Record, template: Template) -> tuple[Record, RunningVm]:
        """Boot from the disk; retries when the guest resets on its way up (fsck), or hangs or crashes."""
        for attempt, timeout in enumerate(BOOT_TIMEOUTS, 1):
            record = await self.step(record, "process")
            async with self.engine.disks.opened(record, coming_up(record).top, template) as disk:
                process = await self.engine.host.boot(record.vm_slot, record.size, disk)
                record, live = await self._hold(record, process, "boot", None)
            try:
                await live.agent.call("GET", "/v1/health", timeout=timeout, connect_timeout=timeout)
                break
            except GuestUnreachable:
                # Emulated kernels hang, and QEMU crashes emulating many CPUs, now and then; twice is a fault.
                again = attempt == 1
                if live.vm.ended:
                    end = unexpected_end(live.vm.stop_cause, await live.vm.wait())
                    again = end.restart or (end.crashed and again)
                    if end.crashed:
                        log.warning("guest does not boot", vm=record.id, reason=end.reason)
                else:
                    log.warning("guest does not boot", vm=record.id, console=await _console(live.vm))
                if not again or attempt == len(BOOT_TIMEOUTS):
                    raise
                await self.engine.processes.end(record)
        return record, live

    async def _hold(
        self, record: Record, process: ProcessId, step: str, memory_base: str | None
    ) -> tuple[Record, RunningVm]:
        held = _at(record, step, Run(process, memory_base))
        return await self.engine.processes.hold(record, process, held)

    async def record_running(
        self, record: Record, live: RunningVm, kind: EventKind, why: str | None, note: str | None = None
    ) -> Record:
        """Record that a VM is up and report `kind` with `why`; `note` becomes its reason."""
        state = coming_up(record)
        if state.run is None or live.vm.ended:
            raise StartFailed(f"VM {record.id} ended while it started")
        record = await self.engine.journal.transition(record, Running(state.top, state.run, reason=note))
        # If it has just ended, the watcher of the process records that.
        live.running = not live.vm.ended
        self.engine.events.report(kind, record, why, note)
        return record


async def _grow_root(live: RunningVm, size_gib: int) -> None:
    """Grow the root file system to the size of the disk; does nothing when it fills it already."""
    command = _GROW_ROOT.format(sectors=(size_gib << 30) // 512)
    request = ExecRequest(command, timeout=_GROW_TIMEOUT)
    result = await collect(live.agent, request, SMALL_OUTPUT)
    if not result.ok:
        said = result.stderr.decode(errors="replace").strip()
        raise StartFailed(f"cannot grow the root file system: {said}")


async def _console(vm: Vm) -> str:
    try:
        return (await vm.console())[-_CONSOLE_END:]
    except HostError as error:
        return f"console not readable: {error}"
