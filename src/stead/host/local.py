"""This host's VMs: starts, restores, adopts and discards QEMU processes and their files."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stead import addresses
from stead.deadlines import scaled
from stead.disk_marks import DiskSpace
from stead.errors import CheckpointUnusable, DiskSpaceExceeded, HostError
from stead.files import (
    allocated,
    exists,
    give_to,
    locked,
    raise_descriptor_limit,
    remove_folder,
    remove_garbage,
)
from stead.guest.agent import Agent
from stead.guest_agent import agent_path
from stead.host import disks, interface, network, templates
from stead.host.accelerator import choose_accelerator, machine_type, qemu_version
from stead.host.authority import Authority
from stead.host.cgroups import ControlGroups
from stead.host.checkpoints import CheckpointFolders, LocalCapturedState, LocalVm, device_state, place_memory
from stead.host.image import BaseImage, ensure_image, find_image, image_key
from stead.host.interface import Disk, Inventory, Report, VmSlot, narrowed, template_size
from stead.host.layer_files import LayerFiles
from stead.host.memory import SealedCopies, check_memory, is_short, new_sealed_copy
from stead.host.network import Network
from stead.host.qemu import Command, KernelBoot, Memory, OpenLayer, QemuPlatform, Saved
from stead.host.quarantine import Quarantine
from stead.host.resources import measure
from stead.host.template_builder import TEMPLATE_PREFIX, ensure_template, machine_slots
from stead.host.templates import LocalTemplate, TemplateInputs
from stead.host.vm import Spawner, launch, open_for_all, open_kernel, process_name, running_machines
from stead.host.vm_folders import VmFolders
from stead.host.vpcs import Vpcs
from stead.limits import HostResources
from stead.logs import get_logger
from stead.processes import EXPENDABLE, ProcessId, kill, set_oom_score
from stead.settings import Settings, Size
from stead.tasks import Threads, finished, in_thread

log = get_logger("stead.host")

_NOT_ISOLATED = (
    "QEMU does not promise to isolate VMs in emulation (TCG): use a host with KVM for code of people who do"
    " not trust each other. STEAD_TRUSTED_TENANTS=yes or STEAD_ACCELERATOR=tcg accepts this"
)

_DISK_FLOOR = 1 << 30
_LOCK_TIMEOUT = scaled(5.0)


def require_root() -> None:
    if os.geteuid() != 0:
        raise HostError(
            "Stead must run as root: it creates taps, network namespaces and processes of other users"
        )


@contextlib.asynccontextmanager
async def installation_locked(settings: Settings) -> AsyncIterator[None]:
    """Make the folders of an installation and hold its lock: one process at a time has it open."""
    require_root()
    raise_descriptor_limit()
    if not settings.data.exists():
        settings.data.mkdir(parents=True)
        settings.data.chmod(0o711)
    async with locked(settings.lock, _LOCK_TIMEOUT):
        (settings.runtime / settings.instance).mkdir(parents=True, exist_ok=True, mode=0o711)
        yield


class LocalTemplates:
    """Templates in the cache folder, for the image and the platform of this host."""

    def __init__(self, host: "LocalHost") -> None:
        self._host = host
        self._folder = host.templates_folder

    async def find(self, size: Size) -> LocalTemplate | None:
        image = await self._host.find_current_image()
        if image is None:
            return None
        template = templates.find(self._folder, await self._host.template_inputs(size))
        if template is not None:
            templates.note_use(template)
        return template

    def load(self, template_id: str) -> LocalTemplate | None:
        return templates.load(self._folder, template_id, self._host.find_image)

    async def ensure(self, size: Size, report: Report) -> LocalTemplate:
        return await ensure_template(self._host, size, report)

    async def remove_unused(self, used: Collection[str]) -> list[str]:
        # VMs of other installations may need the templates of a cache that is not this installation's own.
        if self._host.settings.cache is not None:
            return []
        unused = await in_thread(templates.unused, self._folder, used)
        self._host.sealed.close([path.name for path in unused])
        await Threads.COPIES.run(remove_garbage, unused)
        return [path.name for path in unused]


@dataclass(frozen=True)
class _Restore:
    """A QEMU that waits for captured state."""

    process: ProcessId
    saved: Saved
    placing: "asyncio.Future[None]"
    verifying: "asyncio.Future[None]"

    async def load(self, vm: interface.Vm) -> None:
        # Memory first: virtio devices read their rings from it when they are loaded.
        await finished(self.placing)
        await narrowed(vm, LocalVm).load(self.saved)
        # The guest is resumed only after the checksum of its memory is verified.
        await finished(self.verifying)


@contextlib.asynccontextmanager
async def _placed(pid: int, state: LocalCapturedState) -> "AsyncIterator[asyncio.Future[None]]":
    """Place captured memory in a QEMU while it starts; nothing writes to the process after the block."""
    given_up = threading.Event()
    size, copied = state.size.memory_mib << 20, state.base is not None
    placing = asyncio.ensure_future(
        Threads.COPIES.run(place_memory, pid, state.memory, size, copied, given_up)
    )
    try:
        yield placing
    finally:
        given_up.set()
        with contextlib.suppress(HostError):  # of interest to `_Restore.load` only
            await finished(placing)


class LocalHost:
    """This host: VMs are QEMU processes."""

    def __init__(self, settings: Settings, own_network: Network) -> None:
        self.settings = settings
        self.network = own_network
        self._authority = Authority.open_current(settings)
        self.groups = ControlGroups(settings)
        self._quarantine = Quarantine(settings.data)
        self._spawner = Spawner()
        sandbox = self._spawner.sandbox
        self._ready = asyncio.Lock()
        self._image: BaseImage | None = None
        self._platform: QemuPlatform | None = None
        self.sealed = SealedCopies()
        folders = [settings.data / name for name in ("layers", "checkpoints")]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.templates = LocalTemplates(self)
        self.layers = LayerFiles(
            folders[0], settings.data / "machines", self._quarantine, sandbox, settings.disk_uid
        )
        self.checkpoints = CheckpointFolders(folders[1], self.platform, self._quarantine)
        self.disks = VmFolders(settings, own_network, sandbox)

    @classmethod
    async def open(cls, settings: Settings) -> Self:
        return cls(settings, await Network.open(settings))

    @property
    def nics(self) -> Network:
        return self.network

    @property
    def vpcs(self) -> Vpcs:
        return self.network.vpcs

    async def close(self) -> None:
        self._spawner.close()
        self.sealed.close()
        await self.network.close()

    async def remove_from_host(self) -> None:
        """Remove the namespaces, link, rules and cgroups, after `close` and without any VM left."""
        self.groups.remove()
        with contextlib.suppress(OSError):
            (self.settings.runtime / self.settings.instance).rmdir()
        await network.remove(self.settings)

    # Image and platform

    @property
    def templates_folder(self) -> Path:
        return self.settings.cache_folder / "templates"

    async def image(self, progress: Report = lambda _: None) -> BaseImage:
        """The base image, built when it is missing."""
        async with self._ready:
            if self._image is None or not exists(self._image.disk):
                self._image = await ensure_image(self.settings, progress)
            return self._image

    def find_image(self, key: str) -> BaseImage | None:
        return find_image(self.settings, key)

    async def find_current_image(self) -> BaseImage | None:
        """The base image of this version, without building it."""
        if self._image is None and self.find_image(image_key(self.settings, agent_path())) is None:
            return None
        return await self.image()

    async def template_inputs(self, size: Size, progress: Report = lambda _: None) -> TemplateInputs:
        """What the template for VMs of a size is made of; the image is built when it is missing."""
        image = await self.image(progress)
        certificate = self._authority.certificate.decode().strip()
        return TemplateInputs(image, template_size(size), await self.platform(), certificate)

    async def platform(self) -> QemuPlatform:
        image = await self.image()
        async with self._ready:
            if self._platform is None:
                choice = await choose_accelerator(self.settings, image.kernel)
                if choice.name == "tcg" and self.settings.accelerator == "auto":
                    log.warning("kvm not used", reason=choice.reason, cost=choice.cost)
                if choice.name == "tcg" and not self.settings.accepts_emulation:
                    log.warning(_NOT_ISOLATED)
                version = await qemu_version()
                self._platform = QemuPlatform(
                    choice.name,
                    version,
                    await machine_type(version),
                    _host_cpu() if choice.name == "kvm" else "",
                )
            return self._platform

    # Capacity

    @property
    def resources(self) -> HostResources:
        return measure(self.settings)

    def check_capacity(self) -> None:
        check_memory()
        if not self.has_disk_room():
            raise DiskSpaceExceeded(
                f"less than {_DISK_FLOOR >> 30} GiB of disk space is free under {self.settings.data}"
            )

    def check_memory(self, wanted: int) -> None:
        check_memory(wanted)

    def memory_is_short(self) -> bool:
        return is_short()

    def has_disk_room(self) -> bool:
        return self.disk_space().free >= _DISK_FLOOR

    def disk_space(self) -> DiskSpace:
        return DiskSpace.of(self.settings.data)

    @property
    def slots(self) -> range:
        return machine_slots()

    # Processes

    async def restore(self, vm_slot: VmSlot, disk: Disk) -> ProcessId:
        """Start a QEMU that restores the template's memory."""
        template = narrowed(disk.template, LocalTemplate)
        try:
            devices = os.open(template.devices, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise HostError(f"cannot read template {template.id}: {error.strerror}") from error
        # The template's own id: the agent reseeds the clone; if its kernel did so too, udev would react.
        saved = Saved(devices, generation=template.generation)
        try:
            return await self._restore(vm_slot, template.size, template, disk, saved, await self.platform())
        finally:
            os.close(devices)

    @contextlib.asynccontextmanager
    async def restore_state(
        self, vm_slot: VmSlot, state: interface.CapturedState, disk: Disk
    ) -> AsyncIterator[_Restore]:
        captured = narrowed(state, LocalCapturedState)
        base = None
        if captured.base is not None:
            # Usually the template of the disk, which is loaded already.
            same = disk.template.id == captured.base
            base = narrowed(disk.template, LocalTemplate) if same else self.templates.load(captured.base)
            if base is None:
                raise CheckpointUnusable("the template that its memory is based on is missing")
        verifying = asyncio.ensure_future(Threads.COPIES.run(captured.memory.verify))
        try:
            async with device_state(captured.devices) as descriptor:
                saved = Saved(descriptor, deferred=True)
                process = await self._restore(vm_slot, captured.size, base, disk, saved, captured.platform)
                async with _placed(process.pid, captured) as placing:
                    yield _Restore(process, saved, placing, verifying)
        finally:
            await finished(verifying)

    async def _restore(
        self,
        vm_slot: VmSlot,
        size: Size,
        base: LocalTemplate | None,
        disk: Disk,
        saved: Saved,
        platform: QemuPlatform,
    ) -> ProcessId:
        """Start a QEMU from saved device state; its RAM is a private copy of the template's, or empty."""
        async with self._memory(vm_slot, base, platform) as memory:
            return await self._launch(vm_slot, size, memory, disk, saved, platform)

    @contextlib.asynccontextmanager
    async def _memory(
        self, vm_slot: VmSlot, base: LocalTemplate | None, platform: QemuPlatform
    ) -> AsyncIterator[Memory]:
        with contextlib.ExitStack() as opened:
            if base is None:
                yield Memory("own")
            elif not self.settings.share_template_memory:
                check_memory(allocated(base.memory))
                copy = await new_sealed_copy(base.memory)
                opened.callback(os.close, copy)
                yield Memory("copy", copy)
            elif platform.read_only_memory_files:
                yield Memory("copy", await in_thread(open_for_all, base.memory, opened))
            else:
                default = base.image == self._image and base.size == template_size(self.settings.default_size)
                async with self.sealed.opened(
                    base.id, base.memory, vm_slot.machine, vm_slot.account, default=default
                ) as sealed:
                    yield Memory("copy", sealed)

    async def boot(self, vm_slot: VmSlot, size: Size, disk: Disk) -> ProcessId:
        """Start a QEMU that boots from its disk."""
        with contextlib.ExitStack() as opened:
            image = narrowed(disk.template, LocalTemplate).image
            boot = await in_thread(open_kernel, image.kernel, image.initrd, opened)
            return await self._launch(vm_slot, size, Memory("own"), disk, boot, await self.platform())

    async def _launch(
        self,
        vm_slot: VmSlot,
        size: Size,
        memory: Memory,
        disk: Disk,
        start: KernelBoot | Saved,
        platform: QemuPlatform,
    ) -> ProcessId:
        with contextlib.ExitStack() as opened:
            layers = await in_thread(self._open_disk, vm_slot.machine, disk, opened)
            return await self.launch(vm_slot, size, memory, layers, start, platform)

    def _open_disk(self, machine: str, disk: Disk, opened: contextlib.ExitStack) -> tuple[OpenLayer, ...]:
        """Open all layers of a VM's disk, top first."""
        # Older versions gave the folder to the user of its QEMU, who could then replace what is in it.
        give_to(0, self.disks.files(machine).folder)
        top = disks.open_top(self.disks.layer(machine, disk.top), opened)
        return top, *self.layers.open(disk.frozen, disk.template, opened)

    async def launch(
        self,
        vm_slot: VmSlot,
        size: Size,
        memory: Memory,
        layers: tuple[OpenLayer, ...],
        start: KernelBoot | Saved,
        platform: QemuPlatform,
    ) -> ProcessId:
        files = self.disks.files(vm_slot.machine)
        with contextlib.ExitStack() as opened:
            group = await in_thread(self.groups.prepare, vm_slot.machine, size, opened)
            taps = await self.network.attach(vm_slot)
            command = Command(
                platform=platform,
                name=process_name(self.settings.instance, vm_slot.machine),
                size=size,
                memory=memory,
                layers=layers,
                data_tap=taps.data,
                management_tap=taps.management,
                qmp=-1,
                wake=start,
            )
            uid = self.settings.uid(vm_slot.number)
            process = await launch(self._spawner, command, files, taps, uid, group)
        set_oom_score(process.pid, EXPENDABLE)
        return process

    async def connect(self, machine: str, process: ProcessId) -> LocalVm:
        vm = await LocalVm.connect(process, self.disks.files(machine))
        vm.checkpoints = self.checkpoints
        return vm

    def agent(self, vm_slot: VmSlot) -> Agent:
        return Agent(lambda: self.network.agent_socket(vm_slot.number), vm_slot.machine)

    async def dial(self, vm_slot: VmSlot, port: int) -> socket.socket:
        return await self.network.dial(addresses.machine_address(vm_slot.number), port)

    async def kill(self, process: ProcessId) -> None:
        await kill(process)

    def tidy(self, machine: str) -> None:
        """Remove the runtime files of a VM whose process has ended."""
        self.sealed.release(machine)
        shutil.rmtree(self.disks.files(machine).runtime, ignore_errors=True)
        self.groups.release(machine)

    async def discard(self, machine: str) -> None:
        """Remove all files of a VM whose process has ended."""
        self.tidy(machine)
        await Threads.COPIES.run(remove_folder, self.disks.files(machine).folder)

    async def set_aside(self, machine: str) -> None:
        folder = self.disks.files(machine).folder
        if os.path.lexists(folder) and not machine.startswith(TEMPLATE_PREFIX):
            await in_thread(self._quarantine.keep, [folder])
        await self.discard(machine)

    async def prune_quarantine(self) -> None:
        await in_thread(self._quarantine.prune)

    def inventory(self) -> Inventory:
        roots = (self.settings.data / "machines", self.settings.runtime / self.settings.instance)
        processes = {ProcessId.of(pid): machine for pid, machine in running_machines(self.settings).items()}
        found = {process: machine for process, machine in processes.items() if process is not None}
        machines = {*found.values(), *self.groups.machines()}
        for root in roots:
            with contextlib.suppress(FileNotFoundError):
                machines.update(path.name for path in root.iterdir())
        return Inventory(found, frozenset(machines))


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
