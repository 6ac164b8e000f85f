"""The sandbox of QEMU processes: a user without rights, no network, and a root folder with programs alone.

Everything else that a QEMU works on is opened by the server and passed as a descriptor.
"""

import contextlib
import ctypes
import os
import signal
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from stead.errors import HostError
from stead.host.cgroups import VmGroup
from stead.host.namespaces import NamespaceThread
from stead.processes import ProcessId, spawn

KVM_GROUP = 2_140_000_000
"""The group of /dev/kvm inside the sandbox; only the QEMUs that use KVM are in it."""

_PROGRAM_FOLDERS = ("usr", "lib", "lib32", "lib64", "libx32", "bin", "sbin", "nix", "gnu")
"""What programs and their libraries are in; on most hosts all but `usr` are links into it."""
_LIBRARY_CACHE = Path("etc/ld.so.cache")
_DEVICES = {"null": (0, 0o666), "urandom": (0, 0o444), "kvm": (KVM_GROUP, 0o660)}

_BEGIN = """
for file; do shift; [ "$file" = -- ] && break; echo 0 > "/proc/self/fd/0/$file" || exit 1; done
ulimit -c 0 && ulimit -n 4096 && unset PWD OLDPWD SHLVL && exec "$@" < /dev/null
"""
"""Enter the cgroups whose files are named before `--`, by the open folder that is standard input.

The variables of the shell name folders of the server.

Guest memory must never land in a core file. Both are set before QEMU starts: later it is another user's
process, and what it has allocated by then would stay with the group of the server.
"""

_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = (
    *(1, 2, 4, 8, 32, 4096, 16384, 1 << 18),
)
_DETACH = 2
_PIVOT_ROOT = 155  # of x86-64, which has no function in libc
_libc = ctypes.CDLL(None, use_errno=True)


class Sandbox:
    """Starts processes in the sandbox, which is made once and shared: it has nothing to take or to change."""

    def __init__(self) -> None:
        self._thread = NamespaceThread(lambda: None)
        self._entered = False

    async def spawn(
        self,
        arguments: Sequence[str],
        *,
        uid: int,
        kvm: bool = False,
        descriptors: Sequence[int] = (),
        errors: int | IO[Any],
        priority: Sequence[str] = (),
        lasting: bool = True,
        group: VmGroup | None = None,
    ) -> ProcessId | None:
        """Start a program as this user, with `descriptors` and nothing else; None when it ended at once.

        One that is not `lasting` ends with this process.
        """
        until = [] if lasting else ["--pdeathsig=KILL"]
        entrances = () if group is None else group.entrances
        begin = ["sh", "-c", _BEGIN, "sh", *entrances, "--"]
        command = [*priority, *begin, *without_rights(uid, kvm), *until, "--", *arguments]
        folder = group.root if group is not None and entrances else subprocess.DEVNULL

        def start() -> ProcessId | None:
            self._enter()
            process = spawn(
                command, environment={}, descriptors=descriptors, errors=errors, standard_input=folder
            )
            if process is not None and group is not None:
                try:
                    group.add(process.pid)
                except HostError:
                    os.kill(process.pid, signal.SIGKILL)
                    os.waitpid(process.pid, 0)
                    raise
            return process

        return await self._thread.call(start)

    def _enter(self) -> None:
        """Move this thread into the sandbox. Namespaces and the root folder belong to threads in Linux."""
        if self._entered:
            return
        try:
            _check(_libc.unshare(_NEW_NETWORK | _NEW_MOUNTS), "unshare")
            _make_root()
        except OSError as error:
            raise HostError(f"cannot create the sandbox of QEMU: {error}") from error
        self._entered = True

    def close(self) -> None:
        self._thread.close()


def without_rights(uid: int, kvm: bool = False) -> list[str]:
    """The beginning of a command line whose program runs as this user and can gain nothing."""
    groups = f"--groups={KVM_GROUP}" if kvm else "--clear-groups"
    return [
        *("setpriv", f"--reuid={uid}", f"--regid={uid}", groups),
        *("--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"),
    ]


def _make_root() -> None:
    """Make a root folder of the host's programs, read-only, and leave the host's own.

    In the new mount namespace /tmp is only the place where it is built.
    """
    root = Path("/tmp")
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NO_SUID, "mode=755,size=4m")
    for name in _PROGRAM_FOLDERS:
        source, target = Path("/", name), root / name
        if source.is_symlink():
            target.symlink_to(source.readlink())
        elif source.is_dir():
            target.mkdir()
            _mount(source, target, None, _BIND | _RECURSIVE)
            _mount(None, target, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    with contextlib.suppress(FileNotFoundError):
        cache = (Path("/") / _LIBRARY_CACHE).read_bytes()
        (root / _LIBRARY_CACHE).parent.mkdir()
        (root / _LIBRARY_CACHE).write_bytes(cache)
    _make_devices(root / "dev")
    _mount_proc(root / "proc")
    _mount(None, root, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID)
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT, b".", b"."), "pivot_root")
    # The old root lies on top of the new one now. Without it no file system of the host is held in use.
    _check(_libc.umount2(b".", _DETACH), "umount")
    os.chdir("/")


def _make_devices(folder: Path) -> None:
    folder.mkdir()
    for name, (group, mode) in _DEVICES.items():
        source, target = Path("/dev", name), folder / name
        try:
            facts = source.stat()
        except FileNotFoundError:
            continue
        if not stat.S_ISCHR(facts.st_mode):
            continue
        try:
            os.mknod(target, stat.S_IFCHR | 0o600, facts.st_rdev)
            os.chown(target, 0, group)
            target.chmod(mode)
        except PermissionError:
            # A container that may use its devices, but not make any.
            target.touch()
            _mount(source, target, None, _BIND)


def _mount_proc(folder: Path) -> None:
    """QEMU opens descriptors by their names there, and reads a few settings of the kernel.

    Other users' processes are hidden (from Linux 5.8 on, which has this option for each mount).
    """
    folder.mkdir()
    _mount("proc", folder, "proc", _NO_SUID | _NO_DEVICES | _NO_EXEC, "hidepid=2")
    _mount(None, folder, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES | _NO_EXEC)


def _mount(
    source: str | Path | None, target: str | Path, kind: str | None, flags: int, options: str | None = None
) -> None:
    given = [None if each is None else os.fsencode(each) for each in (source, target, kind, options)]
    _check(_libc.mount(*given[:3], ctypes.c_ulong(flags), given[3]), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
