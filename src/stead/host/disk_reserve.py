"""Disk space that only the database and logs get: a file that is removed when everything else is full.

VMs that fill the disk are paused, and git refuses writes, long before (`stead.disk_marks`). The reserve is
given up for what else needs space in spite of that.
"""

import asyncio
import contextlib
import os
from pathlib import Path

from stead.disk_marks import DiskMarks, DiskSpace
from stead.logs import get_logger
from stead.tasks import in_thread

_INTERVAL = 1.0

log = get_logger("stead.disk_reserve")


class DiskReserve:
    def __init__(self, data: Path) -> None:
        self._file = data / "reserve"
        self._size = DiskMarks.of(DiskSpace.of(data).total).reserve

    async def watch(self) -> None:
        """Adjust the reserve to the free space every second."""
        while True:
            try:
                await in_thread(self.adjust)
            except OSError as error:
                log.warning("cannot adjust the reserve of disk space", error=str(error))
            await asyncio.sleep(_INTERVAL)

    def adjust(self) -> None:
        """Release the reserve when the disk is full; allocate it again as soon as as much is left beside it.

        What it gave back is no reason to allocate it again.
        """
        free = DiskSpace.of(self._file.parent).free
        if self.allocated and free < self._size // 4:
            self._file.unlink()
            log.error(
                "disk is full: released the reserve for database and logs; delete VMs, snapshots or repos",
                released=self._size,
                folder=str(self._file.parent),
            )
        elif not self.allocated and free > 2 * self._size:
            self._allocate()
            log.info("allocated the reserve of disk space for database and logs", size=self._size)

    @property
    def allocated(self) -> bool:
        return self._file.exists()

    def _allocate(self) -> None:
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._size)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                self._file.unlink()
            raise
        finally:
            os.close(descriptor)
