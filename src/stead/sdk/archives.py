"""Folders as tar streams. Archives from a VM are not trusted: extraction cannot leave the target folder."""

import contextlib
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

CHUNK = 256 * 1024


def pack(folder: Path) -> Iterator[bytes]:
    """The contents of a folder as chunks of a tar stream, owned by root.

    Symbolic links are not followed. Sockets, pipes and devices are skipped.
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
    """Exactly `size` bytes and the padding, as the header says, also if the file grows meanwhile."""
    left = size
    with path.open("rb") as file:
        while left:
            chunk = file.read(min(CHUNK, left))
            if not chunk:
                raise OSError(f"{path} was truncated while it was read")
            left -= len(chunk)
            yield chunk
    if padding := -size % tarfile.BLOCKSIZE:
        yield bytes(padding)


def unpack(archive: BinaryIO, folder: Path) -> list[str]:
    """Extract an archive into a folder, created if missing; returns the names of skipped entries.

    Skipped are devices, pipes, names with `..`, and links that point out of the folder. Files are never
    written through a symbolic link. Owners and setuid bits are not restored.
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
    # Last, because files cannot be written into a read-only folder.
    for place, entry in reversed(folders):
        place.chmod(entry.mode & 0o755 | 0o700)
        _set_time(place, entry.mtime)
    return skipped


def _place(folder: Path, name: str) -> Path | None:
    """The path of an entry, with its parents created; None if the name leads out of the folder."""
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
    """Whether a link at `place` points into the folder.

    Its parents are real folders, so leading `..` can be counted; a later `..` could be relative to the target
    of another link, and is refused.
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
