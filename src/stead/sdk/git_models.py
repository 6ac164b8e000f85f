"""Repositories, commits and files as frozen dataclasses."""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from stead.sdk.errors import UnexpectedAnswer
from stead.sdk.parsing import parse, serialise

Visibility = Literal["public", "private"]
Order = Literal["desc", "asc"]
ObjectKind = Literal["blob", "tree", "commit"]


# Sources and imports


@dataclass(frozen=True)
class Source:
    """Another repository, copied with its history: of one revision, or of all branches."""

    url: str
    rev: str | None = None
    depth: int | None = None
    """The number of commits to copy, from the newest."""
    all_branches: bool | None = None


@dataclass(frozen=True, kw_only=True)
class _Import:
    commit_message: str
    author_name: str | None = None
    author_email: str | None = None


@dataclass(frozen=True, kw_only=True)
class FilesImport(_Import):
    """Import files as one commit: text by path."""

    files: Mapping[str, str]
    type: Literal["files"] = field(default="files", init=False)


@dataclass(frozen=True, kw_only=True)
class TarImport(_Import):
    """Import a tar archive, or one folder of it, as one commit."""

    url: str
    dir: str | None = None
    type: Literal["tar"] = field(default="tar", init=False)


@dataclass(frozen=True, kw_only=True)
class ZipImport(_Import):
    """Import a zip archive, or one folder of it, as one commit."""

    url: str
    dir: str | None = None
    type: Literal["zip"] = field(default="zip", init=False)


@dataclass(frozen=True, kw_only=True)
class GitImport(_Import):
    """Import the files of a revision of another repository, or one folder of them, as one commit."""

    url: str
    rev: str | None = None
    dir: str | None = None
    type: Literal["git"] = field(default="git", init=False)


Import = FilesImport | TarImport | ZipImport | GitImport


# Refs and commits


@dataclass(frozen=True)
class Branch:
    """A branch and its head."""

    name: str
    sha: str | None = None
    """The commit at its head; None if it has no commit yet."""

    @classmethod
    def of(cls, data: Mapping[str, Any], sha: str) -> "Branch":
        """`sha` is the key of the commit, which differs between answers."""
        name = str(data.get("name", ""))
        return parse(cls, {"name": name.removeprefix("refs/heads/"), "sha": data.get(sha)})


@dataclass(frozen=True)
class Signature:
    """The author, committer or tagger, and the time."""

    name: str
    email: str
    date: datetime | None = None


@dataclass(frozen=True)
class Tag:
    """A tag, lightweight or annotated."""

    name: str
    target: str
    """The object that it points to, usually a commit."""
    sha: str | None = None
    """The id of an annotated tag, else that of its target; None in lists of repositories."""
    tagger: Signature | None = None
    message: str | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Tag":
        return parse(cls, {**data, "target": _sha(data.get("target"))})


@dataclass(frozen=True)
class Commit:
    """A commit."""

    sha: str
    message: str
    author: Signature
    committer: Signature
    tree: str
    """The id of its tree."""
    parents: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: object) -> "Commit":
        if not isinstance(data, Mapping):
            raise UnexpectedAnswer("the answer has no valid 'commit'")
        parents = [_sha(each) for each in data.get("parents") or []]
        return parse(cls, {**data, "tree": _sha(data.get("tree")), "parents": parents})


@dataclass(frozen=True)
class CommitPage:
    """One page of a branch's commits. Iterates over the commits."""

    commits: tuple[Commit, ...] = ()
    order: Order = "desc"
    limit: int | None = None
    offset: int | None = None
    total: int | None = None
    """The number of commits of the branch; None if it was not counted."""
    next_commit: str | None = None
    """The first commit of the next page, for `until`, or with order "asc" for `since`; None on the last."""

    @classmethod
    def of(cls, data: object) -> "CommitPage":
        found = _mapping(data)
        commits = tuple(Commit.of(each) for each in found.get("commits") or [])
        facts = {**found, "commits": None, "nextCommit": found.get("next_commit")}
        return replace(parse(cls, facts), commits=commits)

    def __iter__(self) -> Iterator[Commit]:
        return iter(self.commits)

    def __len__(self) -> int:
        return len(self.commits)


@dataclass(frozen=True)
class Author:
    """The author of a new commit."""

    name: str
    email: str


@dataclass(frozen=True)
class FileChange:
    """A change of a file in a commit: its new content as text or bytes, or None to delete it."""

    path: str
    content: str | bytes | None


Changes = Mapping[str, str | bytes | None] | Sequence[FileChange]
"""Files by path, each with its new content, or None to delete it."""


def changes_to_wire(changes: Changes) -> list[dict[str, Any]]:
    if isinstance(changes, Mapping):
        changes = [FileChange(path, content) for path, content in changes.items()]
    return [_change_to_wire(change) for change in changes]


def _change_to_wire(change: FileChange) -> dict[str, Any]:
    match change.content:
        case None:
            return {"path": change.path, "deleted": True}
        case str():
            return {"path": change.path, "content": change.content, "encoding": "utf8"}
        case _:
            content = base64.b64encode(change.content).decode()
            return {"path": change.path, "content": content, "encoding": "base64"}


@dataclass(frozen=True)
class ComparedFile:
    """A file that differs between two revisions."""

    path: str = field(metadata={"wire": "filename"})
    status: Literal["added", "removed", "modified", "renamed", "copied", "changed", "unchanged"]
    additions: int = 0
    deletions: int = 0
    changes: int = 0
    sha: str | None = None
    previous_path: str | None = field(default=None, metadata={"wire": "previous_filename"})
    """Its previous path, if it was renamed or copied."""


@dataclass(frozen=True)
class Comparison:
    """The difference between two revisions, base and head."""

    status: Literal["identical", "ahead", "behind", "diverged"]
    ahead_by: int = field(default=0, metadata={"wire": "ahead_by"})
    behind_by: int = field(default=0, metadata={"wire": "behind_by"})
    total_commits: int = field(default=0, metadata={"wire": "total_commits"})
    files: tuple[ComparedFile, ...] = ()


# Repositories


@dataclass(frozen=True)
class RepoInfo:
    """A repository with its branches and tags by name."""

    id: str
    name: str | None = None
    visibility: Visibility | None = None
    default_branch: str | None = None
    created_at: datetime | None = None
    size_bytes: int | None = None
    """Bytes on disk, LFS objects included, when it was last measured."""
    branches: dict[str, Branch] = field(default_factory=dict)
    tags: dict[str, Tag] = field(default_factory=dict)

    @classmethod
    def of(cls, data: object) -> "RepoInfo":
        found = _mapping(data)
        branches = {name: Branch.of(each, "target") for name, each in _named(found, "branches")}
        tags = {name: Tag.of(each) for name, each in _named(found, "tags")}
        facts = {**found, "id": found.get("id") or found.get("repoId"), "branches": branches, "tags": tags}
        return parse(cls, facts)


@dataclass(frozen=True)
class RepoList:
    """Repositories from `offset` on, newest first, out of `total`. Iterates over the repositories."""

    repos: tuple[RepoInfo, ...] = ()
    total: int = 0
    offset: int = 0

    @classmethod
    def of(cls, data: object) -> "RepoList":
        found = _mapping(data)
        repos = tuple(RepoInfo.of(each) for each in found.get("repositories") or [])
        return replace(parse(cls, {**found, "repos": None}), repos=repos)

    def __iter__(self) -> Iterator[RepoInfo]:
        return iter(self.repos)

    def __len__(self) -> int:
        return len(self.repos)


# Contents


@dataclass(frozen=True)
class FileEntry:
    """A file in a folder, without its content."""

    name: str
    path: str
    sha: str
    size: int = 0


@dataclass(frozen=True)
class RepoFile(FileEntry):
    """A file with its content."""

    content: bytes = field(default=b"", repr=False)

    def text(self, encoding: str = "utf-8") -> str:
        """Its content as text."""
        return self.content.decode(encoding)


@dataclass(frozen=True)
class RepoFolder:
    """A folder. Iterates over its entries, which are None in subfolders unless `recursive` was given."""

    name: str
    path: str
    sha: str
    entries: tuple["RepoFolder | FileEntry", ...] | None = None

    def __iter__(self) -> Iterator["RepoFolder | FileEntry"]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def files(self) -> Iterator[FileEntry]:
        """Every file in this folder, and in its subfolders as far as their entries were listed."""
        for entry in self._listed():
            if not isinstance(entry, RepoFolder):
                yield entry
            elif entry.entries is not None:
                yield from entry.files()

    def _listed(self) -> tuple["RepoFolder | FileEntry", ...]:
        if self.entries is None:
            raise ValueError(
                f"the entries of {self.path!r} were not listed: get this path, or pass recursive=True"
            )
        return self.entries


def contents_of(data: object) -> RepoFile | RepoFolder:
    found = _mapping(data)
    if found.get("type") == "dir":
        return _folder(found)
    return parse(RepoFile, {**found, "content": _bytes(found)})


def _folder(data: Mapping[str, Any]) -> RepoFolder:
    folder = parse(RepoFolder, {**data, "entries": None})
    if data.get("entries") is None:
        return folder
    entries = tuple(
        _folder(each) if each.get("type") == "dir" else parse(FileEntry, each)
        for each in map(_mapping, data["entries"])
    )
    return replace(folder, entries=entries)


@dataclass(frozen=True)
class Blob:
    """A Git blob: the content of a file."""

    sha: str
    size: int = 0
    content: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, data: object) -> "Blob":
        found = _mapping(data)
        return parse(cls, {**found, "content": _bytes(found)})


@dataclass(frozen=True)
class TreeEntry:
    """An entry of a Git tree."""

    path: str
    sha: str
    type: ObjectKind
    """`blob` for a file, `tree` for a folder, `commit` for a submodule."""
    size: int | None = None
    mode: str | None = None


@dataclass(frozen=True)
class Tree:
    """A Git tree: a folder. Iterates over its entries."""

    sha: str
    entries: tuple[TreeEntry, ...] = field(default=(), metadata={"wire": "tree"})

    def __iter__(self) -> Iterator[TreeEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


# Triggers and GitHub


@dataclass(frozen=True)
class Trigger:
    """A webhook for pushes, limited to `branches` and to changes of files that match `globs`, or for all."""

    id: str
    endpoint: str
    event: str = "push"
    action: str = "webhook"
    branches: tuple[str, ...] | None = None
    globs: tuple[str, ...] | None = None
    managed: bool = False
    repository_id: str | None = None
    created_at: datetime | None = None

    @classmethod
    def of(cls, data: object) -> "Trigger":
        found = _mapping(data)
        return parse(cls, {**found, **_mapping(found.get("trigger")), **_mapping(found.get("action"))})


@dataclass(frozen=True)
class Delivery:
    """A call of a webhook and its result."""

    id: str
    state: str
    body: str = ""
    """The JSON that the server sends."""
    attempts: int = 0
    created_at: datetime | None = None
    next_attempt_at: datetime | None = None
    """None after the last attempt."""
    last_attempt_at: datetime | None = None
    finished_at: datetime | None = None
    status: int | None = None
    """The HTTP status of the last answer."""
    error: str | None = None
    response: str | None = None
    """The start of the last answer."""
    redelivery_of: str | None = None


@dataclass(frozen=True)
class DeliveryList:
    """Deliveries from `offset` on, newest first, out of `total`. Iterates over the deliveries."""

    deliveries: tuple[Delivery, ...] = ()
    total: int = 0
    offset: int = 0

    def __iter__(self) -> Iterator[Delivery]:
        return iter(self.deliveries)

    def __len__(self) -> int:
        return len(self.deliveries)


@dataclass(frozen=True)
class Divergence:
    """A branch or tag that differs on both sides and that you have to reconcile."""

    ref: str
    here: str | None = None
    there: str | None = None
    reason: str = ""


@dataclass(frozen=True)
class GithubSync:
    """The synchronisation with a repository on GitHub and its state."""

    github_repo_name: str
    """`owner/name`."""
    state: str | None = None
    """`pending`, `in_step`, `diverged` (see `divergences`) or `failed` (see `error`)."""
    error: str | None = None
    divergences: tuple[Divergence, ...] = ()
    last_synced_at: datetime | None = None
    created_at: datetime | None = None


# Parsing


def list_of(data: object, key: str) -> list[Mapping[str, Any]]:
    """The objects under `key`."""
    found = _mapping(data).get(key)
    if not isinstance(found, list):
        raise UnexpectedAnswer(f"the answer has no list {key!r}")
    return [_mapping(each) for each in found]


def _mapping(data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise UnexpectedAnswer(f"expected an object, got {type(data).__name__}")
    return data


def _named(data: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
    found = data.get(key)
    if not isinstance(found, Mapping):
        return []
    return [(name, {"name": name, **_mapping(each)}) for name, each in found.items()]


def _sha(data: object) -> object:
    """An object id, given as text or in an object."""
    return data.get("sha") if isinstance(data, Mapping) else data


def _bytes(data: Mapping[str, Any]) -> bytes:
    try:
        return base64.b64decode(data["content"], validate=True)
    except (KeyError, TypeError, binascii.Error):
        raise UnexpectedAnswer("the answer has no valid 'content'") from None


def create_body(
    name: str | None,
    public: bool,
    default_branch: str | None,
    source: Source | str | None,
    import_: Import | None,
) -> dict[str, Any]:
    """The body that creates a repository."""
    if source is not None and import_ is not None:
        raise ValueError("give either source or import_, not both")
    body: dict[str, Any] = {
        "name": name,
        "public": public,
        "defaultBranch": default_branch,
        "source": Source(source) if isinstance(source, str) else source,
        "import": import_,
    }
    return {key: serialise(value) for key, value in body.items() if value is not None}
