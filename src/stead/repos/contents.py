"""Reads the contents of a revision: files, folders, blobs, trees, archives."""

import re
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass

from stead.repos.errors import BlobNotFound, PathNotFound, TooLarge, TreeNotFound
from stead.repos.git import TIMEOUT
from stead.repos.model import Kind, TreeItem
from stead.repos.names import check_directory, check_sha
from stead.repos.places import Work
from stead.repos.repository import Repository

MAX_ENTRIES = 200_000
"""Files and folders per listing."""
MAX_NESTED = 1000
"""Files and folders up to which a listing includes the subfolders' entries if the caller does not say."""
_MAX_LISTED = 64 << 20
"""Bytes of git's listing."""
_MAX_MEMORY = 512 << 20
"""Memory limit of git archive, which first lists all entries."""
_CHUNK = 256 << 10
_FOLDER = re.compile(rb"[0-7]{6} tree ")
_NEXT_FOLDER = re.compile(rb"\0[0-7]{6} tree ")
_KINDS: dict[str, Kind] = {"blob": "blob", "tree": "tree", "commit": "commit"}
ARCHIVES = {"tar": "application/x-tar", "zip": "application/zip"}


@dataclass(frozen=True)
class RepoFile:
    entry: TreeItem
    content: bytes


class Listing:
    """The entries that `git ls-tree` printed. They are parsed when they are read, again each time."""

    def __init__(self, printed: bytes = b"", below: str = "") -> None:
        """`below` is the folder whose entries they are."""
        self._printed = printed
        self._prefix = f"{below}/" if below else ""
        self._count = printed.count(b"\0")

    def __len__(self) -> int:
        return self._count

    @property
    def has_folders(self) -> bool:
        return bool(_FOLDER.match(self._printed) or _NEXT_FOLDER.search(self._printed))

    def __iter__(self) -> Iterator[TreeItem]:
        start = 0
        while (end := self._printed.find(b"\0", start)) >= 0:
            facts, _, name = self._printed[start:end].partition(b"\t")
            mode, kind, sha, size = facts.decode().split()
            path = self._prefix + name.decode(errors="replace")
            yield TreeItem(path, sha, _KINDS[kind], mode, int(size) if size.isdigit() else None)
            start = end + 1


@dataclass(frozen=True)
class RepoFolder:
    path: str
    sha: str
    entries: Listing
    """Of this folder and, if `recursive`, of all folders below it."""
    recursive: bool

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


async def read(
    repository: Repository, path: str, rev: str | None, *, recursive: bool | None = None
) -> RepoFile | RepoFolder:
    """A file with its content, or a folder with its entries.

    With `recursive=None` the entries of subfolders are included if there are at most MAX_NESTED in all.
    """
    async with repository.holding() as held:
        return await _read(held, check_directory(path), rev, recursive)


async def _read(
    repository: Repository, place: str, rev: str | None, recursive: bool | None
) -> RepoFile | RepoFolder:
    commit = await repository.resolve(rev)
    async with repository.reader() as reader:
        info = (await reader.infos([f"{commit}:{place}"]))[0]
        if info is None or info.kind not in ("blob", "tree"):
            raise PathNotFound(place)
        if info.kind == "blob":
            found = (await reader.contents([info.sha], reserve=repository.reserve))[0]
            if found is None:
                raise PathNotFound(place)
            return RepoFile(TreeItem(place, info.sha, "blob", "", info.size), found[1])
    if recursive is not None:
        entries = await _list(repository, info.sha, place, recursive=recursive)
        return RepoFolder(place, info.sha, entries, recursive)
    entries = await _list(repository, info.sha, place, recursive=False)
    if entries.has_folders:
        nested = await _list_nested(repository, info.sha, place) if len(entries) < MAX_NESTED else None
        return RepoFolder(place, info.sha, entries if nested is None else nested, nested is not None)
    return RepoFolder(place, info.sha, entries, recursive=True)


async def _list(repository: Repository, tree: str, below: str = "", *, recursive: bool) -> Listing:
    arguments = _ls_tree(tree, recursive=recursive)
    entries = Listing(await repository.run(*arguments, most=_MAX_LISTED), below)
    if len(entries) > MAX_ENTRIES:
        raise TooLarge(
            f"{below or '/'} has {len(entries)} files and folders (max {MAX_ENTRIES} per listing): "
            "list a subfolder, or without recursive"
        )
    return entries


async def _list_nested(repository: Repository, tree: str, below: str) -> Listing | None:
    """All entries below a tree; None if there are more than MAX_NESTED, which are not read to their end."""
    arguments = _ls_tree(tree, recursive=True)
    async with repository.running(*arguments, timeout=TIMEOUT) as process:
        await process.close_input()
        printed = bytearray()
        while piece := await process.stdout.read(_CHUNK):
            printed += piece
            if printed.count(b"\0") > MAX_NESTED:
                return None
        await process.succeed("ls-tree")
    return Listing(bytes(printed), below)


def _ls_tree(tree: str, *, recursive: bool) -> list[str]:
    return ["ls-tree", "-l", "-z", "--full-tree", *(("-r", "-t") if recursive else ()), tree]


async def blob(repository: Repository, sha: str) -> tuple[str, bytes]:
    wanted = check_sha(sha)
    info = await repository.info(wanted)
    found = await repository.content(wanted) if info is not None and info.kind == "blob" else None
    if found is None:
        raise BlobNotFound(sha)
    return wanted, found[1]


async def tree(repository: Repository, sha: str) -> Listing:
    """The entries of a tree, by the sha of the tree or of a commit."""
    wanted = check_sha(sha)
    info = await repository.info(f"{wanted}^{{tree}}")
    if info is None:
        raise TreeNotFound(sha)
    return await _list(repository, info.sha, recursive=False)


async def archive(repository: Repository, kind: str, rev: str | None) -> AsyncGenerator[bytes]:
    """Stream a revision as an archive. A missing revision raises before the first piece."""
    async with repository.holding(Work.TRANSFER) as held:
        commit = await held.resolve(rev)
        arguments = "archive", f"--format={kind}", commit
        async with held.running(*arguments, memory=_MAX_MEMORY) as process:
            await process.close_input()
            while piece := await process.stdout.read(_CHUNK):
                yield piece
            await process.succeed("archive")
