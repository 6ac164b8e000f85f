"""Resource limits of git by cgroup v2 or v1: one group for all of git, and one below it for each user."""

import contextlib
import os
from pathlib import Path

from stead.host.cgroups import Hierarchy, detect, share_io
from stead.logs import get_logger
from stead.settings import Settings

_ROOT = Path("/sys/fs/cgroup")
_MAX_PROCESSES = 4096
_MAX_PROCESSES_PER_USER = 512
_MEMORY_SHARE = 2
"""Git has at most this part of the host's memory, and a user half of that."""
_ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 1; shift; done; shift; exec "$@"'
"""Join the groups whose files are named before `--`, then become the command after it."""

log = get_logger("stead.host")


class GitGroups:
    """Without writable cgroups git has the limits of each process alone."""

    def __init__(self, settings: Settings, hierarchy: Hierarchy | None = None, root: Path = _ROOT) -> None:
        self._hierarchy = hierarchy or detect(root)
        name = f"stead-{settings.instance}-git"
        if self._hierarchy.version == 2:
            self._bases = {"": root / name}
        else:
            self._bases = {each: root / each / name for each in self._hierarchy.controllers}
        self._memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MEMORY_SHARE
        self._made: set[Path] = set()
        """The groups with their limits. One that someone else made may have none."""
        self._failures: dict[str, str] = {}
        """By controller, why the last group could not be made."""

    def enter(self, uid: int) -> list[str]:
        """The command prefix that starts a program in the group of a user; it needs root.

        A group that is gone is made again, and one that could not be made is tried again. A program that
        cannot join a group that was made does not start.
        """
        made = [self._bases[each] / str(uid) for each in self._bases if self._make(each, uid)]
        files = [str(folder / "cgroup.procs") for folder in made]
        return ["sh", "-c", _ENTER, "sh", *files, "--"] if files else []

    def _make(self, controller: str, uid: int) -> bool:
        base = self._bases[controller]
        folder = base / str(uid)
        if folder.is_dir() and folder in self._made:
            return True
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._hierarchy.version == 2:
                wanted = " ".join(f"+{name}" for name in self._hierarchy.controllers)
                for above in (base.parent, base):
                    (above / "cgroup.subtree_control").write_text(wanted)
                share_io(base, folder)
            for group, memory, processes in (
                (base, self._memory, _MAX_PROCESSES),
                (folder, self._memory // 2, _MAX_PROCESSES_PER_USER),
            ):
                for name, value in self._limits(controller, memory, processes):
                    (group / name).write_text(value)
        except OSError as error:
            # A container may list controllers that are read-only.
            reason = error.strerror or str(error)
            if self._failures.get(controller) != reason:
                self._failures[controller] = reason
                log.warning("git has no limits by cgroup", group=str(folder), error=str(error))
            return False
        if self._failures.pop(controller, None) is not None:
            log.info("git has limits by cgroup again", group=str(folder))
        self._made.add(folder)
        return True

    def _limits(self, controller: str, memory: int, processes: int) -> list[tuple[str, str]]:
        """Weights are equal: each account with work has the same share of the CPUs that git gets."""
        if self._hierarchy.version == 2:
            every = {
                "memory": ("memory.max", str(memory)),
                "pids": ("pids.max", str(processes)),
                "cpu": ("cpu.weight", "100"),
            }
            return [every[name] for name in self._hierarchy.controllers]
        return {
            "memory": [("memory.limit_in_bytes", str(memory))],
            "pids": [("pids.max", str(processes))],
            "cpu": [("cpu.shares", "1024")],
        }[controller]

    def close(self) -> None:
        """Remove the groups without processes."""
        for base in self._bases.values():
            with contextlib.suppress(OSError):
                for folder in [each for each in base.iterdir() if each.is_dir()]:
                    with contextlib.suppress(OSError):
                        folder.rmdir()
                base.rmdir()
