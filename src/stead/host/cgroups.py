"""Resource limits of each QEMU process, by cgroup v2 or v1."""

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

from stead.settings import Settings, Size

_ROOT = Path("/sys/fs/cgroup")
_OVERHEAD_MIB = 512
"""Memory overhead of QEMU itself; most of it is translated code under TCG."""
_MAX_THREADS = 1024
_MAX_WEIGHT = 10_000
_V1_CONTROLLERS = ("memory", "pids", "cpu")


@dataclass(frozen=True)
class Hierarchy:
    """Version 2 has one directory per VM; version 1 has one per controller."""

    version: int
    controllers: tuple[str, ...]


def detect(root: Path = _ROOT) -> Hierarchy:
    with contextlib.suppress(OSError):
        available = (root / "cgroup.controllers").read_text().split()
        return Hierarchy(2, tuple(name for name in ("memory", "pids", "cpu") if name in available))
    present = tuple(name for name in _V1_CONTROLLERS if (root / name / "tasks").exists())
    return Hierarchy(1 if present else 0, present)


class ControlGroups:
    """The cgroups of one installation. Without cgroups VMs run unlimited, which `stead doctor` reports."""

    def __init__(self, settings: Settings, hierarchy: Hierarchy | None = None, root: Path = _ROOT) -> None:
        self._hierarchy = hierarchy or detect(root)
        name = f"stead-{settings.instance}"
        if self._hierarchy.version == 2:
            self._bases = {"": root / name}
        else:
            self._bases = {name_: root / name_ / name for name_ in self._hierarchy.controllers}

    def confine(self, machine: str, size: Size, pid: int) -> None:
        """Move a process into its own cgroup with the VM's limits."""
        for controller, base in self._bases.items():
            folder = base / machine
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if self._hierarchy.version == 2:
                    self._delegate(base)
                for name, value in self._weight(controller, os.cpu_count() or 1):
                    _write_weight(base / name, value)
                for name, value in self._weight(controller, size.vcpus):
                    _write_weight(folder / name, value)
                for name, value in self._limits(controller, size):
                    _write(folder / name, value)
                _write(folder / "cgroup.procs", str(pid))
            except OSError as error:
                # A container may list controllers that are read-only.
                if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EOPNOTSUPP, errno.EBUSY):
                    raise

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
