"""A host in memory, for tests of the VM engine's rules in milliseconds.

A `World` is what survives a crash of the server: processes, disk layers, saved memory. A `FakeHost` is one
server's connection to it: `fail` injects an error, the end of a process or a crash of the server at any call.
Guests have an agent that answers real HTTP. `World.violations` notes what must never happen, such as two
processes with one disk.
"""

import asyncio
import contextlib
import itertools
import json
import secrets
import socket
import struct
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import sqlalchemy as sa

from stead.errors import CapacityExceeded, CheckpointUnusable, DiskSpaceExceeded, HostError
from stead.guest.agent import Agent
from stead.host.interface import (
    Disk,
    Inventory,
    LayerSwitch,
    Pause,
    Place,
    Report,
    Restore,
    Template,
    Vm,
    VmState,
    narrowed,
)
from stead.machines import Machines
from stead.processes import ProcessId
from stead.settings import Settings, Size
from stead.store.database import Database, open_database

DATABASE = "database.write"

T = TypeVar("T")
When = Literal["before", "after"]
_AGENT_NETWORK = 127 << 24 | 1 << 16
"""Each slot has a source address of its own in 127.1.0.0/16, by which the server of all agents knows it."""


class ServerCrashed(BaseException):
    """The server process has ended: nothing that it would still do has an effect."""


# What survives a crash of the server


@dataclass(eq=False)
class Layer:
    name: str
    size_gib: int
    data: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FakeTemplate:
    id: str
    size: Size
    image_key: str = "image"


@dataclass(eq=False)
class FakeState:
    """Memory of one instant, and a copy of the disk of that instant: no other disk goes with it."""

    size: Size
    base: str | None
    memory: dict[str, str]
    cache: dict[str, str]
    disk: dict[str, str]
    corrupt: bool = False
    """Found only when it is loaded."""
    memory_bytes: int = 1 << 20
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass(eq=False)
class Process:
    """A VM's process with its guest."""

    id: ProcessId
    place: Place
    size: Size
    layers: list[Layer]
    """Top first; open, so that renamed and removed ones stay readable."""
    memory: dict[str, str] = field(default_factory=dict)
    cache: dict[str, str] = field(default_factory=dict)
    """Written by the guest, not yet on its disk."""
    spare: dict[str, Layer] = field(default_factory=dict)
    how: str | None = None
    cause: str | None = None
    obeys: bool = True
    """Whether it shuts down when it is asked to."""
    identity: dict[str, Any] = field(default_factory=dict)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    links: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def disk(self) -> dict[str, str]:
        return dict(ChainMap(*(layer.data for layer in self.layers)))

    def sync(self) -> None:
        self.layers[0].data |= self.cache
        self.cache.clear()

    def end(self, how: str = "ended by SIGKILL", cause: str | None = None) -> None:
        if self.how is None:
            self.how, self.cause = how, cause
            self.ended.set()
            for link in self.links:
                link.transport.abort()

    def shut_down(self) -> None:
        if self.obeys and self.how is None:
            self.sync()
            self.end("exited with status 0", "guest-shutdown")


class World:
    def __init__(self) -> None:
        self.processes: dict[ProcessId, Process] = {}
        self.folders: dict[str, dict[str, Layer]] = {}
        """The writable layers of each VM."""
        self.runtime: set[str] = set()
        self.files: dict[str, Layer] = {}
        self.saved: dict[str, FakeState] = {}
        self.unusable: set[str] = set()
        """Checkpoints that this host cannot use any more."""
        self.templates: dict[str, FakeTemplate] = {}
        self.quarantine: list[str] = []
        self.violations: list[str] = []
        self.traffic: dict[int, int] = {}
        self.slots = range(1000)
        self.free_memory = 1 << 40
        self.free_disk = 1 << 40
        self.full_at: int | None = None
        """Files and VMs at which the disk is full."""
        self._pids = itertools.count(1000)
        self._server: asyncio.Server | None = None
        self._address: tuple[Any, ...] = ()

    def alive(self, machine: str) -> list[Process]:
        return [each for each in self.processes.values() if each.place.machine == machine and not each.how]

    def of(self, machine: str) -> Process:
        (process,) = self.alive(machine)
        return process

    def start(self, place: Place, size: Size, disk: Disk, *, awake: bool) -> Process:
        template = self.templates.get(disk.template.id)
        top = self.folders.get(place.machine, {}).get(disk.top)
        missing = [file for file in disk.frozen if file not in self.files]
        if template is None or top is None or missing:
            raise HostError(f"cannot open the disk of VM {place.machine}: {disk.top}, {missing}")
        if self.alive(place.machine):
            self.violations.append(f"two processes of VM {place.machine}")
        if any(each.place.slot == place.slot and not each.how for each in self.processes.values()):
            self.violations.append(f"two processes in slot {place.slot}")
        pid = next(self._pids)
        layers = [top, *(self.files[file] for file in disk.frozen)]
        process = Process(ProcessId(pid, pid), place, size, layers)
        if awake:
            process.awake.set()
        self.processes[process.id] = process
        self.runtime.add(place.machine)
        return process

    def ended_process(self, machine: str) -> None:
        if self.alive(machine):
            self.violations.append(f"files of VM {machine} removed while its process runs")

    @property
    def full(self) -> bool:
        return self.full_at is not None and len(self.files) + len(self.folders) >= self.full_at

    # The agents of all guests

    async def __aenter__(self) -> "World":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._address = self._server.sockets[0].getsockname()
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.end()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def dial(self, place: Place) -> tuple[socket.socket, tuple[Any, ...]]:
        if not self.alive(place.machine):
            raise ConnectionRefusedError
        link = socket.socket()
        link.setblocking(False)
        link.bind((socket.inet_ntoa(struct.pack(">I", _AGENT_NETWORK + place.slot)), 0))
        return link, self._address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = struct.unpack(">I", socket.inet_aton(writer.get_extra_info("peername")[0]))[0]
        slot = source - _AGENT_NETWORK
        found = [each for each in self.processes.values() if each.place.slot == slot and not each.how]
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for process in found:
                process.links.add(writer)
                await self._answer_all(process, reader, writer)
        writer.transport.abort()
        for process in found:
            process.links.discard(writer)

    async def _answer_all(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            await process.awake.wait()
            if process.how is not None:
                return
            status, answer = Guest(process).answer(head[0].split()[1], body)
            writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(answer), answer))
            await writer.drain()


class Guest:
    """What runs inside a VM: an agent, and commands that change its memory, its page cache or its disk."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def answer(self, target: str, body: bytes) -> tuple[int, bytes]:
        match target:
            case "/v1/health":
                return 200, b"{}"
            case "/v1/identity":
                return 200, json.dumps(self._identify(json.loads(body))).encode()
            case "/v1/exec":
                return 200, self._exec(json.loads(body)["argv"])
            case "/v1/sync":
                self._process.sync()
                return 200, b"{}"
            case "/v1/shutdown":
                asyncio.get_running_loop().call_soon(self._process.shut_down)
                return 200, b"{}"
        return 404, b'{"code": "not_found", "message": "no such call"}'

    def _identify(self, wanted: dict[str, Any]) -> dict[str, Any]:
        self._process.identity = {
            **{name: wanted[name] for name in ("machine", "hostname", "machine_id")},
            "address": wanted["network"]["address"],
        }
        keys = {name: text for name, text in wanted["ssh_host_keys"].items() if name.endswith(".pub")}
        return self._process.identity | {
            "nonce": wanted["nonce"],
            "time_ns": time.time_ns(),
            "random": secrets.token_hex(32),
            "boot_id": "boot",
            "kernel": "6",
            "ssh_host_keys": keys,
        }

    def _exec(self, argv: list[str]) -> bytes:
        """`write` is durable, `cache` is in the page cache, `remember` is in memory; each has its reader."""
        process = self._process
        words = argv[-1].split()
        said = ""
        match words:
            case ["write", name, value]:
                process.layers[0].data[name] = value
            case ["cache", name, value]:
                process.cache[name] = value
            case ["remember", name, value]:
                process.memory[name] = value
            case ["read", name]:
                said = (process.disk | process.cache).get(name, "")
            case ["recall", name]:
                said = process.memory.get(name, "")
            case ["resize2fs", _]:
                process.layers[0].data["fs"] = str(process.layers[0].size_gib)
        result = {"exit_code": 0, "signal": None, "timed_out": False, "duration_us": 1, "oom": None}
        frames = ((0, b'{"id": "one", "pid": 1}'), (1, said.encode()), (3, json.dumps(result).encode()))
        return b"".join(struct.pack(">B3xI", kind, len(text)) + text for kind, text in frames)


# One server's connection


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
        self.calls: list[str] = []
        self.states: list[FakeState] = []
        """All captured and opened memory: each is closed by whom it was handed to."""
        self._faults: list[Fault] = []
        self._remaining: int | None = None
        self._agents: list[Agent] = []
        self.templates = FakeTemplates(self)
        self.layers = FakeLayers(self)
        self.checkpoints = FakeCheckpoints(self)

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

    def has_disk_room(self) -> bool:
        return not self.world.full

    # Folders and writable layers

    def make_folder(self, place: Place) -> None:
        with self.call("make_folder"):
            if place.machine in self.world.folders:
                raise HostError(f"the folder of VM {place.machine} exists")
            self.world.folders[place.machine] = {}

    async def make_layer(self, place: Place, layer: str, size_gib: int) -> None:
        with self.call("make_layer"):
            await asyncio.sleep(0)
            folder = self.world.folders.get(place.machine)
            if folder is None:
                raise HostError(f"VM {place.machine} has no folder")
            if layer in folder:
                self.world.violations.append(f"layer {layer} of VM {place.machine} made twice")
            folder[layer] = Layer(layer, size_gib)

    async def grow_layer(self, machine: str, layer: str, size_gib: int) -> None:
        with self.call("grow_layer"):
            self.world.folders[machine][layer].size_gib = size_gib

    def has_layer(self, machine: str, layer: str) -> bool:
        with self.call("has_layer"):
            return layer in self.world.folders.get(machine, {})

    def remove_layer(self, machine: str, layer: str) -> None:
        with self.call("remove_layer"):
            if any(process.layers[0].name == layer for process in self.world.alive(machine)):
                self.world.violations.append(f"layer {layer} removed while VM {machine} writes it")
            self.world.folders.get(machine, {}).pop(layer, None)

    async def sync_layer(self, machine: str, layer: str) -> None:
        with self.call("sync_layer"):
            await asyncio.sleep(0)
            if layer not in self.world.folders.get(machine, {}):
                raise HostError(f"layer {layer} does not exist")

    async def sync_frozen(self, file: str) -> None:
        with self.call("sync_frozen"):
            if file not in self.world.files:
                raise HostError(f"layer {file} does not exist")

    # Processes

    async def restore(self, place: Place, disk: Disk) -> ProcessId:
        with self.call("restore"):
            await asyncio.sleep(0)
            return self.world.start(place, disk.template.size, disk, awake=True).id

    async def boot(self, place: Place, size: Size, disk: Disk) -> ProcessId:
        with self.call("boot"):
            await asyncio.sleep(0)
            return self.world.start(place, size, disk, awake=True).id

    @contextlib.asynccontextmanager
    async def restore_state(self, place: Place, state: VmState, disk: Disk) -> AsyncIterator[Restore]:
        captured = narrowed(state, FakeState)
        with self.call("restore_state"):
            await asyncio.sleep(0)
            if captured.closed:
                self.world.violations.append("closed memory restored")
            if captured.base is not None and captured.base not in self.world.templates:
                raise CheckpointUnusable("its template is missing")
            process = self.world.start(place, captured.size, disk, awake=False)
        yield FakeRestore(self, process, captured)

    async def connect(self, machine: str, process: ProcessId) -> Vm:
        with self.call("connect"):
            await asyncio.sleep(0)
            found = self.world.processes[process]
            if found.how is not None:
                raise ProcessLookupError(process.pid)
            return FakeVm(self, found)

    def agent(self, place: Place) -> Agent:
        agent = Agent(lambda: self.world.dial(place), place.machine)
        self._agents.append(agent)
        return agent

    async def kill(self, process: ProcessId) -> None:
        with self.call("kill"):
            await asyncio.sleep(0)
            if process in self.world.processes:
                self.world.processes[process].end()

    def inventory(self) -> Inventory:
        with self.call("inventory"):
            alive = {each.id: each.place.machine for each in self.world.processes.values() if not each.how}
            return Inventory(alive, frozenset({*self.world.folders, *self.world.runtime}), frozenset())

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

    async def traffic(self) -> Mapping[int, int]:
        return dict(self.world.traffic)


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
            process.awake.clear()

    async def resume(self) -> None:
        async with self._order("resume") as process:
            process.awake.set()

    async def resume_if_paused(self) -> None:
        async with self._order("resume_if_paused") as process:
            process.awake.set()

    async def resume_after_crash(self) -> None:
        async with self._order("resume_after_crash") as process:
            process.awake.set()

    async def power_down(self) -> None:
        async with self._order("power_down") as process:
            process.shut_down()

    async def console(self) -> str:
        return "console"

    async def add_layer(self, layer: str) -> None:
        async with self._order("add_layer") as process:
            process.spare[layer] = self._host.world.folders[process.place.machine][layer]

    async def drop_layer(self, layer: str) -> None:
        async with self._order("drop_layer") as process:
            process.spare.pop(layer, None)

    async def written_layer(self) -> str:
        async with self._order("written_layer") as process:
            return process.layers[0].name

    async def capture(self, size: Size, base: str | None, switch: LayerSwitch) -> tuple[VmState, Pause]:
        async with self._order("capture") as process:
            process.awake.clear()
        async with self._order("switch") as process:
            state = self._state(size, base)
            if process.layers[0].name != switch.layer:
                self._host.world.violations.append("switched from a layer that is not the top")
            process.layers.insert(0, process.spare.pop(switch.to))
        await self.resume()
        self._host.states.append(state)
        return state, Pause(0.0, 1)

    async def save_and_pause(self, size: Size, base: str | None, checkpoint: str) -> None:
        async with self._order("pause") as process:
            process.awake.clear()
        async with self._order("save_and_pause"):
            self._host.world.saved[checkpoint] = self._state(size, base)

    def _state(self, size: Size, base: str | None) -> FakeState:
        process = self._process
        return FakeState(size, base, dict(process.memory), dict(process.cache), process.disk)

    def bound_log(self) -> None:
        pass


class FakeTemplates:
    def __init__(self, host: FakeHost) -> None:
        self._host = host

    async def find(self, size: Size) -> Template | None:
        return self.load(f"template-{size}")

    def load(self, template_id: str) -> Template | None:
        return self._host.world.templates.get(template_id)

    async def ensure(self, size: Size, report: Report) -> Template:
        with self._host.call("templates.ensure"):
            await asyncio.sleep(0)
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

    async def read(self, checkpoint: str, size: Size) -> VmState:
        with self._host.call("checkpoints.read"):
            await asyncio.sleep(0)
            kept = self._world.saved.get(checkpoint)
            if kept is None or checkpoint in self._world.unusable or kept.size != size:
                raise CheckpointUnusable("saved by another version")
            state = FakeState(kept.size, kept.base, kept.memory, kept.cache, kept.disk, kept.corrupt)
            self._host.states.append(state)
            return state

    async def save(self, state: VmState, checkpoint: str) -> None:
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


class CrashingDatabase(Database):
    """A database of a server that may crash before or after a write. Without threads, which is faster."""

    def __init__(self, path: Path, host: FakeHost) -> None:
        super().__init__(path)
        self._host = host

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        with self._host.call(DATABASE):
            await asyncio.sleep(0)
            with self._engine.begin() as connection:
                return work(connection)

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        with self.look_up() as connection:
            return work(connection)

    def look_up(self) -> contextlib.AbstractContextManager[sa.Connection]:
        if self._host.dead:
            raise ServerCrashed
        return super().look_up()


class FakeServer:
    """The engine on a world and a database; both outlive it."""

    empty_database = b""
    """Shared: a migration takes longer than most tests."""

    def __init__(self, world: World, settings: Settings) -> None:
        self.world = world
        self.settings = settings
        self._path = settings.data / "stead.db"
        self._exits = contextlib.AsyncExitStack()

    async def start(self) -> None:
        if not FakeServer.empty_database:
            await (await open_database(self._path)).dispose()
            FakeServer.empty_database = self._path.read_bytes()
        elif not self._path.exists():
            self._path.write_bytes(FakeServer.empty_database)
        self.host = FakeHost(self.world)
        self._database = CrashingDatabase(self._path, self.host)
        self.machines = Machines(self.settings, self._database, self.host)
        self._exits = contextlib.AsyncExitStack()
        await self._exits.enter_async_context(self.machines.recovered())

    async def stop(self) -> None:
        try:
            await self._exits.aclose()
        finally:
            await self.host.disconnect()
            await self._database.dispose()

    async def crash(self) -> None:
        """End the server: nothing that it does on its way out reaches the host or the database."""
        self.host.dead = True
        with contextlib.suppress(ServerCrashed):
            await self.stop()

    async def quiet(self) -> None:
        """Wait for the background work of the engine."""
        await self.machines._tasks.join()

    async def watched(self) -> None:
        """Wait until the engine has seen every process that has ended, and for its background work."""
        for live in list(self.machines.processes._lives.values()):
            if live.vm.ended and live.watcher is not None:
                await asyncio.wait({live.watcher})
        await self.quiet()
