"""Streaming tar and zip reader for untrusted archives, with limits on size, ratio and number of entries.

Archives are never unpacked to disk, so their paths and links cannot touch the host's file system.
"""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import BinaryIO, Literal

from stead.files import open_regular
from stead.repos.errors import RepoError, TooLarge

Kind = Literal["tar", "zip"]
FILE, EXECUTABLE, LINK = "100644", "100755", "120000"
_MAX_EXTENSION = 1 << 20
_MAX_LINK = 4096
_XZ_MEMORY = 128 << 20
_PIECE = 256 << 10
_BLOCK = 512
_PAUSE_EVERY = 1 << 20
"""Bytes after which the reader pauses."""
_ENTRY_COST = 512
"""Bytes that an entry without content counts as."""
_MAX_BARREN = 4 << 20
"""Packed bytes that may unpack to nothing: streams of empty blocks would hold a thread for minutes."""
_SIZE_OF_LIST = 5
_MAX_LIST = 64 << 20
_UNIX, _ENCRYPTED, _UTF8 = 3, 1, 0x800
_UNKNOWN_COMPRESSIONS = {b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x9d": "compress", b"\x04\x22\x4d\x18": "lz4"}


class ArchiveInvalid(RepoError):
    """An archive that is corrupt, or has an entry that cannot be in a repository."""


class ReadingPause(Enum):
    """Yielded between entries after some work, so that no step of a generator holds its thread for long."""

    PAUSE = "pause"


@dataclass(frozen=True)
class ArchiveLimits:
    entries: int = 200_000
    unpacked: int = 2 << 30
    """Total unpacked bytes."""
    ratio: int = 200
    """Zip-bomb guard: maximum ratio of unpacked to packed bytes, above `ratio_from` bytes."""
    ratio_from: int = 64 << 20


@dataclass(frozen=True)
class ArchiveMember:
    """An archive entry. Its content can be read until the next entry is requested."""

    name: str
    mode: str | None
    """The git file mode; None for a folder."""
    size: int = 0
    content: Callable[[], Iterator[bytes]] = field(default=lambda: iter(()))
    copy_of: str | None = None
    """The target of a hard link: the name of an earlier entry with the same content."""


def members(kind: Kind, archive: Path, bounds: ArchiveLimits) -> Iterator[ArchiveMember | ReadingPause]:
    """The entries of an archive, in order, with pauses between them.

    The archive is a file that git's user may have replaced: links are not followed.
    """
    with os.fdopen(open_regular(archive), "rb", buffering=0) as raw:
        packed = _PackedFile(raw)
        budget = _Budget(bounds, os.fstat(raw.fileno()).st_size, packed)
        number = 0
        for member in _MEMBERS[kind](io.BufferedReader(packed), budget):
            if isinstance(member, ArchiveMember):
                number += 1
                if number > bounds.entries:
                    raise TooLarge(f"the archive has too many files and folders (max {bounds.entries})")
            yield member


@contextlib.contextmanager
def reading(kind: Kind) -> Iterator[None]:
    """Context of all reads of entries and contents: converts errors of corrupt archives to ArchiveInvalid."""
    try:
        yield
    except _BROKEN as error:
        raise ArchiveInvalid(f"invalid {kind} archive: {error}") from error


class _PackedFile(io.RawIOBase):
    """The archive's file. Refuses data that unpacks to nothing."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._barren = 0
        self.max_barren = _MAX_BARREN

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what io hands in is one
        size = self._file.readinto(buffer)
        self._barren += size
        if self._barren > self.max_barren:
            raise ArchiveInvalid(f"more than {self.max_barren >> 20} MiB of compressed data without content")
        return size

    def unpacked(self) -> None:
        """Content came out of what was read."""
        self._barren = 0


class _Budget:
    """The remaining budget of unpacked bytes, and the work since the last pause."""

    def __init__(self, bounds: ArchiveLimits, size: int, packed: _PackedFile) -> None:
        self.bounds = bounds
        self.most = min(bounds.unpacked, max(bounds.ratio_from, bounds.ratio * size))
        self.used = 0
        self.packed = packed
        self._since_pause = 0

    def take(self, size: int) -> None:
        self.used += size
        if self.used > self.most:
            raise TooLarge(f"the archive is too large unpacked (max {self.most} bytes)")

    def work(self, size: int) -> None:
        """Count bytes that were read."""
        self.packed.unpacked()
        self._since_pause += size

    def pauses(self) -> Iterator[ReadingPause]:
        """A pause if one is due."""
        if self._since_pause >= _PAUSE_EVERY:
            self._since_pause = 0
            yield ReadingPause.PAUSE


# Tar


class _Xz(io.RawIOBase):
    """An xz reader with bounded memory, unlike the lzma module's."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._unpacker = self._fresh()
        self._rest = b""

    @staticmethod
    def _fresh() -> lzma.LZMADecompressor:
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # what io hands in is one
        while True:
            if self._unpacker.eof:
                # There may be several concatenated streams with zero padding.
                while not (rest := self._rest.lstrip(b"\0")) and (more := self._file.read(_PIECE)):
                    self._rest = more
                if not rest:
                    return 0
                self._unpacker, self._rest = self._fresh(), rest
            if self._unpacker.needs_input and not self._rest:
                self._rest = self._file.read(_PIECE)
                if not self._rest:
                    raise EOFError("unexpected end of archive")
            data = self._unpacker.decompress(self._rest, len(buffer))
            self._rest = self._unpacker.unused_data
            if data:
                buffer[: len(data)] = data
                return len(data)


def _unpacked(file: BinaryIO) -> BinaryIO:
    """The tar stream of a file that may be compressed with gzip, bzip2 or xz."""
    start = file.read(6)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]  # it reads as files do
    if start.startswith(b"BZh"):
        return bz2.BZ2File(file)  # type: ignore[return-value]
    if start.startswith(b"\xfd7zXZ\x00"):
        return io.BufferedReader(_Xz(file), _PIECE)
    for magic, name in _UNKNOWN_COMPRESSIONS.items():
        if start.startswith(magic):
            raise ArchiveInvalid(f"unsupported compression {name}: use gzip, bzip2 or xz")
    return file


class _Blocks:
    """Reads a tar's blocks and counts them against the budget."""

    def __init__(self, stream: BinaryIO, budget: _Budget) -> None:
        self._stream = stream
        self._budget = budget

    def read(self, size: int) -> bytes:
        """Read this many bytes, or fewer at the end."""
        parts: list[bytes] = []
        while size and (part := self._stream.read(size)):
            self._budget.take(len(part))
            self._budget.work(len(part))
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def whole(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) < size:
            raise EOFError("unexpected end of archive")
        return data

    def pieces(self, size: int) -> Iterator[bytes]:
        for place in range(0, size, _PIECE):
            yield self.whole(min(_PIECE, size - place))


def _tar(file: BinaryIO, budget: _Budget) -> Iterator[ArchiveMember | ReadingPause]:
    """Parse headers one by one with the standard library: no header decides how much memory is used."""
    with contextlib.closing(_unpacked(file)) as stream:
        blocks = _Blocks(stream, budget)
        records: dict[str, str] = {}
        header = blocks.whole(_BLOCK)
        while header.strip(b"\0"):
            yield from budget.pauses()
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            if info.size < 0:
                raise tarfile.ReadError("negative file size")
            if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, b"L", b"K"):
                records |= _extension(info.type, _content_of_extension(blocks, info.size))
                header = blocks.whole(_BLOCK)
                continue
            size = int(records.get("size", info.size))
            info.name = records.get("path", info.name)
            info.linkname = records.get("linkpath", info.linkname)
            sparse = info.type == tarfile.GNUTYPE_SPARSE or "sparse" in records
            records = {}
            if sparse:
                raise ArchiveInvalid(f"{info.name!r} is a sparse file, which is not supported")
            yield from _tar_member(info, size, blocks, budget)
            header = blocks.read(_BLOCK)
        while blocks.read(_PIECE):
            # Read to the end of the stream: its checksum is there.
            yield from budget.pauses()


def _content_of_extension(blocks: _Blocks, size: int) -> bytes:
    if size > _MAX_EXTENSION:
        raise tarfile.ReadError("header too long")
    data = blocks.whole(size)
    blocks.whole(-size % _BLOCK)
    return data


def _extension(kind: bytes, data: bytes) -> dict[str, str]:
    """The pax records of the next file; global records are ignored."""
    if kind == tarfile.XGLTYPE:
        return {}
    if kind in (b"L", b"K"):
        text = data.partition(b"\0")[0].decode("utf-8", "surrogateescape")
        return {"path" if kind == b"L" else "linkpath": text}
    records: dict[str, str] = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or len(length) > 8 or not len(length) + 2 < int(length) <= len(data):
            raise tarfile.ReadError("invalid header")
        record, data = data[len(length) + 1 : int(length) - 1], data[int(length) :]
        name, _, value = record.partition(b"=")
        if name in (b"path", b"linkpath"):
            records[name.decode()] = value.decode("utf-8", "surrogateescape")
        elif name == b"size":
            if not value.isdigit() or len(value) > 18:
                raise tarfile.ReadError("invalid header")
            records["size"] = value.decode()
        elif name.startswith(b"GNU.sparse."):
            records["sparse"] = "yes"
    return records


def _tar_member(
    info: tarfile.TarInfo, size: int, blocks: _Blocks, budget: _Budget
) -> Iterator[ArchiveMember | ReadingPause]:
    """One entry. Only regular files have content after their header, whatever size other entries claim."""
    if info.isdir():
        yield ArchiveMember(info.name, None)
    elif info.issym():
        yield _link(info.name, info.linkname.encode("utf-8", "surrogateescape"))
    elif info.islnk():
        yield ArchiveMember(info.name, FILE, copy_of=info.linkname)
    elif info.isreg():
        content = blocks.pieces(size)
        yield ArchiveMember(info.name, _mode(info.mode), size, lambda: content)
        for _ in content:
            # Skip content that was not read.
            yield from budget.pauses()
        blocks.whole(-size % _BLOCK)
    else:
        raise ArchiveInvalid(f"{printable(info.name)!r} is not a file, folder or link")


def _mode(permissions: int) -> str:
    return EXECUTABLE if permissions & stat.S_IXUSR else FILE


def _link(name: str, target: bytes) -> ArchiveMember:
    if not target or len(target) > _MAX_LINK or b"\0" in target:
        raise ArchiveInvalid(f"the link {name!r} has no valid target")
    return ArchiveMember(name, LINK, len(target), lambda: iter((target,)))


# Zip


def _zip(file: BinaryIO, budget: _Budget) -> Iterator[ArchiveMember | ReadingPause]:
    # The file list is read at once.
    budget.packed.max_barren = 2 * _MAX_LIST
    yield from _check_count(file, budget)
    with zipfile.ZipFile(file) as archive:
        budget.packed.max_barren = _MAX_BARREN
        for info in archive.infolist():
            budget.work(_ENTRY_COST)
            yield from budget.pauses()
            yield _zip_member(archive, info, budget)


def _zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: _Budget) -> ArchiveMember:
    name = info.filename
    if not info.flag_bits & _UTF8:
        # Many tools write UTF-8 without the flag; text in another encoding is rarely valid UTF-8.
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode()
    if not name:
        raise ArchiveInvalid("an entry has no name")
    kind = stat.S_IFMT(info.external_attr >> 16) if info.create_system == _UNIX else 0
    if info.is_dir() or kind == stat.S_IFDIR:
        return ArchiveMember(name, None)
    if info.flag_bits & _ENCRYPTED:
        raise ArchiveInvalid(f"{name!r} is encrypted")
    # Other methods can use unbounded memory.
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveInvalid(f"{name!r} uses an unsupported compression method")
    content = _zip_content(archive, info, budget)
    if kind == stat.S_IFLNK:
        if info.file_size > _MAX_LINK:
            raise ArchiveInvalid(f"the link {name!r} has no valid target")
        return _link(name, b"".join(content()))
    if kind not in (0, stat.S_IFREG):
        raise ArchiveInvalid(f"{name!r} is not a file, folder or link")
    return ArchiveMember(name, _mode(info.external_attr >> 16 if kind else 0), info.file_size, content)


def _check_count(file: BinaryIO, budget: _Budget) -> Iterator[ReadingPause]:
    """Check the size of the central directory before the zip module loads it into memory."""
    most = budget.bounds.entries
    # Locate it as the zip module does; otherwise the module could read another directory than the one
    # checked.
    end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    if end is None:
        raise zipfile.BadZipFile("not a zip file")
    if end[_SIZE_OF_LIST] > _MAX_LIST:
        raise TooLarge("the archive's file list is too long")
    file.seek(0)
    count = 0
    rest = b""
    while data := file.read(4 << 20):
        count += (rest + data).count(b"PK\x01\x02")
        rest = data[-3:]
        budget.work(len(data))
        yield from budget.pauses()
    if count > most:
        raise TooLarge(f"the archive has too many files and folders (max {most})")
    file.seek(0)


def _zip_content(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: _Budget
) -> Callable[[], Iterator[bytes]]:
    def read() -> Iterator[bytes]:
        budget.take(info.file_size)
        size = 0
        with archive.open(info) as content:
            while piece := content.read(_PIECE):
                size += len(piece)
                budget.work(len(piece))
                yield piece
        if size != info.file_size:
            raise zipfile.BadZipFile(f"unexpected end of {info.filename!r}")

    return read


_MEMBERS = {"tar": _tar, "zip": _zip}
_BROKEN = (
    tarfile.TarError,
    zipfile.BadZipFile,
    lzma.LZMAError,
    zlib.error,
    struct.error,
    EOFError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)
"""Exceptions of the archive modules for corrupt input."""


def printable(name: str) -> str:
    return name.encode(errors="replace").decode()
