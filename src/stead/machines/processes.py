"""VMs that have a process now: the process, the connection to its guest, and leases on it."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from stead.errors import StartFailed
from stead.guest.agent import Agent
from stead.host.interface import Host, Vm
from stead.machines.journal import Journal
from stead.machines.records import Record
from stead.machines.states import MachineState, unexpected_end
from stead.processes import ProcessId
from stead.tasks import TaskSet, cancel_and_wait, finished, in_background


def new_eviction() -> "asyncio.Future[str]":
    return asyncio.get_running_loop().create_future()


class Boot:
    """A guest from its boot to its end. It outlives suspends: its programs and connections continue."""


@dataclass(eq=False)
class RunningVm:
    """The process of a VM and the connection to its guest."""

    vm: Vm
    agent: Agent
    running: bool = False
    """Recorded as running: leases need no query of the store."""
    ending: bool = False
    """An operation ends it and records that end; the watcher does not."""
    leases: int = 0
    """Uses of its guest under way, such as a running command: meanwhile it is not suspended as idle."""
    last_used: float = 0.0
    """When a lease last ended or an attachment was active, by the loop's clock."""
    boot: Boot = field(default_factory=Boot)
    eviction: "asyncio.Future[str]" = field(default_factory=new_eviction, repr=False)
    """Why attached clients must leave, once an operation ends this run."""
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)

    @contextlib.contextmanager
    def leased(self) -> Iterator[Agent]:
        self.leases += 1
        try:
            yield self.agent
        finally:
            self.leases -= 1
            self.touch()

    def touch(self) -> None:
        self.last_used = asyncio.get_running_loop().time()

    def evict(self, reason: str) -> None:
        """Tell attached clients to leave; clients that attach later are not told."""
        self.eviction.set_result(reason)
        self.eviction = new_eviction()

    async def release(self) -> None:
        """Disconnect from the process without ending it."""
        self.ending = True
        if self.watcher is not None:
            await cancel_and_wait(self.watcher)
        await self.agent.close()
        await self.vm.release()

    async def while_alive(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that needs the guest; StartFailed when its process ends first."""
        async with in_background(work) as task, in_background(self.vm.wait()) as end:
            await asyncio.wait({task, end}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StartFailed(f"QEMU {end.result()}")
            task.result()


class Processes:
    """Connects to VMs' processes, watches them and ends them."""

    def __init__(self, host: Host, journal: Journal, tasks: TaskSet) -> None:
        self._host = host
        self._journal = journal
        self._tasks = tasks
        self._lives: dict[str, RunningVm] = {}
        self._suspended: WeakValueDictionary[str, Boot] = WeakValueDictionary()
        """By checkpoint, as long as a client is attached to it."""
        self.on_unexpected_end: Callable[[str, RunningVm, str], Coroutine[Any, Any, None]] | None = None

    def get(self, machine_id: str) -> RunningVm | None:
        return self._lives.get(machine_id)

    def running(self, machine_id: str) -> RunningVm | None:
        """The process of a VM that is recorded as running."""
        live = self._lives.get(machine_id)
        return live if live is not None and live.running else None

    async def hold(self, record: Record, process: ProcessId, to: MachineState) -> tuple[Record, RunningVm]:
        """Record a process that was just started and connect to it."""
        try:
            record = await self._journal.transition(record, to)
            return record, await self.adopt(record, process)
        except BaseException as error:
            await finished(self._host.kill(process))
            if isinstance(error, ProcessLookupError):
                raise StartFailed("QEMU ended at once") from error
            raise

    async def adopt(self, record: Record, process: ProcessId) -> RunningVm:
        """Connect to a running process and watch for its end."""
        live = RunningVm(await self._host.connect(record.id, process), self._host.agent(record.vm_slot))
        self._lives[record.id] = live
        live.watcher = asyncio.create_task(self._watch(record.id, live))
        return live

    def suspended(self, checkpoint: str, live: RunningVm) -> None:
        """The guest's memory is saved in this checkpoint."""
        self._suspended[checkpoint] = live.boot

    def woken(self, checkpoint: str, live: RunningVm) -> None:
        """The guest was restored from this checkpoint."""
        live.boot = self._suspended.get(checkpoint, live.boot)

    async def _watch(self, machine_id: str, live: RunningVm) -> None:
        how = await live.vm.wait()
        live.running = False
        reason = f"the VM ended: {unexpected_end(live.vm.stop_cause, how).reason}"
        live.evict(reason)
        live.agent.abort(reason)
        if not live.ending and self.on_unexpected_end is not None:
            self._tasks.start(self.on_unexpected_end(machine_id, live, how), f"end of VM {machine_id}")

    async def end(self, record: Record, why: str = "ended") -> None:
        """Kill a VM's process, connected or orphaned, and close its connections."""
        live = self._lives.get(record.id)
        if live is not None:
            live.running, live.ending = False, True
            live.evict(f"the VM was {why}")
            live.agent.abort("the VM was ended")
            await live.vm.kill()
            # Not before: a process that could not be killed is still this VM's.
            self._lives.pop(record.id, None)
            await live.release()
            return
        # The recorded pid may be another program's by now: only processes that carry the VM's id are killed.
        for process, machine in self._host.inventory().processes.items():
            if machine == record.id:
                await self._host.kill(process)

    async def forget(self, machine_id: str) -> None:
        """Disconnect from a VM; its process keeps running."""
        live = self._lives.pop(machine_id, None)
        if live is not None:
            await live.release()

    async def close(self) -> None:
        """Disconnect from every VM; VMs keep running."""
        for machine_id in list(self._lives):
            await self.forget(machine_id)
