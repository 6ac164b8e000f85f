"""The host side of VMs: restore, boot, adopt and discard QEMU processes and their files."""

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stead.errors import DiskSpaceExceeded, HostError
from stead.files import exists, nearest_existing, remove_folder
from stead.guest.agent import Agent
from stead.guest_agent import agent_path
from stead.host import disks, network, templates
from stead.host.accelerator import choose_accelerator, machine_type, qemu_version
from stead.host.cgroups import ControlGroups
from stead.host.image import BaseImage, Progress, ensure_image, find_image, image_key
from stead.host.memory import check_memory, sealed_copy
from stead.host.network import Network
from stead.host.qemu import Boot, Command, Memory, Platform, Saved
from stead.host.templates import Template
from stead.host.vm import Spawner, Vm, VmFiles, launch, process_name, running_machines
from stead.logs import get_logger
from stead.processes import ProcessId
from stead.settings import Settings, Size
from stead.tasks import in_thread

log = get_logger("stead.host")

_DISK_FLOOR = 1 << 30


@dataclass(frozen=True)
class Place:
    """A VM's id and slot, which determine all of its resources on this host."""

    machine: str
    slot: int


@dataclass(frozen=True)
class Inventory:
    """Processes, files and cgroups that exist on this host, whether or not the database knows them."""

    processes: dict[int, str]
    folders: frozenset[str]
    groups: frozenset[str]

    @property
    def machines(self) -> frozenset[str]:
        return frozenset(self.processes.values()) | self.folders | self.groups


def require_root() -> None:
    if os.geteuid() != 0:
        raise HostError(
            "Stead must run as root: it creates taps, network namespaces and processes of other users"
        )


class Host:
    def __init__(self, settings: Settings, own_network: Network) -> None:
        self.settings = settings
        self.network = own_network
        self.groups = ControlGroups(settings)
        self._spawner = Spawner()
        self._ready = asyncio.Lock()
        self._image: BaseImage | None = None
        self._platform: Platform | None = None
        self._sealed: dict[str, int] = {}
        self._empty_layers = disks.EmptyLayers()

    @classmethod
    async def open(cls, settings: Settings) -> Self:
        return cls(settings, await Network.open(settings))

    async def close(self) -> None:
        self._spawner.close()
        for descriptor in self._sealed.values():
            os.close(descriptor)
        self._sealed.clear()
        await self.network.close()

    async def remove_network(self) -> None:
        """Remove the namespace, link, rules and cgroups, after `close` and without any VM left."""
        self.groups.remove()
        with contextlib.suppress(OSError):
            (self.settings.runtime / self.settings.instance).rmdir()
        await network.remove(self.settings)

    # Image and templates

    @property
    def templates_folder(self) -> Path:
        return self.settings.cache_folder / "templates"

    async def image(self, progress: Callable[[Progress], None] = lambda _: None) -> BaseImage:
        """The base image, built when it is missing."""
        async with self._ready:
            if self._image is None or not exists(self._image.disk):
                self._image = await ensure_image(self.settings, progress)
            return self._image

    async def platform(self) -> Platform:
        image = await self.image()
        async with self._ready:
            if self._platform is None:
                choice = await choose_accelerator(self.settings, image.kernel)
                if choice.name == "tcg" and self.settings.accelerator == "auto":
                    log.warning("kvm not used", reason=choice.reason, cost=choice.cost)
                version = await qemu_version()
                self._platform = Platform(
                    choice.name,
                    version,
                    await machine_type(version),
                    _host_cpu() if choice.name == "kvm" else "",
                )
            return self._platform

    def find_image(self, key: str) -> BaseImage | None:
        return find_image(self.settings, key)

    async def find_template(self, size: Size) -> Template | None:
        """The template of a size, without making one."""
        if self._image is None:
            image = find_image(self.settings, image_key(self.settings, agent_path()))
            if image is None:
                return None
        return templates.find(self.templates_folder, await self.image(), size, await self.platform())

    def load_template(self, template_id: str) -> Template | None:
        return templates.load(self.templates_folder, template_id, self.find_image)

    # Machines

    def uid(self, slot: int) -> int:
        return self.settings.uid(slot)

    def files(self, machine: str) -> VmFiles:
        instance = self.settings.instance
        return VmFiles(self.settings.data / "machines" / machine, self.settings.runtime / instance / machine)

    def check_capacity(self) -> None:
        """CapacityExceeded when the host lacks memory or disk space for another VM."""
        check_memory()
        if not self.has_disk_room():
            raise DiskSpaceExceeded(
                f"less than {_DISK_FLOOR >> 30} GiB of disk space is free under {self.settings.data}"
            )

    def has_disk_room(self) -> bool:
        return shutil.disk_usage(nearest_existing(self.settings.data)).free >= _DISK_FLOOR

    def make_folder(self, place: Place) -> None:
        """The VM's own folder, which its QEMU is confined to."""
        folder = self.files(place.machine).folder
        try:
            folder.mkdir(parents=True, mode=0o711)
            folder.chmod(0o700)
            os.chown(folder, self.uid(place.slot), self.uid(place.slot))
        except OSError as error:
            raise HostError(f"cannot create {folder}: {error.strerror}") from error

    async def make_layer(self, place: Place, layer: str, size_gib: int) -> None:
        """An empty disk layer in the VM's folder."""
        await self._empty_layers.make(self.layer(place.machine, layer), size_gib, self.uid(place.slot))

    def layer(self, machine: str, layer: str) -> Path:
        return self.files(machine).folder / f"{layer}.qcow2"

    async def restore(self, place: Place, template: Template, layers: tuple[Path, ...]) -> ProcessId:
        """Start a QEMU that restores the template's memory."""
        try:
            devices = os.open(template.devices, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise HostError(f"cannot read template {template.id}: {error.strerror}") from error
        try:
            return await self.wake(place, template.size, template, layers, Saved(devices))
        finally:
            os.close(devices)

    async def wake(
        self, place: Place, size: Size, base: Template | None, layers: tuple[Path, ...], saved: Saved
    ) -> ProcessId:
        """Start a QEMU from saved device state; its RAM is a private copy of the template's, or empty."""
        if base is None:
            return await self._launch(place, size, Memory("own"), layers, saved, (saved.descriptor,))
        platform = await self.platform()
        inherited: tuple[int, ...] = (saved.descriptor,)
        memory = Memory("copy", str(base.memory))
        if not platform.read_only_memory_files:
            sealed = await self._sealed_memory(base)
            inherited, memory = (*inherited, sealed), Memory("copy", f"/proc/self/fd/{sealed}")
        return await self._launch(place, size, memory, layers, saved, inherited)

    async def boot(
        self, place: Place, size: Size, layers: tuple[Path, ...], image: BaseImage, memory: Path | None = None
    ) -> ProcessId:
        """Start a QEMU that boots from its disk; with `memory`, its RAM is that file."""
        backing = Memory("own") if memory is None else Memory("template", str(memory))
        return await self._launch(place, size, backing, layers, Boot(image.kernel, image.initrd))

    async def _launch(
        self,
        place: Place,
        size: Size,
        memory: Memory,
        layers: tuple[Path, ...],
        wake: Boot | Saved,
        inherited: tuple[int, ...] = (),
    ) -> ProcessId:
        files = self.files(place.machine)
        platform = await self.platform()
        if memory.kind != "template":
            for layer in layers:
                if layer.suffix == ".qcow2":
                    await in_thread(disks.check_layer, layer)
        taps = await self.network.attach(place.slot)
        command = Command(
            platform=platform,
            name=process_name(self.settings.instance, place.machine),
            size=size,
            memory=memory,
            layers=layers,
            folder=files.folder,
            uid=self.uid(place.slot),
            data_tap=taps.data,
            management_tap=taps.management,
            qmp=-1,
            wake=wake,
        )
        process = await launch(self._spawner, command, files, taps, inherited)
        await in_thread(self.groups.confine, place.machine, size, process.pid)
        return process

    async def connect(self, machine: str, process: ProcessId) -> Vm:
        return await Vm.connect(process, self.files(machine))

    def agent(self, place: Place) -> Agent:
        return Agent(lambda: self.network.agent_socket(place.slot), place.machine)

    def tidy(self, machine: str) -> None:
        """Remove the runtime files of a VM whose process has ended."""
        files = self.files(machine)
        shutil.rmtree(files.runtime, ignore_errors=True)
        files.drop_devices()
        self.groups.release(machine)

    async def discard(self, machine: str) -> None:
        """Remove all files of a VM whose process has ended."""
        self.tidy(machine)
        await in_thread(remove_folder, self.files(machine).folder)

    def inventory(self) -> Inventory:
        roots = (self.settings.data / "machines", self.settings.runtime / self.settings.instance)
        folders: set[str] = set()
        for root in roots:
            with contextlib.suppress(FileNotFoundError):
                folders.update(path.name for path in root.iterdir())
        return Inventory(
            running_machines(self.settings), frozenset(folders), frozenset(self.groups.machines())
        )

    async def _sealed_memory(self, template: Template) -> int:
        async with self._ready:
            if template.id not in self._sealed:
                self._sealed[template.id] = await in_thread(sealed_copy, template.memory)
            return self._sealed[template.id]


_CPU_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping")
_GUEST_FLAGS = frozenset(
    """
    3dnowprefetch abm adx aes amx_bf16 amx_int8 amx_tile arch_capabilities avx avx2 avx512_4fmaps
    avx512_4vnniw avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni avx512_vp2intersect
    avx512_vpopcntdq avx512bw avx512cd avx512dq avx512er avx512f avx512ifma avx512pf avx512vbmi avx512vl
    avx_vnni bmi1 bmi2 cldemote clflush clflushopt clwb clzero cmov cx16 cx8 erms f16c flush_l1d fma fma4
    fsgsbase fsrm fxsr fxsr_opt gfni hle ibpb ibrs invpcid la57 lahf_lm lm md_clear misalignsse mmx mmxext
    movbe movdir64b movdiri nx ospke pcid pclmulqdq pdpe1gb pku pni popcnt rdpid rdrand rdseed rdtscp rtm
    serialize sha_ni smap smep ssbd sse sse2 sse4_1 sse4_2 sse4a ssse3 stibp svm syscall tbm tsc tsc_adjust
    tsc_deadline_timer tsxldtrk umip vaes virt_ssbd vmx vpclmulqdq waitpkg x2apic xgetbv1 xop xsave xsavec
    xsaveopt xsaves
    """.split()  # noqa: SIM905  # readable
)
"""CPU features that a guest sees and may use: instructions, register state, modes, speculation control.

All other flags are left out: a new kernel adds names for features and for workarounds of its own.
"""


def _host_cpu(cpuinfo: str | None = None) -> str:
    """Hash of the host's CPU: memory saved with the host's own CPU model fits only the same CPU.

    It stays the same through updates of the kernel and of the microcode that change nothing for a guest.
    """
    facts = set()
    for line in (cpuinfo or Path("/proc/cpuinfo").read_text()).splitlines():
        name, _, value = (part.strip() for part in line.partition(":"))
        if name in _CPU_IDENTITY:
            facts.add(f"{name}: {value}")
        elif name == "flags":
            facts.add(f"flags: {' '.join(sorted(_GUEST_FLAGS.intersection(value.split())))}")
    return hashlib.sha256("\n".join(sorted(facts)).encode()).hexdigest()[:16]
