"""VMs that have a process now: the process, the connection to its guest, and leases on it."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakValueDictionary

from stead.errors import DiskSpaceExceeded, StartFailed
from stead.guest.agent import Agent
from stead.host.interface import Host, Vm
from stead.machines.journal import Journal
from stead.machines.records import Record
from stead.machines.states import MachineState, unexpected_end
from stead.processes import ProcessId
from stead.tasks import TaskSet, cancel_and_wait, finished, in_background


class EvictionKind(Enum):
    SUSPENDED = "suspended"
    """The guest continues when the VM is woken."""
    ENDED = "ended"


@dataclass(frozen=True)
class Eviction:
    """Why clients must leave a run of a VM."""

    kind: EvictionKind
    reason: str
    """In words for them: `the VM was suspended: idle for 300 s`."""


def new_eviction() -> "asyncio.Future[Eviction]":
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Boot:
    """A guest from its boot to its end. It outlives suspends: its programs and connections continue."""

    ended: "asyncio.Future[Eviction]" = field(default_factory=new_eviction, repr=False)
    """Done when it has ended otherwise than by a suspend, also while its VM was suspended."""
    checkpoint: str | None = None
    """Its memory, if it was suspended."""

    def end(self, eviction: Eviction) -> None:
        if not self.ended.done():
            self.ended.set_result(eviction)


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
    held: str | None = None
    """Why the host has paused its guest, in words for its owner."""
    last_used: float = 0.0
    """When a lease last ended or an attachment was active, by the loop's clock."""
    boot: Boot = field(default_factory=Boot)
    eviction: "asyncio.Future[Eviction]" = field(default_factory=new_eviction, repr=False)
    """Why attached clients must leave, once this run ends."""
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

    def evict(self, kind: EvictionKind, reason: str) -> None:
        """Tell attached clients to leave; clients that attach later are not told."""
        eviction = Eviction(kind, reason)
        self.eviction.set_result(eviction)
        self.eviction = new_eviction()
        if kind is EvictionKind.ENDED:
            self.boot.end(eviction)

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
        """Guests of suspended VMs, by VM, as long as a client is attached to them."""
        self.on_unexpected_end: Callable[[str, RunningVm, str], Coroutine[Any, Any, None]] | None = None

    def get(self, machine_id: str) -> RunningVm | None:
        return self._lives.get(machine_id)

    def running(self, machine_id: str) -> RunningVm | None:
        """The process of a VM that is recorded as running."""
        live = self._lives.get(machine_id)
        return live if live is not None and live.running else None

    def connected(self) -> list[tuple[str, RunningVm]]:
        """All VMs with a process, whatever operation is under way on them."""
        return list(self._lives.items())

    def refuse_held(self, machine_id: str) -> None:
        """DiskSpaceExceeded if the host has paused the guest: it would not answer."""
        live = self._lives.get(machine_id)
        if live is not None and live.held is not None:
            raise DiskSpaceExceeded(f"VM {machine_id} is paused: {live.held}")

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

    def suspended(self, machine_id: str, checkpoint: str, live: RunningVm) -> None:
        """The guest's memory is saved in this checkpoint."""
        live.boot.checkpoint = checkpoint
        self._suspended[machine_id] = live.boot

    def woken(self, machine_id: str, checkpoint: str, live: RunningVm) -> None:
        """The guest was restored from this checkpoint."""
        boot = self._suspended.get(machine_id)
        if boot is not None and boot.checkpoint == checkpoint:
            live.boot = boot

    def end_suspended(self, machine_id: str, reason: str) -> None:
        """The saved memory of a suspended VM is given up, and its guest with it."""
        boot = self._suspended.pop(machine_id, None)
        if boot is not None:
            boot.end(Eviction(EvictionKind.ENDED, reason))

    async def _watch(self, machine_id: str, live: RunningVm) -> None:
        how = await live.vm.wait()
        live.running = False
        reason = f"the VM ended: {unexpected_end(live.vm.stop_cause, how).reason}"
        if not live.ending:
            live.evict(EvictionKind.ENDED, reason)
        live.agent.abort(reason)
        if not live.ending and self.on_unexpected_end is not None:
            self._tasks.start(self.on_unexpected_end(machine_id, live, how), f"end of VM {machine_id}")

    async def end(
        self, record: Record, why: str = "ended", *, kind: EvictionKind = EvictionKind.ENDED
    ) -> None:
        """Kill a VM's process, connected or orphaned, and close its connections.

        `kind` is `SUSPENDED` for a VM whose guest continues from its saved memory.
        """
        live = self._lives.get(record.id)
        if live is not None:
            live.running, live.ending = False, True
            live.evict(kind, f"the VM was {why}")
            live.agent.abort("the VM was ended")
            await live.vm.kill()
            # Not before: a process that could not be killed is still this VM's.
            self._lives.pop(record.id, None)
            await live.release()
            return
        if kind is EvictionKind.ENDED:
            self.end_suspended(record.id, f"the VM was {why}")
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
