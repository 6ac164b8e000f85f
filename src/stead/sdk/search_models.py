"""Results of searches in a repository.

`has_more` is True if there is a next page. `stopped_early` is True if the search took too long or found too
much: then the results and totals cover only a part of the repository.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from stead.sdk.parsing import Listing, Model, Time


class LineMatch(Model, frozen=True):
    """A matching line; the match is `line[start_column:end_column]`."""

    line_number: int
    """Counted from 1."""
    line: str
    start_column: int = 0
    end_column: int = 0
    context_before: tuple[str, ...] = ()
    context_after: tuple[str, ...] = ()


class MatchingFile(Model, frozen=True):
    """A file with matching lines. Iterates over the lines."""

    path: str
    extension: str | None = None
    size: int = 0
    matches: tuple[LineMatch, ...] = ()

    def __iter__(self) -> Iterator[LineMatch]:
        return iter(self.matches)


class ContentResults(Listing[MatchingFile], frozen=True):
    """Files with matching lines. Iterates over the files."""

    files: tuple[MatchingFile, ...] = ()
    total_files: int = 0
    total_matches: int = 0
    has_more: bool = False
    stopped_early: bool = False


class FoundFile(Model, frozen=True):
    """A file whose path matches."""

    path: str
    extension: str | None = None
    size: int = 0


class FileResults(Listing[FoundFile], frozen=True):
    """Files whose path matches. Iterates over the files."""

    files: tuple[FoundFile, ...] = ()
    total_files: int = 0
    has_more: bool = False
    stopped_early: bool = False


class FoundCommit(Model, frozen=True):
    """A commit whose message matches."""

    sha: str
    message: str
    """The first line."""
    full_message: str = ""
    author_name: str = ""
    author_email: str = ""
    timestamp: Time | None = None


class CommitResults(Listing[FoundCommit], frozen=True):
    """Commits whose message matches. Iterates over the commits."""

    commits: tuple[FoundCommit, ...] = ()
    total_commits: int = 0
    has_more: bool = False
    stopped_early: bool = False


class ChangedLine(Model, frozen=True):
    """A line that a commit added or removed; the match is `line[start_column:end_column]`."""

    line: str
    line_number: int
    start_column: int = 0
    end_column: int = 0
    is_addition: bool = True


class ChangedFile(Model, frozen=True):
    """A file with matching changes."""

    path: str
    matches: tuple[ChangedLine, ...] = ()


class MatchingCommit(Model, frozen=True):
    """A commit that added or removed matching lines."""

    sha: str
    message: str
    """The first line."""
    author_name: str = ""
    author_email: str = ""
    timestamp: Time | None = None
    files: tuple[ChangedFile, ...] = ()


class DiffResults(Listing[MatchingCommit], frozen=True):
    """Commits that added or removed matching lines. Iterates over the commits."""

    commits: tuple[MatchingCommit, ...] = ()
    total_commits: int = 0
    has_more: bool = False
    stopped_early: bool = False


def columns_in_characters(data: Any) -> Any:
    """Convert columns from UTF-16 code units, as the wire has them, to characters."""
    if isinstance(data, list):
        return [columns_in_characters(each) for each in data]
    if not isinstance(data, Mapping):
        return data
    line = data.get("line")
    if not isinstance(line, str):
        return {key: columns_in_characters(each) for key, each in data.items()}
    columns = {key: _characters(line, data.get(key)) for key in ("startColumn", "endColumn")}
    return {**data, **columns}


def _characters(line: str, column: object) -> object:
    if not isinstance(column, int) or all(sign < "\U00010000" for sign in line[:column]):
        return column
    units = line.encode("utf-16-le", "surrogatepass")[: 2 * column]
    return len(units.decode("utf-16-le", "ignore"))
