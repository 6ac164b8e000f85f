"""Pages of guest RAM, copied out of one process and into another."""

import ctypes
import errno
import hashlib
import mmap
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path
from typing import BinaryIO

from stead.disk_marks import writable
from stead.errors import CheckpointUnusable, DiskSpaceExceeded, HostError
from stead.files import ABSENT, write_atomically
from stead.host.page_scan import Region, Runs

_libc = ctypes.CDLL(None, use_errno=True)
# The mmap module would keep all other threads waiting while memory is populated.
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    )

_MADV_POPULATE_WRITE = 23
_SLACK = 4096
_PIECE = (64 << 20) // PAGESIZE
_PIECES_PER_CALL = 1024
_BYTES_PER_CALL = 8 << 20
_THREADS = min(4, os.cpu_count() or 1)
_BLOCK = 1 << 20

_REASONS = {
    errno.ESRCH: "the process has exited",
    errno.EPERM: "permission denied",
    errno.EFAULT: "a part of it is not mapped",
}


class Delta:
    """Pages with their positions. If a page occurs twice, the later copy counts."""

    def __init__(self, chunks: "list[_Chunk]", saved: "_Saved | None" = None) -> None:
        self._chunks = chunks
        self._saved = saved

    @classmethod
    def prepare(cls, pages: int) -> "Delta":
        """An empty delta with memory allocated for the pages, so that copying does not wait for it."""
        return cls([_Chunk.allocate(pages)])

    @classmethod
    def load(cls, folder: Path, facts: dict[str, object], size: int) -> "Delta":
        """Load a saved delta for `size` bytes of RAM. Its memory is not verified yet."""
        saved, runs = _Saved.open(folder, facts, size)
        try:
            return cls([_Chunk(saved.map(), runs)] if runs.pages else [], saved)
        except ValueError as error:
            saved.close()
            raise CheckpointUnusable(f"cannot map the memory file: {error}") from error
        except OSError as error:
            saved.close()
            raise HostError(f"cannot map the memory file: {error.strerror}") from error

    @property
    def pages(self) -> int:
        return sum(chunk.runs.pages for chunk in self._chunks)

    @property
    def size(self) -> int:
        return self.pages * PAGESIZE

    def copy_from(self, pid: int, region: Region, runs: Runs) -> None:
        """Add these pages of a process' RAM."""
        while runs.pages:
            if not (self._chunks and self._chunks[-1].room):
                self._chunks.append(_Chunk.allocate(runs.pages))
            chunk = self._chunks[-1]
            head, runs = runs.split(chunk.room)
            chunk.fill(pid, region, head)

    def apply_to(self, pid: int, region: Region) -> None:
        """Write all pages into a process' RAM."""
        for chunk in self._chunks:
            chunk.apply(pid, region)

    def write_to(self, folder: Path) -> dict[str, object]:
        """Save the pages in a folder; returns the facts by which they can be loaded."""
        return _write(folder, self._chunks)

    def verify(self) -> None:
        """Compare the checksum; CheckpointUnusable when the loaded memory is not the saved one.

        HostError when it cannot be read now.
        """
        if self._saved is not None:
            self._saved.verify()

    def close(self) -> None:
        for chunk in self._chunks:
            chunk.buffer.close()
        self._chunks = []
        if self._saved is not None:
            self._saved.close()
            self._saved = None


def save_pages(pid: int, region: Region, runs: Runs, folder: Path) -> dict[str, object]:
    """Write pages of a process' RAM straight to a folder, as a delta would; it takes little memory."""

    def chunks() -> "Iterator[_Chunk]":
        left = runs
        while left.pages:
            chunk = _Chunk.allocate(min(left.pages, _PIECE))
            try:
                head, left = left.split(_PIECE)
                chunk.fill(pid, region, head)
                yield chunk
            finally:
                chunk.buffer.close()

    return _write(folder, chunks())


def _write(folder: Path, chunks: "Iterable[_Chunk]") -> dict[str, object]:
    runs = Runs(array("Q"))
    checksum = hashlib.sha256()
    try:
        descriptor = os.open(folder / "memory", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                if chunk.runs.pages * PAGESIZE > writable(folder):
                    raise DiskSpaceExceeded("cannot save memory: the disk of the host is nearly full")
                chunk.save(file, checksum)
                runs += chunk.runs
            file.flush()
            os.fsync(file.fileno())
        pages = runs.to_bytes()
        write_atomically(folder / "pages", pages)
    except OSError as error:
        raise HostError(f"cannot save memory: {error.strerror}") from error
    return {
        "memory_sha256": checksum.hexdigest(),
        "pages_sha256": hashlib.sha256(pages).hexdigest(),
        "bytes": runs.pages * PAGESIZE,
    }


class _Chunk:
    """A buffer with the pages of `runs`, filled from its start."""

    def __init__(self, buffer: mmap.mmap, runs: Runs) -> None:
        self.buffer = buffer
        self.runs = runs

    @classmethod
    def allocate(cls, pages: int) -> "_Chunk":
        length = (pages + pages // 8 + _SLACK) * PAGESIZE
        try:
            buffer = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _populate(buffer)
        except OSError as error:
            raise HostError(
                f"cannot allocate {length} bytes for a copy of memory: {error.strerror}"
            ) from error
        return cls(buffer, Runs(array("Q")))

    @property
    def room(self) -> int:
        return len(self.buffer) // PAGESIZE - self.runs.pages

    def fill(self, pid: int, region: Region, runs: Runs) -> None:
        with memoryview(self.buffer):  # which cannot be closed meanwhile
            place = _address(self.buffer) + self.runs.pages * PAGESIZE
            _transfer(_libc.process_vm_readv, "read", pid, _pieces(region, runs), place)
        self.runs += runs

    def apply(self, pid: int, region: Region) -> None:
        with memoryview(self.buffer):
            place = _address(self.buffer)
            _transfer(_libc.process_vm_writev, "write", pid, _pieces(region, self.runs), place)

    def save(self, file: BinaryIO, checksum: "hashlib._Hash") -> None:
        used = self.runs.pages * PAGESIZE
        with memoryview(self.buffer) as whole:
            for offset in range(0, used, _BLOCK):
                with whole[offset : min(offset + _BLOCK, used)] as block:
                    checksum.update(block)
                    file.write(block)


class _Saved:
    """The file of a delta's memory, open, and the checksum it had when it was written."""

    def __init__(self, descriptor: int, length: int, checksum: object) -> None:
        self._descriptor = descriptor
        self._length = length
        self._checksum = checksum

    @classmethod
    def open(cls, folder: Path, facts: dict[str, object], size: int) -> "tuple[_Saved, Runs]":
        try:
            runs = _load_runs(folder / "pages", facts, size)
            descriptor = os.open(folder / "memory", os.O_RDONLY | os.O_CLOEXEC)
        except ABSENT as error:
            raise CheckpointUnusable(f"cannot open the memory file: {error.strerror}") from error
        except OSError as error:
            raise HostError(f"cannot open the memory file: {error.strerror}") from error
        saved = cls(descriptor, os.fstat(descriptor).st_size, facts.get("memory_sha256"))
        for expected in (facts.get("bytes"), runs.pages * PAGESIZE):
            if saved._length != expected:
                saved.close()
                raise CheckpointUnusable(f"the memory file has {saved._length} bytes instead of {expected}")
        return saved, runs

    def map(self) -> mmap.mmap:
        # Writable, since ctypes gives no address of a read-only buffer; it is private and never written.
        return mmap.mmap(self._descriptor, self._length, flags=mmap.MAP_PRIVATE)

    def verify(self) -> None:
        """Reads the file rather than the mapping: a disk error must be an exception, not a SIGBUS."""
        checksum = hashlib.sha256()
        block = memoryview(bytearray(_BLOCK))
        offset = 0
        try:
            while count := os.preadv(self._descriptor, [block], offset):
                checksum.update(block[:count])
                offset += count
        except OSError as error:
            raise HostError(f"cannot read the memory file: {error.strerror}") from error
        if checksum.hexdigest() != self._checksum:
            raise CheckpointUnusable(_changed("memory"))

    def close(self) -> None:
        os.close(self._descriptor)


def _load_runs(path: Path, facts: dict[str, object], size: int) -> Runs:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != facts.get("pages_sha256"):
        raise CheckpointUnusable(_changed("pages"))
    try:
        return Runs.from_bytes(data, size)
    except ValueError as error:
        raise CheckpointUnusable(f"invalid page list: {error}") from error


def _changed(name: str) -> str:
    return f"checksum mismatch in the file `{name}`: it was changed on disk"


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _populate(buffer: mmap.mmap) -> None:
    """Populate every page of a buffer ahead of its use."""
    with suppress(OSError):  # without huge pages it is only slower
        buffer.madvise(mmap.MADV_HUGEPAGE)
    if _libc.madvise(_address(buffer), len(buffer), _MADV_POPULATE_WRITE) == 0:
        return
    if ctypes.get_errno() != errno.EINVAL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    # Linux before 5.14
    buffer[::PAGESIZE] = bytes(len(buffer) // PAGESIZE)


def _pieces(region: Region, runs: Runs) -> "Iterator[array[int]]":
    """The addresses and lengths of runs, as many at a time as one call takes: an iovec is two such words."""
    if not runs.within(region.size):
        raise ValueError(f"pages beyond {region.size} bytes of RAM")
    pieces, room = array("Q"), _BYTES_PER_CALL
    for first, count in runs:
        address, left = region.start + first * PAGESIZE, count * PAGESIZE
        while left:
            length = min(left, room)
            pieces.extend((address, length))
            address, left, room = address + length, left - length, room - length
            if not room or len(pieces) == 2 * _PIECES_PER_CALL:
                yield pieces
                pieces, room = array("Q"), _BYTES_PER_CALL
    if pieces:
        yield pieces


def _transfer(
    call: Callable[..., int], verb: str, pid: int, batches: "Iterator[array[int]]", place: int
) -> None:
    """Copy between pieces of another process' memory and ours, which is contiguous; with several threads."""

    def copy(batch: "tuple[array[int], int]") -> None:
        pieces, position = batch
        while pieces:
            here = array("Q", (position, sum(pieces[1::2])))
            done = call(pid, here.buffer_info()[0], 1, pieces.buffer_info()[0], len(pieces) // 2, 0)
            if done <= 0:
                number = ctypes.get_errno()
                reason = _REASONS.get(number, os.strerror(number))
                raise HostError(f"cannot {verb} the memory of process {pid}: {reason}")
            position += done
            pieces = _after(pieces, done)

    placed = []
    for batch in batches:
        placed.append((batch, place))
        place += sum(batch[1::2])
    if len(placed) < 2:
        for only in placed:
            copy(only)
        return
    with ThreadPoolExecutor(min(_THREADS, len(placed))) as threads:
        # Results raise the errors of the threads.
        list(threads.map(copy, placed))


def _after(pieces: "array[int]", done: int) -> "array[int]":
    """The pieces that remain after `done` bytes."""
    for index in range(0, len(pieces), 2):
        address, length = pieces[index : index + 2]
        if done < length:
            return array("Q", (address + done, length - done)) + pieces[index + 2 :]
        done -= length
    return array("Q")
