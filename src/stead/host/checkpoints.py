"""VM state at one instant (memory and devices): capture from a running QEMU, save, load into another."""

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

from stead.deadlines import scaled
from stead.errors import CheckpointUnusable, HostError
from stead.files import ABSENT, allocated, exists, open_regular, remove_garbage, sync_folder, write_atomically
from stead.host import interface
from stead.host.interface import Pause, narrowed
from stead.host.memory import check_memory
from stead.host.memory_delta import Delta, save_pages
from stead.host.page_scan import find_ram, mapped_ram, minus, written_pages
from stead.host.qemu import QemuPlatform, is_announced
from stead.host.quarantine import Quarantine
from stead.host.vm import QemuVm
from stead.settings import Size
from stead.tasks import Threads, finished, in_thread

_FORMAT = 1
_FACTS = "checkpoint.json"
_MAPPED_WITHIN = scaled(30.0)
_MAPPING_INTERVAL = 0.002


@dataclass(frozen=True)
class LocalCapturedState:
    """Memory and devices of one paused instant. The disk of the same instant is a frozen layer."""

    size: Size
    base: str | None
    """The template whose memory `memory` is the difference to; None when it is the whole of it."""
    platform: QemuPlatform
    devices: bytes
    memory: Delta

    @property
    def memory_bytes(self) -> int:
        return self.memory.size

    def close(self) -> None:
        self.memory.close()


class LocalVm(QemuVm):
    """A QEMU whose state can be captured."""

    checkpoints: "CheckpointFolders"

    async def capture(
        self, size: Size, base: str | None, *, layer: str, to: str
    ) -> tuple[LocalCapturedState, Pause]:
        """Pause the guest, capture its memory and devices, and resume it on a new disk layer.

        All that can be done while the guest runs is done before: finding the pages that differ from the
        template's, making room for them, opening the new layer. On failure the guest stays paused: what
        happens to it is for the caller to say.
        """
        pid = self.process.pid
        platform = await self._platform()
        region = await in_thread(find_ram, pid, size.memory_mib << 20, base is not None)
        expected = await Threads.COPIES.run(written_pages, pid, region)
        check_memory(expected.pages * PAGESIZE)
        memory = await Threads.COPIES.run(Delta.prepare, expected.pages)
        try:
            async with self.saving_devices() as save_devices:
                await Threads.COPIES.run(_flush, self.files.folder)
                started = time.perf_counter()
                await self.pause()
                devices = await save_devices()
                copying = asyncio.ensure_future(Threads.COPIES.run(memory.copy_from, pid, region, expected))
                try:
                    await self.switch_layer(layer, to)
                    found = await Threads.COPIES.run(written_pages, pid, region)
                finally:
                    await finished(copying)
                await Threads.COPIES.run(memory.copy_from, pid, region, minus(found, expected))
                await self.resume()
                pause = Pause(time.perf_counter() - started, memory.pages)
            with contextlib.suppress(HostError):
                await self.give_up_writing(layer)
            return LocalCapturedState(size, base, platform, devices, memory), pause
        except BaseException:
            memory.close()
            raise

    async def save_and_pause(self, size: Size, base: str | None, checkpoint: str) -> None:
        """Pause the guest for good and save its memory and devices; they are durable when this returns.

        The guest is not resumed, so its memory is streamed to disk without a copy in RAM.
        """
        pid = self.process.pid
        platform = await self._platform()
        region = await in_thread(find_ram, pid, size.memory_mib << 20, base is not None)
        await Threads.COPIES.run(_flush, self.files.folder)
        async with self.saving_devices() as save_devices:
            await self.pause()
            devices = await save_devices()
        pages = await Threads.COPIES.run(written_pages, pid, region)
        write_memory = partial(save_pages, pid, region, pages)
        folder = self.checkpoints.folder(checkpoint)
        await Threads.COPIES.run(_save, folder, size, base, platform, devices, write_memory)

    async def _platform(self) -> QemuPlatform:
        """The platform of this process, which an older version may have started."""
        try:
            command_line = Path(f"/proc/{self.process.pid}/cmdline").read_bytes()
        except OSError as error:
            raise HostError(f"cannot read the arguments of QEMU: {error.strerror}") from error
        return replace(await self.checkpoints.platform(), announced=is_announced(command_line))


class CheckpointFolders:
    """Saved state on disk: one folder per checkpoint."""

    def __init__(
        self,
        folder: Path,
        platform: Callable[[], Awaitable[QemuPlatform]],
        quarantine: Quarantine,
    ) -> None:
        self._folder = folder
        self.platform = platform
        self._quarantine = quarantine

    def folder(self, checkpoint: str) -> Path:
        return self._folder / checkpoint

    def ids(self) -> list[str]:
        return [path.name for path in self._folder.iterdir()]

    async def read(self, checkpoint: str, size: Size) -> LocalCapturedState:
        """Saved state and the check that it fits this host; CheckpointUnusable has the reason if not."""
        return await in_thread(read, self.folder(checkpoint), await self.platform(), size)

    async def save(self, state: interface.CapturedState, checkpoint: str) -> None:
        await Threads.COPIES.run(save, narrowed(state, LocalCapturedState), self.folder(checkpoint))

    async def copy(self, checkpoint: str, to: str) -> None:
        await Threads.COPIES.run(copy, self.folder(checkpoint), self.folder(to))

    def allocated(self, checkpoint: str) -> int:
        return sum(allocated(path) for path in self.folder(checkpoint).iterdir())

    async def remove(self, checkpoints: Sequence[str]) -> None:
        await Threads.COPIES.run(remove_garbage, [self.folder(each) for each in checkpoints])

    async def set_aside(self, checkpoint: str) -> bool:
        """Move saved memory to the quarantine: with the QEMU or CPU that it fits, it could still be used."""
        if not exists(self.folder(checkpoint)):
            return False
        await in_thread(self._quarantine.keep, [self.folder(checkpoint)])
        await in_thread(self._quarantine.prune)
        return True


def place_memory(pid: int, memory: Delta, size: int, copied: bool, given_up: threading.Event) -> None:
    """Write captured memory into a QEMU that waits for saved state, as soon as it has mapped its RAM.

    It may still be starting: a QEMU that waits for saved state writes nothing into RAM before it loads that.
    """
    deadline = time.monotonic() + _MAPPED_WITHIN
    while (region := mapped_ram(pid, size, copied)) is None:
        if given_up.wait(_MAPPING_INTERVAL):
            return
        if time.monotonic() > deadline:
            raise HostError(f"QEMU did not map the guest RAM within {_MAPPED_WITHIN:g} s")
    memory.apply_to(pid, region)


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


# On disk


def save(state: LocalCapturedState, folder: Path) -> None:
    """Save captured state; it is durable when this returns."""
    _save(folder, state.size, state.base, state.platform, state.devices, state.memory.write_to)


def _save(
    folder: Path,
    size: Size,
    base: str | None,
    platform: QemuPlatform,
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


def read(folder: Path, platform: QemuPlatform, size: Size) -> LocalCapturedState:
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
        platform = replace(platform, announced=facts["platform"].get("announced", True))
        if facts["size"] != str(size):
            raise CheckpointUnusable(f"saved from a VM of size {facts['size']}, not {size}")
        devices = (folder / "devices").read_bytes()
        if hashlib.sha256(devices).hexdigest() != facts["devices_sha256"]:
            raise CheckpointUnusable("checksum mismatch in the device state")
        memory = Delta.load(folder, facts["memory"], size.memory_mib << 20)
        return LocalCapturedState(size, facts["base"], platform, devices, memory)
    except ABSENT as error:
        raise CheckpointUnusable(f"cannot read it: {error.strerror}") from error
    except OSError as error:
        # It may pass, so it is no reason to give the memory up.
        raise HostError(f"cannot read the saved memory: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointUnusable(f"invalid {_FACTS}") from error


def _check_platform(kept: dict[str, Any], platform: QemuPlatform) -> None:
    present = asdict(platform)
    names = {"accelerator": "accelerator", "machine": "machine type", "host_cpu": "CPU"}
    # A bug fix of QEMU reads what the one before it wrote; a new release has a machine type of its own.
    versions = [".".join(map(str, each["version"][:2])) for each in (kept, present)]
    if versions[0] != versions[1]:
        raise CheckpointUnusable(f"saved with QEMU {versions[0]}, and this host has QEMU {versions[1]}")
    for field, word in names.items():
        if kept[field] != present[field]:
            raise CheckpointUnusable(f"saved with a different {word} than this host has")


def _checksum(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
