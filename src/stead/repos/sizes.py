"""How large a repository is on the disk, and how many refs it has; without git, which takes longer."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 4096
"""Bytes that a file takes on the disk at least; what it takes is a multiple of them."""
_OWN = b"refs/stead/"
_HALF_DONE = ("tmp_", ".tmp-")
"""How git calls what is not whole yet."""


@dataclass(frozen=True)
class Size:
    objects: int
    """Bytes of all that git keeps but for the refs."""
    refs: int
    """Without those that no client sees."""
    loose_refs: int
    """All refs that are a file each."""


def measured(repository: Path) -> Size:
    loose = set(_loose_refs(repository))
    refs = sum(not name.startswith(_OWN) for name in loose | _packed_refs(repository))
    return Size(_bytes(repository / "objects"), refs, len(loose))


def lfs_size(repository: Path) -> int:
    """Bytes of all large files."""
    return _bytes(repository / "lfs" / "objects")


def on_disk(size: int) -> int:
    """What a file of so many bytes takes."""
    return -(-size // _BLOCK) * _BLOCK


def _bytes(folder: Path) -> int:
    size = 0
    for file in _files(folder, without=_HALF_DONE):
        with contextlib.suppress(FileNotFoundError):
            size += on_disk(file.stat(follow_symlinks=False).st_size)
    return size


def _loose_refs(repository: Path) -> Iterator[bytes]:
    start = len(os.fspath(repository)) + 1
    for file in _files(repository / "refs"):
        if not file.name.endswith(".lock"):
            yield os.fsencode(file.path[start:])


def _packed_refs(repository: Path) -> set[bytes]:
    """From lines of an id and a name; others are about the one before, or about the file."""
    try:
        lines = (repository / "packed-refs").read_bytes().split(b"\n")
    except FileNotFoundError:
        return set()
    return {line[41:] for line in lines if line and line[:1] not in b"#^"}


def _files(folder: Path, without: tuple[str, ...] = ()) -> Iterator[os.DirEntry[str]]:
    """All files below, of those that come and go meanwhile some; without what has names that begin so."""
    waiting = [os.fspath(folder)]
    while waiting:
        with contextlib.suppress(FileNotFoundError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.name.startswith(without):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                else:
                    yield entry
