"""Wire models of the Git API."""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import FailFast, Field, PlainSerializer, WithJsonSchema

from stead.api.wire import Wire
from stead.repos.history import FileChange
from stead.repos.model import Commit, Signature, Tag


def _date(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


Date = Annotated[
    datetime,
    PlainSerializer(_date),
    WithJsonSchema({"type": "string", "format": "date-time"}, mode="serialization"),
]
Sha = Annotated[str, Field(pattern="^[0-9a-fA-F]{40}$")]


# Repositories


class RepoSource(Wire):
    """A remote repository to import with its history."""

    url: str
    rev: str | None = None
    branch: str | None = Field(None, description="Deprecated: use `rev`.")
    depth: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    all_branches: bool | None = None


class _Import(Wire):
    commit_message: str
    author_name: str | None = None
    author_email: str | None = None


class FilesImport(_Import):
    type: Literal["files"]
    files: dict[str, str]


class ArchiveImport(_Import):
    type: Literal["tar", "zip"]
    url: str
    dir: str | None = None


class GitImport(_Import):
    type: Literal["git"]
    url: str
    rev: str | None = None
    branch: str | None = None
    dir: str | None = None


Import = Annotated[FilesImport | ArchiveImport | GitImport, Field(discriminator="type")]


class CreateRepo(Wire):
    name: Annotated[str, Field(max_length=256)] | None = None
    if_missing: bool | None = Field(
        default=None, description="Answer with the repository of this name if there is one, else create it."
    )
    public: bool | None = None
    default_branch: str | None = None
    source: RepoSource | None = None
    import_: Import | None = Field(None, alias="import")


class CreatedRepo(Wire):
    repo_id: str
    created: bool = Field(default=True, description="False: it existed, and `ifMissing` was given.")


class ListedBranch(Wire):
    name: str
    default: bool
    target: str | None = None


class ListedTag(Wire):
    name: str
    target: str
    message: str | None = None


class RepoModel(Wire):
    id: str
    repo_id: str
    name: str | None = None
    visibility: Literal["public", "private"]
    created_at: Date
    size_bytes: int | None = Field(None, description="Bytes on disk with LFS objects, as last measured.")
    default_branch: str
    branches: dict[str, ListedBranch]
    tags: dict[str, ListedTag]


class RepoList(Wire):
    repositories: list[RepoModel]
    total: int
    offset: int


class DefaultBranch(Wire):
    default_branch: str


# Refs


class BranchModel(Wire):
    name: str
    commit: str | None = None


class BranchList(Wire):
    branches: list[BranchModel]


class Ref(Wire):
    name: str
    sha: str


class NewBranch(Wire):
    sha: str | None = Field(None, description="Commit sha. Default: the head of the default branch.")


class Person(Wire):
    name: str
    email: str
    date: Date

    @classmethod
    def of(cls, signature: Signature) -> Self:
        return cls(name=signature.name, email=signature.email, date=signature.date)


class ObjectRef(Wire):
    sha: str


class TagModel(Wire):
    name: str
    sha: str
    target: ObjectRef
    tagger: Person | None = None
    message: str | None = None

    @classmethod
    def of(cls, tag: Tag) -> Self:
        return cls(
            name=tag.name,
            sha=tag.sha,
            target=ObjectRef(sha=tag.target),
            tagger=None if tag.tagger is None else Person.of(tag.tagger),
            message=tag.message,
        )


class TagList(Wire):
    tags: list[TagModel]


# Contents


class FileEntry(Wire):
    type: Literal["file"] = "file"
    name: str
    path: str
    sha: str
    size: int


class FileContent(FileEntry):
    content: str
    """Base64."""


class DirectoryEntry(Wire):
    type: Literal["dir"] = "dir"
    name: str
    path: str
    sha: str
    entries: list["DirectoryEntry | FileEntry"] | None = Field(
        default=None,
        description="Files and folders in this folder. Absent in subfolders whose entries are not listed.",
    )


class Blob(Wire):
    sha: str
    size: int
    encoding: Literal["base64"] = "base64"
    content: str


class TreeEntry(Wire):
    path: str
    sha: str
    type: Literal["blob", "tree", "commit"]
    size: int | None = None
    mode: str


class Tree(Wire):
    sha: str
    tree: list[TreeEntry]


# Commits


class CommitModel(Wire):
    sha: str
    message: str
    author: Person
    committer: Person
    tree: ObjectRef
    parents: list[ObjectRef]

    @classmethod
    def of(cls, commit: Commit) -> Self:
        return cls(
            sha=commit.sha,
            message=commit.message.rstrip("\n"),
            author=Person.of(commit.author),
            committer=Person.of(commit.committer),
            tree=ObjectRef(sha=commit.tree),
            parents=[ObjectRef(sha=sha) for sha in commit.parents],
        )


class CommitList(Wire):
    commits: list[CommitModel]
    count: int
    limit: int
    order: Literal["asc", "desc"]
    offset: int | None = None
    total: int | None = None
    selector: dict[str, Any] | None = None
    next_commit: str | None = Field(None, alias="next_commit")


class CommitAuthor(Wire):
    name: str
    email: str


class FileChangeModel(Wire):
    path: str
    content: str | None = None
    encoding: Literal["utf8", "utf-8", "base64"] | None = None
    deleted: bool | None = None


class NewCommit(Wire):
    message: str
    # Ten thousand invalid files would be as many errors.
    files: Annotated[list[FileChangeModel], FailFast()]
    branch: str | None = None
    author: CommitAuthor | None = None
    expected_sha: str | None = None


class CommitCreated(Wire):
    commit: CommitModel


class ComparedFile(Wire):
    filename: str
    status: Literal["added", "removed", "modified", "renamed", "copied", "changed", "unchanged"]
    additions: int
    deletions: int
    changes: int
    sha: str | None = None
    previous_filename: str | None = Field(None, alias="previous_filename")

    @classmethod
    def of(cls, change: FileChange) -> Self:
        return cls(
            filename=change.path,
            status=change.status,
            additions=change.additions,
            deletions=change.deletions,
            changes=change.additions + change.deletions,
            sha=change.sha,
            previous_filename=change.previous_path,
        )


class Comparison(Wire):
    status: Literal["identical", "ahead", "behind", "diverged"]
    ahead_by: int = Field(alias="ahead_by")
    behind_by: int = Field(alias="behind_by")
    total_commits: int = Field(alias="total_commits")
    files: list[ComparedFile]


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
