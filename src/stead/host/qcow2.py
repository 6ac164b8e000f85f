"""The qcow2 format, as far as the server reads and writes it: the header, and a layer without data."""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from stead.errors import HostError

_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_MAGIC = b"QFI\xfb"
_VERSION = 3
_KNOWN_FEATURES = 0b11
"""Not closed in good order, damaged: QEMU deals with both. An external data file is bit 2."""

_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS
_REFCOUNT_BITS_LOG = 4
_L2_COVERS = _CLUSTER // 8 * _CLUSTER
"""Bytes of the disk that one L2 table, so one entry of the L1 table, covers: 512 MiB."""


@dataclass(frozen=True)
class Header:
    """What is of interest in the header of a qcow2 file."""

    size: int
    incompatible: int
    """Features that a reader must know."""
    autoclear: int
    """Features that a writer which does not know them clears."""

    @property
    def consistent(self) -> bool:
        """Whether it was closed in good order, so that a reader has nothing to repair."""
        return not self.incompatible and not self.autoclear


def read_header(descriptor: int, name: str) -> Header:
    """The header of an open file; HostError unless it is one that leads to no other file.

    Encryption, internal snapshots and external data files are refused: Stead uses none. The name of a
    backing file is not looked at: QEMU is given the whole chain, and ignores it.
    """
    try:
        content = os.pread(descriptor, _HEADER.size, 0)
    except OSError as error:
        raise HostError(f"cannot read disk layer {name}: {error.strerror}") from error
    if len(content) < _HEADER.size:
        raise HostError(f"disk layer {name} is damaged")
    magic, version, _, _, _, size, encryption, *_, snapshots, _, incompatible, _, autoclear, _, _ = (
        _HEADER.unpack(content)
    )
    if (magic, version) != (_MAGIC, _VERSION) or incompatible & ~_KNOWN_FEATURES:
        raise HostError(f"disk layer {name} has an unknown format")
    if encryption or snapshots:
        raise HostError(f"disk layer {name} is encrypted or has internal snapshots")
    return Header(size, incompatible, autoclear)


def empty_layer(size: int) -> tuple[int, Iterator[tuple[int, bytes]]]:
    """The length of a layer of `size` bytes without data, and the parts of it that are not zero.

    It has the clusters of the header, a table with one entry, the block of reference counts that this
    points to, and the L1 table, all in this order.
    """
    entries = -(-size // _L2_COVERS)
    l1_clusters = max(1, -(-entries * 8 // _CLUSTER))
    clusters = 3 + l1_clusters
    header = _HEADER.pack(
        *(_MAGIC, _VERSION, 0, 0, _CLUSTER_BITS, size, 0, entries, 3 * _CLUSTER),
        *(_CLUSTER, 1, 0, 0, 0, 0, 0, _REFCOUNT_BITS_LOG, _HEADER.size),
    )
    counts = struct.pack(">H", 1) * clusters
    parts = ((0, header), (_CLUSTER, struct.pack(">Q", 2 * _CLUSTER)), (2 * _CLUSTER, counts))
    return clusters * _CLUSTER, iter(parts)
