"""Headers of disk layers, which a guest that broke out of its emulator could have written."""

import contextlib
import os
import struct
from collections.abc import Iterator

from stead.errors import HostError
from stead.host.qcow2 import read_header
from support.fuzzing.runs import Feed, Target

_KNOWN = 0b11


@contextlib.contextmanager
def _headers() -> Iterator[Feed]:
    """A header that is accepted names no other file: each field is looked up here by its offset."""
    descriptor = os.memfd_create("layer")

    def feed(data: bytes) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        try:
            header = read_header(descriptor, "layer")
        except HostError:
            return
        assert data[:8] == b"QFI\xfb\0\0\0\3"
        size, encryption = struct.unpack_from(">QI", data, 24)
        (snapshots,) = struct.unpack_from(">I", data, 60)
        incompatible, _, autoclear = struct.unpack_from(">QQQ", data, 72)
        assert encryption == snapshots == 0 and incompatible & ~_KNOWN == 0
        assert (header.size, header.incompatible, header.autoclear) == (size, incompatible, autoclear)
        assert header.consistent == (not incompatible and not autoclear)

    try:
        yield feed
    finally:
        os.close(descriptor)


_FIELDS = (b"QFI\xfb", b"\0\0\0\2", b"\0\0\0\3", b"\0\0\0\x10", b"\xff" * 8, bytes(8), b"\0\0\0\1", b"LUKS")
_FEATURES = tuple(struct.pack(">Q", 1 << bit) for bit in (0, 1, 2, 3, 4, 63))

HEADERS = Target("qcow2-headers", _headers, (*_FIELDS, *_FEATURES), longest=4096, inputs=30_000)
