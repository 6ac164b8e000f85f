"""A host in memory, for tests of the VM engine's rules in milliseconds.

A `FakeHost` is one server's connection to a `World`: `fail` injects an error, the end of a process or a crash
of the server at any call.
"""

import asyncio
import contextlib
import socket
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stead.disk_marks import DiskSpace
from stead.errors import CapacityExceeded, CheckpointUnusable, DiskSpaceExceeded, HostError
from stead.guest.agent import Agent
from stead.host.interface import (
    CapturedState,
    Disk,
    Inventory,
    Pause,
    PrivateNetwork,
    Report,
    Restore,
    Template,
    Vm,
    VmSlot,
    WireGuardTunnel,
    narrowed,
    template_size,
)
from stead.limits import HostResources
from stead.processes import ProcessId
from stead.settings import Size
from support.fake_world import FakeState, FakeTemplate, Layer, Process, World

DATABASE = "database.write"
When = Literal["before", "after"]


class ServerCrashed(BaseException):
    """The server process has ended: nothing that it would still do has an effect."""


@dataclass
class Fault:
    call: str | None
    act: Callable[[], None]
    skip: int
    when: When

    def hits(self, name: str, when: When) -> bool:
        """Only a crash comes at a write of the database."""
        return when == self.when and (self.call == name or (self.call is None and name != DATABASE))


class FakeHost:
    """The host as one server sees it, until that server crashes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dead = False
        self.wanted: Callable[[str], None] = lambda machine: None
        self.calls: list[str] = []
        self.states: list[FakeState] = []
        """All captured and opened memory: each is closed by whom it was handed to."""
        self.bounded: list[str] = []
        """VMs whose log was cut, if it was long."""
        self._faults: list[Fault] = []
        self._remaining: int | None = None
        self._agents: list[Agent] = []
        self.templates = FakeTemplates(self)
        self.layers = FakeLayers(self)
        self.checkpoints = FakeCheckpoints(self)
        self.disks = FakeDisks(self)
        self.nics = FakeNics(self)
        self.vpcs = FakeVpcs(self)

    # Faults

    def fail(
        self,
        call: str | None,
        error: BaseException | Callable[[], object],
        *,
        skip: int = 0,
        when: When = "before",
    ) -> None:
        """At a call (None is any), after `skip` such calls: raise an error or run a function, once."""

        def act() -> None:
            if isinstance(error, BaseException):
                raise error
            error()

        self._faults.append(Fault(call, act, skip, when))

    def crash_after(self, count: int) -> None:
        """Crash the server after so many calls and writes of the database."""
        self._remaining = count

    @property
    def has_faults(self) -> bool:
        """Whether an injected fault has not come yet."""
        return bool(self._faults) or (self._remaining is not None and not self.dead)

    def forget_faults(self) -> None:
        self._faults.clear()
        self._remaining = None

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        self._reach(name, "before")
        self.calls.append(name)
        yield
        self._reach(name, "after")
        if self._remaining is not None:
            self._remaining -= 1
            self.dead = self._remaining <= 0
            if self.dead:
                raise ServerCrashed

    def _reach(self, name: str, when: When) -> None:
        if self.dead:
            raise ServerCrashed
        for fault in list(self._faults):
            if fault.hits(name, when):
                fault.skip -= 1
                if fault.skip < 0:
                    self._faults.remove(fault)
                    fault.act()

    async def disconnect(self) -> None:
        """The server has ended: its connections are closed, whatever it did with them."""
        self.dead = True
        for agent in self._agents:
            agent.abort("the server has ended")
            await agent.close()

    # Capacity

    @property
    def slots(self) -> range:
        return self.world.slots

    @property
    def resources(self) -> HostResources:
        return self.world.resources

    async def platform(self) -> "FakePlatform":
        return FakePlatform()

    def check_capacity(self) -> None:
        with self.call("check_capacity"):
            self.check_memory(0)
            if not self.has_disk_room():
                raise DiskSpaceExceeded("the disk is full")

    def check_memory(self, wanted: int) -> None:
        if wanted > self.world.free_memory:
            raise CapacityExceeded("not enough memory")

    def memory_is_short(self) -> bool:
        return self.world.memory_short

    def has_disk_room(self) -> bool:
        return not self.world.full

    def disk_space(self) -> DiskSpace:
        return self.world.disk_space()

    # Processes

    async def restore(self, vm_slot: VmSlot, disk: Disk) -> ProcessId:
        with self.call("restore"):
            await asyncio.sleep(0)
            size = disk.template.size
            return self.world.start(vm_slot, size, disk, awake=True, disk_gib=size.disk_gib).id

    async def boot(self, vm_slot: VmSlot, size: Size, disk: Disk) -> ProcessId:
        with self.call("boot"):
            await asyncio.sleep(0)
            return self.world.start(vm_slot, size, disk, awake=True).id

    @contextlib.asynccontextmanager
    async def restore_state(
        self, vm_slot: VmSlot, state: CapturedState, disk: Disk
    ) -> AsyncIterator[Restore]:
        captured = narrowed(state, FakeState)
        with self.call("restore_state"):
            await asyncio.sleep(0)
            if captured.closed:
                self.world.violations.append("closed memory restored")
            if captured.base is not None and captured.base not in self.world.templates:
                raise CheckpointUnusable("its template is missing")
            gib = captured.disk_gib
            process = self.world.start(vm_slot, captured.size, disk, awake=False, disk_gib=gib)
        yield FakeRestore(self, process, captured)

    async def connect(self, machine: str, process: ProcessId) -> Vm:
        with self.call("connect"):
            await asyncio.sleep(0)
            found = self.world.processes[process]
            if found.how is not None:
                raise ProcessLookupError(process.pid)
            return FakeVm(self, found)

    def agent(self, vm_slot: VmSlot) -> Agent:
        agent = Agent(lambda: self.world.dial(vm_slot), vm_slot.machine)
        self._agents.append(agent)
        return agent

    async def dial(self, vm_slot: VmSlot, port: int) -> socket.socket:
        with self.call("dial"):
            if not self.world.alive(vm_slot.machine):
                raise ConnectionRefusedError
            link = socket.socket()
            link.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(link, self.world.ports[port])
            except BaseException:
                link.close()
                raise
            return link

    async def kill(self, process: ProcessId) -> None:
        with self.call("kill"):
            await asyncio.sleep(0)
            if process in self.world.processes:
                self.world.processes[process].end()

    def inventory(self) -> Inventory:
        with self.call("inventory"):
            alive = {each.id: each.vm_slot.machine for each in self.world.processes.values() if not each.how}
            return Inventory(alive, frozenset({*alive.values(), *self.world.folders, *self.world.runtime}))

    def tidy(self, machine: str) -> None:
        with self.call("tidy"):
            self.world.ended_process(machine)
            self.world.runtime.discard(machine)

    async def discard(self, machine: str) -> None:
        with self.call("discard"):
            await asyncio.sleep(0)
            self.world.ended_process(machine)
            self.world.runtime.discard(machine)
            self.world.folders.pop(machine, None)

    async def set_aside(self, machine: str) -> None:
        with self.call("set_aside"):
            self.world.runtime.discard(machine)
            if self.world.folders.pop(machine, None) is not None:
                self.world.quarantine.append(machine)

    async def prune_quarantine(self) -> None:
        pass


@dataclass(frozen=True)
class FakePlatform:
    accelerator: str = "fake"
    version: tuple[int, int, int] = (1, 0, 0)
    machine: str = "fake"


class FakeRestore:
    def __init__(self, host: FakeHost, process: Process, state: FakeState) -> None:
        self._host = host
        self._process = process
        self._state = state

    @property
    def process(self) -> ProcessId:
        return self._process.id

    async def load(self, vm: Vm) -> None:
        with self._host.call("load"):
            await asyncio.sleep(0)
            if self._state.corrupt:
                raise CheckpointUnusable("checksum mismatch")
            if self._process.disk != self._state.disk:
                self._host.world.violations.append("memory restored on the disk of another instant")
            self._process.memory |= self._state.memory
            self._process.cache |= self._state.cache


class FakeVm:
    def __init__(self, host: FakeHost, process: Process) -> None:
        self._host = host
        self._process = process
        self._held = False
        self._paused = False

    @property
    def process(self) -> ProcessId:
        return self._process.id

    @property
    def ended(self) -> bool:
        return self._process.how is not None

    @property
    def stop_cause(self) -> str | None:
        return self._process.cause

    async def wait(self) -> str:
        await self._process.ended.wait()
        return self._process.how or ""

    async def ends_now(self) -> bool:
        await asyncio.sleep(0)
        return self.ended

    async def kill(self) -> None:
        with self._host.call("vm.kill"):
            await asyncio.sleep(0)
            self._process.end()

    async def release(self) -> None:
        await asyncio.sleep(0)

    @contextlib.asynccontextmanager
    async def _order(self, name: str) -> AsyncIterator[Process]:
        with self._host.call(f"vm.{name}"):
            await asyncio.sleep(0)
            if self.ended:
                raise HostError(f"cannot {name}: QEMU has ended")
            yield self._process

    async def running(self) -> None:
        async with self._order("running"):
            pass

    async def pause(self) -> None:
        async with self._order("pause") as process:
            self._pause(process)

    async def resume(self) -> None:
        async with self._order("resume") as process:
            self._continue(process)

    async def resume_if_paused(self) -> None:
        async with self._order("resume_if_paused") as process:
            self._continue(process)

    async def resume_after_crash(self) -> None:
        async with self._order("resume_after_crash") as process:
            self._continue(process)

    def _pause(self, process: Process) -> None:
        self._paused = True
        process.awake.clear()

    def _continue(self, process: Process) -> None:
        self._paused = False
        if not self._held:
            process.awake.set()

    async def hold(self) -> None:
        async with self._order("hold") as process:
            self._held = True
            process.awake.clear()

    async def end_hold(self) -> None:
        async with self._order("end_hold") as process:
            self._held = False
            if not self._paused:
                process.awake.set()

    async def power_down(self) -> None:
        async with self._order("power_down") as process:
            process.shut_down()

    async def end_if_panicked(self) -> bool:
        return False

    async def console(self) -> str:
        return "console"

    async def add_layer(self, layer: str) -> None:
        async with self._order("add_layer") as process:
            process.spare[layer] = self._host.world.folders[process.vm_slot.machine][layer]

    async def drop_layer(self, layer: str) -> None:
        async with self._order("drop_layer") as process:
            process.spare.pop(layer, None)

    async def resize_disk(self, layer: str, size_gib: int) -> None:
        async with self._order("resize_disk") as process:
            if process.layers[0].name != layer:
                self._host.world.violations.append("grew a layer that is not the top")
            process.layers[0].size_gib = process.disk_gib = size_gib

    async def written_layer(self) -> str:
        async with self._order("written_layer") as process:
            return process.layers[0].name

    async def capture(
        self, size: Size, base: str | None, *, layer: str, to: str
    ) -> tuple[CapturedState, Pause]:
        async with self._order("capture") as process:
            self._pause(process)
        async with self._order("switch") as process:
            state = self._state(size, base)
            if process.layers[0].name != layer:
                self._host.world.violations.append("switched from a layer that is not the top")
            process.layers.insert(0, process.spare.pop(to))
        await self.resume()
        self._host.states.append(state)
        return state, Pause(0.0, 1)

    async def save_and_pause(self, size: Size, base: str | None, checkpoint: str) -> None:
        async with self._order("pause") as process:
            self._pause(process)
        async with self._order("save_and_pause"):
            self._host.world.saved[checkpoint] = self._state(size, base)

    def _state(self, size: Size, base: str | None) -> FakeState:
        process = self._process
        memory, cache = dict(process.memory), dict(process.cache)
        return FakeState(size, base, memory, cache, process.disk, process.disk_gib)

    def bound_log(self) -> None:
        self._host.bounded.append(self._process.vm_slot.machine)


class FakeDisks:
    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._world = host.world

    async def make_folder(self, vm_slot: VmSlot) -> None:
        with self._host.call("disks.make_folder"):
            if vm_slot.machine in self._world.folders:
                raise HostError(f"the folder of VM {vm_slot.machine} exists")
            self._world.folders[vm_slot.machine] = {}

    async def make_layer(self, vm_slot: VmSlot, layer: str, size_gib: int) -> None:
        with self._host.call("disks.make_layer"):
            await asyncio.sleep(0)
            folder = self._world.folders.get(vm_slot.machine)
            if folder is None:
                raise HostError(f"VM {vm_slot.machine} has no folder")
            if layer in folder:
                self._world.violations.append(f"layer {layer} of VM {vm_slot.machine} made twice")
            folder[layer] = Layer(layer, size_gib)

    async def grow_layer(self, vm_slot: VmSlot, layer: str, size_gib: int) -> None:
        with self._host.call("disks.grow_layer"):
            self._world.folders[vm_slot.machine][layer].size_gib = size_gib

    def has_layer(self, machine: str, layer: str) -> bool:
        with self._host.call("disks.has_layer"):
            return layer in self._world.folders.get(machine, {})

    def remove_layer(self, machine: str, layer: str) -> None:
        with self._host.call("disks.remove_layer"):
            if any(process.layers[0].name == layer for process in self._world.alive(machine)):
                self._world.violations.append(f"layer {layer} removed while VM {machine} writes it")
            self._world.folders.get(machine, {}).pop(layer, None)

    def allocated(self, machine: str) -> int:
        return sum(1 + len(layer.data) for layer in self._world.folders.get(machine, {}).values())

    async def sync_layer(self, machine: str, layer: str) -> None:
        with self._host.call("disks.sync_layer"):
            await asyncio.sleep(0)
            if layer not in self._world.folders.get(machine, {}):
                raise HostError(f"layer {layer} does not exist")


class FakeNics:
    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._world = host.world

    async def join(self, vm_slot: VmSlot) -> None:
        with self._host.call("nics.join"):
            await asyncio.sleep(0)
            self._world.join(self._world.of(vm_slot.machine), vm_slot)

    async def traffic(self) -> Mapping[int, int]:
        return dict(self._world.traffic)

    async def end_connections(self, vm_slot: VmSlot) -> None:
        with self._host.call("nics.end_connections"):
            await asyncio.sleep(0)


class FakeVpcs:
    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._world = host.world

    async def open(
        self, networks: Collection[PrivateNetwork], members: Collection[VmSlot], wanted: Callable[[str], None]
    ) -> None:
        with self._host.call("vpcs.open"):
            self._world.networks = {each.id: each for each in networks}
            self._host.wanted = wanted

    async def add(self, network: PrivateNetwork) -> None:
        with self._host.call("vpcs.add"):
            self._world.networks[network.id] = network

    async def remove(self, network: PrivateNetwork) -> None:
        with self._host.call("vpcs.remove"):
            self._world.networks.pop(network.id, None)
            self._world.tunnels.pop(network.id, None)

    async def set_tunnel(self, tunnel: WireGuardTunnel) -> None:
        with self._host.call("vpcs.set_tunnel"):
            self._world.tunnels[tunnel.network.id] = tunnel


class FakeTemplates:
    def __init__(self, host: FakeHost) -> None:
        self._host = host

    async def find(self, size: Size) -> Template | None:
        return self.load(f"template-{template_size(size)}")

    def load(self, template_id: str) -> Template | None:
        return self._host.world.templates.get(template_id)

    async def ensure(self, size: Size, report: Report) -> Template:
        with self._host.call("templates.ensure"):
            await asyncio.sleep(0)
            size = template_size(size)
            template = FakeTemplate(f"template-{size}", size)
            return self._host.world.templates.setdefault(template.id, template)

    async def remove_unused(self, used: Collection[str]) -> list[str]:
        return []


class FakeLayers:
    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._world = host.world

    def names(self) -> list[str]:
        return list(self._world.files)

    def exists(self, file: str) -> bool:
        return file in self._world.files

    def is_temporary(self, file: str) -> bool:
        return False

    async def adopt(self, machine: str, layer: str, file: str) -> bool:
        with self._host.call("layers.adopt"):
            await asyncio.sleep(0)
            frozen = self._world.folders.get(machine, {}).pop(layer, None)
            if frozen is not None:
                self._world.files[file] = frozen
            return file in self._world.files

    async def not_adopted(self, layer: str, file: str) -> list[str]:
        if file in self._world.files:
            return []
        return [machine for machine, folder in self._world.folders.items() if layer in folder]

    def allocated(self, file: str) -> int:
        return len(self._world.files[file].data) + 1

    async def sync(self, file: str) -> None:
        with self._host.call("layers.sync"):
            if file not in self._world.files:
                raise HostError(f"layer {file} does not exist")

    async def merge(
        self, files: Sequence[str], below: Sequence[str], template: Template, target: str
    ) -> None:
        with self._host.call("layers.merge"):
            await asyncio.sleep(0)
            layers = [self._world.files[file] for file in files]
            merged = dict(ChainMap(*(layer.data for layer in layers)))
            self._world.files[target] = Layer(target, layers[0].size_gib, merged)

    async def remove(self, files: Sequence[str]) -> None:
        with self._host.call("layers.remove"):
            for file in files:
                self._world.files.pop(file, None)

    async def set_aside(self, file: str) -> None:
        with self._host.call("layers.set_aside"):
            self._world.quarantine.append(file)
            del self._world.files[file]


class FakeCheckpoints:
    def __init__(self, host: FakeHost) -> None:
        self._host = host
        self._world = host.world

    def ids(self) -> list[str]:
        return list(self._world.saved)

    async def read(self, checkpoint: str, size: Size) -> CapturedState:
        with self._host.call("checkpoints.read"):
            await asyncio.sleep(0)
            kept = self._world.saved.get(checkpoint)
            if kept is None or checkpoint in self._world.unusable or kept.size != size:
                raise CheckpointUnusable("saved by another version")
            state = replace(kept, closed=False)
            self._host.states.append(state)
            return state

    async def save(self, state: CapturedState, checkpoint: str) -> None:
        with self._host.call("checkpoints.save"):
            await asyncio.sleep(0)
            self._world.saved[checkpoint] = narrowed(state, FakeState)

    async def copy(self, checkpoint: str, to: str) -> None:
        with self._host.call("checkpoints.copy"):
            await asyncio.sleep(0)
            self._world.saved[to] = self._world.saved[checkpoint]

    def allocated(self, checkpoint: str) -> int:
        return 1 + len(self._world.saved[checkpoint].memory)

    async def remove(self, checkpoints: Sequence[str]) -> None:
        with self._host.call("checkpoints.remove"):
            for checkpoint in checkpoints:
                self._world.saved.pop(checkpoint, None)

    async def set_aside(self, checkpoint: str) -> bool:
        with self._host.call("checkpoints.set_aside"):
            if self._world.saved.pop(checkpoint, None) is None:
                return False
            self._world.quarantine.append(checkpoint)
            return True
