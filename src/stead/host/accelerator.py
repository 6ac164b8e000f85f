"""Choice of the accelerator, KVM or TCG emulation. KVM is used only after a kernel has booted in it."""

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from stead.deadlines import scaled
from stead.errors import HostError
from stead.files import write_atomically
from stead.host.commands import run
from stead.host.sandbox import Sandbox, without_rights
from stead.host.vm import open_for_all
from stead.processes import ProcessId, WatchedProcess, kill, spawn
from stead.settings import Settings
from stead.tasks import finished, in_thread, or_undo

QEMU = "qemu-system-x86_64"
MINIMUM_QEMU = (7, 2, 0)

_COST = "VMs run in emulation (TCG), about 15 to 30 times slower"
_DEVICE = Path("/dev/kvm")
_DEADLINE = scaled(10.0)
# With no disk and no such init, a kernel that really runs ends here, after all of its own start.
_MARKER = "Kernel panic - not syncing: VFS: Unable to mount root fs"
_SUCCESS = "exited with status 0"
_MAX_CONSOLE = 1 << 20
_NOBODY = 65534
_versions: dict[str, tuple[int, int, int]] = {}
_MACHINE = re.compile(r"^pc-q35-(\d+)\.(\d+)(?=\s)", re.MULTILINE)


@dataclass(frozen=True)
class AcceleratorChoice:
    """An accelerator, why it was chosen, and what that costs compared with KVM."""

    name: Literal["kvm", "tcg"]
    reason: str
    cost: str = ""


async def choose_accelerator(
    settings: Settings, kernel: Path | None, *, again: bool = False
) -> AcceleratorChoice:
    """Choose the accelerator; `kernel` is what the probe boots, and without one KVM is not used.

    `again` repeats a probe that failed earlier, because the host may have been busy then.
    """
    if settings.accelerator == "tcg":
        return AcceleratorChoice("tcg", "STEAD_ACCELERATOR is tcg", _COST)
    problem = _device_problem()
    if problem is None and kernel is None:
        problem = "KVM is not tested yet: there is no kernel to boot"
    if problem is None and kernel is not None:
        problem = await _probe_cached(settings, kernel, again)
    if problem is None:
        return AcceleratorChoice("kvm", "KVM works (a kernel booted in it)")
    if settings.accelerator == "kvm":
        raise HostError(f"STEAD_ACCELERATOR is kvm, but {problem}")
    return AcceleratorChoice("tcg", problem, _COST)


async def qemu_version() -> tuple[int, int, int]:
    """The version of the installed QEMU, cached per binary."""
    binary = _qemu()
    if binary not in _versions:
        completed = await run(*_unprivileged(), binary, "--version", timeout=10)
        match = re.search(rb"version (\d+)\.(\d+)\.(\d+)", completed.stdout)
        if match is None:
            raise HostError(f"cannot read the version of {QEMU} from its --version output")
        _versions[binary] = (int(match[1]), int(match[2]), int(match[3]))
    return _versions[binary]


async def machine_type(version: tuple[int, int, int] | None = None) -> str:
    """The newest versioned q35 up to `version`; a plain `q35` would change when QEMU is upgraded."""
    completed = await run(*_unprivileged(), _qemu(), "-machine", "help", timeout=10)
    return newest_machine_type(completed.stdout.decode(), version or await qemu_version())


def newest_machine_type(listing: str, version: tuple[int, int, int]) -> str:
    offered = [(int(major), int(minor)) for major, minor in _MACHINE.findall(listing)]
    versions = [one for one in offered if one <= version[:2]]
    if not versions:
        raise HostError("this QEMU has no q35 machine type")
    major, minor = max(versions)
    return f"pc-q35-{major}.{minor}"


def _qemu() -> str:
    binary = shutil.which(QEMU)
    if binary is None:
        raise HostError(f"{QEMU} is not installed on this host (see `stead doctor`)")
    return binary


def _device_problem() -> str | None:
    if not _DEVICE.exists():
        return f"{_DEVICE} is missing"
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return f"no permission to open {_DEVICE}"
    return None


async def _probe_cached(settings: Settings, kernel: Path, again: bool) -> str | None:
    """The probe's result, cached for this boot of the host, this QEMU and this kernel."""
    content = await in_thread(kernel.read_bytes)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    version = ".".join(map(str, await qemu_version()))
    probed = {"boot_id": boot, "qemu": version, "kernel": hashlib.sha256(content).hexdigest()}
    memory = settings.cache_folder / "kvm-probe.json"
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
        known = json.loads(memory.read_text())
        problem: str | None = known.pop("problem")
        if known == probed and not (again and problem):
            return problem
    problem = await probe_kvm(kernel)
    memory.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(memory, json.dumps({**probed, "problem": problem}).encode())
    return problem


async def probe_kvm(kernel: Path, deadline: float = _DEADLINE) -> str | None:
    """KernelBoot a kernel under KVM until it looks for its root disk; returns None, or the problem."""
    return await probe(kernel, "kvm", "host", deadline)


async def probe(kernel: Path, accelerator: str, cpu: str, deadline: float) -> str | None:
    machine = await machine_type()
    with contextlib.ExitStack() as opened:
        console, errors = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        kernel_file = open_for_all(kernel, opened)
        written = os.open(f"/proc/self/fd/{console.fileno()}", os.O_WRONLY | os.O_CLOEXEC)
        opened.callback(os.close, written)
        arguments = [
            *(QEMU, "-machine", machine, "-accel", accelerator, "-cpu", cpu, "-smp", "1", "-m", "256"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
            *("-add-fd", f"fd={written},set=1", "-chardev", "file,id=console,path=/dev/fdset/1"),
            *("-serial", "chardev:console", "-kernel", f"/proc/self/fd/{kernel_file}"),
            *("-append", "console=ttyS0 panic=-1 root=/dev/none"),
        ]
        kvm, descriptors = accelerator == "kvm", (written, kernel_file)
        how = await _outcome(arguments, kvm, descriptors, errors, deadline)
        said = os.pread(console.fileno(), _MAX_CONSOLE, 0)
        if how is None:
            words = _last_line(said)
            where = f"; last console line: {words!r}" if words else ""
            return f"{accelerator} is present, but a kernel did not boot in it within {deadline:g} s{where}"
        if how != _SUCCESS:
            words = _last_line(os.pread(errors.fileno(), _MAX_CONSOLE, 0))
            return f"QEMU does not start with {accelerator} ({words or how})"
        if _MARKER not in said.decode(errors="replace"):
            return f"{accelerator} is present, but a kernel in it stopped during boot"
    return None


async def _outcome(
    arguments: list[str], kvm: bool, descriptors: tuple[int, ...], errors: BinaryIO, deadline: float
) -> str | None:
    """How a QEMU ended that runs as those of VMs do; None when it did not in time."""
    sandbox = Sandbox()
    try:
        if os.geteuid() == 0:
            starting = sandbox.spawn(
                arguments, uid=_NOBODY, kvm=kvm, descriptors=descriptors, errors=errors, lasting=False
            )
        else:  # `stead doctor` for another user
            starting = in_thread(spawn, arguments, environment={}, descriptors=descriptors, errors=errors)
        process = await or_undo(starting, _kill)
        try:
            watched = WatchedProcess(process) if process is not None else None
        except ProcessLookupError:
            watched = None
        if watched is None:
            return "ended at once"
        try:
            async with asyncio.timeout(deadline):
                return await watched.wait()
        except TimeoutError:
            return None
        finally:
            watched.kill()
            await finished(watched.wait())
    finally:
        sandbox.close()


async def _kill(process: ProcessId | None) -> None:
    if process is not None:
        await kill(process)


def _unprivileged() -> list[str]:
    return [*without_rights(_NOBODY), "--"] if os.geteuid() == 0 else []


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
