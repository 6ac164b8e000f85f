"""Wire models of search requests and results."""

from typing import Annotated, Self

from pydantic import Field

from stead.api.wire import LARGEST, Wire
from stead.api.wire.repos import Date
from stead.repos.model import Commit
from stead.repos.search.diffs import CommitDiff
from stead.repos.search.search import (
    MAX_RESULTS,
    CommitsFound,
    ContentFound,
    DiffOptions,
    FileOptions,
    FilesFound,
    MessageOptions,
)


class SearchMessages(Wire):
    query: Annotated[str, Field(description="Text or regular expression.")] = ""
    ref: Annotated[str | None, Field(description="Deprecated: use `rev`.")] = None
    rev: Annotated[
        str | None, Field(description="Branch, tag or commit sha. Default: the default branch.")
    ] = None
    max_results: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 100
    offset: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    case_sensitive: bool = False
    is_regex: bool = False

    @property
    def revision(self) -> str | None:
        """Default: the default branch."""
        return self.ref or self.rev

    @property
    def options(self) -> MessageOptions:
        return {
            "max_results": self.max_results,
            "offset": self.offset,
            "case_sensitive": self.case_sensitive,
            "regex": self.is_regex,
        }


class SearchFiles(SearchMessages):
    path_pattern: Annotated[str | None, Field(description="Glob of paths to search, such as `src/**`.")] = (
        None
    )
    exclude_pattern: Annotated[str | None, Field(description="Glob of paths to skip.")] = None

    @property
    def options(self) -> FileOptions:
        patterns = FileOptions(path_pattern=self.path_pattern, exclude_pattern=self.exclude_pattern)
        return {**super().options, **patterns}


class SearchLines(SearchFiles):
    whole_word: bool = False

    @property
    def options(self) -> DiffOptions:
        return {**super().options, "whole_word": self.whole_word}


class FoundFile(Wire):
    path: str
    extension: str | None
    size: int


class LineMatch(Wire):
    """A matching line. Columns of its first match count from 0 in UTF-16 units, as in JavaScript."""

    line_number: int
    line: str
    start_column: int
    end_column: int
    context_before: list[str]
    context_after: list[str]


class MatchedFile(FoundFile):
    matches: list[LineMatch]


class _Page(Wire):
    has_more: bool
    stopped_early: bool
    """The search stopped at a limit: there may be more matches than counted."""


class ContentResults(_Page):
    total_files: int
    total_matches: int
    files: list[MatchedFile]

    @classmethod
    def of(cls, found: ContentFound) -> Self:
        return cls(
            total_files=found.total_files,
            total_matches=found.total_matches,
            has_more=found.has_more,
            stopped_early=found.stopped,
            files=[MatchedFile.model_validate(file) for file in found.files],
        )


class FileResults(_Page):
    total_files: int
    files: list[FoundFile]

    @classmethod
    def of(cls, found: FilesFound) -> Self:
        files = [FoundFile.model_validate(file) for file in found.files]
        return cls(
            total_files=found.total_files, has_more=found.has_more, stopped_early=found.stopped, files=files
        )


class FoundCommit(Wire):
    sha: str
    message: str
    """The first line of the message."""
    author_name: str
    author_email: str
    timestamp: Date


class FoundMessage(FoundCommit):
    full_message: str

    @classmethod
    def of(cls, commit: Commit) -> Self:
        return cls(
            sha=commit.sha,
            message=commit.subject,
            full_message=commit.message.rstrip("\n"),
            author_name=commit.author.name,
            author_email=commit.author.email,
            timestamp=commit.author.date,
        )


class CommitResults(_Page):
    total_commits: int
    commits: list[FoundMessage]

    @classmethod
    def of(cls, found: CommitsFound[Commit]) -> Self:
        return cls(
            total_commits=found.total_commits,
            has_more=found.has_more,
            stopped_early=found.stopped,
            commits=[FoundMessage.of(commit) for commit in found.commits],
        )


class DiffLine(Wire):
    line: str
    line_number: int
    start_column: int
    end_column: int
    is_addition: bool


class DiffFile(Wire):
    path: str
    matches: list[DiffLine]


class FoundDiff(FoundCommit):
    files: list[DiffFile]


class DiffResults(_Page):
    total_commits: int
    commits: list[FoundDiff]

    @classmethod
    def of(cls, found: CommitsFound[CommitDiff]) -> Self:
        commits = [
            FoundDiff(
                sha=each.commit.sha,
                message=each.commit.subject,
                author_name=each.commit.author.name,
                author_email=each.commit.author.email,
                timestamp=each.commit.author.date,
                files=[DiffFile.model_validate(file) for file in each.files],
            )
            for each in found.commits
        ]
        return cls(
            total_commits=found.total_commits,
            has_more=found.has_more,
            stopped_early=found.stopped,
            commits=commits,
        )
