"""Disk layers: qcow2 files with frozen backing files."""

import json
import os
import struct
import tempfile
from pathlib import Path

from stead.errors import HostError
from stead.files import open_regular, sync_file
from stead.host.commands import run
from stead.tasks import in_thread

_HEADER = struct.Struct(">4sI64xQ")
"""Of a qcow2 file: magic, version, features that a reader must know."""
_KNOWN_FEATURES = 0b11
"""Not closed in good order, damaged: QEMU deals with both. An external data file is bit 2."""


async def make_layer(path: Path, backing: Path, size_gib: int) -> None:
    """Create an empty layer over `backing`. QEMU gets the chain on its command line, not from the header."""
    kind = "raw" if backing.suffix == ".raw" else "qcow2"
    arguments = ("-f", "qcow2", "-F", kind, "-b", str(backing))
    await run("qemu-img", "create", "-q", *arguments, str(path), f"{size_gib}G")


class EmptyLayers:
    """Creates empty writable layers: one per size with qemu-img, the others as faster copies of it."""

    def __init__(self) -> None:
        self._contents: dict[int, bytes] = {}

    async def make(self, path: Path, size_gib: int, uid: int) -> None:
        if size_gib not in self._contents:
            with tempfile.TemporaryDirectory(prefix="stead-layer-") as folder:
                layer = Path(folder) / "empty.qcow2"
                await run("qemu-img", "create", "-q", "-f", "qcow2", layer, f"{size_gib}G")
                self._contents[size_gib] = layer.read_bytes()
        await in_thread(_write, path, self._contents[size_gib], uid)


def _write(path: Path, content: bytes, uid: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as layer:
            layer.write(content)
            os.fchown(descriptor, uid, uid)
            layer.flush()
            # Durable before the saved memory is deleted, or a power cut would lose the VM.
            os.fsync(descriptor)
    except OSError as error:
        raise HostError(f"cannot create a disk layer: {error.strerror}") from error


async def grow_layer(path: Path, size_gib: int) -> None:
    """Grow a layer that no QEMU has open; does nothing if it is large enough."""
    await in_thread(check_layer, path)
    # Whatever its header says, nothing below it is opened.
    file = {"driver": "file", "filename": str(path)}
    node = {"driver": "qcow2", "file": file, "backing": None}
    await run("qemu-img", "resize", "-q", f"json:{json.dumps(node)}", f"{size_gib}G")


def sync_layer(path: Path) -> None:
    """Make a layer durable."""
    try:
        sync_file(path)
    except OSError as error:
        raise HostError(f"cannot sync the disk layer {path.name}: {error.strerror}") from error


def check_layer(path: Path) -> None:
    """Make sure that a layer which some QEMU could write is an ordinary file and names no other.

    It is opened by root: a guest that broke out might have put a link or a FIFO in its place, or the name of
    one of the host's files in its header.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as layer:
            header = layer.read(_HEADER.size)
    except OSError as error:
        raise HostError(f"cannot read disk layer {path.name}: {error.strerror}") from error
    if len(header) < _HEADER.size:
        raise HostError(f"disk layer {path.name} is damaged")
    magic, version, incompatible = _HEADER.unpack(header)
    if (magic, version) != (b"QFI\xfb", 3) or incompatible & ~_KNOWN_FEATURES:
        raise HostError(f"disk layer {path.name} has an unknown format")
