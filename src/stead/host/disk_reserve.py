"""Disk space that only the database and logs get: a file that is emptied when everything else is full.

VMs and git fill a disk to its end. QEMU then stops the guests that write, and Stead lets them continue only
when there is more room than this reserve, so what the file gives back is left to the server.
"""

import asyncio
import contextlib
import os
import shutil
from pathlib import Path

from stead.files import nearest_existing
from stead.logs import get_logger
from stead.tasks import in_thread

_LARGEST = 256 << 20
_INTERVAL = 5.0

log = get_logger("stead.disk_reserve")


def reserve_size(folder: Path) -> int:
    """Bytes of the reserve on the disk of a folder: a hundredth of it, and at most 256 MiB."""
    return min(_LARGEST, shutil.disk_usage(nearest_existing(folder)).total // 100)


class DiskReserve:
    def __init__(self, data: Path) -> None:
        self._file = data / "reserve"
        self._size = reserve_size(data)

    async def watch(self) -> None:
        """Adjust the reserve to the free space every few seconds."""
        while True:
            try:
                await in_thread(self.adjust)
            except OSError as error:
                log.warning("cannot adjust the reserve of disk space", error=str(error))
            await asyncio.sleep(_INTERVAL)

    def adjust(self) -> None:
        """Release the reserve when the disk is full; allocate it again when there is much more room."""
        free = shutil.disk_usage(self._file.parent).free
        if self.allocated and free < self._size // 4:
            self._file.unlink()
            log.error(
                "disk is full: released the reserve for database and logs; delete VMs, snapshots or repos",
                released=self._size,
                folder=str(self._file.parent),
            )
        elif not self.allocated and free > 4 * self._size:
            self._allocate()

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
