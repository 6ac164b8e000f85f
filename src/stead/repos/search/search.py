"""Search in a repository with git: file contents, file names, commit messages and diffs.

Every search is limited in time and memory. A result that a limit cut short is `stopped`: it has what was
found so far, and its totals count only that. It reports more results only if its own page is not empty, so
paging always ends.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypedDict, TypeVar, Unpack

from stead.errors import InvalidRequest
from stead.repos.errors import ReferenceNotFound, RepoBusy
from stead.repos.model import Commit
from stead.repos.names import EMPTY_TREE
from stead.repos.repository import Repository
from stead.repos.search.cache import SearchCache
from stead.repos.search.content import FileMatches, MatchCounts, count, files_with_lines
from stead.repos.search.diffs import CommitDiff, Diffs
from stead.repos.search.file_names import NamedFile, list_tree, matching_names, parse_tree
from stead.repos.search.processes import SHA_LINE, OutputBuffer, first_phase, run
from stead.repos.search.query import JitStackExhausted, Query, Scope, pathspecs
from stead.shares import KeyedLimit
from stead.tasks import Threads

TIMEOUT = 30.0
MAX_RESULTS = 1000
MAX_CONTEXT = 20
_MAX_WAITING = 64
"""Searches of an account that wait."""
_ROW = 300
"""Approximate bytes of a result row besides its text."""
C = TypeVar("C")


@dataclass(frozen=True)
class ContentFound:
    total_files: int
    total_matches: int
    has_more: bool
    stopped: bool
    files: list[FileMatches]


@dataclass(frozen=True)
class FilesFound:
    total_files: int
    has_more: bool
    stopped: bool
    files: list[NamedFile]


@dataclass(frozen=True)
class CommitsFound(Generic[C]):
    total_commits: int
    has_more: bool
    stopped: bool
    commits: list[C]


Found = TypeVar("Found", bound="ContentFound | FilesFound | CommitsFound[Any]")


class MessageOptions(TypedDict, total=False):
    max_results: int
    offset: int
    case_sensitive: bool
    regex: bool


class FileOptions(MessageOptions, total=False):
    path_pattern: str | None
    exclude_pattern: str | None


class DiffOptions(FileOptions, total=False):
    whole_word: bool


class ContentOptions(DiffOptions, total=False):
    context: int
    """Lines before and after a match."""


@dataclass(frozen=True)
class _PageRange:
    offset: int
    size: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_RESULTS:
            raise InvalidRequest(f"max_results must be 1 to {MAX_RESULTS}, not {self.size}")
        if self.offset < 0:
            raise InvalidRequest(f"offset must be 0 or more, not {self.offset}")

    @property
    def end(self) -> int:
        return self.offset + self.size

    def has_more(self, here: int, total: int, stopped: bool) -> bool:
        return self.offset + here < total or (stopped and here > 0)

    def of(self, shas: bytes) -> list[str]:
        return shas[self.offset * SHA_LINE : self.end * SHA_LINE].decode().split()


@dataclass(frozen=True)
class _Asked:
    """A search; `commit` is None in an empty repository."""

    query: Query
    specs: tuple[str, ...]
    page: _PageRange
    context: int
    commit: str | None


async def _asked(
    scope: Scope,
    repository: Repository,
    query: str,
    rev: str | None,
    *,
    path_pattern: str | None = None,
    exclude_pattern: str | None = None,
    max_results: int = 100,
    offset: int = 0,
    case_sensitive: bool = False,
    regex: bool = False,
    whole_word: bool = False,
    context: int = 2,
) -> _Asked:
    wanted = Query(scope, query, regex, case_sensitive, whole_word)
    specs = pathspecs(scope, path_pattern, exclude_pattern)
    page = _PageRange(offset, max_results)
    if not 0 <= context <= MAX_CONTEXT:
        raise InvalidRequest(f"context must be 0 to {MAX_CONTEXT}, not {context}")
    try:
        commit = await repository.resolve(rev)
    except ReferenceNotFound:
        if rev is not None or await repository.any_branch():
            raise
        commit = None
    return _Asked(wanted, specs, page, context, commit)


class Search:
    """Runs searches, of which an account has at most half at a time, and caches results.

    Branch and tag names are resolved each time; results are cached by commit, so they are never stale.
    """

    def __init__(self, *, timeout: float = TIMEOUT, at_once: int | None = None) -> None:
        self.cache = SearchCache()
        self._timeout = timeout
        total = at_once or max(2, os.cpu_count() or 1)
        self._slots = KeyedLimit(
            total, max(1, total // 2), max_waiting=_MAX_WAITING, busy=lambda: RepoBusy("searches")
        )

    def drop_repo(self, repo_id: str) -> None:
        """Drop the cached results of a deleted repository."""
        self.cache.drop_repo(repo_id)

    async def content(
        self, repository: Repository, query: str, rev: str | None = None, **options: Unpack[ContentOptions]
    ) -> ContentFound:
        """Files with matching lines, up to `max_results` files. Binary files are skipped."""
        asked = await _asked("content", repository, query, rev, **options)
        commit, specs, page = asked.commit, asked.specs, asked.page
        if commit is None:
            return ContentFound(0, 0, False, False, [])

        async def find(repository: Repository, wanted: Query, until: float) -> tuple[ContentFound, int]:
            counted = await self._count(repository, commit, wanted, specs, until)
            part = await Threads.PARSING.run(counted.page, page.offset, page.end)
            files, complete = await files_with_lines(repository, wanted, part, asked.context, until)
            stopped = counted.stopped or not complete
            more = page.has_more(len(files), counted.files, stopped)
            size = sum(_ROW + file.text_size for file in files)
            return ContentFound(counted.files, counted.matches, more, stopped, files), size

        return await self._cached(repository, asked, find)

    async def files(
        self, repository: Repository, query: str, rev: str | None = None, **options: Unpack[FileOptions]
    ) -> FilesFound:
        """Files whose paths match; paths start at the repository's root."""
        asked = await _asked("files", repository, query, rev, **options)
        commit, specs, page = asked.commit, asked.specs, asked.page
        if commit is None:
            return FilesFound(0, False, False, [])

        async def find(repository: Repository, wanted: Query, until: float) -> tuple[FilesFound, int]:
            printed, complete = await self._complete(
                (repository.id, "tree", commit, specs),
                lambda: list_tree(repository, commit, specs, first_phase(until)),
            )
            found, seen_all = await matching_names(
                repository, wanted, await Threads.PARSING.run(parse_tree, printed), until
            )
            part = found[page.offset : page.end]
            async with repository.reader() as reader:
                infos = await reader.infos([sha for _, sha in part])
            files = [
                NamedFile(path.decode(errors="replace"), info.size if info else 0)
                for (path, _), info in zip(part, infos, strict=True)
            ]
            stopped = not (complete and seen_all)
            more = page.has_more(len(files), len(found), stopped)
            size = sum(_ROW + len(file.path) for file in files)
            return FilesFound(len(found), more, stopped, files), size

        return await self._cached(repository, asked, find)

    async def commits(
        self, repository: Repository, query: str, rev: str | None = None, **options: Unpack[MessageOptions]
    ) -> CommitsFound[Commit]:
        """Commits with a matching line in their message, newest first."""
        asked = await _asked("commits", repository, query, rev, **options)
        tip, page = asked.commit, asked.page
        if tip is None:
            return CommitsFound(0, False, False, [])

        async def find(
            repository: Repository, wanted: Query, until: float
        ) -> tuple[CommitsFound[Commit], int]:
            shas, complete = await self._complete(
                (repository.id, "history", tip, wanted),
                lambda: _matching_commits(repository, tip, wanted, first_phase(until)),
            )
            commits = await repository.commits(page.of(shas))
            total = len(shas) // SHA_LINE
            more = page.has_more(len(commits), total, not complete)
            size = sum(2 * _ROW + len(each.message) for each in commits)
            return CommitsFound(total, more, not complete, commits), size

        return await self._cached(repository, asked, find)

    async def diffs(
        self, repository: Repository, query: str, rev: str | None = None, **options: Unpack[DiffOptions]
    ) -> CommitsFound[CommitDiff]:
        """Commits that add or remove matching lines, newest first; merges are skipped."""
        asked = await _asked("diffs", repository, query, rev, **options)
        tip, specs, page = asked.commit, asked.specs, asked.page
        if tip is None:
            return CommitsFound(0, False, False, [])

        async def find(
            repository: Repository, wanted: Query, until: float
        ) -> tuple[CommitsFound[CommitDiff], int]:
            key = (repository.id, "changes", tip, wanted, specs)
            diffs = Diffs(repository, wanted, specs)
            shas: bytes | None = self.cache.get(key)
            if shas is not None:
                commits = await diffs.matches_in(page.of(shas), until)
            else:
                shas, commits = await diffs.search(tip, page.offset, page.end, until)
                if not diffs.stopped:
                    self.cache.put(key, shas, len(shas))
            total = len(shas) // SHA_LINE
            more = page.has_more(len(commits), total, diffs.stopped)
            return CommitsFound(total, more, diffs.stopped, commits), diffs.size

        return await self._cached(repository, asked, find)

    async def _cached(
        self,
        repository: Repository,
        asked: _Asked,
        find: Callable[[Repository, Query, float], Awaitable[tuple[Found, int]]],
    ) -> Found:
        """The cached result, or a new one, which is cached if it is complete."""
        key = (repository.id, "answer", asked)
        kept: Found | None = self.cache.get(key)
        if kept is not None:
            return kept
        query = asked.query
        until = asyncio.get_running_loop().time() + self._timeout
        async with self._slots.hold(repository.share, max_wait=self._timeout):
            searched = repository.counted_elsewhere()
            if query.regex and query.whole_word:
                await _check(searched, replace(query, whole_word=False), until)
            try:
                answer, size = await find(searched, query, until)
            except JitStackExhausted:
                answer, size = await find(searched, replace(query, jit=False), until)
        if not answer.stopped:
            self.cache.put(key, answer, size)
        return answer

    # Complete results, before a page is selected

    async def _count(
        self, repository: Repository, commit: str, query: Query, specs: tuple[str, ...], until: float
    ) -> MatchCounts:
        key = (repository.id, "counted", commit, query, specs)
        kept: MatchCounts | None = self.cache.get(key)
        if kept is not None:
            return kept
        counted = await count(repository, commit, query, specs, first_phase(until))
        if not counted.stopped:
            self.cache.put(key, counted, len(counted.printed))
        return counted

    async def _complete(
        self, key: tuple[object, ...], find: Callable[[], Awaitable[tuple[bytes, bool]]]
    ) -> tuple[bytes, bool]:
        """The cached output of git, or a new one, which is cached if it is complete; and whether it is."""
        kept: bytes | None = self.cache.get(key)
        if kept is not None:
            return kept, True
        printed, complete = await find()
        if complete:
            self.cache.put(key, printed, len(printed))
        return printed, complete


async def _matching_commits(
    repository: Repository, tip: str, query: Query, until: float
) -> tuple[bytes, bool]:
    """The matching commits, one id per line, and whether the list is complete."""
    gathered = OutputBuffer()
    arguments = ["rev-list", *query.options, f"--grep={query.pattern}", tip, "--"]
    complete = await run(repository, arguments, gathered, until, query=query)
    shas = gathered.data
    return shas[: len(shas) // SHA_LINE * SHA_LINE], complete


async def _check(repository: Repository, query: Query, until: float) -> None:
    """Check that the expression is valid on its own, not only with its surroundings."""
    arguments = ["grep", *query.options, *query.expression, EMPTY_TREE]
    await run(repository, arguments, OutputBuffer(), until, query=query)
