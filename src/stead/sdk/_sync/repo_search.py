# Made by scripts/unasync from _async/repo_search.py.
"""Searching a repository: contents, names of files, messages and changes of commits."""

from collections.abc import Generator, Iterator
from typing import Any, Protocol, TypeVar

from stead.sdk._sync.repo_part import RepoPart
from stead.sdk._sync.streams import Stream
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
    in_characters,
)

_PAGE = 100
T = TypeVar("T")
Item = TypeVar("Item", covariant=True)


class RepoSearch(RepoPart):
    """Searches in one repository. Each returns one page; its `iterate_` twin goes through all of them.

    Args, as far as a search has them:
        query: a text, or with `is_regex` a regular expression.
        rev: a branch, a tag or a commit to search at; without it, the default branch.
        path_pattern, exclude_pattern: only in files whose path fits the one and not the other: `src/**/*.py`.
        case_sensitive: a letter is not the same in its other case.
        whole_word: only where the match is a word of its own.
        max_results: files, or commits, in one page: 100 unless told, at most 1000.
        offset: how many to pass over.
    """

    def search(
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
        """Lines of files that match."""
        options = _options(
            query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex, whole_word=whole_word
        )
        return self._find(ContentResults, "", options, max_results, offset)

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
    ) -> Stream[MatchingFile]:
        """All files with lines that match."""
        options = _options(
            query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex, whole_word=whole_word
        )
        return Stream(self._pages(ContentResults, "", options, page_size))

    def search_files(
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
        """Files whose path matches."""
        options = _options(query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex)
        return self._find(FileResults, "/files", options, max_results, offset)

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
    ) -> Stream[FoundFile]:
        """All files whose path matches."""
        options = _options(query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex)
        return Stream(self._pages(FileResults, "/files", options, page_size))

    def search_commits(
        self,
        query: str,
        *,
        rev: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        max_results: int | None = None,
        offset: int = 0,
    ) -> CommitResults:
        """Commits whose message matches."""
        options = _options(query, rev, None, None, case_sensitive, is_regex)
        return self._find(CommitResults, "/commits", options, max_results, offset)

    def iterate_search_commits(
        self,
        query: str,
        *,
        rev: str | None = None,
        case_sensitive: bool = False,
        is_regex: bool = False,
        page_size: int = _PAGE,
    ) -> Stream[FoundCommit]:
        """All commits whose message matches."""
        options = _options(query, rev, None, None, case_sensitive, is_regex)
        return Stream(self._pages(CommitResults, "/commits", options, page_size))

    def search_diffs(
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
        """Commits that added or removed lines that match."""
        options = _options(
            query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex, whole_word=whole_word
        )
        return self._find(DiffResults, "/diffs", options, max_results, offset)

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
    ) -> Stream[MatchingCommit]:
        """All commits that added or removed lines that match."""
        options = _options(
            query, rev, path_pattern, exclude_pattern, case_sensitive, is_regex, whole_word=whole_word
        )
        return Stream(self._pages(DiffResults, "/diffs", options, page_size))

    def _find(self, model: type[T], path: str, options: dict[str, Any], limit: int | None, offset: int) -> T:
        query = {**options, "maxResults": limit, "offset": offset or None}
        answer = self._call("GET", f"/search{path}", query=query, timeout=LIFECYCLE_TIMEOUT)
        return parse(model, in_characters(answer))

    def _pages(
        self, model: "type[_Results[T]]", path: str, options: dict[str, Any], limit: int
    ) -> Generator[T]:
        offset = 0
        while True:
            page = self._find(model, path, options, limit, offset)
            yield from page
            if not page.has_more or not len(page):
                return
            offset += len(page)


class _Results(Protocol[Item]):
    """One page of what was found."""

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
