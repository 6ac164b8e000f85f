"""Imports: the history of another repository, files, tar and zip archives."""

import asyncio
import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import stat
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from stead.errors import InvalidRequest
from stead.repos.errors import (
    InvalidChange,
    InvalidPath,
    InvalidRevision,
    ReferenceNotFound,
    RepoError,
    TooLarge,
)
from stead.repos.fast_import import Author
from stead.repos.repos import Fill
from stead.repos.repository import Repository
from stead.repos.ssrf import AddressRefused, RequestFailed, SsrfGuard
from stead.repos.transfer.archive_import import ArchiveTree
from stead.repos.transfer.archives import (
    FILE,
    LINK,
    ArchiveInvalid,
    ArchiveLimits,
    ArchiveMember,
    Kind,
    members,
    reading,
)
from stead.repos.transfer.imports import Imports, SubdirNotFound
from stead.repos.transfer.remotes import SourceInvalid, SourceNotFound, SourceUnauthorized
from support.git_hosting import Stage, staged
from support.git_server import GitServer, Page, redirect, serving

LOCAL = SsrfGuard([IPv4Network("127.0.0.0/8")])
NOBODY = 1_899_999_999


@pytest_asyncio.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Shared by all tests; at the end every repository must pass fsck."""
    async with staged(tmp_path_factory.mktemp("stage")) as stage:
        yield stage


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitServer]:
    with serving(tmp_path_factory.mktemp("elsewhere")) as server:
        yield server


@pytest.fixture
def server(elsewhere: GitServer, tmp_path: Path) -> GitServer:
    """The shared server, reset and empty."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.forget(folder)
    return elsewhere


@pytest.fixture
def sources() -> Imports:
    return Imports(LOCAL, timeout=30)


def git(folder: Path, *arguments: str, stdin: bytes = b"", bare: bool = True) -> str:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        **({"GIT_DIR": str(folder)} if bare else {}),
    }
    done = subprocess.run(
        ["git", *arguments], cwd=folder, input=stdin, capture_output=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


def add(place: Path, branch: str, *names: str, content: bytes = b"text\n", start: str | None = None) -> str:
    """Add one commit per name to a branch; returns the last id."""
    lines = [b"feature done\n"]
    for number, name in enumerate(names):
        lines += [
            f"commit refs/heads/{branch}\ncommitter A <a@b> {number} +0000\n".encode(),
            b"data 4\nadd\n\n",
        ]
        known = subprocess.run(
            ["git", "rev-parse", "-q", "--verify", f"refs/heads/{branch}"], cwd=place, capture_output=True
        )
        if number == 0 and (start or known.returncode == 0):
            lines.append(f"from {start or f'refs/heads/{branch}^0'}\n".encode())
        lines += [f"M 644 inline {name}\ndata {len(content)}\n".encode(), content, b"\n"]
    git(place, "fast-import", "--quiet", stdin=b"".join([*lines, b"done\n"]))
    return git(place, "rev-parse", f"refs/heads/{branch}")


@pytest.fixture
def origin(server: GitServer) -> Path:
    """`trunk` with three commits, `feature/x` with another one on the second, and a tag on each branch."""
    place = server.init("origin.git", "trunk")
    add(place, "trunk", "one", "two")
    add(place, "feature/x", "side", start="refs/heads/trunk^0")
    add(place, "trunk", "dir/three")
    tag = "-c", "user.name=T", "-c", "user.email=t@u", "tag", "-m", "first"
    git(place, *tag, "v1", "trunk~1")
    git(place, "tag", "side-tag", "feature/x")
    return place


def refs(repository: Repository | Path) -> dict[str, str]:
    place = repository.path if isinstance(repository, Repository) else repository
    lines = git(place, "for-each-ref", "--format=%(refname) %(objectname)").splitlines()
    return {line.split()[0]: line.split()[1] for line in lines}


def tree(repository: Repository | Path, rev: str = "HEAD") -> str:
    return git(
        repository.path if isinstance(repository, Repository) else repository, "rev-parse", f"{rev}^{{tree}}"
    )


def files(repository: Repository) -> dict[str, str]:
    """Paths and modes."""
    lines = git(repository.path, "ls-tree", "-r", "-z", "HEAD").split("\0")[:-1]
    return {line.partition("\t")[2]: line.split()[0] for line in lines}


def shown(repository: Repository, path: str) -> str:
    return git(repository.path, "cat-file", "blob", f"HEAD:{path}")


Raised = TypeVar("Raised", bound=Exception)


async def refused(
    stage: Stage, fill: Fill, error: type[Raised] | tuple[type[Raised], ...], match: str | None = None
) -> Raised:
    """The import fails with this error, and nothing is left."""
    before = (await stage.repos.list(stage.ours, limit=1)).total
    with pytest.raises(error, match=match) as raised:
        await stage.repository(fill=fill)
    assert list((stage.folder / "repos" / "new").iterdir()) == []
    assert (await stage.repos.list(stage.ours, limit=1)).total == before
    return raised.value


# History


async def test_import_default_branch_with_history(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    """Its tags are included, those of other branches are not; nothing else is in the repository."""
    repository = await stage.repository(fill=sources.source(f"{server.url}/origin.git/"))
    theirs = refs(origin)
    assert refs(repository) == {name: theirs[name] for name in ("refs/heads/trunk", "refs/tags/v1")}
    assert repository.default_branch == "trunk"
    assert sorted(each.name for each in repository.path.iterdir()) == ["HEAD", "config", "objects", "refs"]
    assert not (repository.path / "objects" / "info" / "alternates").exists()
    assert "remote" not in (repository.path / "config").read_text()


async def test_import_renames_the_default_branch(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    fill = sources.source(f"{server.url}/origin.git", default_branch="main")
    repository = await stage.repository(fill=fill, default_branch="main")
    assert refs(repository)["refs/heads/main"] == refs(origin)["refs/heads/trunk"]
    assert (repository.default_branch, len(await repository.branches())) == ("main", 1)


async def test_import_one_branch(stage: Stage, sources: Imports, server: GitServer, origin: Path) -> None:
    for rev in ("feature/x", "refs/heads/feature/x"):
        repository = await stage.repository(fill=sources.source(f"{server.url}/origin.git", rev=rev))
        theirs = refs(origin)
        assert refs(repository) == {
            name: theirs[name] for name in ("refs/heads/feature/x", "refs/tags/v1", "refs/tags/side-tag")
        }
        assert repository.default_branch == "feature/x"


async def test_import_tag(stage: Stage, sources: Imports, server: GitServer, origin: Path) -> None:
    """The history up to it is on the default branch."""
    repository = await stage.repository(fill=sources.source(f"{server.url}/origin.git", rev="v1"))
    assert refs(repository) == {
        "refs/heads/trunk": git(origin, "rev-parse", "trunk~1"),
        "refs/tags/v1": refs(origin)["refs/tags/v1"],
    }
    assert repository.default_branch == "trunk"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("length", [40, 7])
async def test_import_commit(
    stage: Stage, sources: Imports, server: GitServer, origin: Path, length: int, old: bool
) -> None:
    """Also if the server does not serve commits by id, and with an abbreviated id."""
    server.old = old
    sha = git(origin, "rev-parse", "trunk~2")
    later = git(origin, "rev-parse", "trunk")
    fill = sources.source(f"{server.url}/origin.git", rev=sha[:length], default_branch="here")
    repository = await stage.repository(fill=fill)
    assert refs(repository) == {"refs/heads/here": sha}
    assert repository.default_branch == "here"
    with pytest.raises(AssertionError, match=later):
        git(repository.path, "cat-file", "commit", later)


async def test_import_any_ref(stage: Stage, sources: Imports, server: GitServer, origin: Path) -> None:
    """Such as the merge request refs of some servers."""
    git(origin, "update-ref", "refs/pull/7/head", "feature/x")
    repository = await stage.repository(
        fill=sources.source(f"{server.url}/origin.git", rev="refs/pull/7/head")
    )
    assert refs(repository)["refs/heads/trunk"] == refs(origin)["refs/pull/7/head"]


async def test_import_all_branches(stage: Stage, sources: Imports, server: GitServer, origin: Path) -> None:
    url = f"{server.url}/origin.git"
    theirs = refs(origin)
    repository = await stage.repository(fill=sources.source(url, all_branches=True))
    assert (refs(repository), repository.default_branch) == (theirs, "trunk")
    repository = await stage.repository(fill=sources.source(url, all_branches=True, rev="feature/x"))
    assert (refs(repository), repository.default_branch) == (theirs, "feature/x")
    fill = sources.source(url, all_branches=True, default_branch="main")
    repository = await stage.repository(fill=fill, default_branch="main")
    assert refs(repository) == theirs | {"refs/heads/main": theirs["refs/heads/trunk"]}
    assert repository.default_branch == "main"
    with pytest.raises(InvalidRequest):
        await stage.repository(fill=sources.source(url, all_branches=True, rev="v1"))


async def test_shallow_import_can_be_cloned_and_committed_to(
    stage: Stage, sources: Imports, server: GitServer, origin: Path, tmp_path: Path
) -> None:
    repository = await stage.repository(fill=sources.source(f"{server.url}/origin.git", depth=2))
    assert git(repository.path, "rev-list", "--count", "HEAD") == "2"
    assert (repository.path / "shallow").exists()
    with serving(repository.path.parent) as ours:
        url = f"{ours.url}/{repository.path.name}"
        ours.config["safe.directory"] = "*"
        git(tmp_path, "clone", "-q", url, "copy", bare=False)
        copy = tmp_path / "copy"
        assert git(copy, "rev-list", "--count", "HEAD", bare=False) == "2"
        who = "-c", "user.name=A", "-c", "user.email=a@b"
        git(copy, *who, "commit", "-q", "--allow-empty", "-m", "more", bare=False)
        git(copy, "push", "-q", "origin", "trunk", bare=False)
        git(tmp_path, "clone", "-q", "--depth=1", url, "again", bare=False)
    assert git(repository.path, "rev-list", "--count", "HEAD") == "3"
    again = await stage.repository(
        fill=sources.source(f"{server.url}/origin.git", depth=1, all_branches=True)
    )
    assert refs(again) == refs(origin)
    with pytest.raises(InvalidRequest):
        sources.source(f"{server.url}/origin.git", depth=0)


async def test_import_of_shallow_source(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    git(server.folder, "clone", "-q", "--bare", "--depth=2", f"file://{origin}", "cut.git", bare=False)
    repository = await stage.repository(fill=sources.source(f"{server.url}/cut.git"))
    assert git(repository.path, "rev-list", "--count", "HEAD") == "2"


async def test_import_of_empty_source(stage: Stage, sources: Imports, server: GitServer) -> None:
    server.init("empty.git")
    repository = await stage.repository(fill=sources.source(f"{server.url}/empty.git"))
    assert refs(repository) == {}
    await refused(stage, sources.source(f"{server.url}/empty.git", rev="main"), ReferenceNotFound)


async def test_import_of_source_with_detached_head(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    url = f"{server.url}/origin.git"
    git(origin, "symbolic-ref", "HEAD", "refs/heads/gone")
    repository = await stage.repository(fill=sources.source(url))
    assert repository.default_branch in ("feature/x", "trunk")
    (origin / "HEAD").write_text(git(origin, "rev-parse", "trunk~1") + "\n")
    repository = await stage.repository(fill=sources.source(url))
    assert refs(repository)["refs/heads/main"] == git(origin, "rev-parse", "trunk~1")
    (origin / "HEAD").write_text(git(origin, "rev-parse", "trunk") + "\n")
    repository = await stage.repository(fill=sources.source(url))
    assert repository.default_branch == "trunk"


@pytest.mark.parametrize(
    ("rev", "error"),
    [
        ("missing", ReferenceNotFound),
        ("1" * 40, ReferenceNotFound),
        ("abcd123", ReferenceNotFound),
        ("refs/heads/missing", ReferenceNotFound),
        ("--upload-pack=touch /tmp/x", InvalidRevision),
        ("a..b", InvalidRevision),
        ("trunk:refs/heads/x", InvalidRevision),
        ("+trunk", ReferenceNotFound),
    ],
)
async def test_missing_revision_of_source_is_refused(
    stage: Stage, sources: Imports, server: GitServer, origin: Path, rev: str, error: type[Exception]
) -> None:
    await refused(stage, sources.source(f"{server.url}/origin.git", rev=rev), error)


async def test_missing_sources_are_refused(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    url = f"{server.url}/other.git"
    error = await refused(stage, sources.source(url), SourceNotFound)
    assert error.url == url
    server.pages["/page/info/refs"] = Page(b"<html>", headers={"Content-Type": "text/html"})
    await refused(stage, sources.source(f"{server.url}/page"), SourceNotFound)
    server.pages["/forbidden/info/refs"] = Page(status=403)
    await refused(stage, sources.source(f"{server.url}/forbidden"), SourceUnauthorized)
    server.pages["/broken/info/refs"] = Page(status=500)
    await refused(stage, sources.source(f"{server.url}/broken"), RequestFailed, "500")
    for bad in (f"{server.url}/origin.git?x=1", f"{server.url}/origin.git#x"):
        await refused(stage, sources.source(bad), SourceInvalid)
    for bad in (str(origin), f"file://{origin}", f"ext::sh -c touch% {origin}/x"):
        await refused(stage, sources.source(bad), AddressRefused)
    await refused(stage, Imports(SsrfGuard()).source(f"{server.url}/origin.git"), AddressRefused)


async def test_source_credentials_are_used_and_not_stored(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    server.credentials = "agent:s3cret-t0ken"
    url = server.url.replace("http://", "http://agent:{}@") + "/origin.git"
    await refused(stage, sources.source(f"{server.url}/origin.git"), SourceUnauthorized)
    error = await refused(stage, sources.source(url.format("wr0ng-one")), SourceUnauthorized)
    assert error.url == f"{server.url}/origin.git"
    assert "wr0ng" not in str(error)
    repository = await stage.repository(fill=sources.source(url.format("s3cret-t0ken")))
    assert refs(repository)["refs/heads/trunk"] == refs(origin)["refs/heads/trunk"]
    encoded = "YWdlbnQ6czNjcmV0LXQwa2Vu"
    for file in repository.path.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert b"s3cret" not in content and encoded.encode() not in content


async def test_redirected_source_is_found_without_leaking_credentials(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    with serving(server.folder) as other:
        other.credentials = "agent:secret"
        moved = f"{server.url}/origin.git/info/refs?service=git-upload-pack"
        other.pages["/old/info/refs"] = redirect(moved, 301)
        url = other.url.replace("http://", "http://agent:secret@")
        await stage.repository(fill=sources.source(f"{url}/old"))
        assert len(other.requests) == 1
        assert all("authorization" not in request.headers for request in server.requests)
        other.pages["/old/info/refs"] = redirect("http://169.254.169.254/info/refs?service=git-upload-pack")
        await refused(stage, sources.source(f"{url}/old"), AddressRefused)
        other.pages["/old/info/refs"] = redirect(f"{server.url}/origin.git/HEAD")
        await refused(stage, sources.source(f"{url}/old"), SourceNotFound)


async def test_redirect_during_fetch_is_not_followed(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    server.pages["/origin.git/git-upload-pack"] = redirect("http://127.0.0.1:1/git-upload-pack", 307)
    await refused(stage, sources.source(f"{server.url}/origin.git"), RequestFailed)


async def test_dumb_http_source_is_refused(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    """Dumb HTTP is refused, because objects would not be checked; also after a smart first response."""
    git(origin, "repack", "-adq")
    git(origin, "update-server-info")
    for file in (each for each in origin.rglob("*") if each.is_file()):
        server.pages[f"/dumb/{file.relative_to(origin)}"] = Page(file.read_bytes())
    git(server.folder, "clone", "-q", "--bare", f"{server.url}/dumb", "copy.git", bare=False)
    await refused(stage, sources.source(f"{server.url}/dumb"), SourceNotFound)
    listed = (origin / "info" / "refs").read_bytes()
    smart = {"Content-Type": "application/x-git-upload-pack-advertisement"}
    answers = iter([Page(headers=smart)])
    server.pages["/dumb/info/refs"] = lambda: next(answers, Page(listed))
    await refused(stage, sources.source(f"{server.url}/dumb"), SourceNotFound)


async def test_source_size_limit(stage: Stage, server: GitServer) -> None:
    place = server.init("large.git")
    add(place, "main", "large", content=random.Random(1).randbytes(3 << 20))
    sources = Imports(LOCAL, most_bytes=1 << 20)
    await refused(stage, sources.source(f"{server.url}/large.git"), TooLarge)
    await stage.repository(fill=Imports(LOCAL, most_bytes=8 << 20).source(f"{server.url}/large.git"))


async def test_source_time_limit(stage: Stage, server: GitServer, origin: Path) -> None:
    sources = Imports(LOCAL, timeout=0.7)
    slow = Page(b"fff0" + b"x" * 100_000, pause=0.05)
    server.pages["/origin.git/git-upload-pack"] = slow
    await refused(stage, sources.source(f"{server.url}/origin.git"), RequestFailed, "timed out after")
    server.pages["/slow/info/refs"] = server.pages["/slow.tar"] = slow
    await refused(stage, sources.source(f"{server.url}/slow"), RepoError)
    await refused(
        stage, sources.archive("tar", f"{server.url}/slow.tar", "all"), RequestFailed, "timed out after"
    )


async def test_cancelled_import_leaves_nothing(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow() -> Page:
        loop.call_soon_threadsafe(asked.set)
        return Page(b"x" * 1_000_000, pause=0.05)

    server.pages["/origin.git/git-upload-pack"] = server.pages["/slow.tar"] = slow
    for fill in (
        sources.source(f"{server.url}/origin.git"),
        sources.archive("tar", f"{server.url}/slow.tar", "all"),
    ):
        making = asyncio.create_task(stage.repository(fill=fill))
        async with asyncio.timeout(20):
            await asked.wait()
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert list((stage.folder / "repos" / "new").iterdir()) == []
        asked.clear()


def broken(place: Path, kind: str, data: bytes) -> str:
    """Write an object that git itself would refuse."""
    return git(place, "hash-object", "-t", kind, "--literally", "-w", "--stdin", stdin=data)


def commit_of(place: Path, tree: str, who: str = "A <a@b> 1 +0000") -> str:
    return broken(place, "commit", f"tree {tree}\nauthor {who}\ncommitter {who}\n\nold\n".encode())


async def test_harmless_fsck_findings_are_accepted(stage: Stage, sources: Imports, server: GitServer) -> None:
    place = server.init("old.git")
    blob = broken(place, "blob", b"old\n")
    folder = broken(place, "tree", b"100644 file\0" + bytes.fromhex(blob))
    padded = broken(place, "tree", b"040000 folder\0" + bytes.fromhex(folder))
    persons = [
        "A <a@b> 1 +0000",
        "A<a@b> 1 +0000",
        "A <a@b>1 +0000",
        "<a@b> 1 +0000",
        "A <a@b> 01 +0000",
        "A <a@b> 1 +051800",
        "A <a@b <c> 1 +0000",
        "A <a@b> 99999999999999999999 +0000",
    ]
    for number, who in enumerate(persons):
        git(place, "update-ref", f"refs/heads/b{number}", commit_of(place, padded, who))
    git(place, "symbolic-ref", "HEAD", "refs/heads/b0")
    repository = await stage.repository(fill=sources.source(f"{server.url}/old.git", all_branches=True))
    assert refs(repository) == refs(place)
    for branch in await repository.branches():
        assert (await repository.commit(branch.sha)).message == "old\n"
    # The final fsck of all repositories would fail on it.
    await stage.repos.delete(repository.id)


@pytest.mark.parametrize(
    "entry",
    [
        b"100644 .git\0",
        b"100644 .GIT\0",
        b"100644 git~1\0",
        b"100644 ..\0",
        b"100644 a/b\0",
        b"120000 .gitmodules\0",
    ],
)
async def test_dangerous_fsck_findings_are_refused(
    stage: Stage, sources: Imports, server: GitServer, entry: bytes
) -> None:
    place = server.init("bad.git")
    blob = broken(place, "blob", b"x")
    bad = broken(place, "tree", entry + bytes.fromhex(blob))
    git(place, "update-ref", "refs/heads/main", commit_of(place, bad))
    await refused(stage, sources.source(f"{server.url}/bad.git"), SourceInvalid)
    await refused(stage, sources.tree(f"{server.url}/bad.git", "all"), SourceInvalid)


async def test_submodules_are_not_fetched(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    place = server.init("outer.git")
    text = f'[submodule "m"]\n\tpath = m\n\turl = {server.url}/origin.git\n'.encode()
    blob = broken(place, "blob", text)
    inner = refs(origin)["refs/heads/trunk"]
    entries = b"100644 .gitmodules\0" + bytes.fromhex(blob) + b"160000 m\0" + bytes.fromhex(inner)
    git(place, "update-ref", "refs/heads/main", commit_of(place, broken(place, "tree", entries)))
    repository = await stage.repository(fill=sources.source(f"{server.url}/outer.git"))
    assert files(repository) == {".gitmodules": "100644", "m": "160000"}
    assert not any("origin" in request.path for request in server.requests)


async def test_import_runs_as_the_git_user(
    sources: Imports, server: GitServer, origin: Path, open_folder: Path
) -> None:
    async with staged(open_folder, NOBODY) as stage:
        url = f"{server.url}/origin.git"
        server.pages["/a.tar"] = Page(tar_of(file("a/b", b"text")))
        for fill in (
            sources.source(url),
            sources.source(url, rev="v1"),
            sources.tree(url, "all", folder="dir"),
            sources.files({"a": "b"}, "all"),
            sources.archive("tar", f"{server.url}/a.tar", "all"),
        ):
            repository = await stage.repository(fill=fill)
            assert all(each.lstat().st_uid == NOBODY for each in repository.path.rglob("*"))


# Files


async def test_import_files_as_one_commit(stage: Stage, sources: Imports) -> None:
    texts = {"README.md": "# ü\n", "src/a b.py": "", 'q"\\': "x"}
    fill = sources.files(texts, "Begin", Author("Ada", "ada@example.org"))
    repository = await stage.repository(fill=fill, default_branch="trunk")
    commits = await repository.commits([await repository.resolve(None)])
    assert (commits[0].message, commits[0].author.name, commits[0].parents) == ("Begin\n", "Ada", ())
    assert [branch.name for branch in await repository.branches()] == ["trunk"]
    assert {path: shown(repository, path) for path in texts} == {k: v.strip() for k, v in texts.items()}


async def test_invalid_file_imports_are_refused(stage: Stage, sources: Imports) -> None:
    for path in ("../a", "/a", ".git/config", "a/.GIT/x", ""):
        await refused(stage, sources.files({path: "x"}, "all"), InvalidPath)
    await refused(stage, sources.files({"a": "b", "a/b": "c"}, "all"), InvalidChange)
    await refused(stage, sources.files({"a": "\ud800"}, "all"), InvalidChange)
    evil = '[submodule "m"]\n\tpath = m\n\turl = --upload-pack=evil\n'
    await refused(stage, sources.files({".gitmodules": evil}, "all"), SourceInvalid)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that archives can contain."""
    work = tmp_path_factory.mktemp("work") / "project"
    (work / "src" / "deep").mkdir(parents=True)
    (work / "empty").mkdir()
    (work / "README.md").write_text("read me\n")
    (work / "src" / "run.sh").write_text("#!/bin/sh\n")
    (work / "src" / "run.sh").chmod(0o755)
    (work / "src" / "nothing").touch()
    (work / "src" / 'a "b" \\ ü').write_bytes(b"\0\xff" * 100)
    (work / "src" / "deep" / ("long" * 40)).write_text("long\n")
    (work / "/".join(["folder" * 8] * 6)).mkdir(parents=True)
    (work / "/".join(["folder" * 8] * 6) / "file").write_text("far\n")
    (work / "src" / "link").symlink_to("../README.md")
    (work / "src" / "deep" / "up").symlink_to("../../src")
    (work / "dangling").symlink_to("no/such")
    (work / "large").write_bytes(random.Random(2).randbytes(300_001))
    os.link(work / "README.md", work / "src" / "same")
    return work


def tree_of(work: Path) -> str:
    """The tree that git makes of a folder."""
    git(work, "init", "-q", bare=False)
    git(work, "add", "-A", bare=False)
    made = git(work, "write-tree", bare=False)
    shutil.rmtree(work / ".git")
    return made


def packed(work: Path, *command: str) -> bytes:
    return subprocess.run(command, cwd=work, capture_output=True, check=True).stdout


@pytest.mark.parametrize(
    ("form", "option"), [("gnu", ""), ("gnu", "-z"), ("gnu", "-j"), ("pax", "-J"), ("pax", "")]
)
async def test_tar_import_equals_git_add(
    stage: Stage, sources: Imports, server: GitServer, work: Path, form: str, option: str
) -> None:
    expected = tree_of(work)
    options = [option] if option else []
    server.pages["/a"] = Page(packed(work, "tar", "-c", *options, f"--format={form}", "."))
    repository = await stage.repository(fill=sources.archive("tar", f"{server.url}/a", "Begin"))
    assert tree(repository) == expected
    assert git(repository.path, "rev-list", "--count", "--all") == "1"
    assert not (repository.path / "import").exists()
    assert git(repository.path, "count-objects", "-v").splitlines()[-2:] == ["garbage: 0", "size-garbage: 0"]


async def test_zip_import_equals_git_add(
    stage: Stage, sources: Imports, server: GitServer, work: Path
) -> None:
    expected = tree_of(work)
    packed(work, "zip", "-q", "-r", "-y", "../a.zip", ".")
    server.pages["/a"] = Page((work.parent / "a.zip").read_bytes())
    repository = await stage.repository(fill=sources.archive("zip", f"{server.url}/a", "Begin"))
    assert tree(repository) == expected


@pytest.mark.parametrize("form", ["tar", "tar.gz", "zip"])
async def test_import_of_git_archive_output(
    stage: Stage, sources: Imports, server: GitServer, origin: Path, tmp_path: Path, form: str
) -> None:
    """With one top-level folder, as code hosts make them; it is kept unless `dir` names it."""
    made = tmp_path / "a"
    git(origin, "archive", f"--format={form}", "--prefix=origin-1/", f"--output={made}", "trunk")
    server.pages["/a"] = Page(made.read_bytes())
    kind: Kind = "zip" if form == "zip" else "tar"
    url = f"{server.url}/a"
    whole = await stage.repository(fill=sources.archive(kind, url, "all"))
    assert set(files(whole)) == {"origin-1/one", "origin-1/two", "origin-1/dir/three"}
    inner = await stage.repository(fill=sources.archive(kind, url, "all", folder="/origin-1/"))
    assert tree(inner) == tree(origin, "trunk")
    deep = await stage.repository(fill=sources.archive(kind, url, "all", folder="origin-1/dir"))
    assert set(files(deep)) == {"three"}
    for missing in ("origin", "origin-1/di", "origin-1/one", "origin-1/dir/three/x"):
        error = await refused(stage, sources.archive(kind, url, "all", folder=missing), SubdirNotFound)
        assert (error.source, error.folder) == (url, missing)
    with pytest.raises(InvalidPath):
        sources.archive(kind, url, "all", folder="../x")


def file(name: str, content: bytes = b"text\n", mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), mode
    return info, content


def special(name: str, kind: bytes, link: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info, b""


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return special(name, tarfile.SYMTYPE, target)


def tar_of(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def zip_of(*members: tuple[zipfile.ZipInfo | str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return packed.getvalue()


def zipped(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, mode << 16
    return info


async def test_last_duplicate_entry_wins(stage: Stage, sources: Imports, server: GitServer) -> None:
    server.pages["/a"] = Page(
        tar_of(file("a", b"1"), file("./a", b"2", 0o755), link("b", "../x"), file("b", b"3"))
    )
    repository = await stage.repository(fill=sources.archive("tar", f"{server.url}/a", "all"))
    assert files(repository) == {"a": "100755", "b": "100644"}
    assert (shown(repository, "a"), shown(repository, "b")) == ("2", "3")


async def test_git_folders_in_archives_are_skipped(stage: Stage, sources: Imports, server: GitServer) -> None:
    server.pages["/a"] = Page(tar_of(file("a"), file(".git/config"), file("sub/.git"), file(".gitignore")))
    repository = await stage.repository(fill=sources.archive("tar", f"{server.url}/a", "all"))
    assert set(files(repository)) == {"a", ".gitignore"}


async def test_internal_symlinks_are_kept(stage: Stage, sources: Imports, server: GitServer) -> None:
    server.pages["/a"] = Page(
        tar_of(
            link("x/y/up", "../.."),
            link("again", "x/y/up/x/../x/y"),
            link("loop", "loop"),
            link("round", "x/y/up/round"),
            link("later", "./file"),
            file("file"),
            special("copy", tarfile.LNKTYPE, "./file"),
            special("copied", tarfile.LNKTYPE, "later"),
        )
    )
    repository = await stage.repository(fill=sources.archive("tar", f"{server.url}/a", "all"))
    modes = files(repository)
    assert {path for path, mode in modes.items() if mode == "120000"} == {
        "x/y/up", "again", "loop", "round", "later", "copied"
    }  # fmt: skip
    assert (shown(repository, "x/y/up"), shown(repository, "copy")) == ("../..", "text")


def greedy_xz() -> bytes:
    """Its header requires 4 GiB of memory to unpack."""
    packed = bytearray(lzma.compress(tar_of(file("a"))))
    end = 12 + (packed[12] + 1) * 4
    packed[16] = 40
    packed[end - 4 : end] = struct.pack("<I", zlib.crc32(packed[12 : end - 4]))
    return bytes(packed)


HOSTILE_TARS: dict[str, bytes] = {
    "up": tar_of(file("../evil")),
    "up inside": tar_of(file("a/../../evil")),
    "absolute": tar_of(file("/etc/evil")),
    "other spelling of git": tar_of(file("a/.GIT/config")),
    "git on ntfs": tar_of(file("git~1/config")),
    "git on hfs": tar_of(file(".g\u200cit/config")),
    "control": tar_of(file("a\nb")),
    "not unicode": tar_of(file("a\udcff"), form=tarfile.GNU_FORMAT),
    "absolute link": tar_of(link("a", "/etc/passwd")),
    "link up": tar_of(link("a/b", "../../x")),
    "link by windows": tar_of(link("a", "..\\..\\x")),
    "link by link": tar_of(link("x/y/up", "../.."), link("out", "x/y/up/../secret")),
    "link by later link": tar_of(link("out", "x/y/up/../secret"), link("x/y/up", "../..")),
    "hard link to such a link": tar_of(link("a/b", "../x"), special("c", tarfile.LNKTYPE, "a/b")),
    "through a link": tar_of(link("a", "b"), file("a/file")),
    "link over a folder": tar_of(file("a/file"), link("a", "b")),
    "file over a folder": tar_of(file("a/file"), file("a")),
    "hard link to nothing": tar_of(special("a", tarfile.LNKTYPE, "b")),
    "hard link out": tar_of(special("a", tarfile.LNKTYPE, "../../etc/passwd")),
    "hard link to the root": tar_of(special("a", tarfile.LNKTYPE, "/etc/passwd")),
    "device": tar_of(special("a", tarfile.CHRTYPE)),
    "block device": tar_of(special("a", tarfile.BLKTYPE)),
    "fifo": tar_of(special("a", tarfile.FIFOTYPE)),
    "sparse": tar_of(special("a", tarfile.GNUTYPE_SPARSE), form=tarfile.GNU_FORMAT),
    "empty link": tar_of(link("a", "")),
    "submodule trick": tar_of(file(".gitmodules", b'[submodule "../x"]\n\tpath = x\n\turl = http://a/b\n')),
    "submodule link": tar_of(file("other"), link(".gitmodules", "other")),
    "cut": tar_of(file("a", b"x" * 5000))[:2000],
    "cut in a header": tar_of(file("a"))[:100],
    "nothing": b"",
    "not a tar": b"<html>not found</html>" * 100,
    "zip": zip_of(("a", b"b")),
    "cut gzip": gzip.compress(tar_of(file("a", os.urandom(5000))))[:3000],
    "broken gzip": b"\x1f\x8b\x08" + b"\0" * 1000,
    "cut bzip2": bz2.compress(tar_of(file("a", os.urandom(5000))))[:3000],
    "cut xz": lzma.compress(tar_of(file("a", os.urandom(5000))))[:3000],
    "greedy xz": greedy_xz(),
    "zstd": b"\x28\xb5\x2f\xfd" + b"\0" * 100,
}


@pytest.mark.parametrize("name", HOSTILE_TARS)
async def test_malicious_and_corrupt_tars_are_refused(
    stage: Stage, sources: Imports, server: GitServer, name: str
) -> None:
    server.pages["/a"] = Page(HOSTILE_TARS[name])
    await refused(stage, sources.archive("tar", f"{server.url}/a", "all"), (InvalidPath, SourceInvalid))


async def test_tars_with_corrupt_headers_are_refused(
    stage: Stage, sources: Imports, server: GitServer
) -> None:
    pax = tarfile.TarInfo("x")
    pax.type = tarfile.XHDTYPE
    for data in (
        b"5 path=x\n",
        b"99999999999 path=x\n",
        b"path",
        b"11 size=-1\n",
        b"12 size=\xc2\xb2\n",
        b"22 GNU.sparse.major=1\n",
    ):
        pax.size = len(data)
        header = pax.tobuf() + data + b"\0" * (-len(data) % 512)
        server.pages["/a"] = Page(header + tar_of(file("a")))
        await refused(stage, sources.archive("tar", f"{server.url}/a", "all"), SourceInvalid)
    pax.size = 1 << 30
    server.pages["/a"] = Page(pax.tobuf() + b"\0" * 10_000)
    await refused(stage, sources.archive("tar", f"{server.url}/a", "all"), SourceInvalid, "too long")


def lying_zip() -> bytes:
    """Its central directory states a larger size than the content."""
    packed = bytearray(zip_of(("a", b"x" * 100)))
    place = packed.index(b"PK\x01\x02") + 24
    packed[place : place + 4] = struct.pack("<I", 1000)
    return bytes(packed)


def changed_zip() -> bytes:
    packed = bytearray(zip_of(("a", b"x" * 100), method=zipfile.ZIP_STORED))
    packed[packed.index(b"xxxx")] = ord("y")
    return bytes(packed)


def encrypted_zip() -> bytes:
    packed = bytearray(zip_of(("a", b"x" * 100)))
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    packed[6] |= 1
    return bytes(packed)


HOSTILE_ZIPS: dict[str, bytes] = {
    "up": zip_of(("../evil", b"x")),
    "absolute": zip_of(("/etc/evil", b"x")),
    "by windows": zip_of(("..\\evil", b"x")),
    "git": zip_of((".Git/config", b"x")),
    "link up": zip_of((zipped("a", stat.S_IFLNK | 0o777), b"../x")),
    "absolute link": zip_of((zipped("a", stat.S_IFLNK | 0o777), b"/etc/passwd")),
    "long link": zip_of((zipped("a", stat.S_IFLNK | 0o777), b"a/" * 5000)),
    "through a link": zip_of((zipped("a", stat.S_IFLNK | 0o777), b"b"), ("a/file", b"x")),
    "device": zip_of((zipped("a", stat.S_IFCHR | 0o644), b"")),
    "lzma": zip_of(("a", b"x" * 100), method=zipfile.ZIP_LZMA),
    "bzip2": zip_of(("a", b"x" * 100), method=zipfile.ZIP_BZIP2),
    "lie": lying_zip(),
    "changed": changed_zip(),
    "encrypted": encrypted_zip(),
    "cut": zip_of(("a", os.urandom(1000)))[:500],
    "tar": tar_of(file("a")),
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE_ZIPS)
async def test_malicious_and_corrupt_zips_are_refused(
    stage: Stage, sources: Imports, server: GitServer, name: str
) -> None:
    server.pages["/a"] = Page(HOSTILE_ZIPS[name])
    await refused(stage, sources.archive("zip", f"{server.url}/a", "all"), (InvalidPath, SourceInvalid))


def test_fuzzed_archives_are_imported_or_refused(tmp_path: Path) -> None:
    """Archives with random bytes changed: they are refused as corrupt, or have other content."""
    inside = file("a/b", b"text" * 300), link("c", "a/b"), file("d" * 120, b"x"), file("e", mode=0o755)
    entries = ("a/b", b"text" * 300), (zipped("c", stat.S_IFLNK | 0o777), b"a/b"), ("d", b"x")
    whole: list[tuple[Kind, bytes]] = [
        ("tar", tar_of(*inside)),
        ("tar", tar_of(*inside, form=tarfile.GNU_FORMAT)),
        ("tar", gzip.compress(tar_of(*inside))),
        ("tar", bz2.compress(tar_of(*inside))),
        ("tar", lzma.compress(tar_of(*inside))),
        ("zip", zip_of(*entries)),
    ]
    archive = tmp_path / "archive"
    ends: set[int | type[RepoError]] = set()
    for seed in range(800):
        chance = random.Random(seed)
        kind, data = chance.choice(whole)
        changed = bytearray(data)
        for _ in range(chance.randint(0, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        archive.write_bytes(changed[: chance.choice([len(changed), chance.randrange(len(changed))])])
        snapshot = ArchiveTree()
        try:
            with reading(kind):
                for _ in snapshot.blobs(members(kind, archive, ArchiveLimits(unpacked=1 << 20))):
                    pass
            ends.add(len(list(snapshot.lines())))
        except RepoError as error:
            ends.add(type(error))
    assert {4, 3, ArchiveInvalid, InvalidPath} <= ends


async def test_archive_bombs_are_refused(stage: Stage, sources: Imports, server: GitServer) -> None:
    zeros = bytes(3 << 16)
    plain = tar_of(file("a", zeros))
    archives: dict[str, tuple[Kind, bytes]] = {
        "plain": ("tar", plain),
        "gzip": ("tar", gzip.compress(plain)),
        "bzip2": ("tar", bz2.compress(plain)),
        "xz": ("tar", lzma.compress(plain)),
        "twice": ("tar", gzip.compress(plain[:1000]) + gzip.compress(plain[1000:])),
        "zip": ("zip", zip_of(("a", zeros))),
        "many": ("zip", zip_of(*((f"{number}", zeros[:6000]) for number in range(30)))),
    }
    bounded = Imports(LOCAL, bounds=ArchiveLimits(unpacked=2 << 16))
    for name, (kind, data) in archives.items():
        url = f"{server.url}/{name}"
        server.pages[f"/{name}"] = Page(data)
        await refused(stage, bounded.archive(kind, url, "all"), TooLarge)
    for name, (kind, _) in archives.items():
        url = f"{server.url}/{name}"
        repository = await stage.repository(fill=sources.archive(kind, url, "all"))
        assert len(files(repository)) == (30 if name == "many" else 1)


async def test_compression_ratio_limit(stage: Stage, server: GitServer) -> None:
    """Far below the size limit, but over the compression ratio limit."""
    plain = tar_of(file("a", bytes(1 << 20)))
    server.pages["/bomb"] = Page(gzip.compress(plain, 1))
    sources = Imports(LOCAL, bounds=ArchiveLimits(ratio=50, ratio_from=1 << 19))
    await refused(stage, sources.archive("tar", f"{server.url}/bomb", "all"), TooLarge)


async def test_archive_entry_limit(stage: Stage, server: GitServer) -> None:
    names = [f"{number}" for number in range(11)]
    server.pages["/tar"] = Page(tar_of(*(file(name) for name in names)))
    server.pages["/folders"] = Page(tar_of(*(special(name, tarfile.DIRTYPE) for name in names)))
    server.pages["/zip"] = Page(zip_of(*((name, b"") for name in names)))
    few, enough = (Imports(LOCAL, bounds=ArchiveLimits(entries=most)) for most in (10, 11))
    await refused(stage, few.archive("tar", f"{server.url}/tar", "all"), TooLarge)
    await refused(stage, few.archive("tar", f"{server.url}/folders", "all"), TooLarge)
    await refused(stage, few.archive("zip", f"{server.url}/zip", "all"), TooLarge)
    kinds: tuple[Kind, ...] = ("tar", "zip")
    for kind in kinds:
        repository = await stage.repository(fill=enough.archive(kind, f"{server.url}/{kind}", "all"))
        assert len(files(repository)) == 11


def test_archive_name_and_link_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small compressed archives that would take hours to process."""
    monkeypatch.setattr("stead.repos.transfer.archive_import._MAX_NAMES", 1 << 20)
    monkeypatch.setattr("stead.repos.transfer.archive_import._MAX_STEPS", 1_000_000)
    long = "/".join(["a" * 250] * 16)
    with pytest.raises(TooLarge):
        deque(
            ArchiveTree().blobs(ArchiveMember(f"{number}/{long}", FILE) for number in range(200_000)),
            maxlen=0,
        )
    with pytest.raises(InvalidPath):
        deque(ArchiveTree().blobs([ArchiveMember("a/" * 2000 + "f", FILE)]), maxlen=0)
    chain = [_leading(f"{number:02}", "x/../" * 800 + f"{number + 1:02}") for number in range(38)]
    links = [_leading(f"l{number}", "00") for number in range(3000)]
    snapshot = ArchiveTree()
    deque(snapshot.blobs([*chain, *links]), maxlen=0)
    with pytest.raises(TooLarge):
        deque(snapshot.lines(), maxlen=0)


def _leading(name: str, target: str) -> ArchiveMember:
    return ArchiveMember(name, LINK, len(target), lambda: iter((target.encode(),)))


async def test_archive_download_failures_are_reported(
    stage: Stage, sources: Imports, server: GitServer
) -> None:
    await refused(stage, sources.archive("tar", f"{server.url}/missing.tar", "all"), SourceNotFound)
    for path, page in {
        "/broken": Page(b"x" * 1000, complete=False),
        "/error": Page(status=503),
        "/large": Page(b"x" * 5000),
        "/inside": redirect("http://10.0.0.1/a.tar"),
    }.items():
        server.pages[path] = page
    await refused(stage, sources.archive("tar", f"{server.url}/broken", "all"), RequestFailed)
    await refused(stage, sources.archive("tar", f"{server.url}/error", "all"), RequestFailed, "503")
    small = Imports(LOCAL, most_bytes=4999)
    await refused(stage, small.archive("tar", f"{server.url}/large", "all"), TooLarge)
    await refused(stage, sources.archive("tar", f"{server.url}/inside", "all"), AddressRefused)
    await refused(stage, Imports(SsrfGuard()).archive("tar", f"{server.url}/large", "all"), AddressRefused)
    server.credentials = "a:s3cret"
    await refused(stage, sources.archive("tar", f"{server.url}/a", "all"), SourceUnauthorized)
    server.pages["/a"] = Page(tar_of(file("a")))
    url = server.url.replace("http://", "http://a:s3cret@")
    repository = await stage.repository(fill=sources.archive("tar", f"{url}/a?signed=yes", "all"))
    assert set(files(repository)) == {"a"}


async def test_import_git_revision_as_one_commit(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    """Nothing else is imported: no history, other folders or tags."""
    url = f"{server.url}/origin.git"
    author = Author("Ada", "ada@example.org")
    first = git(origin, "rev-parse", "trunk~2")
    for rev, expected in (
        (None, "trunk"),
        ("feature/x", "feature/x"),
        ("v1", "v1"),
        (first, first),
        (first[:8], first),
    ):
        repository = await stage.repository(fill=sources.tree(url, "Begin", rev=rev, author=author))
        assert tree(repository) == tree(origin, expected)
        assert list(refs(repository)) == ["refs/heads/main"]
        commit = await repository.commit(await repository.resolve(None))
        assert (commit.message, commit.author.name, commit.parents) == ("Begin\n", "Ada", ())
        assert sorted(each.name for each in repository.path.iterdir() if each.name != "packed-refs") == [
            "HEAD", "config", "objects", "refs"
        ]  # fmt: skip
        kept = git(repository.path, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
        assert set(kept.split()) == set(
            git(repository.path, "rev-list", "--objects", "--no-object-names", "--all").split()
        )


async def test_import_git_folder_as_one_commit(
    stage: Stage, sources: Imports, server: GitServer, origin: Path
) -> None:
    url = f"{server.url}/origin.git"
    repository = await stage.repository(fill=sources.tree(url, "Begin", folder="dir"), default_branch="trunk")
    assert (set(files(repository)), repository.default_branch) == ({"three"}, "trunk")
    for missing, rev in (("dir", "v1"), ("one", None), ("nothing", None)):
        error = await refused(stage, sources.tree(url, "Begin", folder=missing, rev=rev), SubdirNotFound)
        assert (error.source, error.folder) == (url, missing)
    await refused(stage, sources.tree(url, "Begin", rev="missing"), ReferenceNotFound)
    server.init("empty.git")
    await refused(stage, sources.tree(f"{server.url}/empty.git", "Begin"), ReferenceNotFound)
