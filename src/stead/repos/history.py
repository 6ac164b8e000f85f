"""Commit history: pages of commits, and comparison of revisions."""

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from stead.repos.errors import (
    CommitNotFound,
    CommitNotInBranch,
    InvalidRange,
    OffsetWithSelector,
    ReferenceNotFound,
    TooLarge,
)
from stead.repos.git import TIMEOUT, GitFailed
from stead.repos.model import Commit
from stead.repos.names import check_sha
from stead.repos.repository import Repository
from stead.tasks import Threads

Order = Literal["asc", "desc"]
MAX_COMMITS = 500
_MAX_INT = 2**31 - 1
"""The largest number that git takes."""
_ORDER = "--date-order"
"""By date, but never a parent before its children: dates may be equal or wrong."""
_LINES = 64 << 10
_MAX_COMPARED = 16 << 20
"""Bytes of git's list of changed files: more than 50,000 files."""
_FEW_CHANGES = 64 << 10
_PARSED = 6
"""Bytes of parsed changes for each byte of that list, at the most."""
Status = Literal["added", "removed", "modified", "renamed", "copied", "changed"]
_STATUSES: dict[str, Status] = {
    "A": "added",
    "D": "removed",
    "M": "modified",
    "R": "renamed",
    "C": "copied",
    "T": "changed",
}


@dataclass(frozen=True)
class CommitPage:
    commits: list[Commit]
    next_commit: str | None
    total: int | None


@dataclass(frozen=True, slots=True)
class FileChange:
    path: str
    status: Status
    additions: int
    deletions: int
    sha: str | None
    previous_path: str | None = None


@dataclass(frozen=True)
class RevisionComparison:
    ahead_by: int
    behind_by: int
    files: list[FileChange]

    @property
    def status(self) -> Literal["identical", "ahead", "behind", "diverged"]:
        if self.ahead_by and self.behind_by:
            return "diverged"
        if self.ahead_by:
            return "ahead"
        return "behind" if self.behind_by else "identical"


async def commits(
    repository: Repository,
    branch: str | None = None,
    *,
    limit: int = 50,
    order: Order = "desc",
    offset: int = 0,
    since: str | None = None,
    until: str | None = None,
    count: bool = True,
) -> CommitPage:
    """A page of a branch's commits, newest or oldest first, and the start of the next page.

    With order desc, the page starts at `until` and stops before `since`; with order asc, it starts at
    `since`.
    """
    if offset and (since or until):
        raise OffsetWithSelector
    since, until = since and check_sha(since), until and check_sha(until)
    try:
        tip = await repository.resolve(branch)
    except ReferenceNotFound:
        if branch is None and not await repository.any_branch():
            return CommitPage([], None, 0)
        raise
    known = branch or repository.default_branch
    await _check_in_history(repository, tip, known, since, until)
    total = None
    if since or until:
        shas, next_commit = await _between(repository, tip, limit, order, since, until)
    else:
        if count or order == "asc":
            total = int(await repository.run("rev-list", "--count", tip, "--"))
        shas, next_commit = await _at_offset(repository, tip, limit, order, offset, total)
    return CommitPage(await repository.commits(shas), next_commit, total if count else None)


async def _at_offset(
    repository: Repository, tip: str, limit: int, order: Order, offset: int, total: int | None
) -> tuple[list[str], str | None]:
    """The commits of a page, and the first of the next one; for order asc, `total` must be known."""
    first, last = offset, offset + limit + 1
    if order == "asc" and total is not None:
        # Git skips and counts commits before it reverses them.
        first, last = max(0, total - last), max(0, total - first)
    page = f"--skip={min(first, _MAX_INT)}", f"--max-count={last - first}"
    shas = (await repository.run("rev-list", _ORDER, *page, tip, "--")).decode().split()
    if order == "asc":
        shas.reverse()
    return shas[:limit], shas[limit] if len(shas) > limit else None


async def _between(
    repository: Repository, tip: str, limit: int, order: Order, since: str | None, until: str | None
) -> tuple[list[str], str | None]:
    """The commits of a page that begins or ends at a commit, and the first of the next one."""
    options = [_ORDER, *(["--reverse"] if order == "asc" else [])]
    first, last = (since, until) if order == "asc" else (until, since)
    shas: list[str] = []
    begun = first is None
    async with contextlib.aclosing(_rev_list(repository, *options, tip)) as history:
        async for lines in history:
            if not begun and first in lines:
                lines, begun = lines[lines.index(first) :], True
            for sha in lines if begun else ():
                if order == "desc" and sha == last:
                    return shas, None
                if len(shas) == limit:
                    return shas, sha
                shas.append(sha)
                if order == "asc" and sha == last:
                    return shas, None
    return shas, None


async def _check_in_history(
    repository: Repository, tip: str, branch: str, since: str | None, until: str | None
) -> None:
    for sha in (since, until):
        if sha is None:
            continue
        info = await repository.info(sha)
        if info is None or info.kind != "commit":
            raise CommitNotFound(sha)
        if not await is_ancestor(repository, sha, tip):
            raise CommitNotInBranch(sha, branch)
    if since is not None and until is not None and not await is_ancestor(repository, since, until):
        raise InvalidRange(since, until)


async def is_ancestor(repository: Repository, older: str, newer: str) -> bool:
    finished = await repository.finish("merge-base", "--is-ancestor", older, newer)
    if finished.status not in (0, 1):
        raise GitFailed("merge-base", finished)
    return finished.status == 0


async def _rev_list(repository: Repository, *options: str) -> AsyncGenerator[list[str]]:
    """Commits from git rev-list, as many at a time as are there."""
    async with repository.running("rev-list", *options, "--", timeout=TIMEOUT) as process:
        rest = ""
        while piece := await process.stdout.read(_LINES):
            *lines, rest = (rest + piece.decode()).split("\n")
            yield lines


async def compare(repository: Repository, base: str, head: str) -> RevisionComparison:
    """The commits and changes of `head` since its merge base with `base`."""
    async with repository.holding() as held:
        return await _compare(held, base, head)


async def _compare(repository: Repository, base: str, head: str) -> RevisionComparison:
    old, new = await repository.resolve(base), await repository.resolve(head)
    counted = await repository.run("rev-list", "--left-right", "--count", f"{old}...{new}", "--")
    behind, ahead = (int(word) for word in counted.split())
    shared = await repository.finish("merge-base", old, new)
    start = shared.stdout.decode().split()[0] if shared.status == 0 else old
    return RevisionComparison(ahead, behind, await _changes(repository, start, new))


async def _changes(repository: Repository, old: str, new: str) -> list[FileChange]:
    arguments = "diff-tree", "-r", "-z", "-M", "-C", "--raw", "--numstat", "--abbrev=40", old, new
    try:
        printed = await repository.run(*arguments, most=_MAX_COMPARED)
    except TooLarge as error:
        raise TooLarge(f"cannot compare: {error}; clone the repository and run git diff") from error
    if len(printed) <= _FEW_CHANGES:
        return _parse_changes(printed)
    await repository.reserve(_PARSED * len(printed))
    return await Threads.PARSING.run(_parse_changes, printed)


def _parse_changes(printed: bytes) -> list[FileChange]:
    words = printed.decode(errors="replace").split("\0")[:-1]
    facts: dict[str, tuple[str, str, str | None]] = {}
    changes: list[FileChange] = []
    place = iter(words)
    for word in place:
        if word.startswith(":"):
            _, _, _, sha, letter = word.split(" ")
            previous = next(place) if letter[0] in "RC" else None
            facts[next(place)] = letter[0], sha, previous
            continue
        added, removed, path = word.split("\t")
        if not path:
            next(place)
            path = next(place)
        letter, sha, previous = facts[path]
        more, less = (int(number) if number.isdigit() else 0 for number in (added, removed))
        status = _STATUSES.get(letter, "changed")
        changes.append(FileChange(path, status, more, less, None if letter == "D" else sha, previous))
    return changes
