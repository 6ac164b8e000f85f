"""QEMU's command line, as pure data. No argument is the path of a file: QEMU inherits descriptors."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stead import addresses
from stead.host import console
from stead.settings import Size

# Without no_timer_check a kernel that is emulated on a busy host may take its timer for broken and give up.
_KERNEL_ARGUMENTS = (
    "root=/dev/vda rw console=ttyS0 quiet net.ifnames=0 mitigations=off panic=-1 no_timer_check"
    # Not used: pressure statistics, TOMOYO and BPF as security modules, which would run with every system
    # call, and the watchdog for lockups, which would wake an idle machine and take a busy host for one.
    " psi=0 lsm=landlock,lockdown,yama,integrity,apparmor nowatchdog"
)
_UNANNOUNCED = "guest_announce=off"
SECCOMP = ("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")

Node = dict[str, object]


@dataclass(frozen=True)
class QemuPlatform:
    """The platform of saved memory: it can be restored only on the same one."""

    accelerator: Literal["kvm", "tcg"]
    version: tuple[int, int, int]
    machine: str
    host_cpu: str = ""
    """Hash of the host's CPU model under KVM; empty under emulation."""
    announced: bool = False
    """Whether a restored guest announces itself on its NICs; guests of older versions have to."""

    @property
    def cpu(self) -> str:
        # Emulated vector instructions are slow: an old CPU model is the fastest under TCG.
        return "host,migratable=on" if self.accelerator == "kvm" else "Nehalem-v1"

    @property
    def kernel_arguments(self) -> str:
        if self.accelerator == "kvm" or self.version >= (8, 0, 0):
            return _KERNEL_ARGUMENTS
        # QEMU leaves garbage in the flags after CMPXCHG16B, and an interrupt at that moment ends in a double
        # fault: one in about seven hundred new guests. Programs still have the instruction.
        return f"{_KERNEL_ARGUMENTS} clearcpuid=cx16"

    @property
    def read_only_memory_files(self) -> bool:
        """Whether RAM can be a private mapping of a file that QEMU may not write (8.2 and later)."""
        return self.version >= (8, 2, 0)


@dataclass(frozen=True)
class Memory:
    """The backing of guest RAM: anonymous, a template's file (shared) or a private mapping of one."""

    kind: Literal["own", "template", "copy"]
    descriptor: int = -1


@dataclass(frozen=True)
class KernelBoot:
    """Descriptors of the kernel and its initrd."""

    kernel: int
    initrd: int
    generation: str = "auto"
    """The id that vmgenid shows to the guest."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.kernel, self.initrd


@dataclass(frozen=True)
class OpenLayer:
    """A disk layer that is open for a QEMU."""

    name: str
    format: Literal["raw", "qcow2"]
    reading: int
    writing: int | None = None
    """A second descriptor of a layer that is written. QEMU returns to the first when the layer is frozen."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.reading,) if self.writing is None else (self.reading, self.writing)


@dataclass(frozen=True)
class Saved:
    """Device state to restore, in an inherited descriptor."""

    descriptor: int
    deferred: bool = False
    """Start paused and load it on command, after the memory is in place."""
    generation: str = "auto"
    """The id of vmgenid. Another one than the saved memory has tells the guest's kernel that it is a copy."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        return (self.descriptor,)

    @property
    def uri(self) -> str:
        return f"fd:{self.descriptor}"


@dataclass(frozen=True)
class Command:
    """One QEMU process. `layers` is the disk chain, top first; only the top is written."""

    platform: QemuPlatform
    name: str
    size: Size
    memory: Memory
    layers: tuple[OpenLayer, ...]
    data_tap: int
    management_tap: int
    qmp: int
    wake: KernelBoot | Saved

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All descriptors that QEMU must inherit, but for its monitor's."""
        layers = (descriptor for layer in self.layers for descriptor in layer.descriptors)
        memory = () if self.memory.kind == "own" else (self.memory.descriptor,)
        return (self.data_tap, self.management_tap, *layers, *memory, *self.wake.descriptors)

    def arguments(self) -> list[str]:
        return [
            "qemu-system-x86_64",
            *("-name", f"guest={self.name},debug-threads=on"),
            *("-no-user-config", "-nodefaults", "-no-reboot"),
            # A guest that panicked is held until its console is read; then its QEMU is ended.
            *("-action", "panic=pause"),
            *("-display", "none", "-vga", "none"),
            *(
                "-machine",
                f"{self.platform.machine},memory-backend=ram,usb=off,vmport=off,smbus=off,sata=off",
            ),
            *("-accel", "kvm" if self.platform.accelerator == "kvm" else "tcg,thread=multi,tb-size=128"),
            *("-cpu", self.platform.cpu, "-smp", str(self.size.vcpus), "-m", f"{self.size.memory_mib}M"),
            *("-object", self._memory()),
            *self._disk(),
            *self._nic("data", self.data_tap, addresses.DATA_MAC),
            *self._nic("management", self.management_tap, addresses.MANAGEMENT_MAC),
            *(
                "-object",
                "rng-random,id=random,filename=/dev/urandom",
                "-device",
                "virtio-rng-pci,rng=random",
            ),
            *("-device", f"vmgenid,guid={self.wake.generation}", "-device", "pvpanic"),
            # A ring in memory, not a file: a guest that floods its console must not fill the host's disk.
            *("-chardev", f"ringbuf,id=console,size={console.SIZE}", "-serial", "chardev:console"),
            *(
                "-chardev",
                f"socket,id=qmp,fd={self.qmp},server=on,wait=off",
                "-mon",
                "chardev=qmp,mode=control",
            ),
            *SECCOMP,
            *self._start(),
        ]

    def _memory(self) -> str:
        size = f"id=ram,size={self.size.memory_mib}M"
        if self.memory.kind == "own":
            return f"memory-backend-ram,{size},reserve=off"
        file = f"memory-backend-file,{size},mem-path={_path(self.memory.descriptor)}"
        if self.memory.kind == "template":
            return f"{file},share=on"
        read_only = ",readonly=on,rom=off" if self.platform.read_only_memory_files else ""
        return f"{file},share=off,reserve=off{read_only}"

    def _disk(self) -> list[str]:
        return [
            *disk_arguments(self.layers),
            "-device",
            f"virtio-blk-pci,drive={node_name(self.layers[0].name)},serial=root,werror=enospc",
        ]

    def _nic(self, name: str, descriptor: int, mac: str) -> list[str]:
        # Nothing learns a guest's address from packets: the neighbours on its taps are permanent.
        quiet = "" if self.platform.announced else f",{_UNANNOUNCED}"
        return [
            *("-netdev", f"tap,id={name},fd={descriptor}"),
            *("-device", f"virtio-net-pci,netdev={name},mac={mac},romfile={quiet}"),
        ]

    def _start(self) -> list[str]:
        if isinstance(self.wake, Saved):
            # Device state is saved without the wrapper of a migration stream.
            return [
                *(("-S", "-incoming", "defer") if self.wake.deferred else ("-incoming", self.wake.uri)),
                *("-global", "migration.send-configuration=off"),
                *("-global", "migration.store-global-state=off"),
            ]
        return [
            "-kernel",
            _path(self.wake.kernel),
            "-initrd",
            _path(self.wake.initrd),
            "-append",
            self.platform.kernel_arguments,
        ]


def disk_arguments(layers: Sequence[OpenLayer]) -> list[str]:
    """Open a disk of these layers, top first. Names in their headers lead nowhere: the chain is given."""
    node: Node | None = None
    for depth, layer in reversed(list(enumerate(layers))):
        name = frozen_name(depth) if layer.writing is None else node_name(layer.name)
        node = block_node(layer, f"/dev/fdset/{depth + 1}", name, node)
    return [*_descriptor_sets(layers), "-blockdev", json.dumps(node)]


def block_node(layer: OpenLayer, file: str, name: str, backing: Node | None) -> Node:
    opened: Node = {"driver": "file", "filename": file, "discard": "unmap"}
    node: Node = {"driver": layer.format, "node-name": name, "file": opened, "discard": "unmap"}
    if layer.writing is None:
        # Frozen layers are shared and read-only, so they need no lock.
        opened |= {"locking": "off", "read-only": True}
        node["read-only"] = True
    if layer.format == "qcow2":
        node["backing"] = backing
    return node


def _descriptor_sets(layers: Iterable[OpenLayer]) -> Iterator[str]:
    for number, layer in enumerate(layers, start=1):
        yield from ("-add-fd", f"fd={layer.reading},set={number},opaque={reading_label(layer.name)}")
        if layer.writing is not None:
            yield from ("-add-fd", f"fd={layer.writing},set={number},opaque={writing_label(layer.name)}")


def reading_label(layer: str) -> str:
    return f"{layer}:read"


def writing_label(layer: str) -> str:
    return f"{layer}:write"


def _path(descriptor: int) -> str:
    """The name of an inherited descriptor, for files that QEMU can open by a name only."""
    return f"/proc/self/fd/{descriptor}"


def node_name(layer: str) -> str:
    """QEMU's node name of a writable layer, by which it is identified later."""
    return f"disk-{layer}"


def frozen_name(depth: int) -> str:
    """QEMU's node name of a layer that it only reads."""
    return f"below{depth}"


def is_announced(command_line: bytes) -> bool:
    """Whether the guest of a QEMU with this command line announces itself."""
    return _UNANNOUNCED.encode() not in command_line
