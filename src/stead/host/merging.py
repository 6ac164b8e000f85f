"""Merging disk layers into one."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from stead.deadlines import scaled
from stead.errors import HostError
from stead.files import sync_file
from stead.host.commands import run
from stead.host.disks import check_layer
from stead.tasks import in_thread

_TIMEOUT = scaled(6 * 3600.0)
# Machines come first, for the processor and for the disk.
_GENTLY = ("nice", "-n", "19", "ionice", "-t", "-c", "3")
_HEADER = struct.Struct(">24xQ40xQ8xQ")
"""Of a qcow2 file: virtual size, features that a reader must know, features that a writer clears."""

Node = dict[str, object]


async def merge(layers: Sequence[Path], below: Sequence[Path], target: Path) -> None:
    """Merge `layers` into the file `target`, with `below` as its backing files.

    The layers are committed into it, the oldest first: what one of them has, data or zeros, replaces what is
    there, and what none has is left to `below`. (`qemu-img convert -B` would take what the newest has alone.)
    Only `target` changes. `qemu-img commit` opens the layers for writing as well, but that changes nothing in
    a layer that is in good order.
    """
    sizes = await in_thread(_sizes, [path for path in (*layers, *below) if _kind(path) == "qcow2"])
    merged = sizes[: len(layers)]
    if merged != sorted(merged, reverse=True):
        raise HostError("a disk layer is smaller than its parent layer")
    # It starts as large as the oldest layer and grows with them: what lies beyond an end reads as zeros.
    create = ("create", "-q", "-f", "qcow2", "-u", "-b", str(below[0]), "-F", _kind(below[0]))
    await run(*_GENTLY, "qemu-img", *create, target, str(merged[-1]))
    rest: Node | None = None
    for path in reversed(below):
        rest = _node(path, rest) | {"read-only": True}
    for layer in reversed(layers):
        chain = _node(layer, _node(target, rest) | {"discard": "unmap"})
        commit = ("commit", "-q", "-d", f"json:{json.dumps(chain)}")
        await run(*_GENTLY, "qemu-img", *commit, timeout=_TIMEOUT)
    await in_thread(sync_file, target)


def _kind(path: Path) -> str:
    return "raw" if path.suffix == ".raw" else "qcow2"


def _node(path: Path, backing: Node | None) -> Node:
    """A file as QEMU is to open it, with what is below it, whatever its header says."""
    # Other QEMUs may have it open, read-only as well.
    file = {"driver": "file", "filename": str(path), "locking": "off"}
    node: Node = {"driver": _kind(path), "file": file}
    return node | {"backing": backing} if _kind(path) == "qcow2" else node


def _sizes(paths: Sequence[Path]) -> list[int]:
    """The virtual sizes of qcow2 files; HostError unless each is consistent and can be opened read-only."""
    sizes = []
    for path in paths:
        check_layer(path)
        with path.open("rb") as file:
            size, incompatible, autoclear = _HEADER.unpack(file.read(_HEADER.size))
        if incompatible or autoclear:
            raise HostError(f"disk layer {path.name} failed its consistency check")
        sizes.append(size)
    return sizes
