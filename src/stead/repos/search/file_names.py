"""File name search in a commit."""

import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stead.repos.names import EMPTY_TREE
from stead.repos.repository import Repository
from stead.repos.search.processes import OutputBuffer, run
from stead.repos.search.query import Query
from stead.tasks import Threads, in_thread

_SUBMODULE = "160000"
Listing = list[tuple[bytes, str]]
"""Paths and their blobs."""


@dataclass(frozen=True)
class NamedFile:
    path: str
    size: int

    @property
    def extension(self) -> str | None:
        return PurePosixPath(self.path).suffix[1:] or None


async def list_tree(
    repository: Repository, commit: str, specs: tuple[str, ...], until: float
) -> tuple[bytes, bool]:
    """All files of a commit, as a raw diff against the empty tree, and whether the list is complete."""
    gathered = OutputBuffer()
    arguments = ["diff-tree", "-r", "-z", "--no-renames", EMPTY_TREE, commit, "--", *specs]
    complete = await run(repository, arguments, gathered, until)
    return gathered.data, complete


def parse_tree(printed: bytes) -> Listing:
    """Parse a sequence of `:mode mode sha sha letter NUL path NUL`."""
    parts = printed.split(b"\0")[:-1]
    listing = []
    for facts, path in zip(parts[::2], parts[1::2], strict=False):
        _, mode, _, sha, _ = facts.decode().split(" ")
        if mode != _SUBMODULE:
            listing.append((path, sha))
    return listing


async def matching_names(
    repository: Repository, query: Query, listing: Listing, until: float
) -> tuple[Listing, bool]:
    """The files whose paths match, and whether the list is complete."""
    if query.regex:
        return await _grep_names(repository, query, listing, until)
    text = re.compile(re.escape(query.text), 0 if query.case_sensitive else re.IGNORECASE)

    def pick() -> Listing:
        return [each for each in listing if text.search(each[0].decode(errors="replace"))]

    return await Threads.PARSING.run(pick), True


async def _grep_names(
    repository: Repository, query: Query, listing: Listing, until: float
) -> tuple[Listing, bool]:
    """Match paths with git in a file of all paths: unlike Python's re, git can be stopped."""
    folder = Path(await in_thread(tempfile.mkdtemp, prefix="stead-search-"))
    try:
        names = b"".join(path.replace(b"\n", b" ") + b"\n" for path, _ in listing)
        await in_thread((folder / "names").write_bytes, names)
        owner = repository.path.stat()
        if owner.st_uid != os.geteuid():
            os.chown(folder, owner.st_uid, owner.st_gid)
        gathered = OutputBuffer()
        arguments = ["grep", "--no-index", "-a", "-h", "-n", *query.options, *query.expression, "--", "names"]
        complete = await run(repository, arguments, gathered, until, query=query, cwd=folder)
    finally:
        await in_thread(shutil.rmtree, folder, ignore_errors=True)
    lines = gathered.data.split(b"\n")[:-1]
    return [listing[int(line.partition(b":")[0]) - 1] for line in lines], complete
