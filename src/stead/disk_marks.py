"""How little of a disk may be free before writers are stopped, one kind after the other.

VMs of accounts above their share are paused first, then all that still write, then git refuses what it would
store, and only then the server gives up its reserve for the database and logs.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stead.files import nearest_existing

_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class DiskSpace:
    """A file system in bytes; `free` is what programs without privileges may still write."""

    free: int
    total: int

    @classmethod
    def of(cls, folder: Path) -> Self:
        """The file system of a folder; without a free inode nothing of it is free."""
        disk = os.statvfs(nearest_existing(folder))
        free = 0 if disk.f_files and not disk.f_favail else disk.f_bavail * disk.f_frsize
        return cls(free, disk.f_blocks * disk.f_frsize)


@dataclass(frozen=True)
class DiskMarks:
    """Bytes that are free, each mark below the one before it. They are smaller on small file systems."""

    enough: int
    """Above it, paused VMs continue."""
    low: int
    """Below it, VMs of accounts above their share are paused."""
    critical: int
    """Below it, VMs of accounts that still write are paused."""
    floor: int
    """Below it, neither git nor saved memory is stored."""
    reserve: int
    """Size of the reserve, which is allocated: it is not among the free bytes."""

    @classmethod
    def of(cls, total: int) -> Self:
        low = min(max(3 * _GIB, total * 3 // 100), total // 10)
        return cls(
            enough=2 * low,
            low=low,
            critical=min(low // 2, 3 * _GIB // 2),
            floor=min(512 * _MIB, total // 50),
            reserve=min(256 * _MIB, total // 100),
        )


def writable(folder: Path) -> int:
    """Bytes of git or of saved memory that may still be written to the disk of a folder."""
    space = DiskSpace.of(folder)
    return max(0, space.free - DiskMarks.of(space.total).floor)
