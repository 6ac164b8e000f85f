"""Options of searches in a repository."""

from typing import Any, TypedDict


class CommitSearch(TypedDict, total=False):
    rev: str | None
    """The branch, tag or commit to search; the default branch if None."""
    case_sensitive: bool
    """Upper and lower case differ."""
    is_regex: bool


class FileSearch(CommitSearch, total=False):
    path_pattern: str | None
    """Only files whose path matches, for example `src/**/*.py`."""
    exclude_pattern: str | None
    """Only files whose path does not match."""


class LineSearch(FileSearch, total=False):
    whole_word: bool
    """Match whole words only."""


def search_query(
    kind: type[CommitSearch],
    query: str,
    *,
    rev: str | None = None,
    path_pattern: str | None = None,
    exclude_pattern: str | None = None,
    case_sensitive: bool = False,
    is_regex: bool = False,
    whole_word: bool = False,
) -> dict[str, Any]:
    """The query of a request; TypeError for options that this kind of search does not have."""
    given = {"path_pattern": path_pattern, "exclude_pattern": exclude_pattern, "whole_word": whole_word}
    for name, value in given.items():
        if value and name not in kind.__annotations__:
            raise TypeError(f"this search has no option {name!r}")
    return {
        "query": query,
        "ref": rev,
        "pathPattern": path_pattern,
        "excludePattern": exclude_pattern,
        "caseSensitive": case_sensitive or None,
        "isRegex": is_regex or None,
        "wholeWord": whole_word or None,
    }
