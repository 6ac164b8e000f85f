"""Measures a repository on disk: bytes and number of refs, without git, which is slower."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stead.repos.errors import RepoDamaged
from stead.repos.folders import read_regular

_BLOCK = 4096
"""File system block size: a file uses a multiple of it."""
_LEAST_LFS = 16 << 10
"""What an LFS object counts for at least: ext4 has one inode for so many bytes, and each takes one."""
_OWN = b"refs/stead/"
_MAX_PACKED_REFS = 64 << 20
_HALF_DONE = ("tmp_", ".tmp-")
"""Name prefixes of git's temporary files."""


@dataclass(frozen=True)
class RepoSize:
    objects: int
    """Bytes of everything except refs."""
    refs: int
    """Number of refs that clients see."""
    loose_refs: int
    """Number of refs in files of their own."""


def measure_repo(repository: Path) -> RepoSize:
    loose = set(_loose_refs(repository))
    refs = sum(not name.startswith(_OWN) for name in loose | _packed_refs(repository))
    return RepoSize(folder_size(repository / "objects", _HALF_DONE), refs, len(loose))


def lfs_size(repository: Path) -> int:
    """Bytes that all LFS objects count for."""
    return sum(map(lfs_object_size, _sizes(repository / "lfs" / "objects", _HALF_DONE)))


def lfs_object_size(size: int) -> int:
    """The bytes that an LFS object of this size counts for."""
    return max(_LEAST_LFS, _on_disk(size))


def folder_size(folder: Path, without: tuple[str, ...] = ()) -> int:
    """Bytes that all files below a folder use on disk, except those with these prefixes."""
    return sum(map(_on_disk, _sizes(folder, without)))


def _on_disk(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _sizes(folder: Path, without: tuple[str, ...]) -> Iterator[int]:
    for file in _files(folder, without):
        with contextlib.suppress(FileNotFoundError):
            yield file.stat(follow_symlinks=False).st_size


def _loose_refs(repository: Path) -> Iterator[bytes]:
    start = len(os.fspath(repository)) + 1
    for file in _files(repository / "refs"):
        if not file.name.endswith(".lock"):
            yield os.fsencode(file.path[start:])


def _packed_refs(repository: Path) -> set[bytes]:
    """Ref names in packed-refs; peeled ids and comments are skipped."""
    try:
        lines = read_regular(repository / "packed-refs", _MAX_PACKED_REFS).split(b"\n")
    except (FileNotFoundError, RepoDamaged):
        return set()
    return {line[41:] for line in lines if line and line[:1] not in b"#^"}


def _files(folder: Path, without: tuple[str, ...] = ()) -> Iterator[os.DirEntry[str]]:
    """All files below a folder, except those with these prefixes; files may disappear meanwhile."""
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
