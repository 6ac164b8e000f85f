"""Commits, history and contents of a repository."""

import asyncio
import hashlib
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from stead.errors import InvalidRequest
from stead.repos import committing, contents, history
from stead.repos.committing import Change, commit
from stead.repos.errors import (
    AmbiguousRevision,
    BlobNotFound,
    BranchExists,
    BranchNotFound,
    CommitNotFound,
    CommitNotInBranch,
    ConflictingParent,
    InvalidBranch,
    InvalidChange,
    InvalidObjectId,
    InvalidRange,
    InvalidRevision,
    OffsetWithSelector,
    PathNotFound,
    ReferenceNotFound,
    TagNotFound,
    TooLarge,
    TreeNotFound,
)
from stead.repos.fast_import import Author
from stead.repos.places import GitCaller
from stead.repos.repository import Repository
from support.git_hosting import RepoHosting
from support.git_repos import git, write

# Commits


async def test_commit_has_the_requested_content_and_author(repository: Repository) -> None:
    """Text, binary, odd names, folders, deletions; read back with plain git."""
    binary = bytes(range(256)) * 40
    odd = ["-dash", 'quo"te', "back\\slash", "spa ce", "üñí/日本", "a/b/c/d.txt"]
    changes = [Change("bin", binary), *(write(path, path) for path in odd)]
    first = await commit(repository, changes, "first\n\nbody", author=Author("Zoë", "zoe@example.org"))
    assert first.parents == () and first.message == "first\n\nbody\n"
    assert (first.author.name, first.author.email) == ("Zoë", "zoe@example.org")
    listed = git(repository, "-c", "core.quotePath=false", "ls-tree", "-r", "-z", "--name-only", "main")
    assert set(listed.strip("\0").split("\0")) == {"bin", *odd}
    found = await contents.read(repository, "bin", "main")
    assert isinstance(found, contents.RepoFile) and found.content == binary

    second = await commit(repository, [Change("bin", None), write("spa ce", "new")], "second")
    assert second.parents == (first.sha,)
    assert git(repository, "show", "main:spa ce") == "new"
    with pytest.raises(PathNotFound):
        await contents.read(repository, "bin", None)
    assert git(repository, "log", "--format=%an|%s", "main").splitlines() == ["Stead|second", "Zoë|first"]
    assert git(repository, "for-each-ref", "--format=%(refname)") == "refs/heads/main"


async def test_commit_keeps_executable_bit_and_replaces_symlink(
    repository: Repository, tmp_path: Path
) -> None:
    blob = git(repository, "hash-object", "-w", "--stdin", stdin=b"#!/bin/sh\n")
    lines = f"100755 blob {blob}\trun\n120000 blob {blob}\tlink\n100644 blob {blob}\tplain\n"
    tree = git(repository, "mktree", stdin=lines.encode())
    first = git(repository, "commit-tree", "-m", "by git", tree)
    git(repository, "update-ref", "refs/heads/main", first)
    await commit(repository, [write("run"), write("link"), write("plain")], "all")
    modes = [line.split()[0] for line in git(repository, "ls-tree", "main").splitlines()]
    assert modes == ["100644", "100644", "100755"]


async def test_commit_that_would_delete_other_files_is_refused(repository: Repository) -> None:
    await commit(repository, [write("folder/file"), write("file")], "one")
    for changes in (
        [write("folder")],
        [write("file/below")],
        [Change("folder", None)],
        [Change("missing", None)],
        [write("a"), write("a")],
        [write("b"), write("b/c")],
    ):
        with pytest.raises(InvalidChange):
            await commit(repository, changes, "no")
    made = await commit(repository, [Change("file", None), write("file/below")], "a file becomes a folder")
    assert git(repository, "ls-tree", "-r", "--name-only", made.sha).split() == ["file/below", "folder/file"]
    with pytest.raises(InvalidRequest):
        await commit(repository, [write("x")], "no", author=Author("a <b", "c"))
    with pytest.raises(TooLarge):
        await commit(repository, [write(f"f{number}") for number in range(committing.MAX_FILES + 1)], "no")
    assert (await history.commits(repository)).total == 2


async def test_commit_with_expected_sha_is_compare_and_swap(repository: Repository) -> None:
    first = await commit(repository, [write("a")], "one")
    with pytest.raises(ConflictingParent) as missing:
        await commit(repository, [write("a")], "no", branch="other", expected=first.sha)
    assert (missing.value.expected, missing.value.actual) == (first.sha, None)
    second = await commit(repository, [write("a", "2")], "two", expected=first.sha)
    with pytest.raises(ConflictingParent) as moved:
        await commit(repository, [write("a", "3")], "no", expected=first.sha)
    assert (moved.value.expected, moved.value.actual) == (first.sha, second.sha)
    with pytest.raises(InvalidObjectId):
        await commit(repository, [write("a")], "no", expected="main")
    orphan = await commit(repository, [write("b")], "elsewhere", branch="feature/x")
    assert orphan.parents == ()


async def test_concurrent_commits_succeed_or_conflict(repository: Repository) -> None:
    """Through the API with and without expectedSha, and with plain git: no acknowledged commit is lost."""
    start = await commit(repository, [write("start")], "start")

    async def blind(number: int) -> str | None:
        try:
            return (await commit(repository, [write(f"blind{number}")], f"b{number}")).sha
        except ConflictingParent:
            return None

    async def careful(number: int) -> str | None:
        try:
            return (await commit(repository, [write(f"c{number}")], f"c{number}", expected=start.sha)).sha
        except ConflictingParent:
            return None

    async def pushed(number: int) -> str | None:
        def push() -> str | None:
            tip = git(repository, "rev-parse", "main")
            made = git(repository, "commit-tree", "-p", tip, "-m", f"p{number}", f"{tip}^{{tree}}")
            try:
                git(repository, "update-ref", "refs/heads/main", made, tip)
            except AssertionError:
                return None
            return made

        return await asyncio.to_thread(push)

    work = [kind(number) for number in range(4) for kind in (blind, careful, pushed)]
    answered = [sha for sha in await asyncio.gather(*work) if sha is not None]
    log = git(repository, "rev-list", "main").split()
    assert set(answered) <= set(log)
    assert len(log) == len(answered) + 1


# History


async def test_history_pages_have_no_gaps_or_duplicates(repository: Repository) -> None:
    """Newest and oldest first, with merges and side branches, by offset and by cursor."""
    shas = [(await commit(repository, [write("a", str(number))], str(number))).sha for number in range(4)]
    tree = git(repository, "rev-parse", "main^{tree}")
    side = git(repository, "commit-tree", "-p", shas[1], "-m", "side", tree)
    merge = git(repository, "commit-tree", "-p", shas[3], "-p", side, "-m", "merge", tree)
    git(repository, "update-ref", "refs/heads/main", merge)
    await commit(repository, [write("a", "end")], "end")
    expected = git(repository, "rev-list", "--date-order", "main").split()
    whole = await history.commits(repository)
    assert [each.sha for each in whole.commits] == expected and whole.total == 7 and whole.next_commit is None

    for size in (1, 2, 3):
        seen, place = [], None
        while True:
            page = await history.commits(repository, limit=size, until=place)
            seen += [each.sha for each in page.commits]
            if (place := page.next_commit) is None:
                break
        assert seen == expected
        seen, place = [], None
        while True:
            page = await history.commits(repository, limit=size, order="asc", since=place)
            seen += [each.sha for each in page.commits]
            if (place := page.next_commit) is None:
                break
        assert seen == expected[::-1]
        paged = [await history.commits(repository, limit=size, offset=offset) for offset in range(0, 7, size)]
        assert [each.sha for page in paged for each in page.commits] == expected

    newer = await history.commits(repository, since=shas[3])
    assert shas[3] not in [each.sha for each in newer.commits] and newer.commits[0].sha == expected[0]
    between = await history.commits(repository, since=shas[0], until=shas[2])
    assert [each.sha for each in between.commits][-1] != shas[0] and between.commits[0].sha == shas[2]
    upto = await history.commits(repository, order="asc", until=shas[1])
    assert [each.sha for each in upto.commits] == shas[:2]


async def test_invalid_history_ranges_are_refused(repository: Repository) -> None:
    first = await commit(repository, [write("a")], "one")
    second = await commit(repository, [write("a", "2")], "two")
    other = await commit(repository, [write("a")], "else", branch="other")
    with pytest.raises(CommitNotInBranch):
        await history.commits(repository, "main", since=other.sha)
    with pytest.raises(InvalidRange):
        await history.commits(repository, since=second.sha, until=first.sha)
    with pytest.raises(CommitNotFound):
        await history.commits(repository, since="1" * 40)
    with pytest.raises(OffsetWithSelector):
        await history.commits(repository, since=first.sha, offset=1)
    with pytest.raises(ReferenceNotFound):
        await history.commits(repository, "no-such-branch")


@pytest.mark.parametrize(
    ("base", "head", "status", "ahead", "behind"),
    [
        ("main", "main", "identical", 0, 0),
        ("main", "feature", "diverged", 2, 1),
        ("start", "main", "ahead", 1, 0),
        ("feature", "start", "behind", 0, 2),
    ],
)
async def test_compare_two_revisions(
    repository: Repository, base: str, head: str, status: str, ahead: int, behind: int
) -> None:
    first = await commit(
        repository, [write("kept", "kept\n" * 20), write("gone"), write("old name", "x\n" * 30)], "0"
    )
    await repository.create_branch("start", first.sha)
    await repository.create_branch("feature", "main")
    await commit(repository, [write("main only")], "m")
    await commit(
        repository, [write("kept", "kept\n" * 19 + "new\n"), Change("gone", None)], "f", branch="feature"
    )
    moved = [Change("old name", None), write("new name", "x\n" * 30), Change("binary", b"\0\1\2")]
    await commit(repository, moved, "g", branch="feature")
    compared = await history.compare(repository, base, head)
    assert (compared.status, compared.ahead_by, compared.behind_by) == (status, ahead, behind)
    if (base, head) == ("main", "feature"):
        facts = {
            change.path: (change.status, change.additions, change.deletions) for change in compared.files
        }
        assert facts == {
            "kept": ("modified", 1, 1),
            "gone": ("removed", 0, 1),
            "new name": ("renamed", 0, 0),
            "binary": ("added", 0, 0),
        }
        renamed = next(change for change in compared.files if change.path == "new name")
        assert renamed.previous_path == "old name"


# Contents


async def test_read_folders_files_blobs_and_trees(repository: Repository) -> None:
    made = await commit(
        repository, [write("top"), write("a/one"), write("a/b/two", "two"), write("a/b/c/three")], "m"
    )
    flat = await contents.read(repository, "/a/", "main", recursive=False)
    assert isinstance(flat, contents.RepoFolder) and not flat.recursive
    assert [(entry.path, entry.kind) for entry in flat.entries] == [("a/b", "tree"), ("a/one", "blob")]
    deep = await contents.read(repository, "", made.sha[:10], recursive=True)
    assert isinstance(deep, contents.RepoFolder)
    assert [entry.path for entry in deep.entries] == [
        "a",
        "a/b",
        "a/b/c",
        "a/b/c/three",
        "a/b/two",
        "a/one",
        "top",
    ]
    file = await contents.read(repository, "a/b/two", None)
    assert isinstance(file, contents.RepoFile)
    assert await contents.blob(repository, file.entry.sha) == (file.entry.sha, b"two")
    assert [entry.path for entry in await contents.tree(repository, made.sha)] == ["a", "top"]
    with pytest.raises(PathNotFound):
        await contents.read(repository, "a/missing", None)
    with pytest.raises(BlobNotFound):
        await contents.blob(repository, made.sha)
    with pytest.raises(TreeNotFound):
        await contents.tree(repository, "2" * 40)
    with pytest.raises(InvalidObjectId):
        await contents.tree(repository, "main")


async def test_listing_includes_subfolders_up_to_a_bound(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    await commit(repository, [write("top"), write("a/one"), write("a/b/two")], "m")
    small = await contents.read(repository, "", None)
    assert isinstance(small, contents.RepoFolder) and small.recursive
    assert [entry.path for entry in small.entries] == ["a", "a/b", "a/b/two", "a/one", "top"]
    leaf = await contents.read(repository, "a/b", None)
    assert isinstance(leaf, contents.RepoFolder) and [entry.path for entry in leaf.entries] == ["a/b/two"]
    for bound in (4, 1):
        monkeypatch.setattr(contents, "MAX_NESTED", bound)
        large = await contents.read(repository, "", None)
        assert isinstance(large, contents.RepoFolder) and not large.recursive
        assert [entry.path for entry in large.entries] == ["a", "top"]


async def test_revision_resolves_as_branch_then_tag_then_commit(repository: Repository) -> None:
    first = await commit(repository, [write("a")], "one")
    second = await commit(repository, [write("a", "2")], "two")
    git(repository, "tag", "both", first.sha)
    git(repository, "tag", "-a", "-m", "words", "noted", first.sha)
    await repository.create_branch("both", second.sha)
    assert await repository.resolve("both") == second.sha
    assert await repository.resolve("refs/tags/both") == first.sha
    assert await repository.resolve("noted") == first.sha
    assert await repository.resolve(first.sha.upper()[:12]) == first.sha
    assert await repository.resolve("HEAD") == second.sha
    for bad in ("main~1", "main^{tree}", ":/one", "-x", "main..other", "a b", "@{-1}", "\n"):
        with pytest.raises(InvalidRevision):
            await repository.resolve(bad)
    with pytest.raises(ReferenceNotFound):
        await repository.resolve("nowhere")
    with pytest.raises(BranchExists):
        await repository.create_branch("both")
    with pytest.raises(InvalidBranch):
        await repository.create_branch("both/below")


async def test_ambiguous_abbreviated_sha_is_refused(repository: Repository) -> None:
    await commit(repository, [write("a")], "one")
    tree = git(repository, "rev-parse", "main^{tree}")
    seen: dict[str, bytes] = {}
    for number in itertools.count():
        made = f"tree {tree}\nauthor A <a> {number} +0000\ncommitter A <a> {number} +0000\n\nx\n".encode()
        sha = hashlib.sha1(b"commit %d\0" % len(made) + made, usedforsecurity=False).hexdigest()
        if sha[:6] in seen:
            break
        seen[sha[:6]] = made
    for each in (made, seen[sha[:6]]):
        git(repository, "hash-object", "-t", "commit", "-w", "--stdin", stdin=each)
    with pytest.raises(AmbiguousRevision):
        await repository.resolve(sha[:6])
    assert await repository.resolve(sha) == sha


async def test_annotated_tags_have_tagger_and_message(repository: Repository) -> None:
    made = await commit(repository, [write("a")], "one")
    git(repository, "tag", "light", made.sha)
    git(repository, "tag", "-a", "-m", "words\n\nand more", "noted/1.0", made.sha)
    noted, light = sorted(await repository.tags(), key=lambda tag: tag.name, reverse=True)
    assert (light.target, light.tagger, light.message) == (made.sha, None, None)
    assert noted.target == made.sha and noted.sha != made.sha
    assert noted.message == "words\n\nand more\n" and noted.tagger is not None and noted.tagger.name == "C"
    assert await repository.tag("noted/1.0") == noted
    assert await repository.tag_object(noted.sha) == noted
    for missing in ("none", "-x", "a..b"):
        with pytest.raises(TagNotFound):
            await repository.tag(missing)
    with pytest.raises(TagNotFound):
        await repository.tag_object(made.sha)


@pytest.mark.parametrize("kind", ["tar", "zip"])
async def test_download_revision_as_archive(repository: Repository, tmp_path: Path, kind: str) -> None:
    await commit(repository, [write("a/b", "in it\n"), Change("large", os.urandom(3 << 20))], "one")
    packed = b"".join([piece async for piece in contents.archive(repository, kind, "main")])
    (tmp_path / f"all.{kind}").write_bytes(packed)
    safely: Any = {"filter": "data"} if kind == "tar" else {}
    shutil.unpack_archive(tmp_path / f"all.{kind}", tmp_path / "out", kind, **safely)
    assert (tmp_path / "out" / "a" / "b").read_text() == "in it\n"
    assert (tmp_path / "out" / "large").stat().st_size == 3 << 20
    with pytest.raises(ReferenceNotFound):
        await anext(contents.archive(repository, kind, "missing"))


async def test_default_branch_must_exist(repository: Repository) -> None:
    await repository.set_default_branch("early")
    assert repository.default_branch == "early"
    await commit(repository, [write("a")], "one")
    await repository.create_branch("later")
    await repository.set_default_branch("refs/heads/later")
    assert git(repository, "symbolic-ref", "HEAD") == "refs/heads/later"
    with pytest.raises(BranchNotFound):
        await repository.set_default_branch("missing")


@pytest.mark.parametrize("order", ["desc", "asc"])
async def test_pages_at_any_offset_are_those_of_git(repository: Repository, order: history.Order) -> None:
    """With a merge, whose commits have equal dates."""
    for number in range(5):
        await commit(repository, [write("a", str(number))], str(number))
    side = git(repository, "commit-tree", "main~2^{tree}", "-p", "main~3", "-m", "side")
    merge = git(repository, "commit-tree", "main^{tree}", "-p", "main", "-p", side, "-m", "merge")
    git(repository, "update-ref", "refs/heads/main", merge)
    reverse = ["--reverse"] if order == "asc" else []
    whole = git(repository, "rev-list", "--date-order", *reverse, "main").split()
    assert len(whole) == 7
    for offset, limit in itertools.product([*range(9), 2**31, 2**53], [1, 3, 7, 500]):
        page = await history.commits(repository, limit=limit, order=order, offset=offset)
        assert [each.sha for each in page.commits] == whole[offset : offset + limit]
        assert page.next_commit == next(iter(whole[offset + limit :]), None)
        assert page.total == 7
    uncounted = await history.commits(repository, limit=2, order=order, offset=1, count=False)
    assert ([each.sha for each in uncounted.commits], uncounted.total) == (whole[1:3], None)


async def test_huge_messages_are_not_read_all_at_once(repository: Repository) -> None:
    await commit(repository, [write("a")], "first")
    for size in (9 << 20, 8 << 20):
        sha = git(repository, "commit-tree", "main^{tree}", "-p", "main", stdin=b"x" * size)
        git(repository, "update-ref", "refs/heads/main", sha)
    assert len((await repository.commit(sha)).message) >= 8 << 20
    assert len((await history.commits(repository, limit=1)).commits) == 1
    with pytest.raises(TooLarge, match="3 objects have more than"):
        await history.commits(repository)
    tag = b"object %s\ntype commit\ntag v1\ntagger A <a@example.org> 1 +0000\n\n" % sha.encode()
    large = git(repository, "hash-object", "-t", "tag", "-w", "--stdin", stdin=tag + b"y" * (17 << 20))
    git(repository, "update-ref", "refs/tags/v1", large)
    for found in (repository.tag("v1"), repository.tag_object(large)):
        with pytest.raises(TooLarge):
            await found


async def test_memory_for_what_is_read_is_reserved(hosting: RepoHosting) -> None:
    reserved: list[int] = []

    async def reserve(amount: int) -> bool:
        reserved.append(amount)
        return True

    info = await hosting.repos.create(hosting.ours)
    await commit(
        hosting.repos.repository(info.id), [Change("large", b"x" * (3 << 20)), write("small")], "one"
    )
    repository = hosting.repos.opened(info, GitCaller(hosting.ours), reserve)
    small = await contents.read(repository, "small", None)
    assert isinstance(small, contents.RepoFile) and reserved == []
    large = await contents.read(repository, "large", None)
    assert isinstance(large, contents.RepoFile) and 3 << 20 <= sum(reserved) + (64 << 10) <= 4 << 20
    reserved.clear()
    assert await contents.blob(repository, large.entry.sha)
    assert sum(reserved) > 2 << 20
