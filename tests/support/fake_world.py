"""What survives a crash of the server, in memory: processes, disk layers, saved memory, and guests.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stead.disk_marks import DiskSpace
from stead.errors import HostError
from stead.host.interface import Disk, PrivateNetwork, VmSlot, WireGuardTunnel
from stead.limits import HostResources
from stead.processes import ProcessId
from stead.settings import Size
from support.fake_sessions import FakeSessions

_AGENT_NETWORK = 127 << 24 | 1 << 16
"""Each slot has a source address of its own in 127.1.0.0/16, by which the server of all agents knows it."""


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
    disk_gib: int
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
    vm_slot: VmSlot
    size: Size
    layers: list[Layer]
    """Top first; open, so that renamed and removed ones stay readable."""
    disk_gib: int
    """The size of the disk that the guest's kernel knows; in a restored guest, that of the saved memory."""
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
    sessions: FakeSessions = field(default_factory=FakeSessions)

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
        self.networks: dict[str, PrivateNetwork] = {}
        self.tunnels: dict[str, WireGuardTunnel] = {}
        self.traffic: dict[int, int] = {}
        self.ports: dict[int, tuple[str, int]] = {}
        """Where the ports of all VMs really are."""
        self.on_ssh: Callable[[str, dict[str, Any]], dict[str, Any]] | None = None
        """Answers the agents' call about SSH, by VM."""
        self.slots = range(1000)
        self.resources = HostResources(cpus=16, memory_mib=1 << 20, disk_gib=1 << 16)
        self.free_memory = 1 << 40
        self.memory_short = False
        self.disk_space: Callable[[], DiskSpace] = lambda: DiskSpace(1 << 40, 1 << 41)
        """The file system with the disks of VMs."""
        self.full_at: int | None = None
        """Files and VMs at which the disk is full."""
        self._pids = itertools.count(1000)
        self._server: asyncio.Server | None = None
        self._address: tuple[Any, ...] = ()

    def alive(self, machine: str) -> list[Process]:
        return [each for each in self.processes.values() if each.vm_slot.machine == machine and not each.how]

    def of(self, machine: str) -> Process:
        (process,) = self.alive(machine)
        return process

    def start(
        self, vm_slot: VmSlot, size: Size, disk: Disk, *, awake: bool, disk_gib: int | None = None
    ) -> Process:
        """Start a process; `disk_gib` is what the kernel of a restored guest knows of its disk."""
        template = self.templates.get(disk.template.id)
        top = self.folders.get(vm_slot.machine, {}).get(disk.top)
        missing = [file for file in disk.frozen if file not in self.files]
        if template is None or top is None or missing:
            raise HostError(f"cannot open the disk of VM {vm_slot.machine}: {disk.top}, {missing}")
        if self.alive(vm_slot.machine):
            self.violations.append(f"two processes of VM {vm_slot.machine}")
        if any(each.vm_slot.number == vm_slot.number and not each.how for each in self.processes.values()):
            self.violations.append(f"two processes in slot {vm_slot.number}")
        pid = next(self._pids)
        layers = [top, *(self.files[file] for file in disk.frozen)]
        process = Process(ProcessId(pid, pid), vm_slot, size, layers, disk_gib or top.size_gib)
        self.join(process, vm_slot)
        if awake:
            process.awake.set()
        self.processes[process.id] = process
        self.runtime.add(vm_slot.machine)
        return process

    def join(self, process: Process, vm_slot: VmSlot) -> None:
        """The VM of a process is in the VPC of this place from now on, if it names one."""
        process.vm_slot = vm_slot
        if vm_slot.nic is None:
            return
        if vm_slot.nic.vpc not in self.networks:
            raise HostError(f"VPC {vm_slot.nic.vpc} does not exist")
        others = (each for each in self.processes.values() if each is not process and not each.how)
        if any(each.vm_slot.nic == vm_slot.nic for each in others):
            self.violations.append(f"two VMs with {vm_slot.nic}")

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

    async def dial(self, vm_slot: VmSlot) -> tuple[socket.socket, tuple[Any, ...]]:
        if not self.alive(vm_slot.machine):
            raise ConnectionRefusedError
        link = socket.socket()
        link.setblocking(False)
        link.bind((socket.inet_ntoa(struct.pack(">I", _AGENT_NETWORK + vm_slot.number)), 0))
        return link, self._address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        source = struct.unpack(">I", socket.inet_aton(writer.get_extra_info("peername")[0]))[0]
        slot = source - _AGENT_NETWORK
        found = [each for each in self.processes.values() if each.vm_slot.number == slot and not each.how]
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
            if head[0].split()[1].startswith(("/v1/sessions", "/v1/connect")):
                await process.sessions.serve(head[0], headers, body, reader, writer)
                if headers.get("connection") == "upgrade":
                    return
                continue
            status, answer = Guest(process, self).answer(head[0].split()[1], body)
            writer.write(b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(answer), answer))
            await writer.drain()


class Guest:
    """What runs inside a VM: an agent, and commands that change its memory, its page cache or its disk."""

    def __init__(self, process: Process, world: World) -> None:
        self._process = process
        self._world = world

    def answer(self, target: str, body: bytes) -> tuple[int, bytes]:
        match target:
            case "/v1/health":
                return 200, b"{}"
            case "/v1/identity":
                return 200, json.dumps(self._identify(json.loads(body))).encode()
            case "/v1/exec":
                return 200, self._exec(json.loads(body)["argv"])
            case "/v1/ssh" if self._world.on_ssh is not None:
                asked = self._world.on_ssh(self._process.vm_slot.machine, json.loads(body))
                return 200, json.dumps(asked).encode()
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
        said, failure = "", ""
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
            case _ if "resize2fs" in words:
                # Only when the kernel knows a disk of so many sectors.
                if process.disk_gib << 21 < int(words[words.index("-ge") + 1]):
                    failure = f"the guest's disk has {process.disk_gib << 21} sectors"
                else:
                    process.layers[0].data["fs"] = str(process.disk_gib)
        status = 1 if failure else 0
        result = {"exit_code": status, "signal": None, "timed_out": False, "duration_us": 1, "oom": None}
        started, ended = b'{"id": "one", "pid": 1}', json.dumps(result).encode()
        frames = ((0, started), (1, said.encode()), (2, failure.encode()), (3, ended))
        return b"".join(struct.pack(">B3xI", kind, len(text)) + text for kind, text in frames)
