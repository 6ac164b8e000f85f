"""Options of searches in a repository."""

from collections.abc import Mapping
from typing import TypedDict

from stead.sdk.parsing import wire_name


class CommitSearch(TypedDict, total=False):
    """Options of a search in commit messages."""

    rev: str | None
    """The branch, tag or commit to search; the default branch if None."""
    case_sensitive: bool
    """Upper and lower case differ."""
    is_regex: bool
    """The query is a regular expression."""


class FileSearch(CommitSearch, total=False):
    """Options of a search in paths."""

    path_pattern: str | None
    """Only files whose path matches, for example `src/**/*.py`."""
    exclude_pattern: str | None
    """Only files whose path does not match."""


class LineSearch(FileSearch, total=False):
    """Options of a search in lines of files and diffs."""

    whole_word: bool
    """Match whole words only."""


def search_query(query: str, options: Mapping[str, object]) -> dict[str, object]:
    """The query of a request. Options that are False or None are left out."""
    given = {wire_name(name): value for name, value in options.items() if value not in (False, None)}
    return {"query": query, "ref": given.pop("rev", None), **given}
