"""What is in a revision: files, folders, blobs, trees, archives."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from stead.repos.errors import BlobNotFound, PathNotFound, TooLarge, TreeNotFound
from stead.repos.git import Finished, GitFailed, check_memory
from stead.repos.model import Entry, Kind
from stead.repos.names import check_directory, check_sha
from stead.repos.repository import Repository

MAX_ENTRIES = 200_000
"""Files and folders in one answer."""
_MAX_LISTED = 64 << 20
"""Bytes in which git lists them."""
_MAX_MEMORY = 512 << 20
"""Bytes for an archive: git first makes a list of all that is to be in it."""
_CHUNK = 256 << 10
_KINDS: dict[str, Kind] = {"blob": "blob", "tree": "tree", "commit": "commit"}
ARCHIVES = {"tar": "application/x-tar", "zip": "application/zip"}


@dataclass(frozen=True)
class File:
    entry: Entry
    content: bytes


@dataclass(frozen=True)
class Folder:
    path: str
    sha: str
    entries: list[Entry]
    """Of this folder; with those of the folders below it, when they were asked for."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


async def read(
    repository: Repository, path: str, rev: str | None, *, recursive: bool = False
) -> File | Folder:
    """A file with its content, or a folder with what is in it."""
    place = check_directory(path)
    commit = await repository.resolve(rev)
    async with repository.readers.of(repository.path) as reader:
        info = (await reader.infos([f"{commit}:{place}"]))[0]
        if info is None or info.kind not in ("blob", "tree"):
            raise PathNotFound(place)
        if info.kind == "blob":
            found = (await reader.contents([info.sha]))[0]
            if found is None:
                raise PathNotFound(place)
            return File(Entry(place, info.sha, "blob", "", info.size), found[1])
    return Folder(place, info.sha, await _list(repository, info.sha, place, recursive=recursive))


async def _list(repository: Repository, tree: str, below: str = "", *, recursive: bool) -> list[Entry]:
    deep = ("-r", "-t") if recursive else ()
    arguments = "ls-tree", "-l", "-z", "--full-tree", *deep, tree
    printed = await repository.git.run(repository.path, *arguments, most=_MAX_LISTED)
    lines = printed.split(b"\0")[:-1]
    if len(lines) > MAX_ENTRIES:
        raise TooLarge(f"there are {len(lines)} files and folders, and at most {MAX_ENTRIES} in one answer")
    prefix = f"{below}/" if below else ""
    entries = []
    for line in lines:
        facts, _, name = line.partition(b"\t")
        mode, kind, sha, size = facts.decode().split()
        path = prefix + name.decode(errors="replace")
        entries.append(Entry(path, sha, _KINDS[kind], mode, int(size) if size.isdigit() else None))
    return entries


async def blob(repository: Repository, sha: str) -> tuple[str, bytes]:
    wanted = check_sha(sha)
    async with repository.readers.of(repository.path) as reader:
        found = (await reader.contents([wanted]))[0]
    if found is None or found[0].kind != "blob":
        raise BlobNotFound(sha)
    return wanted, found[1]


async def tree(repository: Repository, sha: str) -> list[Entry]:
    """What is in a tree, by its own id or that of a commit."""
    wanted = check_sha(sha)
    async with repository.readers.of(repository.path) as reader:
        info = (await reader.infos([f"{wanted}^{{tree}}"]))[0]
    if info is None:
        raise TreeNotFound(sha)
    return await _list(repository, info.sha, recursive=False)


async def archive(repository: Repository, kind: str, rev: str | None) -> AsyncIterator[bytes]:
    """A revision as one archive, in pieces. That there is such a revision is known with the first."""
    commit = await repository.resolve(rev)
    arguments = "archive", f"--format={kind}", commit
    async with repository.git.running(repository.path, *arguments, memory=_MAX_MEMORY) as process:
        await process.close_input()
        while piece := await process.stdout.read(_CHUNK):
            yield piece
        said = await process.errors()
        if status := await process.wait():
            finished = Finished(status, b"", said)
            check_memory(finished)
            raise GitFailed("archive", finished)
