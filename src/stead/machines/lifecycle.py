"""The steps of a machine's life: each is recorded, taken, and undone when it fails."""

import asyncio
import contextlib
import itertools
import secrets
import string
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from stead.errors import CapacityExceeded, GuestError, GuestUnreachable, HostError, StartFailed, SteadError
from stead.host import addresses
from stead.host.execution import ExecRequest, collect
from stead.host.host import Host, Place
from stead.host.identity import Identity, confer, new_machine_id
from stead.host.processes import ProcessId, kill
from stead.host.template_builder import machine_slots
from stead.host.templates import Template
from stead.logs import get_logger
from stead.machines.live import Live, Turns
from stead.machines.states import State, unexpected_end
from stead.settings import Size
from stead.store.machines import MachineRow, MachineStore
from stead.tasks import finished

CONFIRM_TIMEOUT = 60.0
BOOT_TIMEOUT = 300.0
STOP_TIMEOUT = 60.0
_ID_ALPHABET = string.ascii_lowercase + string.digits
_PLACEHOLDER = "prepared"

log = get_logger("stead.machines")


def new_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(20))


def place_of(row: MachineRow) -> Place:
    return Place(row.id, row.slot)


def process_of(row: MachineRow) -> ProcessId | None:
    if row.pid is None or row.pid_started is None:
        return None
    return ProcessId(row.pid, row.pid_started)


class Lifecycle:
    """Brings machines up and down on one host, keeping rows and reality in step."""

    def __init__(self, host: Host, store: MachineStore) -> None:
        self.host = host
        self.store = store
        self.lives: dict[str, Live] = {}
        self.turns = Turns()
        self._slots = asyncio.Lock()
        self._next_slot = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_unowned_end: Callable[[], None] = lambda: None

    # Rows

    async def allocate(self, state: State, size: Size, template: Template, name: str | None) -> MachineRow:
        """A new row with a slot of its own."""
        async with self._slots:
            taken = await self.store.slots()
            slots = machine_slots()
            # Round robin: an address is not used again right away.
            order = itertools.chain(slots[self._next_slot :], slots[: self._next_slot])
            slot = next((slot for slot in order if slot not in taken), None)
            if slot is None:
                raise CapacityExceeded("every address of this host is in use")
            self._next_slot = (slot + 1) % len(slots)
            machine_id = new_id()
            return await self.store.insert(
                MachineRow(
                    id=machine_id,
                    name=name,
                    state=state,
                    step="allocate",
                    vcpus=size.vcpus,
                    memory_mib=size.memory_mib,
                    disk_gib=size.disk_gib,
                    slot=slot,
                    template=template.id,
                    hostname=machine_id,
                    guest_machine_id=new_machine_id(),
                )
            )

    async def step(self, row: MachineRow, step: str, **changes: object) -> None:
        """Record what is about to be done."""
        await self.store.update(row.id, step=step, **changes)

    # Up

    async def restore(self, row: MachineRow, template: Template) -> Live:
        """Wake a new machine from its template; on failure the caller removes the row and its remains."""
        place = place_of(row)
        await self.step(row, "disk")
        await self.host.make_disk(place, template)
        await self.step(row, "process")
        process = await self.host.restore(place, template)
        live = await self._hold(row, process, "restore")
        await self._while_alive(live, live.vm.running())
        return live

    async def warm(self, row: MachineRow, live: Live) -> None:
        """Take an unowned machine through what its first user will ask of it, then pause it.

        The identity is a placeholder: the real one is conferred when the machine is handed out.
        """
        await self.step(row, "warm")
        identity = Identity(row.id, _PLACEHOLDER, new_machine_id(), addresses.machine_address(row.slot))
        await confer(live.agent, identity, timeout=CONFIRM_TIMEOUT)
        for _ in range(2):
            await collect(live.agent, ExecRequest("true", timeout=CONFIRM_TIMEOUT))
        await live.vm.pause()

    async def identify(self, row: MachineRow, live: Live, *, new_keys: bool) -> None:
        """Make a guest the machine of its row; StartFailed unless it confirms."""
        address = addresses.machine_address(row.slot)
        identity = Identity(row.id, row.hostname, row.guest_machine_id, address)
        try:
            await confer(live.agent, identity, timeout=CONFIRM_TIMEOUT, new_keys=new_keys)
        except GuestUnreachable as error:
            raise StartFailed(f"the guest did not confirm its identity: {error}") from error

    async def boot(self, row: MachineRow, template: Template) -> Live:
        """Boot a stopped machine from its own disk."""
        place = place_of(row)
        await self.step(row, "process")
        disk = self.host.files(row.id).folder / "disk.qcow2"
        size = Size(row.vcpus, row.memory_mib, row.disk_gib)
        process = await self.host.boot(place, size, template.layers(disk), template.image)
        live = await self._hold(row, process, "boot")
        await live.agent.call("GET", "/v1/health", timeout=BOOT_TIMEOUT, connect_timeout=BOOT_TIMEOUT)
        return live

    async def _hold(self, row: MachineRow, process: ProcessId, next_step: str) -> Live:
        try:
            await self.step(row, next_step, pid=process.pid, pid_started=process.started)
            return await self.adopt(row, process)
        except BaseException:
            await finished(kill(process))
            raise

    async def adopt(self, row: MachineRow, process: ProcessId) -> Live:
        """Take hold of a running QEMU and watch it."""
        vm = await self.host.connect(row.id, process)
        live = Live(vm, self.host.agent(row.slot))
        self.lives[row.id] = live
        live.watcher = asyncio.create_task(self._watch(row.id, live))
        return live

    async def record_running(self, row: MachineRow, live: Live) -> MachineRow:
        updated = await self.store.update(row.id, state=State.RUNNING, step=None, reason=None)
        if updated is None:
            raise StartFailed(f"machine {row.id} was removed while it started")
        if live.vm.process.ended:
            raise StartFailed(f"machine {row.id} ended while it started")
        live.running = True
        return updated

    async def _while_alive(self, live: Live, work: Coroutine[Any, Any, None]) -> None:
        """Do something with a guest, but not longer than its QEMU lives."""
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
        """End whatever process a machine has, held or not, and let go of it."""
        live = self.lives.pop(row.id, None)
        if live is not None:
            live.running, live.ending = False, True
            live.agent.abort("the machine was ended")
            await live.vm.kill()
            await live.release()
        process = process_of(row)
        if process is not None:
            await kill(process)
        for pid, machine in self.host.inventory().processes.items() if live is None else ():
            orphan = ProcessId.of(pid) if machine == row.id else None
            if orphan is not None:
                await kill(orphan)

    async def remove(self, row: MachineRow) -> None:
        """Leave nothing of a machine: process, files, groups, row."""
        await self.store.update(row.id, state=State.DELETING, step="end")
        await self.end_process(row)
        await self.store.update(row.id, step="clean")
        await self.host.discard(row.id)
        await self.store.delete(row.id)

    async def shut_down(self, row: MachineRow, live: Live, timeout: float = STOP_TIMEOUT) -> str | None:
        """Ask the guest to power off and wait; says so when it had to be ended by force."""
        live.running, live.ending = False, True
        with contextlib.suppress(GuestUnreachable, GuestError):
            await live.agent.call("POST", "/v1/shutdown", timeout=5, connect_timeout=5)
        with contextlib.suppress(HostError):
            await live.vm.execute("system_powerdown")
        try:
            await asyncio.wait_for(live.vm.wait(), timeout)
        except TimeoutError:
            return f"it did not shut down within {timeout:g} s and was ended"
        return None

    async def record_stopped(self, row: MachineRow, reason: str) -> MachineRow | None:
        """The process has ended: remove what only a running machine has and say why it stopped."""
        await self.end_process(row)
        self.host.tidy(row.id)
        return await self.store.update(
            row.id, state=State.STOPPED, step=None, pid=None, pid_started=None, reason=reason
        )

    # Ends that nobody asked for

    async def _watch(self, machine_id: str, live: Live) -> None:
        how = await live.vm.wait()
        live.running = False
        live.agent.abort(f"the machine ended: QEMU {how}")
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
                # An operation is under way; it has seen the same end and deals with it.
                return
            end = unexpected_end(live.vm.stop_cause, how)
            log.warning("machine ended", machine=machine_id, reason=end.reason)
            stopped = await self.record_stopped(row, end.reason)
            if end.restart and stopped is not None:
                with contextlib.suppress(SteadError):
                    await self.start(stopped)

    async def start(self, row: MachineRow) -> MachineRow:
        """Boot a stopped machine; a failure leaves it stopped with the reason. Call in the machine's turn."""
        template = self.host.load_template(row.template)
        if template is None or not (self.host.files(row.id).folder / "disk.qcow2").exists():
            reason = "the disk layers that it stands on are gone"
            await self.store.update(row.id, state=State.LOST, step=None, reason=reason)
            raise StartFailed(f"machine {row.id} is lost: {reason}")
        await self.store.update(row.id, state=State.STARTING, step="process", reason=None)
        try:
            live = await self.boot(row, template)
            await self.step(row, "identify")
            await self.identify(row, live, new_keys=False)
            return await self.record_running(row, live)
        except BaseException as error:
            why = str(error) if isinstance(error, SteadError) else "the start was interrupted"
            await finished(self.record_stopped(row, f"it could not be started: {why}"))
            if isinstance(error, SteadError) and not isinstance(error, StartFailed):
                raise StartFailed(f"machine {row.id} did not start: {error}") from error
            raise

    # Background work

    def background(self, work: Awaitable[None]) -> None:
        async def guarded() -> None:
            try:
                await work
            except Exception:
                log.exception("background work failed")

        self.keep(asyncio.create_task(guarded()))

    def keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Hold on to a task until it ends; `close` ends it."""

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                # Whoever waits has the error; when nobody does any more, it is not one that was forgotten.
                task.exception()

        self._tasks.add(task)
        task.add_done_callback(done)
        return task

    async def close(self) -> None:
        """Let go of every machine; they go on."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for live in list(self.lives.values()):
            await live.release()
        self.lives.clear()
