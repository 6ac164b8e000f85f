"""Repositories with the real git: create, read, commit, maintain, delete."""

import asyncio
import hashlib
import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stead.errors import HostError, InvalidRequest
from stead.identity.callers import Caller
from stead.limits import Limits
from stead.repos import committing, contents, history
from stead.repos.access import RepoPermissionExists, RepoPermissionNotFound
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
    InvalidPath,
    InvalidRange,
    InvalidRevision,
    OffsetWithSelector,
    PathNotFound,
    ReferenceNotFound,
    RepoLimitExceeded,
    RepoNotFound,
    TagNotFound,
    TooLarge,
    TreeNotFound,
)
from stead.repos.fast_import import Author
from stead.repos.maintenance import housekeeping
from stead.repos.maintenance.housekeeping import MAX_PACKS
from stead.repos.names import check_path, is_ref
from stead.repos.repos import Repos
from stead.repos.repository import Repository
from support.git_hosting import Stage, staged

NOBODY = 1_899_999_999


@pytest_asyncio.fixture
async def repository(stage: Stage) -> Repository:
    return await stage.repository()


def git(repository: Repository | Path, *arguments: str, stdin: bytes = b"") -> str:
    """Plain git, to verify results independently."""
    folder = repository.path if isinstance(repository, Repository) else repository
    environment = os.environ | {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_AUTHOR_NAME": "A",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "C",
        "GIT_COMMITTER_EMAIL": "c@example.org",
    }
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


def write(path: str, text: str = "text\n") -> Change:
    return Change(path, text.encode())


# Create and delete


async def test_new_repository_equals_git_init_bare(stage: Stage, tmp_path: Path) -> None:
    """Empty, with the requested branch; plain git accepts it."""
    repository = await stage.repository(default_branch="trunk")
    assert repository.default_branch == "trunk"
    assert git(repository, "symbolic-ref", "HEAD") == "refs/heads/trunk"
    assert git(repository, "rev-parse", "--is-bare-repository") == "true"
    git(tmp_path, "clone", "-q", str(repository.path), "copy")
    assert await repository.branches() == []
    assert (await history.commits(repository)).commits == []
    for missing in (
        repository.resolve(None),
        repository.branch("trunk"),
        contents.read(repository, "", None),
    ):
        with pytest.raises((ReferenceNotFound, BranchNotFound)):
            await missing


async def test_repository_is_visible_to_its_account_only(stage: Stage) -> None:
    info = await stage.repos.create(stage.ours, name="mine")
    assert (await stage.repos.owned(stage.ours, info.id)).name == "mine"
    for account, repo in ((stage.theirs, info.id), (stage.ours, "no-such-id"), (stage.ours, "../../etc")):
        with pytest.raises(RepoNotFound, match=f"^no repository {repo}$"):
            await stage.repos.owned(account, repo)
    assert (await stage.repos.list(stage.theirs, limit=10)).total == 0


async def test_list_pages_and_searches_by_name(stage: Stage) -> None:
    made = [(await stage.repos.create(stage.ours, name=f"Project {number}")).id for number in range(5)]
    await stage.repos.create(stage.theirs, name="Project 9")
    pages = [await stage.repos.list(stage.ours, limit=2, offset=offset) for offset in (0, 2, 4)]
    assert [info.id for page in pages for info in page.items] == made[::-1]
    assert {page.total for page in pages} == {5}
    found = await stage.repos.list(stage.ours, limit=10, search="project 3")
    assert [info.id for info in found.items] == [made[3]]
    assert (await stage.repos.list(stage.ours, limit=10, search="100%_")).items == []
    assert [info.id for info in (await stage.repos.list(stage.ours, limit=10, only={made[1]})).items] == [
        made[1]
    ]


async def test_delete_removes_files(stage: Stage, repository: Repository) -> None:
    await commit(repository, [write("a")], "one")
    await contents.read(repository, "a", None)
    await stage.repos.delete(repository.id)
    assert not repository.path.exists()
    with pytest.raises(RepoNotFound):
        await stage.repos.get(repository.id)
    with pytest.raises(RepoNotFound):
        await stage.repos.delete(repository.id)


async def test_account_repository_limit(stage: Stage) -> None:
    """Also with concurrent creates."""

    async def two(_: str) -> Limits:
        return Limits(repos=2)

    async with Repos.open(stage.database, stage.folder / "few", two) as repos:
        made = await asyncio.gather(*(repos.create(stage.ours) for _ in range(6)), return_exceptions=True)
        assert sum(isinstance(each, RepoLimitExceeded) for each in made) == 4
        assert list((stage.folder / "few" / "new").iterdir()) == []


async def test_crash_during_create_leaves_a_complete_repository_or_none(stage: Stage) -> None:
    """Interrupted at every step of create and delete."""
    folder = stage.folder / "repos"
    recorded, whole, going = [await stage.repository() for _ in range(3)]
    for each in (recorded, whole, going):
        await commit(each, [write("kept")], "kept")
    shutil.move(recorded.path, folder / "new" / recorded.id)
    shutil.move(going.path, folder / "gone" / going.id)
    (folder / "new" / "half-made").mkdir()
    async with staged(stage.folder) as again:
        for each in (recorded, whole):
            found = again.repos.repository(each.id)
            assert isinstance(await contents.read(found, "kept", None), contents.RepoFile)
        with pytest.raises(RepoNotFound):
            await again.repos.get(going.id)
        assert list((folder / "gone").iterdir()) == []
        assert list((folder / "new").iterdir()) == []


async def test_git_runs_as_its_own_user(open_folder: Path) -> None:
    """The git user cannot read files of others, and only root can read its files."""
    async with staged(open_folder, NOBODY) as stage:
        repository = await stage.repository()
        made = await commit(repository, [write("a")], "one")
        assert {path.lstat().st_uid for path in repository.path.rglob("*")} == {NOBODY}
        assert repository.path.stat().st_mode & 0o077 == 0
        secret = open_folder / "secret"
        secret.write_text("secret")
        secret.chmod(0o600)
        refused = await stage.repos.git.finish(repository.path, "hash-object", str(secret))
        assert refused.status != 0 and "Permission denied" in refused.stderr
        assert (await repository.resolve("main")) == made.sha


async def test_untraversable_data_folder_is_reported(tmp_path: Path) -> None:
    above = tmp_path / "closed"
    above.mkdir(mode=0o700)
    (above / "data").mkdir()
    with pytest.raises(HostError, match=f"cannot traverse {above}: run chmod"):
        async with staged(above / "data", NOBODY):
            pass


# Names


@given(st.text(max_size=12) | st.from_regex(r"[a-z./@{~^:.-]{1,8}", fullmatch=True))
@settings(max_examples=150, deadline=None)
def test_accepted_branch_names_are_valid_in_git(name: str) -> None:
    if "\0" in name or not is_ref(name):
        return
    checked = subprocess.run(["git", "check-ref-format", "--branch", name], capture_output=True, timeout=10)
    assert checked.returncode == 0


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "a/",
        "a//b",
        ".",
        "..",
        "../a",
        "a/../b",
        "./a",
        ".git/config",
        "a/.GIT/hooks/x",
        ".git ",
        ".git.",
        "git~1",
        "GIT~1/config",
        ".git::$INDEX_ALLOCATION/config",
        ".g\u200cit/config",
        "\ufeff.git",
        "a\\..\\b",
        "a\\.git\\config",
        "a\nb",
        "a\0b",
        "x" * 5000,
        "a/" + "y" * 256,
        "\udc80",
    ],
)
async def test_dangerous_paths_are_refused(repository: Repository, path: str) -> None:
    with pytest.raises(InvalidPath):
        await commit(repository, [write(path)], "harm")
    assert await repository.branches() == []


_pieces = st.sampled_from(
    [".git", "git~1", ".GiT", ".g\u200dit", "a", "..", ".", " ", ":x", "\\", "-", '"', "ü", "~"]
)


@given(st.lists(st.lists(_pieces, min_size=1, max_size=3).map("".join), min_size=1, max_size=3).map("/".join))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_accepted_paths_are_valid_in_git(tmp_path_factory: pytest.TempPathFactory, path: str) -> None:
    """With all protections on: for file systems of Linux, macOS and Windows."""
    try:
        check_path(path)
    except InvalidPath:
        return
    folder = tmp_path_factory.mktemp("index")
    git(folder, "init", "-q", "--bare", ".")
    blob = git(folder, "hash-object", "-w", "--stdin", stdin=b"x")
    protect = ("-c", "core.protectNTFS=true", "-c", "core.protectHFS=true")
    git(folder, *protect, "update-index", "--add", "--cacheinfo", f"100644,{blob},{path}")
    tree = git(folder, "write-tree")
    git(folder, "fsck", "--strict")
    assert tree


@pytest.mark.parametrize(
    "name", ["", "refs/heads/", "-x", "a..b", "a b", "x.lock", "HEAD", "a/.b", "@{1}", "é" * 400]
)
async def test_invalid_branch_names_are_refused(repository: Repository, name: str) -> None:
    with pytest.raises(InvalidBranch):
        await repository.branch(name)


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


# Access


async def test_access_levels_of_account_and_identities(stage: Stage) -> None:
    info = await stage.repos.create(stage.ours)
    public = await stage.repos.create(stage.ours, public=True)
    identity = await stage.identities.create(stage.ours)
    owner, holder, foreign = Caller(stage.ours), Caller(stage.ours, identity.id), Caller(stage.theirs)

    async def levels(repo: str) -> list[str | None]:
        found = await stage.repos.get(repo)
        return [await stage.access.level(caller, found) for caller in (owner, holder, foreign, None)]

    assert await levels(info.id) == ["write", None, None, None]
    assert await levels(public.id) == ["write", "read", "read", "read"]
    await stage.access.grant(stage.ours, identity.id, info.id, "read")
    assert await levels(info.id) == ["write", "read", None, None]
    with pytest.raises(RepoPermissionExists):
        await stage.access.grant(stage.ours, identity.id, info.id, "write")
    await stage.access.change(identity.id, info.id, "write")
    assert await levels(info.id) == ["write", "write", None, None]
    page = await stage.access.all_granted(identity.id, 10, 0)
    assert [(each.id, level) for each, level in page.items] == [(info.id, "write")]
    await stage.access.revoke(identity.id, info.id)
    assert await levels(info.id) == ["write", None, None, None]
    with pytest.raises(RepoPermissionNotFound):
        await stage.access.revoke(identity.id, info.id)
    with pytest.raises(RepoNotFound):
        await stage.access.grant(stage.theirs, identity.id, info.id, "read")
    await stage.access.grant(stage.ours, identity.id, info.id, "read")
    await stage.repos.delete(info.id)
    assert await stage.access.repos_of(identity.id) == set()


# Maintenance


async def test_many_commits_are_repacked(stage: Stage, repository: Repository) -> None:
    """Repacked while readers and writers are active."""
    for number in range(MAX_PACKS + 3):
        await commit(repository, [write(f"file{number}", str(number))], str(number))
    packs = repository.path / "objects" / "pack"
    assert len(list(packs.glob("*.pack"))) > MAX_PACKS
    repack = stage.repos.housekeeping.schedule(repository)
    assert repack is not None and repack is stage.repos.housekeeping.schedule(repository)
    while not repack.done():
        found = await contents.read(repository, "file7", None)
        assert isinstance(found, contents.RepoFile) and found.content == b"7"
    await commit(repository, [write("last")], "last")
    assert len(list(packs.glob("*.pack"))) < 5
    assert (await history.commits(repository)).total == MAX_PACKS + 4
    deep = await contents.read(repository, "", None, recursive=True)
    assert isinstance(deep, contents.RepoFolder) and len(deep.entries) == MAX_PACKS + 4


async def test_large_repository_gets_bitmap_index(
    stage: Stage, repository: Repository, tmp_path: Path
) -> None:
    """git fsck accepts them; unreachable objects are kept."""
    orphan = git(repository, "hash-object", "-w", "--stdin", stdin=b"not referred to yet")
    await commit(repository, [Change("large", os.urandom(2 << 20))], "large")
    stage.repos.housekeeping.schedule(repository)
    await stage.repos.housekeeping.join()
    assert list((repository.path / "objects" / "pack").glob("*.bitmap"))
    git(repository, "multi-pack-index", "verify")
    git(repository, "commit-graph", "verify")
    assert git(repository, "cat-file", "-p", orphan) == "not referred to yet"
    assert stage.repos.housekeeping.schedule(repository) is None
    git(tmp_path, "clone", "-q", str(repository.path), "copy")
    assert (tmp_path / "copy" / "large").stat().st_size == 2 << 20


HALF_DONE = (
    "packed-refs.lock",
    "packed-refs.new",
    "fast_import_crash_7",
    "refs/heads/main.lock",
    "objects/pack/multi-pack-index.lock",
    "objects/pack/pack-1.keep",
    "objects/pack/tmp_pack_1",
    "objects/pack/.tmp-7-pack-1.pack",
    "objects/info/commit-graphs/commit-graph-chain.lock",
    "objects/tmp_objdir-incoming-1/",
    "objects/tmp_objdir-commit-1/",
    "lfs/incoming/1",
)


@pytest.mark.parametrize("age", [1, -1])
async def test_leftovers_of_killed_processes_are_removed(
    stage: Stage, repository: Repository, age: int
) -> None:
    """Stale locks and temporary files are removed; current writes are left alone."""
    await commit(repository, [write("a")], "one")
    git(repository, "update-ref", "refs/heads/tmp_mine", "main")
    started = time.time()
    for name in HALF_DONE:
        place = repository.path / name
        (place if name.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if not place.is_dir():
            place.touch()
        os.utime(place, (started - age, started - age))
    housekeeping.remove_stale_files(stage.folder / "repos", started)
    left = [name for name in HALF_DONE if (repository.path / name).exists()]
    assert left == ([] if age > 0 else list(HALF_DONE))
    housekeeping.remove_stale_files(stage.folder / "repos", started + 60)
    await commit(repository, [write("a", "2")], "two")
    git(repository, "pack-refs", "--all")
    git(repository, "update-ref", "-d", "refs/heads/tmp_mine")
    git(repository, "repack", "-q", "-a", "-d", "--write-midx")
    git(repository, "commit-graph", "write", "--reachable", "--split")
