"""Lifecycle steps of VMs: journaled before they happen, undone when they fail."""

import asyncio
import contextlib
import functools
import itertools
import secrets
import string
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from stead import addresses
from stead.deadlines import scaled
from stead.errors import CapacityExceeded, GuestError, GuestUnreachable, HostError, StartFailed, SteadError
from stead.files import exists
from stead.guest.execution import ExecRequest, collect
from stead.guest.identity import Identity, confer, new_machine_id
from stead.host.host import Host, Place
from stead.host.template_builder import machine_slots
from stead.host.templates import Template
from stead.host.vm import Vm
from stead.logs import get_logger
from stead.machines.events import REQUESTED, EventKind, MachineEvent, OnEvent, status
from stead.machines.layers import LayerMissing, Layers
from stead.machines.live import Live, Turns
from stead.machines.persistence import Persistence, ends_with, from_columns
from stead.machines.quotas import Quotas
from stead.machines.states import State, unexpected_end
from stead.processes import ProcessId, kill
from stead.settings import Size
from stead.store.machines import LayerRow, MachineRow, MachineStore
from stead.store.snapshots import SnapshotRow
from stead.tasks import finished

CONFIRM_TIMEOUT = scaled(60.0)
BOOT_TIMEOUTS = (scaled(120.0), scaled(240.0), scaled(240.0))
"""Seconds that each attempt of a boot may take."""
_SHUTDOWN_TIMEOUT = scaled(5.0)
STOP_TIMEOUT = scaled(60.0)
_GROW_TIMEOUT = scaled(300.0)
_LAST_WORDS = 2000
_ID_ALPHABET = string.ascii_lowercase + string.digits
_PLACEHOLDER = "prepared"
_MAX_UNHEARD = 1000
T = TypeVar("T")

log = get_logger("stead.machines")


def new_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(20))


def place_of(row: MachineRow) -> Place:
    return Place(row.id, row.slot)


def size_of(row: MachineRow | SnapshotRow) -> Size:
    return _size(row.vcpus, row.memory_mib, row.disk_gib)


_size = functools.lru_cache(Size)
"""Cached: there are few sizes, and lists with a thousand VMs."""


def persistence_of(row: MachineRow) -> Persistence:
    return from_columns(row.persistence, row.priority, row.delete_event)


async def _last_words(vm: Vm) -> str:
    try:
        return (await vm.console())[-_LAST_WORDS:]
    except HostError as error:
        return f"console not readable: {error}"


def process_of(row: MachineRow) -> ProcessId | None:
    if row.pid is None or row.pid_started is None:
        return None
    return ProcessId(row.pid, row.pid_started)


class Lifecycle:
    """Brings VMs up and down on one host and keeps rows and processes consistent."""

    def __init__(self, host: Host, store: MachineStore, layers: Layers) -> None:
        self.host = host
        self.store = store
        self.layers = layers
        self.lives: dict[str, Live] = {}
        self.turns = Turns()
        self.quotas = Quotas(store)
        self._next_slot = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._exits: dict[str, set[asyncio.Future[str]]] = {}
        self._sweeping = False
        self._sweep_again = False
        self._sweeps_allowed = False
        self.on_unowned_end: Callable[[], None] = lambda: None
        # Recovery comes before the listener: its events wait here.
        self._unheard: deque[MachineEvent] = deque(maxlen=_MAX_UNHEARD)
        self._on_event: OnEvent = self._unheard.append

    # Events

    def listen(self, on_event: OnEvent) -> None:
        """Report every event to this, first those of the recovery at start."""
        self._on_event = on_event
        while self._unheard:
            on_event(self._unheard.popleft())

    def report(self, kind: EventKind, row: MachineRow, *reasons: str | None, removed: bool = False) -> None:
        said = "; ".join(reason for reason in reasons if reason)
        self._on_event(MachineEvent(kind, row, said or None, removed))

    # Rows

    async def allocate(self, state: State, size: Size, template: str, **facts: Any) -> MachineRow:
        """Insert a row with a free slot (its address); LimitExceeded when the account may have no more."""
        async with self.quotas.admitting(facts.get("account"), size):
            taken = await self.store.slots()
            slots = machine_slots()
            # Round robin: an address is not used again right away.
            order = itertools.chain(slots[self._next_slot :], slots[: self._next_slot])
            slot = next((slot for slot in order if slot not in taken), None)
            if slot is None:
                raise CapacityExceeded("no free VM address on this host; delete a VM first")
            self._next_slot = (slot + 1) % len(slots)
            machine_id = new_id()
            return await self.store.insert(
                MachineRow(
                    **{"id": machine_id, "name": None} | facts,
                    state=state,
                    step="allocate",
                    vcpus=size.vcpus,
                    memory_mib=size.memory_mib,
                    disk_gib=size.disk_gib,
                    slot=slot,
                    template=template,
                    hostname=machine_id,
                    guest_machine_id=new_machine_id(),
                    top=new_id(),
                )
            )

    async def step(self, row: MachineRow, step: str, **changes: object) -> None:
        """Journal a step before its side effects."""
        await self.store.update(row.id, step=step, **changes)

    # Up

    async def restore(self, row: MachineRow, template: Template) -> Live:
        """Restore a new VM from its template; on failure the caller removes the row and its files."""
        await self.make_disk(row)
        await self.step(row, "process")
        async with self.disk(row, template) as layers:
            process = await self.host.restore(place_of(row), template, layers)
            live = await self.hold(row, process, "restore", memory_base=template.id)
        await self.while_alive(live, live.vm.running())
        return live

    async def make_disk(self, row: MachineRow) -> None:
        """Make the folder and the top disk layer of a new VM."""
        await self.step(row, "disk")
        self.host.make_folder(place_of(row))
        await self.make_top(row)

    async def make_top(self, row: MachineRow) -> None:
        assert row.top is not None  # noqa: S101  # recorded before it is made
        await self.host.make_layer(place_of(row), row.top, row.disk_gib)

    @contextlib.asynccontextmanager
    async def disk(self, row: MachineRow, template: Template) -> AsyncIterator[tuple[Path, ...]]:
        """All layers of a VM's disk, top first; none is removed inside the block, while QEMU opens them."""
        assert row.top is not None  # noqa: S101
        async with self.layers.reading():
            frozen = await self.layers.chain(row.layer)
            yield self.host.layer(row.id, row.top), *frozen, *template.layers

    async def warm(self, row: MachineRow, live: Live) -> None:
        """Run what the first user of a pool VM will need, so that its code is translated, then pause it.

        The identity is a placeholder: a create confers the real one.
        """
        await self.step(row, "warm")
        identity = Identity(row.id, _PLACEHOLDER, new_machine_id(), addresses.machine_address(row.slot))
        await confer(live.agent, identity, timeout=CONFIRM_TIMEOUT)
        for _ in range(2):
            await collect(live.agent, ExecRequest("true", timeout=CONFIRM_TIMEOUT))
        await live.vm.pause()

    async def identify(self, row: MachineRow, live: Live, *, new_keys: bool) -> None:
        """Confer the identity and keys of a row on a guest; StartFailed unless it confirms."""
        address = addresses.machine_address(row.slot)
        identity = Identity(row.id, row.hostname, row.guest_machine_id, address)
        try:
            await confer(live.agent, identity, timeout=CONFIRM_TIMEOUT, new_keys=new_keys)
        except GuestUnreachable as error:
            raise StartFailed(f"guest did not confirm its identity: {error}") from error

    async def boot(self, row: MachineRow, template: Template) -> Live:
        """Boot a VM from its own disk; retries when the guest resets on its way up (fsck) or hangs once."""
        for attempt, timeout in enumerate(BOOT_TIMEOUTS, 1):
            await self.step(row, "process")
            async with self.disk(row, template) as layers:
                process = await self.host.boot(place_of(row), size_of(row), layers, template.image)
                live = await self.hold(row, process, "boot", memory_base=None)
            try:
                await live.agent.call("GET", "/v1/health", timeout=timeout, connect_timeout=timeout)
                break
            except GuestUnreachable:
                if live.vm.process.ended:
                    again = unexpected_end(live.vm.stop_cause, await live.vm.wait()).restart
                else:
                    # Emulated kernels hang now and then; one that hangs twice is broken.
                    again = attempt == 1
                    log.warning("guest does not boot", vm=row.id, console=await _last_words(live.vm))
                if not again or attempt == len(BOOT_TIMEOUTS):
                    raise
                await self.end_process(row)
        return live

    async def hold(self, row: MachineRow, process: ProcessId, next_step: str, **changes: object) -> Live:
        """Record a QEMU that was just started and connect to it."""
        try:
            await self.step(row, next_step, pid=process.pid, pid_started=process.started, **changes)
            return await self.adopt(row, process)
        except BaseException:
            await finished(kill(process))
            raise

    async def adopt(self, row: MachineRow, process: ProcessId) -> Live:
        """Connect to a running QEMU and watch for its end."""
        vm = await self.host.connect(row.id, process)
        live = Live(vm, self.host.agent(place_of(row)))
        self.lives[row.id] = live
        live.watcher = asyncio.create_task(self._watch(row.id, live))
        return live

    async def record_running(
        self, row: MachineRow, live: Live, kind: EventKind, why: str | None, note: str | None = None
    ) -> MachineRow:
        """Record that a VM is up and report `kind` with `why`; `note` becomes its reason."""
        facts = {"state": State.RUNNING, "step": None, "reason": note, "checkpoint": None}
        updated = await self.store.update(row.id, **facts, active_at=time.time_ns())
        if updated is None:
            raise StartFailed(f"VM {row.id} was removed while it started")
        if live.vm.process.ended:
            raise StartFailed(f"VM {row.id} ended while it started")
        live.running = True
        self.report(kind, updated, why, note)
        return updated

    async def while_alive(self, live: Live, work: Coroutine[Any, Any, None]) -> None:
        """Run work that needs a guest; StartFailed when its QEMU ends first."""
        task = asyncio.ensure_future(work)
        end = asyncio.ensure_future(live.vm.wait())
        try:
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StartFailed(f"QEMU {end.result()}")
            task.result()
        finally:
            for each in (task, end):
                each.cancel()
            await asyncio.gather(task, end, return_exceptions=True)

    # Down

    async def end_process(self, row: MachineRow) -> None:
        """Kill a VM's QEMU, connected or orphaned, and close its connections."""
        live = self.lives.pop(row.id, None)
        if live is not None:
            live.running, live.ending = False, True
            live.agent.abort("the VM was ended")
            await live.vm.kill()
            await live.release()
        process = process_of(row)
        if process is not None:
            await kill(process)
        for pid, machine in self.host.inventory().processes.items() if live is None else ():
            orphan = ProcessId.of(pid) if machine == row.id else None
            if orphan is not None:
                await kill(orphan)

    async def remove(self, row: MachineRow, why: str | None = None, *, forget: bool = True) -> None:
        """Delete a VM's process, files, groups and row; `why` is None on request.

        Without `forget`, a VM with `recreate` keeps its row.
        """
        ended = status(EventKind.DELETED, why)
        await self.store.update(row.id, state=State.DELETING, step="end")
        await self.end_process(row)
        await self.store.update(row.id, step="clean")
        await self.host.discard(row.id)
        kept = row.recreate and not forget
        if kept:
            gone: dict[str, object] = dict.fromkeys(("step", "pid", "pid_started"))
            gone |= dict.fromkeys(("top", "next_top", "layer", "checkpoint", "memory_base"))
            await self.store.update(row.id, state=State.DELETED, reason=ended, **gone)
        else:
            await self.store.delete(row.id)
        self.tell_exit(row.id, ended)
        self.report(EventKind.DELETED, row, why or REQUESTED, removed=not kept)
        self.sweep()

    async def shut_down(self, row: MachineRow, live: Live, timeout: float = STOP_TIMEOUT) -> str | None:
        """Ask the guest to power off and wait; returns why the caller has to kill it, None when it ended."""
        live.running, live.ending = False, True
        try:
            await live.agent.call("POST", "/v1/shutdown", timeout=_SHUTDOWN_TIMEOUT)
        except (GuestUnreachable, GuestError):
            # Never both: the agent would take the refusal of a second shutdown for a broken guest.
            with contextlib.suppress(HostError):
                await live.vm.execute("system_powerdown")
        try:
            async with asyncio.timeout(timeout):
                await live.vm.wait()
        except TimeoutError:
            return f"did not shut down within {timeout:g} s"
        return None

    async def record_stopped(
        self, row: MachineRow, kind: EventKind, why: str | None = None, *, for_good: bool = True
    ) -> MachineRow | None:
        """The process has ended: remove what only a running VM has and record why; None is on request.

        An ephemeral VM is deleted, unless it is started again at once (`for_good=False`).
        """
        reason = status(kind, why)
        await self.end_process(row)
        self.report(kind, row, why or REQUESTED)
        self.host.tidy(row.id)
        await self.settle_disk(row)
        if for_good and ends_with(persistence_of(row), suspended=False):
            self.tell_exit(row.id, reason)
            await self.remove(row, f"ephemeral: {reason}", forget=False)
            return None
        down: dict[str, object] = dict.fromkeys(("step", "pid", "pid_started", "memory_base"))
        down |= {"reason": reason, "active_at": time.time_ns()}
        stopped = await self.store.update(row.id, state=State.STOPPED, **down)
        if for_good:
            # After the row: a caller that reads the old state before this then still gets the exit.
            self.tell_exit(row.id, reason)
        return stopped

    async def settle_disk(self, row: MachineRow) -> None:
        """Finish an interrupted switch to a new top layer after QEMU ended.

        Whether QEMU switched or not, an empty layer over the old one is the same disk. A layer that was
        only being made for a start may be incomplete: the next start makes it again.
        """
        recorded = await self.store.get(row.id)
        if recorded is None or recorded.top is None:
            return
        if (recorded.state, recorded.step) == (State.STARTING, "disk"):
            self.host.layer(row.id, recorded.top).unlink(missing_ok=True)
            await self.store.update(row.id, top=None)
        elif recorded.next_top is None:
            return
        elif exists(self.host.layer(row.id, recorded.next_top)):
            await self.record_frozen(recorded, top=recorded.next_top)
        else:
            await self.store.update(row.id, next_top=None)

    async def record_frozen(self, row: MachineRow, **changes: object) -> MachineRow | None:
        """Record a VM's top layer as read-only and adopt its file; others can be based on it."""
        assert row.top is not None  # noqa: S101
        layer = LayerRow(row.top, row.layer, row.template, f"{row.top}.qcow2")
        updated = await self.store.freeze(layer, row.id, **changes)
        await self.layers.adopt(layer.id, self.host.layer(row.id, layer.id))
        return updated

    # Unexpected ends

    async def _watch(self, machine_id: str, live: Live) -> None:
        how = await live.vm.wait()
        live.running = False
        live.agent.abort(f"the VM ended: {unexpected_end(live.vm.stop_cause, how).reason}")
        if not live.ending:
            self.background(self._ended(machine_id, live, how))

    async def _ended(self, machine_id: str, live: Live, how: str) -> None:
        async with self.turns.of(machine_id):
            row = await self.store.get(machine_id)
            if row is None or self.lives.get(machine_id) is not live:
                return
            if row.state == State.PREPARED:
                await self.remove(row)
                self.on_unowned_end()
                return
            if row.state != State.RUNNING:
                # The operation under way sees the same end and handles it.
                return
            end = unexpected_end(live.vm.stop_cause, how)
            log.warning("VM ended", vm=machine_id, reason=end.reason)
            kind = EventKind.CRASHED if end.crashed else EventKind.STOPPED
            stopped = await self.record_stopped(row, kind, end.reason, for_good=not end.restart)
            if end.restart and stopped is not None:
                with contextlib.suppress(SteadError):
                    await self.start(stopped, end.reason)

    async def start(self, row: MachineRow, why: str, note: str | None = None) -> MachineRow:
        """Boot a stopped VM; a failure leaves it stopped with the reason. Call with the VM's lock held."""
        template = await self.whole_disk(row)
        fresh = row.top is None
        row = replace(row, top=row.top or new_id())
        step = "disk" if fresh else "process"
        await self.store.update(row.id, state=State.STARTING, step=step, reason=None, top=row.top)
        try:
            if fresh:
                await self.make_top(row)
            live = await self.bring_up_from_disk(row, template, new_keys=False)
            return await self.record_running(row, live, EventKind.STARTED, why, note)
        except BaseException as error:
            cause = str(error) if isinstance(error, SteadError) else "the start was interrupted"
            await finished(self.record_stopped(row, EventKind.START_FAILED, cause, for_good=False))
            self.tell_exit(row.id, status(EventKind.START_FAILED, cause))
            if isinstance(error, SteadError) and not isinstance(error, StartFailed):
                raise StartFailed(f"VM {row.id} did not start: {error}") from error
            raise

    async def whole_disk(self, row: MachineRow) -> Template:
        """The template below a VM's disk when every layer exists; else the VM becomes lost.

        An error that does not prove that a layer is missing, such as EMFILE or EIO, only fails the call.
        """
        template = self.host.load_template(row.template)
        reason = "disk layers are missing"
        if template is not None and (row.top is None or exists(self.host.layer(row.id, row.top))):
            try:
                return await self._with_all_layers(row, template)
            except LayerMissing as error:
                reason = str(error)
        lost = status(EventKind.LOST, reason)
        await self.store.update(row.id, state=State.LOST, step=None, reason=lost)
        self.report(EventKind.LOST, row, reason)
        self.tell_exit(row.id, lost)
        raise StartFailed(f"VM {row.id} is lost: {reason}")

    async def _with_all_layers(self, row: MachineRow, template: Template) -> Template:
        try:
            await self.layers.chain(row.layer)
        except LayerMissing:
            # A crash may have come between freezing a layer and adopting its file.
            failed = await self.layers.finish_adoptions()
            try:
                await self.layers.chain(row.layer)
            except LayerMissing as error:
                if error.layer in failed:
                    raise failed[error.layer] from error
                raise
        return template

    async def bring_up_from_disk(self, row: MachineRow, template: Template, *, new_keys: bool) -> Live:
        """Boot a VM, confer its identity and grow its file system to the size of its disk."""
        live = await self.boot(row, template)
        await self.step(row, "identify")
        await self.identify(row, live, new_keys=new_keys)
        if row.disk_gib > template.size.disk_gib:
            await self._grow_root(live)
        return live

    async def _grow_root(self, live: Live) -> None:
        """Grow the root file system to the size of the disk; does nothing when it fills it already."""
        result = await collect(live.agent, ExecRequest("resize2fs /dev/vda", timeout=_GROW_TIMEOUT))
        if not result.ok:
            said = result.stderr.decode(errors="replace").strip()
            raise StartFailed(f"cannot grow the root file system: {said}")

    # Waiting for exits

    async def exit(self, machine_id: str) -> str:
        """Wait until a VM's run ends; returns why."""
        waiting: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiters = self._exits.setdefault(machine_id, set())
        waiters.add(waiting)
        try:
            return await waiting
        finally:
            waiters.discard(waiting)
            if not waiters:
                self._exits.pop(machine_id, None)

    def tell_exit(self, machine_id: str, how: str) -> None:
        for waiting in list(self._exits.get(machine_id, ())):
            if not waiting.done():
                waiting.set_result(how)

    # Background work

    def sweep(self) -> None:
        """Garbage-collect layers and checkpoints in the background; calls during a run lead to one more."""
        self._sweep_again = True
        if self._sweeps_allowed and not self._sweeping:
            self._sweeping = True
            self.background(self._sweep())

    def allow_sweeps(self) -> None:
        """Called when recovery has set files without rows aside: before that, a sweep would remove them."""
        self._sweeps_allowed = True
        if self._sweep_again:
            self.sweep()

    async def _sweep(self) -> None:
        try:
            while self._sweep_again:
                self._sweep_again = False
                await self.layers.collect()
        finally:
            self._sweeping = False

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background and log its failure; `close` cancels it."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("background work failed", error=repr(error))

        self.keep(asyncio.create_task(work)).add_done_callback(done)

    def keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Hold a reference to a task until it ends; `close` cancels it."""

        def done(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                # Retrieve the exception so asyncio does not log it as never retrieved.
                task.exception()

        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    async def close(self) -> None:
        """Cancel background work and disconnect from every VM; VMs keep running."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for live in list(self.lives.values()):
            await live.release()
        self.lives.clear()
