"""What the product knows of a host: VMs, disk layers, saved memory and capacity, all named by ids.

QMP, QEMU's command line, paths, namespaces and cgroups stay behind it. `local.py` implements it with QEMU;
tests of rules have a host in memory.
"""

import functools
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network
from typing import Literal, Protocol, TypeVar

from stead.disk_marks import DiskSpace
from stead.errors import HostError
from stead.guest.agent import Agent
from stead.limits import HostResources
from stead.processes import ProcessId
from stead.settings import Size


@dataclass(frozen=True)
class Progress:
    """Progress of a build: the phase, the current item, and the fraction done when it is known."""

    phase: str
    detail: str
    fraction: float | None
    subject: Literal["base image", "template"] = "base image"
    """What is built."""

    @property
    def title(self) -> str:
        return f"{self.subject}: {self.phase}" if self.phase else self.subject


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class PrivateNetwork:
    """A VPC. Its number, unique in the installation, determines its resources on this host."""

    id: str
    number: int
    cidr: IPv4Network
    account: str | None = None


@dataclass(frozen=True)
class Peer:
    """A WireGuard client of a VPC."""

    public_key: str
    address: IPv4Address


@dataclass(frozen=True)
class WireGuardTunnel:
    """WireGuard into a VPC: the port and key of the host's end, and all clients."""

    network: PrivateNetwork
    port: int
    private_key: str = field(repr=False)
    peers: tuple[Peer, ...]


@dataclass(frozen=True)
class Nic:
    """The VPC that a VM's data NIC is in, by id, and the VM's address there."""

    vpc: str
    address: IPv4Address


@dataclass(frozen=True)
class VmSlot:
    """A VM on this host: its id and slot number, which determine all of its resources, and its VPC.

    A VM of the pool has no account yet.
    """

    machine: str
    number: int
    nic: Nic | None = None
    account: str | None = None


class TemplateUnreadable(HostError):
    """A template may exist, but the host cannot read it now."""


@functools.lru_cache
def template_size(size: Size) -> Size:
    """The size of the template for VMs of a size: it has the smallest disk, which a create grows.

    So the number of templates does not follow from the disk sizes that callers ask for.
    """
    return replace(size, disk_gib=Size.MIN_DISK_GIB)


class Template(Protocol):
    """A VM booted once and saved: new VMs with the same vCPUs and memory are restored from it.

    It never changes. A template of an older version has the disk size of its VMs instead of the smallest.
    """

    @property
    def id(self) -> str: ...
    @property
    def size(self) -> Size: ...
    @property
    def image_key(self) -> str:
        """Hash of what the base image below it is made of."""


@dataclass(frozen=True)
class Disk:
    """The layers of a VM's disk: the one that it writes, read-only files (newest first), the template's."""

    top: str
    frozen: Sequence[str]
    template: Template


class CapturedState(Protocol):
    """Memory and devices of one paused instant. The disk of the same instant is a frozen layer."""

    @property
    def size(self) -> Size: ...
    @property
    def base(self) -> str | None:
        """The template whose memory it is a delta to; None when it is complete."""

    @property
    def memory_bytes(self) -> int: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Pause:
    """How long a VM was paused for a capture, and how many pages were copied meanwhile."""

    seconds: float
    pages: int


class Vm(Protocol):
    """A VM's process. Every order raises HostError when the process has ended."""

    @property
    def process(self) -> ProcessId: ...
    @property
    def ended(self) -> bool: ...
    @property
    def stop_cause(self) -> str | None:
        """Why the guest ended: guest-shutdown, guest-reset, guest-panic, ..."""

    async def wait(self) -> str:
        """Wait until the process has ended; returns how."""

    async def ends_now(self) -> bool:
        """Whether it has ended, or does so in a moment."""

    async def kill(self) -> None: ...
    async def release(self) -> None:
        """Disconnect without ending the process."""

    async def running(self) -> None:
        """Wait until a VM that is being restored has loaded its state and runs."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def resume_if_paused(self) -> None: ...
    async def resume_after_crash(self) -> None:
        """Resume a VM whose capture was interrupted by a crash of the server."""

    async def hold(self) -> None:
        """Pause the guest until `end_hold`, whatever an operation orders meanwhile.

        Unlike every other order it needs no lock: it stops a guest in the middle of an operation too.
        """

    async def end_hold(self) -> None:
        """Let the guest continue, unless an operation has paused it."""

    async def end_if_panicked(self) -> bool:
        """End a VM whose guest panicked while the server was not connected; False if it did not."""

    async def power_down(self) -> None:
        """Send an ACPI power button event: the guest decides whether it shuts down."""

    async def console(self) -> str:
        """The end of the guest's console output, as text; of an ended guest, what was read before."""

    async def add_layer(self, layer: str) -> None:
        """Open an empty layer that can become the writable one."""

    async def drop_layer(self, layer: str) -> None: ...
    async def resize_disk(self, layer: str, size_gib: int) -> None:
        """Grow the writable layer to this size, which it may have already, and notify the guest of it."""

    async def written_layer(self) -> str:
        """The current writable layer."""

    async def capture(
        self, size: Size, base: str | None, *, layer: str, to: str
    ) -> tuple[CapturedState, Pause]:
        """Pause the guest, capture its memory and devices, and resume it on the disk layer `to`.

        On failure the guest may stay paused: what happens to it is for the caller to say.
        """

    async def save_and_pause(self, size: Size, base: str | None, checkpoint: str) -> None:
        """Pause the guest for good and save its memory; it is durable when this returns."""

    def bound_log(self) -> None:
        """Cut the log of a process that prints without end, which a guest can make it do."""


class Restore(Protocol):
    """A process that waits for the state of a captured VM."""

    @property
    def process(self) -> ProcessId: ...
    async def load(self, vm: Vm) -> None:
        """Put memory and devices in place and verify the memory's checksum; the guest stays paused."""


@dataclass(frozen=True)
class Inventory:
    """Processes and resources that exist on this host, whether or not the database knows them."""

    processes: Mapping[ProcessId, str]
    machines: frozenset[str]
    """All VMs that have a process, a folder or a group."""


class HostPlatform(Protocol):
    """What VMs run on."""

    @property
    def accelerator(self) -> str: ...
    @property
    def version(self) -> tuple[int, int, int]: ...
    @property
    def machine(self) -> str: ...


class TemplateStorage(Protocol):
    async def find(self, size: Size) -> Template | None:
        """The template for VMs of a size, without making one."""

    def load(self, template_id: str) -> Template | None:
        """None when it was removed; HostError when the host cannot tell."""

    async def ensure(self, size: Size, report: Report) -> Template:
        """The template for VMs of a size, built when it is missing."""

    async def remove_unused(self, used: Collection[str]) -> list[str]:
        """Remove templates that cannot be restored here any more, but for those `used`; returns their ids."""


class LayerStorage(Protocol):
    """Files of read-only disk layers, by name."""

    def names(self) -> list[str]:
        """All files, but for those of a merge under way."""

    def exists(self, file: str) -> bool: ...
    def is_temporary(self, file: str) -> bool:
        """Whether it is what an interrupted merge left."""

    async def adopt(self, machine: str, layer: str, file: str) -> bool:
        """Move a frozen layer out of its VM's folder; idempotent. False when it is neither there nor here."""

    async def not_adopted(self, layer: str, file: str) -> list[str]:
        """The VMs whose folders still have this layer, if the file does not exist."""

    def allocated(self, file: str) -> int:
        """Bytes that a file occupies on disk."""

    async def sync(self, file: str) -> None:
        """Make a file durable."""

    async def merge(
        self, files: Sequence[str], below: Sequence[str], template: Template, target: str
    ) -> None:
        """Merge the layers `files` into the file `target`, with `below` as its backing files."""

    async def remove(self, files: Sequence[str]) -> None: ...
    async def set_aside(self, file: str) -> None:
        """Move it to the quarantine."""


class CheckpointStorage(Protocol):
    """Saved memory, by id."""

    def ids(self) -> list[str]: ...
    async def read(self, checkpoint: str, size: Size) -> CapturedState:
        """CheckpointUnusable when this host cannot use it; HostError when the next call may succeed."""

    async def save(self, state: CapturedState, checkpoint: str) -> None:
        """It is durable when this returns."""

    async def copy(self, checkpoint: str, to: str) -> None: ...
    def allocated(self, checkpoint: str) -> int: ...
    async def remove(self, checkpoints: Sequence[str]) -> None: ...
    async def set_aside(self, checkpoint: str) -> bool:
        """Move it to the quarantine; False when it does not exist."""


class VmDisks(Protocol):
    """The folder of each VM, with the layers that it writes."""

    async def make_folder(self, vm_slot: VmSlot) -> None:
        """The folder of a new VM. Its address has no connections of the VM that had it before."""

    async def make_layer(self, vm_slot: VmSlot, layer: str, size_gib: int) -> None: ...
    async def grow_layer(self, vm_slot: VmSlot, layer: str, size_gib: int) -> None: ...
    def has_layer(self, machine: str, layer: str) -> bool:
        """HostError when the host cannot tell."""

    def remove_layer(self, machine: str, layer: str) -> None: ...
    def allocated(self, machine: str) -> int:
        """Bytes on disk of the folder of a VM; 0 if it has none."""

    async def sync_layer(self, machine: str, layer: str) -> None: ...


class VmNics(Protocol):
    """The data NICs of VMs."""

    async def join(self, vm_slot: VmSlot) -> None:
        """Make the NIC of a VM that has a process its account's, in its VPC if it is in one."""

    async def end_connections(self, vm_slot: VmSlot) -> None:
        """Delete the tracked connections of a VM that is being deleted, as far as the host can."""

    async def traffic(self) -> Mapping[int, int]:
        """Bytes of IPv4 traffic of each slot so far."""


class PrivateNetworkHost(Protocol):
    """The VPCs on this host."""

    async def open(
        self,
        networks: Collection[PrivateNetwork],
        members: Collection[VmSlot],
        wanted: Callable[[str], None],
    ) -> None:
        """Make this host's VPCs those that are recorded, with these VMs; `wanted` is called with the id of
        a VM that does not run and that another VM of its VPC sends packets to."""

    async def add(self, network: PrivateNetwork) -> None: ...
    async def remove(self, network: PrivateNetwork) -> None:
        """Remove a VPC without VMs from this host; idempotent."""

    async def set_tunnel(self, tunnel: WireGuardTunnel) -> None:
        """Let exactly these clients into a VPC; without any there is no tunnel."""


class Host(Protocol):
    """One host with its VMs: their processes, and the host's capacity."""

    @property
    def slots(self) -> range:
        """The slots of VMs of users."""

    @property
    def templates(self) -> TemplateStorage: ...
    @property
    def layers(self) -> LayerStorage: ...
    @property
    def checkpoints(self) -> CheckpointStorage: ...
    @property
    def disks(self) -> VmDisks: ...
    @property
    def nics(self) -> VmNics: ...
    @property
    def vpcs(self) -> PrivateNetworkHost: ...
    @property
    def resources(self) -> HostResources: ...
    async def platform(self) -> HostPlatform: ...
    def check_capacity(self) -> None:
        """CapacityExceeded when the host lacks memory or disk space for another VM."""

    def check_memory(self, wanted: int) -> None:
        """CapacityExceeded when `wanted` bytes would leave the host with too little memory."""

    def memory_is_short(self) -> bool:
        """Whether programs wait for memory, or it is about to run out."""

    def has_disk_room(self) -> bool: ...
    def disk_space(self) -> DiskSpace:
        """The file system with the disks of VMs."""

    async def restore(self, vm_slot: VmSlot, disk: Disk) -> ProcessId:
        """Start a VM from the memory of its disk's template: the guest knows a disk of that one's size."""

    async def boot(self, vm_slot: VmSlot, size: Size, disk: Disk) -> ProcessId: ...
    def restore_state(
        self, vm_slot: VmSlot, state: CapturedState, disk: Disk
    ) -> AbstractAsyncContextManager[Restore]:
        """Start a VM that waits for captured state; load it inside the block."""

    async def connect(self, machine: str, process: ProcessId) -> Vm:
        """ProcessLookupError when it has ended."""

    def agent(self, vm_slot: VmSlot) -> Agent: ...
    async def dial(self, vm_slot: VmSlot, port: int) -> socket.socket:
        """A TCP connection to a port of a VM, as a non-blocking socket. OSError when the VM refuses it."""

    async def kill(self, process: ProcessId) -> None: ...
    def inventory(self) -> Inventory: ...
    def tidy(self, machine: str) -> None:
        """Remove the runtime files of a VM whose process has ended."""

    async def discard(self, machine: str) -> None:
        """Remove all files of a VM whose process has ended."""

    async def set_aside(self, machine: str) -> None:
        """Move the files of a VM without a row to the quarantine, and discard the rest of it."""

    async def prune_quarantine(self) -> None: ...


T = TypeVar("T")


def narrowed(thing: object, kind: type[T]) -> T:
    """A host gets back what it handed out: TypeError for what another host made."""
    if not isinstance(thing, kind):
        raise TypeError(f"{thing!r} is not of this host")
    return thing
