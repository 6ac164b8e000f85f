"""Disk layers: qcow2 files with frozen backing files. The server opens them; QEMU gets descriptors."""

import contextlib
import errno
import fcntl
import functools
import os
import signal
import tempfile
from pathlib import Path
from typing import Literal

from stead.errors import HostError
from stead.files import open_regular, sync_file
from stead.host.qcow2 import empty_layer, read_header
from stead.host.qemu import OpenLayer
from stead.logs import get_logger

log = get_logger("stead.layers")

_NO_LEASES = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


def open_top(path: Path, opened: contextlib.ExitStack) -> OpenLayer:
    """Open a layer for the one QEMU that writes it. `opened` closes its descriptors."""
    reading = _open(path, os.O_RDONLY, opened)
    writing = _open(path, os.O_RDWR, opened)
    if not os.path.sameopenfile(reading, writing):
        raise HostError(f"disk layer {path.name} was replaced while it was opened")
    read_header(reading, path.name)
    _give_to_root(writing)
    return OpenLayer(path.stem, "qcow2", reading, writing)


def open_frozen(path: Path, opened: contextlib.ExitStack) -> OpenLayer:
    """Open a layer that no process can write; StillWritten if one can. `opened` closes its descriptor."""
    reading = _open(path, os.O_RDONLY, opened)
    # Before its header is read: that of a file without writers stays what it is.
    if has_writers(reading):
        raise StillWritten(f"disk layer {path.name} is open for writing in another process")
    kind = layer_format(path)
    if kind == "qcow2":
        read_header(reading, path.name)
    return OpenLayer(path.stem, kind, reading)


class StillWritten(HostError):
    """A frozen layer has a writer: a QEMU of an older version, or one that its guest has broken."""


def layer_format(path: Path) -> Literal["raw", "qcow2"]:
    return "raw" if path.suffix == ".raw" else "qcow2"


def has_writers(descriptor: int) -> bool:
    """Whether any process has the file open for writing, or mapped so.

    The kernel grants a read lease only on a file without writers, whoever they are. After that none can
    come: the file is root's, and an unprivileged process cannot open it again through a descriptor.
    """
    try:
        _lease(descriptor)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        if error.errno not in _NO_LEASES:
            raise HostError(f"cannot tell whether a disk layer is written: {error.strerror}") from error
        _report_no_leases()
    return False


def knows_writers(folder: Path) -> bool:
    """Whether `has_writers` works on the file system of a folder."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            reading = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _lease(reading)
            finally:
                os.close(reading)
    except OSError as error:
        return error.errno == errno.EAGAIN  # `file` is its writer
    return False


def _lease(descriptor: int) -> None:
    # Should a process of root open the file in this moment, the default signal would end this process.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


@functools.cache
def _report_no_leases() -> None:
    """Log it once. A copy of each layer would be no answer: a fork would copy the whole disk."""
    log.warning(
        "the file system of the data folder has no leases: a QEMU that its guest has broken could go on"
        " writing a disk layer that others use. Keep the data folder on ext4, xfs or btrfs"
    )


def _open(path: Path, access: int, opened: contextlib.ExitStack) -> int:
    try:
        descriptor = open_regular(path, access)
    except OSError as error:
        raise HostError(f"cannot read disk layer {path.name}: {error.strerror}") from error
    opened.callback(os.close, descriptor)
    return descriptor


def _give_to_root(descriptor: int) -> None:
    """Older versions gave layers to the user of their QEMU, who could then open them again."""
    facts = os.fstat(descriptor)
    if facts.st_uid or facts.st_gid or facts.st_mode & 0o077:
        os.fchown(descriptor, 0, 0)
        os.fchmod(descriptor, 0o600)


def make_layer(path: Path, size: int) -> None:
    """Create a layer of `size` bytes without data. It names no backing file: QEMU gets the whole chain."""
    length, parts = empty_layer(size)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, length)
            for offset, part in parts:
                os.pwrite(descriptor, part, offset)
            # Durable before the saved memory is deleted, or a power cut would lose the VM.
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HostError(f"cannot create a disk layer: {error.strerror}") from error


def sync_layer(path: Path) -> None:
    """Make a layer durable."""
    try:
        sync_file(path)
    except OSError as error:
        raise HostError(f"cannot sync the disk layer {path.name}: {error.strerror}") from error
