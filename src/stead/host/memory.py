"""Host memory: capacity check, and template memory in sealed files that many VMs map copy-on-write."""

import asyncio
import fcntl
import os
from collections.abc import Collection
from pathlib import Path

from stead.errors import CapacityExceeded, HostError
from stead.files import allocated, copy_sparse
from stead.tasks import Threads

_FLOOR = 512 << 20
_SHORT = 1 << 30
"""Idle VMs are suspended below this, so that the floor is not reached."""
_STALLED = 20.0
"""Percent of the time."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def check_memory(wanted: int = 0) -> None:
    """CapacityExceeded when `wanted` bytes would leave the host with too little memory."""
    if available() - wanted < _FLOOR:
        need = f" beyond the {wanted >> 20} MiB that this needs" if wanted >> 20 else ""
        raise CapacityExceeded(f"less than {_FLOOR >> 20} MiB of memory is available on this host{need}")


def is_short() -> bool:
    """Whether programs wait for memory, or it is about to run out: time to suspend idle VMs."""
    try:
        stalled = _stalled(Path("/proc/pressure/memory").read_text())
    except (OSError, ValueError, IndexError):
        stalled = 0.0  # a kernel without PSI
    return stalled >= _STALLED or available() < _SHORT


def _stalled(pressure: str) -> float:
    """Percent of the last 10 s in which some program waited for memory: `some avg10=0.00 ...`."""
    some = next(line for line in [*pressure.splitlines(), ""] if line.startswith("some ") or not line)
    return float(some.partition("avg10=")[2].split()[0]) if some else 0.0


def available() -> int:
    return _meminfo("MemAvailable")


def total() -> int:
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


class SealedCopies:
    """Sealed copies of the memory of templates, the most recently used ones.

    A copy that is closed stays in memory as long as a VM has it mapped.
    """

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._copies: dict[str, int] = {}
        """By template, the least recently used first."""
        self._lock = asyncio.Lock()

    async def open(self, template: str, path: Path) -> int:
        """A descriptor of the copy of a template's memory, which the caller closes."""
        async with self._lock:
            copy = self._copies.pop(template, None)
            if copy is None:
                copy = await self._new(path)
            self._copies[template] = copy
            while len(self._copies) > self._most:
                self._close_oldest()
            return os.dup(copy)

    async def _new(self, path: Path) -> int:
        size = allocated(path)
        while self._copies and available() - size < _FLOOR:
            self._close_oldest()
        check_memory(size)
        return await Threads.COPIES.run(sealed_copy, path)

    def _close_oldest(self) -> None:
        os.close(self._copies.pop(next(iter(self._copies))))

    def close(self, templates: Collection[str] | None = None) -> None:
        """Close the copies of these templates; default: all."""
        for template in set(self._copies) if templates is None else templates:
            if (copy := self._copies.pop(template, None)) is not None:
                os.close(copy)


def sealed_copy(path: Path) -> int:
    """A sealed in-memory copy of a sparse file.

    QEMU before 8.2 opens the file behind its RAM for writing even when it maps it privately. What is sealed
    cannot be written through such a descriptor, so a guest that broke out could not poison the template.
    """
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    copy = os.memfd_create("stead-template", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        copy_sparse(source, copy)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(copy)
        raise HostError(f"cannot load template {path.name} into memory: {error.strerror}") from error
    finally:
        os.close(source)
    return copy
