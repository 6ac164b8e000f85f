"""VM state at one instant (memory and devices): capture from a running QEMU, save, load into another."""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

from stead.errors import CheckpointUnusable, HostError
from stead.files import ABSENT, open_regular, sync_folder, write_atomically
from stead.host.memory import check_memory
from stead.host.memory_delta import Delta, save_pages
from stead.host.page_scan import find_ram, minus, written_pages
from stead.host.qemu import Platform, Saved
from stead.host.vm import Vm
from stead.settings import Size
from stead.tasks import finished, in_thread

_FORMAT = 1
_DEVICES_LIMIT = 64 << 20
_FACTS = "checkpoint.json"


@dataclass(frozen=True)
class Moment:
    """Memory and devices of one paused instant. The disk of the same instant is a frozen layer."""

    size: Size
    base: str | None
    """The template whose memory `memory` is the difference to; None when it is the whole of it."""
    platform: Platform
    devices: bytes
    memory: Delta

    def close(self) -> None:
        self.memory.close()


@dataclass(frozen=True)
class Pause:
    """How long the VM was paused, and how much was copied meanwhile."""

    seconds: float
    pages: int


@dataclass(frozen=True)
class DiskSwitch:
    """The disk layers before and after the capture."""

    layer: str
    to: str


async def take(
    vm: Vm, size: Size, base: str | None, platform: Platform, switch: DiskSwitch
) -> tuple[Moment, Pause]:
    """Pause the guest, capture its memory and devices, and resume it on a new disk layer.

    All that can be done while the guest runs is done before: finding the pages that differ from the
    template's, making room for them, opening the new layer. On failure the guest stays paused: what happens
    to it is for the caller to say.
    """
    pid = vm.process.identity.pid
    region = await in_thread(find_ram, pid, size.memory_mib << 20, base is not None)
    expected = await in_thread(written_pages, pid, region)
    check_memory(expected.pages * PAGESIZE)
    memory = await in_thread(Delta.prepare, expected.pages)
    try:
        await in_thread(_flush, vm.files.folder)
        started = time.perf_counter()
        await vm.pause()
        devices = await vm.save_devices()
        copying = asyncio.ensure_future(in_thread(memory.copy_from, pid, region, expected))
        try:
            await vm.switch_layer(switch.layer, switch.to)
            found = await in_thread(written_pages, pid, region)
        finally:
            await finished(copying)
        await in_thread(memory.copy_from, pid, region, minus(found, expected))
        await vm.resume()
        pause = Pause(time.perf_counter() - started, memory.pages)
        return Moment(size, base, platform, _read_devices(devices), memory), pause
    except BaseException:
        memory.close()
        raise
    finally:
        vm.files.drop_devices()


async def keep(vm: Vm, size: Size, base: str | None, platform: Platform, folder: Path) -> None:
    """Pause the guest for good and save its memory and devices; they are durable when this returns.

    The guest is not resumed, so its memory is streamed to disk without a copy in RAM.
    """
    pid = vm.process.identity.pid
    region = await in_thread(find_ram, pid, size.memory_mib << 20, base is not None)
    await in_thread(_flush, vm.files.folder)
    await vm.pause()
    try:
        devices = _read_devices(await vm.save_devices())
    finally:
        vm.files.drop_devices()
    pages = await in_thread(written_pages, pid, region)
    await in_thread(_save, folder, size, base, platform, devices, partial(save_pages, pid, region, pages))


async def load(vm: Vm, moment: Moment, saved: Saved, copied: bool) -> None:
    """Load saved state into a QEMU that waits for it; the guest stays paused."""
    pid = vm.process.identity.pid
    region = await in_thread(find_ram, pid, moment.size.memory_mib << 20, copied)
    await in_thread(moment.memory.apply_to, pid, region)
    await vm.load(saved)


@contextlib.asynccontextmanager
async def device_state(content: bytes) -> AsyncIterator[int]:
    """Saved device state as a descriptor that a QEMU can inherit."""
    descriptor = os.memfd_create("stead-devices", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _flush(folder: Path) -> None:
    """Flush the disk layers before the pause, so that QEMU's own flush is short."""
    for path in folder.glob("*.qcow2"):
        with contextlib.suppress(OSError):
            descriptor = open_regular(path)
            try:
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)


def _read_devices(path: Path) -> bytes:
    """The device state that QEMU wrote; the directory is QEMU's own, so the content is untrusted."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size > _DEVICES_LIMIT:
                raise HostError("unexpected content in the device state that QEMU saved")
            return file.read()
    except OSError as error:
        raise HostError(f"cannot read the saved device state: {error.strerror}") from error


# On disk


def save(moment: Moment, folder: Path) -> None:
    """Save captured state; it is durable when this returns."""
    _save(folder, moment.size, moment.base, moment.platform, moment.devices, moment.memory.write_to)


def _save(
    folder: Path,
    size: Size,
    base: str | None,
    platform: Platform,
    devices: bytes,
    write_memory: Callable[[Path], dict[str, object]],
) -> None:
    try:
        folder.mkdir(parents=True, mode=0o700)
        write_atomically(folder / "devices", devices)
        facts = {
            "format": _FORMAT,
            "size": str(size),
            "base": base,
            "platform": asdict(platform),
            "devices_sha256": hashlib.sha256(devices).hexdigest(),
            "memory": write_memory(folder),
        }
        content = json.dumps({"facts": facts, "sha256": _checksum(facts)}).encode()
        write_atomically(folder / _FACTS, content)
        sync_folder(folder.parent)
    except BaseException as error:
        # On a full disk the database needs the space to record the outcome.
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise HostError(f"cannot save the memory: {error.strerror}") from error
        raise


def copy(source: Path, target: Path) -> None:
    """Share saved state by hard links; its files never change."""
    try:
        target.mkdir(mode=0o700)
        for path in source.iterdir():
            os.link(path, target / path.name)
        sync_folder(target)
        sync_folder(target.parent)
    except OSError as error:
        raise HostError(f"cannot save the memory: {error.strerror}") from error


def read(folder: Path, platform: Platform, size: Size) -> Moment:
    """Read saved state and check that it fits this host; CheckpointUnusable has the reason if not.

    HostError when the host cannot read it now, as with too many open files: the next call may succeed.
    Its memory is not yet verified: that takes a while, and is done beside other work.
    """
    try:
        kept = json.loads((folder / _FACTS).read_bytes())
        facts = kept["facts"]
        if kept["sha256"] != _checksum(facts):
            raise CheckpointUnusable(f"checksum mismatch in {_FACTS}")
        if facts["format"] != _FORMAT:
            raise CheckpointUnusable(f"unsupported format {facts['format']} (this version reads {_FORMAT})")
        _check_platform(facts["platform"], platform)
        if facts["size"] != str(size):
            raise CheckpointUnusable(f"saved from a VM of size {facts['size']}, not {size}")
        devices = (folder / "devices").read_bytes()
        if hashlib.sha256(devices).hexdigest() != facts["devices_sha256"]:
            raise CheckpointUnusable("checksum mismatch in the device state")
        memory = Delta.load(folder, facts["memory"], size.memory_mib << 20)
        return Moment(size, facts["base"], platform, devices, memory)
    except ABSENT as error:
        raise CheckpointUnusable(f"cannot read it: {error.strerror}") from error
    except OSError as error:
        # It may pass, so it is no reason to give the memory up.
        raise HostError(f"cannot read the saved memory: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointUnusable(f"invalid {_FACTS}") from error


def _check_platform(kept: dict[str, Any], platform: Platform) -> None:
    present = asdict(platform)
    names = {
        "accelerator": "accelerator",
        "machine": "machine type",
        "host_cpu": "CPU",
    }
    # A bug fix of QEMU reads what the one before it wrote; a new release has a machine type of its own.
    versions = [".".join(map(str, each["version"][:2])) for each in (kept, present)]
    if versions[0] != versions[1]:
        raise CheckpointUnusable(f"saved with QEMU {versions[0]}, and this host has QEMU {versions[1]}")
    for field, word in names.items():
        if kept[field] != present[field]:
            raise CheckpointUnusable(f"saved with a different {word} than this host has")


def _checksum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
