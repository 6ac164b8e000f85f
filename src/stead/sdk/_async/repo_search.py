"""Search in a repository: file contents, file names, commit messages and diffs."""

from collections.abc import AsyncGenerator, Iterator
from typing import Any, Protocol, TypeVar

from stead.sdk._async.repo_part import AsyncRepoPart
from stead.sdk._async.streams import AsyncStream
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

_PAGE = 100
T = TypeVar("T")
Item = TypeVar("Item", covariant=True)


class AsyncRepoSearch(AsyncRepoPart):
    """Searches in one repository. Each returns one page; its `iterate_` variant yields all results.

    Args, as far as a search has them:
        query: text, or with `is_regex` a regular expression.
        rev: the branch, tag or commit to search; the default branch if None.
        path_pattern, exclude_pattern: only files whose path matches the first and not the second, for example
            `src/**/*.py`.
        case_sensitive: upper and lower case differ.
        whole_word: match whole words only.
        max_results: files or commits in one page: 100 by default, at most 1000.
        offset: the number of results to skip.
    """

    async def search(
        self,
        query: str,
        *,
        rev: str | None = None,
        path_pattern: str | None = None,
        exclude_pattern: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        whole_word: bool = False,
        max_results: int | None = None,
        offset: int = 0,
    ) -> ContentResults:
        """Search the contents of files."""
        options = _options(
            query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex, whole_word=whole_word
        )
        return await self._find(ContentResults, "", options, max_results, offset)

    def iterate_search(
        self,
        query: str,
        *,
        rev: str | None = None,
        path_pattern: str | None = None,
        exclude_pattern: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        whole_word: bool = False,
        page_size: int = _PAGE,
    ) -> AsyncStream[MatchingFile]:
        """Search the contents of files, all pages."""
        options = _options(
            query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex, whole_word=whole_word
        )
        return AsyncStream(self._pages(ContentResults, "", options, page_size))

    async def search_files(
        self,
        query: str,
        *,
        rev: str | None = None,
        path_pattern: str | None = None,
        exclude_pattern: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        max_results: int | None = None,
        offset: int = 0,
    ) -> FileResults:
        """Search the paths of files."""
        options = _options(query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex)
        return await self._find(FileResults, "/files", options, max_results, offset)

    def iterate_search_files(
        self,
        query: str,
        *,
        rev: str | None = None,
        path_pattern: str | None = None,
        exclude_pattern: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        page_size: int = _PAGE,
    ) -> AsyncStream[FoundFile]:
        """Search the paths of files, all pages."""
        options = _options(query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex)
        return AsyncStream(self._pages(FileResults, "/files", options, page_size))

    async def search_commits(
        self,
        query: str,
        *,
        rev: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        max_results: int | None = None,
        offset: int = 0,
    ) -> CommitResults:
        """Search commit messages."""
        options = _options(query, rev, None, None, case_sensitive, is_regex)
        return await self._find(CommitResults, "/commits", options, max_results, offset)

    def iterate_search_commits(
        self,
        query: str,
        *,
        rev: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        page_size: int = _PAGE,
    ) -> AsyncStream[FoundCommit]:
        """Search commit messages, all pages."""
        options = _options(query, rev, None, None, case_sensitive, is_regex)
        return AsyncStream(self._pages(CommitResults, "/commits", options, page_size))

    async def search_diffs(
        self,
        query: str,
        *,
        rev: str | None = None,
        path_pattern: str | None = None,
        exclude_pattern: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        whole_word: bool = False,
        max_results: int | None = None,
        offset: int = 0,
    ) -> DiffResults:
        """Search for commits that added or removed matching lines."""
        options = _options(
            query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex, whole_word=whole_word
        )
        return await self._find(DiffResults, "/diffs", options, max_results, offset)

    def iterate_search_diffs(
        self,
        query: str,
        *,
        rev: str | None = None,
        path_pattern: str | None = None,
        exclude_pattern: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        whole_word: bool = False,
        page_size: int = _PAGE,
    ) -> AsyncStream[MatchingCommit]:
        """Search for commits that added or removed matching lines, all pages."""
        options = _options(
            query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex, whole_word=whole_word
        )
        return AsyncStream(self._pages(DiffResults, "/diffs", options, page_size))

    async def _find(
        self, model: type[T], path: str, options: dict[str, Any], limit: int | None, offset: int
    ) -> T:
        query = {**options, "maxResults": limit, "offset": offset or None}
        answer = await self._call("GET", f"/search{path}", query=query, timeout=LIFECYCLE_TIMEOUT)
        return parse(model, columns_in_characters(answer))

    async def _pages(
        self, model: "type[_Results[T]]", path: str, options: dict[str, Any], limit: int
    ) -> AsyncGenerator[T]:
        offset = 0
        while True:
            page = await self._find(model, path, options, limit, offset)
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


def _options(
    query: str,
    rev: str | None,
    path_pattern: str | None,
    exclude_pattern: str | None,
    case_sensitive: bool,
    is_regex: bool,
    *,
    whole_word: bool = False,
) -> dict[str, Any]:
    return {
        "query": query,
        "ref": rev,
        "pathPattern": path_pattern,
        "excludePattern": exclude_pattern,
        "caseSensitive": case_sensitive or None,
        "isRegex": is_regex or None,
        "wholeWord": whole_word or None,
    }
