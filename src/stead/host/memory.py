"""Host memory: capacity check, and template memory in sealed files that many VMs map copy-on-write."""

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field
from pathlib import Path

from stead.errors import CapacityExceeded, HostError
from stead.files import allocated, copy_sparse
from stead.shares import SharedEntries
from stead.tasks import Threads, or_undo

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


@dataclass(eq=False)
class _Copy:
    template: str
    descriptor: int
    account: str | None
    """The account whose VMs alone have used it."""
    machines: set[str] = field(default_factory=set)
    """The VMs that have it mapped, or are being started for that."""


class SealedCopies:
    """Sealed copies of the memory of templates.

    A copy that a VM has mapped stays open: closing it would free nothing, and the next VM of its template
    would need another one. `most` copies that no VM has mapped stay open; above that, the account with the
    most gives one up. That of the default template always stays, so no account can evict it.

    Copies of a server before this one are not used again: they could only be opened through a QEMU, which may
    have put another file in their place.
    """

    def __init__(self, most: int = 8) -> None:
        self._copies: dict[str, _Copy] = {}
        """By template."""
        self._mapped: dict[str, _Copy] = {}
        """By VM."""
        self._unmapped: SharedEntries[str] = SharedEntries(most)
        self._default: str | None = None
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def opened(
        self, template: str, path: Path, machine: str, account: str | None, *, default: bool = False
    ) -> AsyncIterator[int]:
        """A descriptor of the copy of a template's memory, for a VM that is started in this block.

        The VM counts as having it mapped until `release`, or until the block fails.
        """
        async with self._lock:
            self.release(machine)
            copy = self._copies.get(template)
            if copy is None:
                copy = self._copies[template] = _Copy(template, await self._new(path), account)
            elif copy.account != account:
                copy.account = None
            descriptor = os.dup(copy.descriptor)
            if template in self._unmapped:
                self._unmapped.remove(template)
            copy.machines.add(machine)
            self._mapped[machine] = copy
            if default:
                self._set_default(template)
        try:
            yield descriptor
        except BaseException:
            self.release(machine)
            raise
        finally:
            os.close(descriptor)

    async def _new(self, path: Path) -> int:
        size = allocated(path)
        while len(self._unmapped) and available() - size < _FLOOR:
            self._close(self._unmapped.first_to_go())
        check_memory(size)
        return await new_sealed_copy(path)

    def _set_default(self, template: str) -> None:
        before, self._default = self._default, template
        if before is not None and before != template and before in self._copies:
            self._keep_unmapped(self._copies[before])

    def release(self, machine: str) -> None:
        """The process of a VM has ended, if it had one: it has no copy mapped."""
        copy = self._mapped.pop(machine, None)
        if copy is not None:
            copy.machines.discard(machine)
            if self._copies.get(copy.template) is copy:
                self._keep_unmapped(copy)

    def _keep_unmapped(self, copy: _Copy) -> None:
        """Let a copy be closed for others if no VM has it mapped."""
        if copy.machines or copy.template == self._default:
            return
        surplus = self._unmapped.add(copy.template, copy.account)
        if surplus is not None:
            self._close(surplus)

    def _close(self, template: str) -> None:
        os.close(self._copies.pop(template).descriptor)
        if template in self._unmapped:
            self._unmapped.remove(template)

    def close(self, templates: Collection[str] | None = None) -> None:
        """Close the copies of these templates; default: all."""
        for template in {*self._copies} if templates is None else templates:
            if template in self._copies:
                self._close(template)


async def new_sealed_copy(path: Path) -> int:
    """As `sealed_copy`, in a thread; a cancelled caller leaves none."""
    return await or_undo(Threads.COPIES.run(sealed_copy, path), _close_descriptor)


async def _close_descriptor(descriptor: int) -> None:
    os.close(descriptor)


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
