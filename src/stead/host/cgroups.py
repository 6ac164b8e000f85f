"""Resource limits of each QEMU process, by cgroup v2 or v1."""

import contextlib
import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from stead.errors import HostError
from stead.files import nearest_existing
from stead.logs import get_logger
from stead.settings import Settings, Size

log = get_logger("stead.host")

_ROOT = Path("/sys/fs/cgroup")
_OVERHEAD_MIB = 512
"""Memory overhead of QEMU itself; most of it is translated code under TCG."""
_MAX_THREADS = 1024
_MAX_WEIGHT = 10_000
_IO_WEIGHT = "default 100"
_CONTROLLERS = ("memory", "pids", "cpu")
_READ_ONLY = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EOPNOTSUPP, errno.EBUSY})
"""Errors of cgroups that are listed, as in a container, but not to be changed from here."""


@dataclass(frozen=True)
class Hierarchy:
    """Version 2 has one directory per VM; version 1 has one per controller."""

    version: int
    controllers: tuple[str, ...]


def detect(root: Path = _ROOT) -> Hierarchy:
    with contextlib.suppress(OSError):
        available = (root / "cgroup.controllers").read_text().split()
        return Hierarchy(2, tuple(name for name in _CONTROLLERS if name in available))
    present = tuple(name for name in _CONTROLLERS if (root / name / "tasks").exists())
    return Hierarchy(1 if present else 0, present)


_SELF = "tasks"
"""Of version 1: a thread moves itself without a lock that all processes of the host wait for."""
_OTHERS = "cgroup.procs"


@dataclass(frozen=True)
class VmGroup:
    """The cgroup of a VM, as a process enters it that cannot see the file system of cgroups."""

    machine: str
    root: int
    """The open folder of all cgroups."""
    folders: tuple[str, ...]
    """The groups, by their paths below it."""
    version: int

    @property
    def entrances(self) -> tuple[str, ...]:
        """The files below the root into which the process itself writes 0 before it becomes QEMU.

        None with version 2: moving a process takes milliseconds there, so the server does it meanwhile.
        """
        return tuple(f"{each}/{_SELF}" for each in self.folders) if self.version == 1 else ()

    def add(self, pid: int) -> None:
        """Move a process that does not enter by itself."""
        if self.entrances:
            return
        try:
            for folder in self.folders:
                descriptor = os.open(f"{folder}/{_OTHERS}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.root)
                try:
                    os.write(descriptor, b"%d" % pid)
                finally:
                    os.close(descriptor)
        except ProcessLookupError:
            pass  # it has ended already: the first call that connects to it gets the reason
        except OSError as error:
            raise HostError(f"cannot limit the resources of VM {self.machine}: {_reason(error)}") from error


class ControlGroups:
    """The cgroups of one installation.

    A host that offers none, or offers them read-only as some containers do, is found out with the first
    VM: VMs run without limits there, with a warning, or are refused with STEAD_REQUIRE_CGROUPS. After that
    a VM that gets no group is refused in any case.
    """

    def __init__(self, settings: Settings, hierarchy: Hierarchy | None = None, root: Path = _ROOT) -> None:
        self._hierarchy = hierarchy or detect(root)
        self._required = settings.require_cgroups
        self._checked = threading.Lock()
        self._usable: bool | None = None
        self._root = root
        self._io = _io_limit(settings) if self._hierarchy.version == 2 else None
        name = f"stead-{settings.instance}"
        if self._hierarchy.version == 2:
            self._bases = {"": root / name}
        else:
            self._bases = {name_: root / name_ / name for name_ in self._hierarchy.controllers}

    def prepare(self, machine: str, size: Size, opened: contextlib.ExitStack) -> VmGroup | None:
        """Make the group of a VM with its limits, before its process starts; None on a host without groups.

        `opened` closes its descriptor.
        """
        if not self._check():
            return None
        if not all(base.is_dir() for base in self._bases.values()):
            self._make_bases()  # an administrator has removed them
        try:
            for controller, base in self._bases.items():
                folder = base / machine
                folder.mkdir(exist_ok=True)
                for name, value in self._weight(controller, size.vcpus):
                    _write_weight(folder / name, value)
                for name, value in self._limits(controller, size):
                    _write(folder / name, value)
                self._limit_io(base, folder)
                if self._hierarchy.version == 2:
                    share_io(base, folder)
            root = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise HostError(f"cannot limit the resources of VM {machine}: {_reason(error)}") from error
        opened.callback(os.close, root)
        folders = (str((base / machine).relative_to(self._root)) for base in self._bases.values())
        return VmGroup(machine, root, tuple(folders), self._hierarchy.version)

    def _check(self) -> bool:
        """Whether this host has groups that Stead can use. Decided once."""
        with self._checked:
            if self._usable is None:
                self._usable = self._make_bases()
            return self._usable

    def _make_bases(self) -> bool:
        missing = [name for name in _CONTROLLERS if name not in self._hierarchy.controllers]
        problem = f"this host has no cgroups for {', '.join(missing)}" if missing else ""
        try:
            for controller, base in self._bases.items():
                base.mkdir(parents=True, exist_ok=True)
                if self._hierarchy.version == 2:
                    self._delegate(base)
                for name, value in self._weight(controller, os.cpu_count() or 1):
                    _write_weight(base / name, value)
        except OSError as error:
            if error.errno not in _READ_ONLY:
                raise HostError(f"cannot create cgroups: {_reason(error)}") from error
            problem = f"cannot create cgroups: {_reason(error)}"
            usable = False
        else:
            usable = bool(self._bases)
        if problem and self._required:
            raise HostError(f"{problem}, and STEAD_REQUIRE_CGROUPS is set")
        if problem:
            log.warning("VMs have not all resource limits", reason=problem)
        return usable

    def _limit_io(self, base: Path, folder: Path) -> None:
        """Not every disk can be limited, and no VM is refused for it."""
        if self._io is None:
            return
        try:
            for each in (base.parent, base):
                _write(each / "cgroup.subtree_control", "+io")
            _write(folder / "io.max", self._io)
        except OSError as error:
            self._io = None
            log.warning("cannot limit the I/O of VMs (STEAD_VM_IO_MIB)", error=str(error))

    def _limits(self, controller: str, size: Size) -> list[tuple[str, str]]:
        memory = str((size.memory_mib + _OVERHEAD_MIB) << 20)
        if self._hierarchy.version == 2:
            every = {
                "memory": [("memory.max", memory), ("memory.swap.max", "0"), ("memory.oom.group", "1")],
                "pids": [("pids.max", str(_MAX_THREADS))],
                "cpu": [("cpu.max", f"{size.vcpus * 100_000 + 50_000} 100000")],
            }
            return [limit for name in self._hierarchy.controllers for limit in every[name]]
        return {
            "memory": [("memory.limit_in_bytes", memory)],
            "pids": [("pids.max", str(_MAX_THREADS))],
            "cpu": [
                ("cpu.cfs_period_us", "100000"),
                ("cpu.cfs_quota_us", str(size.vcpus * 100_000 + 50_000)),
            ],
        }[controller]

    def _weight(self, controller: str, cpus: int) -> list[tuple[str, str]]:
        """Let each vCPU count as one process of the host when CPUs are short."""
        if controller == "cpu":
            return [("cpu.shares", str(1024 * cpus))]
        if self._hierarchy.version == 2 and "cpu" in self._hierarchy.controllers:
            return [("cpu.weight", str(min(100 * cpus, _MAX_WEIGHT)))]
        return []

    def _delegate(self, base: Path) -> None:
        wanted = " ".join(f"+{name}" for name in self._hierarchy.controllers)
        for folder in (base.parent, base):
            _write(folder / "cgroup.subtree_control", wanted)

    def release(self, machine: str) -> None:
        """Remove a VM's cgroups; its processes have ended."""
        for base in self._bases.values():
            with contextlib.suppress(OSError):
                (base / machine).rmdir()

    def machines(self) -> set[str]:
        """The VMs that have a cgroup."""
        found: set[str] = set()
        for base in self._bases.values():
            with contextlib.suppress(OSError):
                found.update(folder.name for folder in base.iterdir() if folder.is_dir())
        return found

    def remove(self) -> None:
        for base in self._bases.values():
            with contextlib.suppress(OSError):
                base.rmdir()


def share_io(base: Path, folder: Path) -> None:
    """Give a group the same weight at the disk as each of its siblings below `base`.

    A kernel without the io controller has none, and one without a scheduler that knows weights (BFQ, iocost)
    has no file for them: then the disk serves who asks most.
    """
    with contextlib.suppress(OSError):
        for each in (base.parent, base):
            _write(each / "cgroup.subtree_control", "+io")
        for name in ("io.weight", "io.bfq.weight"):
            for group in (base, folder):
                if (group / name).exists():
                    _write(group / name, _IO_WEIGHT)


def _reason(error: OSError) -> str:
    return f"{error.filename or 'cgroup'}: {error.strerror}"


def _io_limit(settings: Settings) -> str | None:
    """What a VM may read from and write to the disk of the data folder in a second, for `io.max`."""
    if not settings.vm_io_mib:
        return None
    disk, rate = disk_of(settings.data), settings.vm_io_mib << 20
    if disk is None:
        log.warning("cannot limit the I/O of VMs (STEAD_VM_IO_MIB): the data folder is on no block device")
        return None
    return f"{disk} rbps={rate} wbps={rate}"


def disk_of(folder: Path, devices: Path = Path("/sys/dev/block")) -> str | None:
    """`MAJOR:MINOR` of the disk that has a folder, as `io.max` wants it: whole, not a partition."""
    device = nearest_existing(folder).stat().st_dev
    entry = devices / f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        whole = entry.resolve(strict=True)
        if (whole / "partition").exists():
            whole = whole.parent
        return (whole / "dev").read_text().strip()
    return None  # a file system without a block device of its own, such as btrfs or tmpfs


def _write(path: Path, value: str) -> None:
    try:
        path.write_text(value)
    except FileNotFoundError:
        # memory.swap.max is absent without swap accounting; everything else was listed as present.
        if path.name != "memory.swap.max":
            raise


def _write_weight(path: Path, value: str) -> None:
    """Set a weight, unless an administrator has made the group idle (cpu.idle), which excludes weights."""
    try:
        _write(path, value)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
