"""Host memory: capacity check, and template memory in sealed files that many VMs map copy-on-write."""

import errno
import fcntl
import os
from pathlib import Path

from stead.errors import CapacityExceeded, HostError

_FLOOR = 512 << 20
_CHUNK = 8 << 20
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def check_memory(wanted: int = 0) -> None:
    """CapacityExceeded when `wanted` bytes would leave the host with too little memory."""
    if available() - wanted < _FLOOR:
        need = f" beyond the {wanted >> 20} MiB that this needs" if wanted >> 20 else ""
        raise CapacityExceeded(f"less than {_FLOOR >> 20} MiB of memory is available on this host{need}")


def available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def sealed_copy(path: Path) -> int:
    """A sealed in-memory copy of a sparse file.

    QEMU before 8.2 opens the file behind its RAM for writing even when it maps it privately. What is sealed
    cannot be written through such a descriptor, so a guest that broke out could not poison the template.
    """
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    copy = os.memfd_create("stead-template", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size = os.fstat(source).st_size
        os.ftruncate(copy, size)
        for start, end in _extents(source, size):
            for offset in range(start, end, _CHUNK):
                block = os.pread(source, min(_CHUNK, end - offset), offset)
                os.pwrite(copy, block, offset)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(copy)
        raise HostError(f"cannot load template {path.name} into memory: {error.strerror}") from error
    finally:
        os.close(source)
    return copy


def _extents(descriptor: int, size: int) -> list[tuple[int, int]]:
    """The parts of a sparse file that hold data."""
    extents = []
    offset = 0
    while offset < size:
        try:
            start = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        offset = os.lseek(descriptor, start, os.SEEK_HOLE)
        extents.append((start, offset))
    return extents
