"""Push detection: changed branches and files, and the triggers that they match."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from stead.repos.errors import RepoDamaged, TooLarge
from stead.repos.globs import GlobPattern
from stead.repos.names import EMPTY_TREE
from stead.repos.repository import Repository

MAX_CHANGED_FILES = 3000
_MAX_CHANGED_BYTES = 1 << 20
_COMPARE_TIMEOUT = 20.0


@dataclass(frozen=True)
class BranchUpdate:
    """A branch that changed; `old` is None for a new branch."""

    branch: str
    old: str | None
    new: str


@dataclass(frozen=True)
class PushEvent:
    """What a webhook is called for: a branch that changed."""

    repo_id: str
    delivery_id: str
    update: BranchUpdate
    detected_at: datetime

    def body(self) -> str:
        """The body of the webhook, whose names receivers rely on."""
        return json.dumps(
            {
                "event": "branchUpdate",
                "repoId": self.repo_id,
                "branch": self.update.branch,
                "commit": self.update.new,
                "previousCommit": self.update.old,
                "deliveryId": self.delivery_id,
                "timestamp": self.detected_at.isoformat(timespec="milliseconds"),
            }
        )


class TriggerFilter:
    """The compiled patterns of a trigger."""

    def __init__(self, branches: Iterable[str], globs: Iterable[str]) -> None:
        self._branches = [GlobPattern.branch(each) for each in branches]
        self._globs = [GlobPattern.path(each) for each in globs]

    @property
    def globs(self) -> int:
        """Number of patterns that each changed file is matched against."""
        return sum(map(len, self._globs))

    def matches_branch(self, name: str) -> bool:
        return not self._branches or any(pattern.matches(name) for pattern in self._branches)

    def matches_files(self, paths: Sequence[str] | None) -> bool:
        """Whether changed files match; None (too many files to check) matches."""
        if not self._globs or paths is None:
            return True
        return any(pattern.matches(path) for pattern in self._globs for path in paths)


async def branches_of(repository: Repository) -> dict[str, str]:
    return {branch.name: branch.sha for branch in await repository.branches()}


async def changed_files(repository: Repository, update: BranchUpdate) -> list[str] | None:
    """The changed files, with deleted ones; None if there are too many.

    An updated branch is compared with its old commit. A new branch is compared with its merge base with the
    default branch; without one, all its files are new.
    """
    try:
        old = update.old or await _merge_base(repository, update)
        printed = await repository.run(
            *("diff-tree", "-r", "-z", "--name-only", "--no-renames", old, update.new),
            timeout=_COMPARE_TIMEOUT,
            most=_MAX_CHANGED_BYTES,
        )
    except (TooLarge, RepoDamaged):
        return None
    paths = printed.decode(errors="replace").split("\0")[:-1]
    return paths if len(paths) <= MAX_CHANGED_FILES else None


async def _merge_base(repository: Repository, update: BranchUpdate) -> str:
    if repository.default_branch == update.branch:
        return EMPTY_TREE
    main = f"refs/heads/{repository.default_branch}"
    finished = await repository.finish("merge-base", main, update.new, timeout=_COMPARE_TIMEOUT)
    return finished.stdout.decode().strip() if finished.status == 0 else EMPTY_TREE
