"""Merging disk layers into one."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stead.deadlines import scaled
from stead.errors import HostError
from stead.files import sync_file
from stead.host.disk_process import disk_process
from stead.host.disks import make_layer, open_top
from stead.host.qcow2 import Header, read_header
from stead.host.qemu import OpenLayer
from stead.host.sandbox import Sandbox
from stead.tasks import Threads, in_thread

_TIMEOUT = scaled(6 * 3600.0)


async def merge(
    sandbox: Sandbox, uid: int, layers: Sequence[OpenLayer], below: Sequence[OpenLayer], target: Path
) -> None:
    """Merge `layers` into the file `target`, with `below` as its backing files.

    The layers are committed into it, the oldest first: what one of them has, data or zeros, replaces what is
    there, and what none has is left to `below`. Only `target` is written.
    """
    merged = [_header(layer).size for layer in layers]
    for layer in below:
        if layer.format == "qcow2":
            _header(layer)
    if merged != sorted(merged, reverse=True):
        raise HostError("a disk layer is smaller than its parent layer")
    # It starts as large as the oldest layer and grows with them: what lies beyond an end reads as zeros.
    await in_thread(make_layer, target, merged[-1])
    for layer in reversed(layers):
        with contextlib.ExitStack() as opened:
            written = replace(await in_thread(open_top, target, opened), name="merged")
            chain = [layer, written, *below]
            async with disk_process(sandbox, uid, chain, gently=True, timeout=_TIMEOUT) as process:
                await process.commit(into=written.name)
    await Threads.COPIES.run(sync_file, target)


def _header(layer: OpenLayer) -> Header:
    """The header of a layer that can be opened read-only; HostError if it must be repaired first."""
    header = read_header(layer.reading, layer.name)
    if not header.consistent:
        raise HostError(f"disk layer {layer.name} failed its consistency check")
    return header
