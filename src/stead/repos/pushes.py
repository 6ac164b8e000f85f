"""Pushes: what is different in a repository, and whom it concerns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stead.repos.errors import RepoDamaged, TooLarge
from stead.repos.names import EMPTY_TREE
from stead.repos.patterns import Pattern
from stead.repos.repository import Repository

MAX_CHANGED_FILES = 3000
_MAX_CHANGED_BYTES = 1 << 20
_COMPARE_TIMEOUT = 20.0


@dataclass(frozen=True)
class Update:
    """A branch that is somewhere else than it was; `old` is None for a new one."""

    branch: str
    old: str | None
    new: str


class Rule:
    """What a trigger listens to, ready to be asked."""

    def __init__(self, branches: Iterable[str], globs: Iterable[str]) -> None:
        self._branches = [Pattern.branch(each) for each in branches]
        self._globs = [Pattern.path(each) for each in globs]

    @property
    def globs(self) -> int:
        """How many patterns each changed file is held against."""
        return sum(map(len, self._globs))

    def wants_branch(self, name: str) -> bool:
        return not self._branches or any(pattern.matches(name) for pattern in self._branches)

    def wants_files(self, paths: Sequence[str] | None) -> bool:
        """None for more files than anyone looks at: then it is better to tell once too often."""
        if not self._globs or paths is None:
            return True
        return any(pattern.matches(path) for pattern in self._globs for path in paths)


async def branches_of(repository: Repository) -> dict[str, str]:
    return {branch.name: branch.sha for branch in await repository.branches()}


async def changed_files(repository: Repository, update: Update) -> list[str] | None:
    """The files that are different, also those that are gone; None when they are too many to look at.

    A branch that was moved is compared with where it was, whatever lies between. A new one is compared with
    where it left the default branch; when it never did, all of its files are new.
    """
    try:
        old = update.old or await _start(repository, update)
        printed = await repository.git.run(
            repository.path,
            *("diff-tree", "-r", "-z", "--name-only", "--no-renames", old, update.new),
            timeout=_COMPARE_TIMEOUT,
            most=_MAX_CHANGED_BYTES,
        )
    except (TooLarge, RepoDamaged):
        return None
    paths = printed.decode(errors="replace").split("\0")[:-1]
    return paths if len(paths) <= MAX_CHANGED_FILES else None


async def _start(repository: Repository, update: Update) -> str:
    if repository.default_branch == update.branch:
        return EMPTY_TREE
    main = f"refs/heads/{repository.default_branch}"
    finished = await repository.git.finish(
        repository.path, "merge-base", main, update.new, timeout=_COMPARE_TIMEOUT
    )
    return finished.stdout.decode().strip() if finished.status == 0 else EMPTY_TREE
