"""Search in a repository: file contents, file names, commit messages and diffs."""

from collections.abc import AsyncGenerator, Iterator
from typing import Protocol, TypeVar, Unpack

from stead.sdk._async.repo_part import AsyncRepoPart
from stead.sdk._async.streams import AsyncStream
from stead.sdk.arguments import checks_arguments
from stead.sdk.parsing import parse
from stead.sdk.requests import LIFECYCLE_TIMEOUT
from stead.sdk.search_models import (
    CommitResults,
    ContentResults,
    DiffResults,
    FileResults,
    FoundCommit,
    FoundFile,
    MatchingCommit,
    MatchingFile,
    columns_in_characters,
)
from stead.sdk.search_options import CommitSearch, FileSearch, LineSearch, search_query

_PAGE = 100
T = TypeVar("T")
Item = TypeVar("Item", covariant=True)


@checks_arguments
class AsyncRepoSearch(AsyncRepoPart):
    """Searches in one repository. Each returns one page; its `iterate_` variant yields all results.

    `query` is text, or with `is_regex` a regular expression. A page has up to `max_results` files or commits
    (100 by default, at most 1000) after the first `offset`.
    """

    async def search(
        self, query: str, *, max_results: int | None = None, offset: int = 0, **options: Unpack[LineSearch]
    ) -> ContentResults:
        """Search the contents of files."""
        wanted = search_query(query, options)
        return await self._find(ContentResults, "", wanted, max_results, offset)

    def iterate_search(
        self, query: str, *, page_size: int = _PAGE, **options: Unpack[LineSearch]
    ) -> AsyncStream[MatchingFile]:
        """Search the contents of files, all pages."""
        wanted = search_query(query, options)
        return AsyncStream(self._pages(ContentResults, "", wanted, page_size))

    async def search_files(
        self, query: str, *, max_results: int | None = None, offset: int = 0, **options: Unpack[FileSearch]
    ) -> FileResults:
        """Search the paths of files."""
        wanted = search_query(query, options)
        return await self._find(FileResults, "/files", wanted, max_results, offset)

    def iterate_search_files(
        self, query: str, *, page_size: int = _PAGE, **options: Unpack[FileSearch]
    ) -> AsyncStream[FoundFile]:
        """Search the paths of files, all pages."""
        wanted = search_query(query, options)
        return AsyncStream(self._pages(FileResults, "/files", wanted, page_size))

    async def search_commits(
        self, query: str, *, max_results: int | None = None, offset: int = 0, **options: Unpack[CommitSearch]
    ) -> CommitResults:
        """Search commit messages."""
        wanted = search_query(query, options)
        return await self._find(CommitResults, "/commits", wanted, max_results, offset)

    def iterate_search_commits(
        self, query: str, *, page_size: int = _PAGE, **options: Unpack[CommitSearch]
    ) -> AsyncStream[FoundCommit]:
        """Search commit messages, all pages."""
        wanted = search_query(query, options)
        return AsyncStream(self._pages(CommitResults, "/commits", wanted, page_size))

    async def search_diffs(
        self, query: str, *, max_results: int | None = None, offset: int = 0, **options: Unpack[LineSearch]
    ) -> DiffResults:
        """Search for commits that added or removed matching lines."""
        wanted = search_query(query, options)
        return await self._find(DiffResults, "/diffs", wanted, max_results, offset)

    def iterate_search_diffs(
        self, query: str, *, page_size: int = _PAGE, **options: Unpack[LineSearch]
    ) -> AsyncStream[MatchingCommit]:
        """Search for commits that added or removed matching lines, all pages."""
        wanted = search_query(query, options)
        return AsyncStream(self._pages(DiffResults, "/diffs", wanted, page_size))

    async def _find(
        self, model: type[T], path: str, query: dict[str, object], limit: int | None, offset: int
    ) -> T:
        page = {**query, "maxResults": limit, "offset": offset or None}
        answer = await self._call("GET", f"/search{path}", query=page, timeout=LIFECYCLE_TIMEOUT)
        return parse(model, columns_in_characters(answer))

    async def _pages(
        self, model: "type[_Results[T]]", path: str, query: dict[str, object], limit: int
    ) -> AsyncGenerator[T]:
        offset = 0
        while True:
            page = await self._find(model, path, query, limit, offset)
            for found in page:
                yield found
            if not page.has_more or not len(page):
                return
            offset += len(page)


class _Results(Protocol[Item]):
    """One page of results."""

    @property
    def has_more(self) -> bool: ...
    def __iter__(self) -> Iterator[Item]: ...
    def __len__(self) -> int: ...
