"""Folders as tar streams.

What comes out of a machine is not trusted: nothing of it is written outside its folder.
"""

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

CHUNK = 256 * 1024


def pack(folder: Path) -> Iterator[bytes]:
    """The contents of a folder as a tar stream, a chunk at a time. Everything in it belongs to root.

    Links are kept as links. Sockets, pipes and devices are left out.
    """
    for path in sorted(folder.rglob("*")):
        yield from _packed(path, path.relative_to(folder).as_posix())
    yield bytes(2 * tarfile.BLOCKSIZE)


def _packed(path: Path, name: str) -> Iterator[bytes]:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    entry = tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(found.st_mode)
    entry.mtime = found.st_mtime
    if stat.S_ISDIR(found.st_mode):
        entry.type = tarfile.DIRTYPE
        yield _header(entry)
    elif stat.S_ISLNK(found.st_mode):
        entry.type = tarfile.SYMTYPE
        entry.linkname = os.readlink(path)  # noqa: PTH115
        yield _header(entry)
    elif stat.S_ISREG(found.st_mode):
        entry.size = found.st_size
        yield _header(entry)
        yield from _content(path, entry.size)


def _header(entry: tarfile.TarInfo) -> bytes:
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(path: Path, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes and the padding: the header has promised them, also if the file changes
    meanwhile."""
    left = size
    with path.open("rb") as file:
        while left:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise OSError(f"{path} became shorter while it was being read")
            left -= len(chunk)
            yield chunk
    if padding := -size % tarfile.BLOCKSIZE:
        yield bytes(padding)


def unpack(archive: BinaryIO, folder: Path) -> list[str]:
    """Write an archive's files into a folder, made if missing; returns the names that were left out.

    Left out is what has no business on another machine: devices and pipes, names that climb, links that
    lead out of the folder. Files are never written through a link, whoever made it. Owners are not kept,
    nor setuid bits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    skipped = []
    folders: list[tuple[Path, tarfile.TarInfo]] = []
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        for entry in tar:
            place = _place(folder, entry.name)
            if place is None:
                skipped.append(entry.name)
            elif entry.isdir():
                if place.is_symlink() or not place.is_dir():
                    _clear(place)
                    place.mkdir(0o700)
                folders.append((place, entry))
            elif not _written(tar, entry, place, folder):
                skipped.append(entry.name)
    # Last, so that a folder that may not be written to can be filled first.
    for place, entry in reversed(folders):
        place.chmod(entry.mode & 0o755 | 0o700)
        _set_time(place, entry.mtime)
    return skipped


def _place(folder: Path, name: str) -> Path | None:
    """Where an entry goes, with its parents made, or None if the name leads elsewhere."""
    parts = [part for part in PurePosixPath(name).parts if part != "."]
    if not parts or name.startswith("/") or ".." in parts or any("\0" in part for part in parts):
        return folder if not parts and not name.startswith("/") else None
    place = folder
    for part in parts[:-1]:
        place = place / part
        if place.is_symlink() or (place.exists() and not place.is_dir()):
            return None
        place.mkdir(exist_ok=True)
    return place / parts[-1]


def _written(tar: tarfile.TarFile, entry: tarfile.TarInfo, place: Path, folder: Path) -> bool:
    if entry.isreg():
        content = tar.extractfile(entry)
        if content is None:
            return False
        _clear(place)
        with content, place.open("xb") as file:
            while chunk := content.read(CHUNK):
                file.write(chunk)
        place.chmod(entry.mode & 0o755 | 0o600)
        _set_time(place, entry.mtime)
        return True
    if entry.issym() and _stays_inside(place, entry.linkname, folder):
        _clear(place)
        place.symlink_to(entry.linkname)
        return True
    if entry.islnk():
        source = _place(folder, entry.linkname)
        if source is not None and source.is_file() and not source.is_symlink():
            _clear(place)
            place.hardlink_to(source)
            return True
    return False


def _stays_inside(place: Path, target: str, folder: Path) -> bool:
    """Whether a link at `place` leads to something in the folder.

    Its parents are real folders, so leading `..` can be counted; any later one could go up from a place
    that another link has led to, and is not believed.
    """
    parts = PurePosixPath(target).parts
    climbs = 0
    while climbs < len(parts) and parts[climbs] == "..":
        climbs += 1
    depth = len(place.parent.relative_to(folder).parts)
    return not target.startswith("/") and climbs <= depth and ".." not in parts[climbs:]


def _clear(place: Path) -> None:
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        place.unlink()


def _set_time(place: Path, moment: float) -> None:
    with contextlib.suppress(OverflowError, ValueError, OSError):
        os.utime(place, (moment, moment))
