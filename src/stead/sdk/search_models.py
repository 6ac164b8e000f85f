"""What a search in a repository finds.

All results say whether there are more of them, and whether the search `stopped_early`, because it took too
long or found too much: then they are what was found until then, and so are the totals.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class LineMatch:
    """A line that matches; `line[start_column:end_column]` is the part that does."""

    line_number: int
    """From 1 on."""
    line: str
    start_column: int = 0
    end_column: int = 0
    context_before: tuple[str, ...] = ()
    context_after: tuple[str, ...] = ()


@dataclass(frozen=True)
class MatchingFile:
    """A file with lines that match. Iterates over them."""

    path: str
    extension: str | None = None
    size: int = 0
    matches: tuple[LineMatch, ...] = ()

    def __iter__(self) -> Iterator[LineMatch]:
        return iter(self.matches)


@dataclass(frozen=True)
class ContentResults:
    """Files with lines that match. Iterates over the files."""

    files: tuple[MatchingFile, ...] = ()
    total_files: int = 0
    total_matches: int = 0
    has_more: bool = False
    stopped_early: bool = False

    def __iter__(self) -> Iterator[MatchingFile]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True)
class FoundFile:
    path: str
    extension: str | None = None
    size: int = 0


@dataclass(frozen=True)
class FileResults:
    """Files whose path matches. Iterates over the files."""

    files: tuple[FoundFile, ...] = ()
    total_files: int = 0
    has_more: bool = False
    stopped_early: bool = False

    def __iter__(self) -> Iterator[FoundFile]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True)
class FoundCommit:
    sha: str
    message: str
    """The first line."""
    full_message: str = ""
    author_name: str = ""
    author_email: str = ""
    timestamp: datetime | None = None


@dataclass(frozen=True)
class CommitResults:
    """Commits whose message matches. Iterates over the commits."""

    commits: tuple[FoundCommit, ...] = ()
    total_commits: int = 0
    has_more: bool = False
    stopped_early: bool = False

    def __iter__(self) -> Iterator[FoundCommit]:
        return iter(self.commits)

    def __len__(self) -> int:
        return len(self.commits)


@dataclass(frozen=True)
class ChangedLine:
    """A line that a commit added or removed; `line[start_column:end_column]` is the part that matches."""

    line: str
    line_number: int
    start_column: int = 0
    end_column: int = 0
    is_addition: bool = True


@dataclass(frozen=True)
class ChangedFile:
    path: str
    matches: tuple[ChangedLine, ...] = ()


@dataclass(frozen=True)
class MatchingCommit:
    """A commit that added or removed lines that match."""

    sha: str
    message: str
    """The first line."""
    author_name: str = ""
    author_email: str = ""
    timestamp: datetime | None = None
    files: tuple[ChangedFile, ...] = ()


@dataclass(frozen=True)
class DiffResults:
    """Commits that added or removed lines that match. Iterates over the commits."""

    commits: tuple[MatchingCommit, ...] = ()
    total_commits: int = 0
    has_more: bool = False
    stopped_early: bool = False

    def __iter__(self) -> Iterator[MatchingCommit]:
        return iter(self.commits)

    def __len__(self) -> int:
        return len(self.commits)


def in_characters(data: Any) -> Any:
    """An answer whose columns count characters. On the wire they count as JavaScript does, in UTF-16."""
    if isinstance(data, list):
        return [in_characters(each) for each in data]
    if not isinstance(data, Mapping):
        return data
    line = data.get("line")
    if not isinstance(line, str):
        return {key: in_characters(each) for key, each in data.items()}
    columns = {key: _characters(line, data.get(key)) for key in ("startColumn", "endColumn")}
    return {**data, **columns}


def _characters(line: str, column: object) -> object:
    if not isinstance(column, int) or all(sign < "\U00010000" for sign in line[:column]):
        return column
    units = line.encode("utf-16-le", "surrogatepass")[: 2 * column]
    return len(units.decode("utf-16-le", "ignore"))
