"""Repositories, commits and files as immutable models."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from msgspec import field

from stead.sdk.errors import UnexpectedAnswer
from stead.sdk.exceptions import InvalidArgument
from stead.sdk.parsing import Listing, Model, Open, Time, parse, parse_object, serialise

Visibility = Literal["public", "private"]
Order = Literal["desc", "asc"]
ObjectKind = Literal["blob", "tree", "commit"]


# Sources and imports


class Source(Model, frozen=True):
    """Another repository, copied with its history: of one revision, or of all branches."""

    url: str
    rev: str | None = None
    depth: int | None = None
    """The number of commits to copy, from the newest."""
    all_branches: bool | None = None


class _Import(Model, frozen=True, kw_only=True):
    commit_message: str
    author_name: str | None = None
    author_email: str | None = None


class FilesImport(_Import, frozen=True, kw_only=True, tag_field="type", tag="files"):
    """Import files as one commit: text by path."""

    files: Mapping[str, str]


class TarImport(_Import, frozen=True, kw_only=True, tag_field="type", tag="tar"):
    """Import a tar archive, or one folder of it, as one commit."""

    url: str
    dir: str | None = None


class ZipImport(_Import, frozen=True, kw_only=True, tag_field="type", tag="zip"):
    """Import a zip archive, or one folder of it, as one commit."""

    url: str
    dir: str | None = None


class GitImport(_Import, frozen=True, kw_only=True, tag_field="type", tag="git"):
    """Import the files of a revision of another repository, or one folder of them, as one commit."""

    url: str
    rev: str | None = None
    dir: str | None = None


Import = FilesImport | TarImport | ZipImport | GitImport


# Refs and commits


class Branch(Model, frozen=True):
    """A branch and its head."""

    name: str
    sha: str | None = None
    """The commit at its head; None if it has no commit yet."""

    @classmethod
    def from_wire(cls, data: Mapping[str, Any], sha: str) -> "Branch":
        """`sha` is the key of the commit, which differs between answers."""
        found = parse_object(data)
        name = str(found.get("name", ""))
        return parse(cls, {"name": name.removeprefix("refs/heads/"), "sha": found.get(sha)})


class Signature(Model, frozen=True):
    """The author, committer or tagger, and the time."""

    name: str
    email: str
    date: Time | None = None


class Tag(Model, frozen=True):
    """A tag, lightweight or annotated."""

    name: str
    target: str
    """The object that it points to, usually a commit."""
    sha: str | None = None
    """The id of an annotated tag, else that of its target; None in lists of repositories."""
    tagger: Signature | None = None
    message: str | None = None

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> "Tag":
        """A tag from the server's JSON."""
        found = parse_object(data)
        return parse(cls, {**found, "target": _sha(found.get("target"))})


class Commit(Model, frozen=True):
    """A commit."""

    sha: str
    message: str
    author: Signature
    committer: Signature
    tree: str
    """The id of its tree."""
    parents: tuple[str, ...] = ()

    @classmethod
    def from_wire(cls, data: object) -> "Commit":
        """A commit from the server's JSON."""
        if not isinstance(data, Mapping):
            raise UnexpectedAnswer("the answer has no valid 'commit'")
        parents = [_sha(each) for each in data.get("parents") or []]
        return parse(cls, {**data, "tree": _sha(data.get("tree")), "parents": parents})


class CommitPage(Listing[Commit], frozen=True):
    """One page of a branch's commits. Iterates over the commits."""

    commits: tuple[Commit, ...] = ()
    order: Open[Order] = "desc"
    limit: int | None = None
    offset: int | None = None
    total: int | None = None
    """The number of commits of the branch; None if it was not counted."""
    next_commit: str | None = field(default=None, name="next_commit")
    """The first commit of the next page, for `until`, or with order "asc" for `since`; None on the last."""

    @classmethod
    def from_wire(cls, data: object) -> "CommitPage":
        """A page from the server's JSON."""
        commits = [Commit.from_wire(each) for each in objects_at(data, "commits")]
        return parse(cls, {**_mapping(data), "commits": commits})


class Author(Model, frozen=True):
    """The author of a new commit."""

    name: str
    email: str


class FileChange(Model, frozen=True):
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


class ComparedFile(Model, frozen=True):
    """A file that differs between two revisions."""

    path: str = field(name="filename")
    status: Open[Literal["added", "removed", "modified", "renamed", "copied", "changed", "unchanged"]]
    additions: int = 0
    deletions: int = 0
    changes: int = 0
    sha: str | None = None
    previous_path: str | None = field(default=None, name="previous_filename")
    """Its previous path, if it was renamed or copied."""


class Comparison(Model, frozen=True):
    """The difference between two revisions, base and head."""

    status: Open[Literal["identical", "ahead", "behind", "diverged"]]
    ahead_by: int = field(default=0, name="ahead_by")
    behind_by: int = field(default=0, name="behind_by")
    total_commits: int = field(default=0, name="total_commits")
    files: tuple[ComparedFile, ...] = ()


# Repositories


class RepoInfo(Model, frozen=True):
    """A repository with its branches and tags by name."""

    id: str
    name: str | None = None
    visibility: Open[Visibility] | None = None
    default_branch: str | None = None
    created_at: Time | None = None
    size_bytes: int | None = None
    """Bytes on disk, LFS objects included, when it was last measured."""
    branches: dict[str, Branch] = field(default_factory=dict)
    tags: dict[str, Tag] = field(default_factory=dict)

    @classmethod
    def from_wire(cls, data: object) -> "RepoInfo":
        """A repository from the server's JSON."""
        found = _mapping(data)
        branches = {name: Branch.from_wire(each, "target") for name, each in _named(found, "branches")}
        tags = {name: Tag.from_wire(each) for name, each in _named(found, "tags")}
        facts = {**found, "id": found.get("id") or found.get("repoId"), "branches": branches, "tags": tags}
        return parse(cls, facts)


class RepoList(Listing[RepoInfo], frozen=True):
    """Repositories from `offset` on, newest first, out of `total`. Iterates over the repositories."""

    repos: tuple[RepoInfo, ...] = field(default=(), name="repositories")
    total: int = 0
    offset: int = 0

    @classmethod
    def from_wire(cls, data: object) -> "RepoList":
        """Repositories from the server's JSON."""
        repos = [RepoInfo.from_wire(each) for each in objects_at(data, "repositories")]
        return parse(cls, {**_mapping(data), "repositories": repos})


# Contents


class FileEntry(Model, frozen=True, tag_field="type", tag="file"):
    """A file in a folder, without its content."""

    name: str
    path: str
    sha: str
    size: int = 0


class RepoFile(FileEntry, frozen=True, kw_only=True):
    """A file with its content."""

    content: bytes

    _hidden: ClassVar[str] = "content"

    def text(self, encoding: str = "utf-8") -> str:
        """Its content as text."""
        return self.content.decode(encoding)


class RepoFolder(Model, frozen=True, tag_field="type", tag="dir"):
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
            raise InvalidArgument(
                f"the entries of {self.path!r} were not listed: get this path, or pass recursive=True"
            )
        return self.entries


def parse_contents(data: object) -> RepoFile | RepoFolder:
    if _mapping(data).get("type") == "dir":
        return parse(RepoFolder, data)
    return parse(RepoFile, data)


class Blob(Model, frozen=True, kw_only=True):
    """A Git blob: the content of a file."""

    sha: str
    size: int = 0
    content: bytes

    _hidden: ClassVar[str] = "content"


class TreeEntry(Model, frozen=True):
    """An entry of a Git tree."""

    path: str
    sha: str
    type: Open[ObjectKind]
    """`blob` for a file, `tree` for a folder, `commit` for a submodule."""
    size: int | None = None
    mode: str | None = None


class Tree(Model, frozen=True):
    """A Git tree: a folder. Iterates over its entries."""

    sha: str
    entries: tuple[TreeEntry, ...] = field(default=(), name="tree")

    def __iter__(self) -> Iterator[TreeEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


# Triggers and GitHub


class Trigger(Model, frozen=True):
    """A webhook for pushes, limited to `branches` and to changes of files that match `globs`, or for all.

    As text it is its id.
    """

    id: str
    endpoint: str
    event: str = "push"
    action: str = "webhook"
    branches: tuple[str, ...] | None = None
    globs: tuple[str, ...] | None = None
    managed: bool = False
    repository_id: str | None = None
    created_at: Time | None = None

    def __str__(self) -> str:
        return self.id

    @classmethod
    def from_wire(cls, data: object) -> "Trigger":
        """A trigger from the server's JSON."""
        found = _mapping(data)
        return parse(cls, {**found, **_mapping(found.get("trigger")), **_mapping(found.get("action"))})


class Delivery(Model, frozen=True):
    """A call of a webhook and its result."""

    id: str
    state: str
    body: str = ""
    """The JSON that the server sends."""
    attempts: int = 0
    created_at: Time | None = None
    next_attempt_at: Time | None = None
    """None after the last attempt."""
    last_attempt_at: Time | None = None
    finished_at: Time | None = None
    status: int | None = None
    """The HTTP status of the last answer."""
    error: str | None = None
    response: str | None = None
    """The start of the last answer."""
    redelivery_of: str | None = None


class DeliveryList(Listing[Delivery], frozen=True):
    """Deliveries from `offset` on, newest first, out of `total`. Iterates over the deliveries."""

    deliveries: tuple[Delivery, ...] = ()
    total: int = 0
    offset: int = 0


class Divergence(Model, frozen=True):
    """A branch or tag that differs on both sides and that you have to reconcile."""

    ref: str
    here: str | None = None
    there: str | None = None
    reason: str = ""


class GithubSync(Model, frozen=True):
    """The synchronisation with a repository on GitHub and its state."""

    github_repo_name: str
    """`owner/name`."""
    state: str | None = None
    """`pending`, `in_step`, `diverged` (see `divergences`) or `failed` (see `error`)."""
    error: str | None = None
    divergences: tuple[Divergence, ...] = ()
    last_synced_at: Time | None = None
    created_at: Time | None = None


# Parsing


def objects_at(data: object, key: str) -> list[Mapping[str, Any]]:
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


def create_body(
    name: str | None,
    public: bool,
    default_branch: str | None,
    source: Source | str | None,
    import_: Import | None,
) -> dict[str, Any]:
    """The body that creates a repository."""
    if source is not None and import_ is not None:
        raise InvalidArgument("give either source or import_, not both")
    body: dict[str, Any] = {
        "name": name,
        "public": public,
        "defaultBranch": default_branch,
        "source": Source(source) if isinstance(source, str) else source,
        "import": import_,
    }
    return {key: serialise(value) for key, value in body.items() if value is not None}
