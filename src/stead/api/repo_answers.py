"""Answers of the Git API that may be long: listings of folders, branches and tags."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stead.api.large_answers import Items, LongValue, Members
from stead.api.wire.repos import (
    BranchModel,
    DirectoryEntry,
    FileEntry,
    ListedBranch,
    ListedTag,
    RepoModel,
    TagModel,
    TreeEntry,
    moment,
)
from stead.repos.contents import Listing, RepoFolder
from stead.repos.model import Branch, Tag, TreeItem
from stead.repos.repos import RepoInfo
from stead.repos.repository import Refs


@dataclass(frozen=True)
class FolderEntries(LongValue):
    """The entries of a folder. In a recursive listing, subfolders have their entries in them."""

    folder: RepoFolder

    @property
    def weight(self) -> int:
        return len(self.folder.entries)

    def pieces(self) -> Iterator[bytes]:
        # Git lists a folder before its entries.
        open_folders = [self.folder.path]
        yield b"["
        before = b""
        for entry in self.folder.entries:
            while len(open_folders) > 1 and open_folders[-1] != entry.path.rpartition("/")[0]:
                open_folders.pop()
                yield b"]}"
                before = b","
            text = _entry(entry).model_dump_json(by_alias=True, exclude_none=True).encode()
            if entry.kind == "tree" and self.folder.recursive:
                yield before + text.removesuffix(b"}") + b',"entries":['
                open_folders.append(entry.path)
                before = b""
            else:
                yield before + text
                before = b","
        yield b"]}" * (len(open_folders) - 1) + b"]"


def _entry(entry: TreeItem) -> DirectoryEntry | FileEntry:
    """Submodules are shown as files of size 0: their content is in another repository."""
    if entry.kind == "tree":
        return DirectoryEntry(name=entry.name, path=entry.path, sha=entry.sha)
    return FileEntry(name=entry.name, path=entry.path, sha=entry.sha, size=entry.size or 0)


def tree_entries(entries: Listing) -> Items:
    def models() -> Iterator[TreeEntry]:
        for each in entries:
            yield TreeEntry(path=each.path, sha=each.sha, type=each.kind, size=each.size, mode=each.mode)

    return Items(TreeEntry, len(entries), models, exclude_none=True)


def branch_items(branches: Sequence[Branch]) -> Items:
    def models() -> Iterator[BranchModel]:
        for branch in branches:
            yield BranchModel(name=branch.name, commit=branch.sha)

    return Items(BranchModel, len(branches), models)


def tag_items(tags: Sequence[Tag]) -> Items:
    return Items(TagModel, len(tags), lambda: map(TagModel.of, tags), _size_of(tags))


def repo_fields(info: RepoInfo, refs: Refs, default: str) -> dict[str, object]:
    """A repository with its branches and tags, as fields of an answer."""
    visibility: Literal["public", "private"] = "public" if info.public else "private"
    model = RepoModel(
        id=info.id,
        repo_id=info.id,
        name=info.name,
        visibility=visibility,
        created_at=moment(info.created_at),
        size_bytes=info.size,
        default_branch=default,
        branches={},
        tags={},
    )
    branches = Members(ListedBranch, len(refs.branches), lambda: _branches(refs.branches, default))
    tags = Members(ListedTag, len(refs.tags), lambda: _tags(refs.tags), _size_of(refs.tags))
    return {**model.model_dump(mode="json", by_alias=True), "branches": branches, "tags": tags}


def _branches(branches: Sequence[Branch], default: str) -> Iterator[tuple[str, ListedBranch]]:
    # Names that are not UTF-8 may be equal as text.
    for name, branch in {branch.name: branch for branch in branches}.items():
        yield name, ListedBranch(name=name, default=name == default, target=branch.sha)


def _tags(tags: Sequence[Tag]) -> Iterator[tuple[str, ListedTag]]:
    for name, tag in {tag.name: tag for tag in tags}.items():
        yield name, ListedTag(name=name, target=tag.target, message=tag.message)


def _size_of(tags: Sequence[Tag]) -> int:
    """Bytes of their messages."""
    return sum(len(tag.message) for tag in tags if tag.message is not None)
