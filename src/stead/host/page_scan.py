"""Which pages of guest RAM a process has written into its private mapping."""

import ctypes
import errno
import fcntl
import os
import re
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from mmap import PAGESIZE
from operator import add
from pathlib import Path

from stead.errors import HostError

_ENTRY = 8
_PRESENT, _SWAPPED, _FILE = 0x80, 0x40, 0x20
_WRITTEN = bytes(bool(top & (_PRESENT | _SWAPPED)) and not top & _FILE for top in range(256))
_PIECE = 1 << 18  # pages whose entries are read at once: 2 MiB of them

_PAGEMAP_SCAN = 0xC0606610
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_REGIONS = 16384
_NEVER = 1 << 64
_NO_FILE = (0, 0)


@dataclass(frozen=True)
class Region:
    """Address range of the guest RAM in a process."""

    start: int
    size: int


@dataclass(frozen=True)
class Runs:
    """Runs of pages in some order, each a first page and a count, flat in one array."""

    pairs: "array[int]"

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.pairs[0::2], self.pairs[1::2], strict=True)

    def __add__(self, later: "Runs") -> "Runs":
        return Runs(self.pairs + later.pairs)

    @property
    def pages(self) -> int:
        return sum(self.pairs[1::2])

    def within(self, size: int) -> bool:
        """Whether every page lies in a RAM of that many bytes."""
        return max(map(add, self.pairs[0::2], self.pairs[1::2]), default=0) * PAGESIZE <= size

    def split(self, pages: int) -> "tuple[Runs, Runs]":
        """The first so many pages, and the rest."""
        left = pages
        for index, (first, count) in enumerate(self):
            if count > left:
                head, tail = self.pairs[: 2 * index], self.pairs[2 * index :]
                if left:
                    head.extend((first, left))
                    tail[0], tail[1] = first + left, count - left
                return Runs(head), Runs(tail)
            left -= count
        return self, Runs(array("Q"))

    def to_bytes(self) -> bytes:
        return _little_endian(self.pairs).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, size: int) -> "Runs":
        """Raises ValueError for what cannot be runs of pages in a RAM of that many bytes."""
        pairs = array("Q")
        if len(data) % (2 * pairs.itemsize):
            raise ValueError(f"{len(data)} bytes are not a whole number of runs")
        pairs.frombytes(data)
        runs = cls(_little_endian(pairs))
        if not all(runs.pairs[1::2]):
            raise ValueError("empty run of pages")
        if not runs.within(size):
            raise ValueError(f"a run ends beyond {size} bytes of RAM")
        return runs


def minus(pages: Runs, others: Runs) -> Runs:
    """The pages that are not among the others; both ascend, as those of a scan do."""
    left = array("Q")
    cuts = iter(others)
    cut = cut_end = 0
    for first, count in pages:
        end = first + count
        while first < end:
            while cut_end <= first:
                cut, cut_count = next(cuts, (_NEVER, 1))
                cut_end = cut + cut_count
            if first < cut:
                left.extend((first, min(cut, end) - first))
            first = cut_end
    return Runs(left)


def find_ram(pid: int, size: int, copied: bool) -> Region:
    """The guest RAM of a process: its one private mapping of that size.

    It began as a copy of a file, or empty. Which file is not asked: a process that outlived the Stead which
    started it has a copy of a file that is nowhere else any more.
    """
    region = mapped_ram(pid, size, copied)
    if region is None:
        raise HostError(f"cannot find the guest RAM of process {pid}: no private mappings of {size} bytes")
    return region


def mapped_ram(pid: int, size: int, copied: bool) -> Region | None:
    """As `find_ram`; None while a process that starts has not mapped it yet."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError as error:
        raise HostError(f"cannot read the memory map of process {pid}: {error.strerror}") from error
    mappings = [_Mapping.parse(line) for line in lines if line.split(maxsplit=2)[1] == "rw-p"]
    files = {mapping.file for mapping in mappings if (mapping.file != _NO_FILE) == copied}
    found = [
        span for file in files for span in _spans([each for each in mappings if each.file == file], size)
    ]
    if len(found) > 1:
        raise HostError(
            f"cannot find the guest RAM of process {pid}: {len(found)} private mappings of {size} bytes"
        )
    return found[0] if found else None


@dataclass(frozen=True)
class _Mapping:
    start: int
    end: int
    offset: int
    file: tuple[int, int]

    @classmethod
    def parse(cls, line: str) -> "_Mapping":
        addresses, _, offset, device, inode = line.split(maxsplit=5)[:5]
        start, end = (int(address, 16) for address in addresses.split("-"))
        major, minor = (int(number, 16) for number in device.split(":"))
        return cls(start, end, int(offset, 16), (os.makedev(major, minor), int(inode)))


def _spans(mappings: list[_Mapping], size: int) -> Iterator[Region]:
    """Where neighbouring mappings make up the size together: the kernel may show one in several parts.

    Anonymous memory of another kind may lie right beside the RAM, so not all neighbours belong together.
    """
    for index, first in enumerate(mappings):
        end = first.start
        for part in mappings[index:]:
            follows = part.file == _NO_FILE or part.offset - first.offset == end - first.start
            if part.start != end or not follows or end - first.start >= size:
                break
            end = part.end
        if end - first.start == size:
            yield Region(first.start, size)


def written_pages(pid: int, region: Region) -> Runs:
    """The pages that the process no longer shares with the file they came from, in ascending order.

    In RAM that began empty, pages that were only read may be among them, as pages of zeros.
    """
    try:
        descriptor = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _scan(descriptor, region)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise HostError(f"cannot read the page map of process {pid}: {error.strerror}") from error


def _scan(pagemap: int, region: Region) -> Runs:
    # Some kernels crash on a scan of a process that has ended, others find no pages.
    _entries(pagemap, region.start // PAGESIZE, 1)
    try:
        runs = _by_ioctl(pagemap, region)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EINVAL):
            raise
        runs = _by_pagemap(pagemap, region)
    _entries(pagemap, region.start // PAGESIZE, 1)
    return runs


def _by_ioctl(pagemap: int, region: Region) -> Runs:
    """Let the kernel pick the pages; Linux 6.7 and later."""
    return _joined(_scanned(pagemap, region))


class _ScanArguments(ctypes.Structure):
    """struct pm_scan_arg of linux/fs.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("size", "flags", "start", "end", "walk_end", "vec", "vec_len", "max_pages"),
            *("category_inverted", "category_mask", "category_anyof_mask", "return_mask"),
        )
    )


def _scanned(pagemap: int, region: Region) -> Iterator[tuple[int, int]]:
    found = array("Q", bytes(3 * 8 * _REGIONS))
    position, end = region.start, region.start + region.size
    while position < end:
        arguments = _ScanArguments(
            size=ctypes.sizeof(_ScanArguments),
            start=position,
            end=end,
            vec=found.buffer_info()[0],
            vec_len=_REGIONS,
            category_inverted=_IS_FILE,
            category_mask=_IS_FILE,
            category_anyof_mask=_IS_PRESENT | _IS_SWAPPED,
            # The same for every page that is found: pages in swap do not divide a run.
            return_mask=_IS_FILE,
        )
        count = fcntl.ioctl(pagemap, _PAGEMAP_SCAN, arguments)
        for index in range(0, 3 * count, 3):
            yield (found[index] - region.start) // PAGESIZE, (found[index + 1] - region.start) // PAGESIZE
        # The kernel may report an earlier end than it reached: skip pages that were found already.
        position = max(arguments.walk_end, found[3 * count - 2] if count else 0)


def _by_pagemap(pagemap: int, region: Region) -> Runs:
    """Look at the entry of every page."""
    return _joined(_looked_up(pagemap, region))


def _looked_up(pagemap: int, region: Region) -> Iterator[tuple[int, int]]:
    page, pages = 0, region.size // PAGESIZE
    while page < pages:
        entries = _entries(pagemap, region.start // PAGESIZE + page, min(_PIECE, pages - page))
        written = entries[_ENTRY - 1 :: _ENTRY].translate(_WRITTEN)
        for run in re.finditer(b"\x01+", written):
            yield page + run.start(), page + run.end()
        page += len(written)


def _entries(pagemap: int, page: int, count: int) -> bytes:
    """Page map entries of a process; empty when it has ended."""
    entries = os.pread(pagemap, count * _ENTRY, page * _ENTRY)
    if not entries:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return entries


def _joined(spans: Iterable[tuple[int, int]]) -> Runs:
    """Runs from ascending spans of pages: spans that touch are one."""
    pairs = array("Q")
    begin = reached = 0
    for first, end in spans:
        if first != reached:
            if reached > begin:
                pairs.extend((begin, reached - begin))
            begin = first
        reached = end
    if reached > begin:
        pairs.extend((begin, reached - begin))
    return Runs(pairs)


def _little_endian(words: "array[int]") -> "array[int]":
    if sys.byteorder == "little":
        return words
    swapped = array("Q", words)
    swapped.byteswap()
    return swapped
