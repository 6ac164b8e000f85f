"""Imports of the history of another repository, or of one revision as a commit."""

import asyncio
import random
from pathlib import Path

import pytest

from stead.errors import InvalidRequest
from stead.repos.errors import InvalidRevision, ReferenceNotFound, RepoError, TooLarge
from stead.repos.fast_import import Author
from stead.repos.ssrf import AddressRefused, RequestFailed, SsrfGuard
from stead.repos.transfer.imports import Imports, SubdirNotFound
from stead.repos.transfer.remotes import SourceInvalid, SourceNotFound, SourceUnauthorized
from support.git_imports import Importing, add, files, refs, tree
from support.git_repos import git
from support.git_server import Page, redirect, serving


async def test_import_default_branch_with_history(importing: Importing, origin: Path) -> None:
    """Its tags are included, those of other branches are not; nothing else is in the repository."""
    repository = await importing.make(importing.source("origin.git/"))
    theirs = refs(origin)
    assert refs(repository) == {name: theirs[name] for name in ("refs/heads/trunk", "refs/tags/v1")}
    assert repository.default_branch == "trunk"
    assert sorted(each.name for each in repository.path.iterdir()) == ["HEAD", "config", "objects", "refs"]
    assert not (repository.path / "objects" / "info" / "alternates").exists()
    assert "remote" not in (repository.path / "config").read_text()


async def test_import_renames_the_default_branch(importing: Importing, origin: Path) -> None:
    fill = importing.source(default_branch="main")
    repository = await importing.make(fill, default_branch="main")
    assert refs(repository)["refs/heads/main"] == refs(origin)["refs/heads/trunk"]
    assert (repository.default_branch, len(await repository.branches())) == ("main", 1)


async def test_import_one_branch(importing: Importing, origin: Path) -> None:
    for rev in ("feature/x", "refs/heads/feature/x"):
        repository = await importing.make(importing.source(rev=rev))
        theirs = refs(origin)
        assert refs(repository) == {
            name: theirs[name] for name in ("refs/heads/feature/x", "refs/tags/v1", "refs/tags/side-tag")
        }
        assert repository.default_branch == "feature/x"


async def test_import_tag(importing: Importing, origin: Path) -> None:
    """The history up to it is on the default branch."""
    repository = await importing.make(importing.source(rev="v1"))
    assert refs(repository) == {
        "refs/heads/trunk": git(origin, "rev-parse", "trunk~1"),
        "refs/tags/v1": refs(origin)["refs/tags/v1"],
    }
    assert repository.default_branch == "trunk"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("length", [40, 7])
async def test_import_commit(importing: Importing, origin: Path, length: int, old: bool) -> None:
    """Also if the server does not serve commits by id, and with an abbreviated id."""
    importing.server.old = old
    sha = git(origin, "rev-parse", "trunk~2")
    later = git(origin, "rev-parse", "trunk")
    fill = importing.source(rev=sha[:length], default_branch="here")
    repository = await importing.make(fill)
    assert refs(repository) == {"refs/heads/here": sha}
    assert repository.default_branch == "here"
    with pytest.raises(AssertionError, match=later):
        git(repository, "cat-file", "commit", later)


async def test_import_any_ref(importing: Importing, origin: Path) -> None:
    """Such as the merge request refs of some servers."""
    git(origin, "update-ref", "refs/pull/7/head", "feature/x")
    repository = await importing.make(importing.source(rev="refs/pull/7/head"))
    assert refs(repository)["refs/heads/trunk"] == refs(origin)["refs/pull/7/head"]


async def test_import_all_branches(importing: Importing, origin: Path) -> None:
    theirs = refs(origin)
    repository = await importing.make(importing.source(all_branches=True))
    assert (refs(repository), repository.default_branch) == (theirs, "trunk")
    repository = await importing.make(importing.source(all_branches=True, rev="feature/x"))
    assert (refs(repository), repository.default_branch) == (theirs, "feature/x")
    fill = importing.source(all_branches=True, default_branch="main")
    repository = await importing.make(fill, default_branch="main")
    assert refs(repository) == theirs | {"refs/heads/main": theirs["refs/heads/trunk"]}
    assert repository.default_branch == "main"
    with pytest.raises(InvalidRequest):
        await importing.make(importing.source(all_branches=True, rev="v1"))


async def test_shallow_import_can_be_cloned_and_committed_to(
    importing: Importing, origin: Path, tmp_path: Path
) -> None:
    repository = await importing.make(importing.source(depth=2))
    assert git(repository, "rev-list", "--count", "HEAD") == "2"
    assert (repository.path / "shallow").exists()
    with serving(repository.path.parent) as ours:
        url = f"{ours.url}/{repository.path.name}"
        ours.config["safe.directory"] = "*"
        git(tmp_path, "clone", "-q", url, "copy")
        copy = tmp_path / "copy"
        assert git(copy, "rev-list", "--count", "HEAD") == "2"
        who = "-c", "user.name=A", "-c", "user.email=a@b"
        git(copy, *who, "commit", "-q", "--allow-empty", "-m", "more")
        git(copy, "push", "-q", "origin", "trunk")
        git(tmp_path, "clone", "-q", "--depth=1", url, "again")
    assert git(repository, "rev-list", "--count", "HEAD") == "3"
    again = await importing.make(importing.source(depth=1, all_branches=True))
    assert refs(again) == refs(origin)
    with pytest.raises(InvalidRequest):
        importing.source(depth=0)


async def test_import_of_shallow_source(importing: Importing, origin: Path) -> None:
    git(importing.server.folder, "clone", "-q", "--bare", "--depth=2", f"file://{origin}", "cut.git")
    repository = await importing.make(importing.source("cut.git"))
    assert git(repository, "rev-list", "--count", "HEAD") == "2"


async def test_import_of_empty_source(importing: Importing) -> None:
    importing.server.init("empty.git")
    repository = await importing.make(importing.source("empty.git"))
    assert refs(repository) == {}
    await importing.refused(importing.source("empty.git", rev="main"), ReferenceNotFound)


async def test_import_of_source_with_detached_head(importing: Importing, origin: Path) -> None:
    git(origin, "symbolic-ref", "HEAD", "refs/heads/gone")
    repository = await importing.make(importing.source())
    assert repository.default_branch in ("feature/x", "trunk")
    (origin / "HEAD").write_text(git(origin, "rev-parse", "trunk~1") + "\n")
    repository = await importing.make(importing.source())
    assert refs(repository)["refs/heads/main"] == git(origin, "rev-parse", "trunk~1")
    (origin / "HEAD").write_text(git(origin, "rev-parse", "trunk") + "\n")
    repository = await importing.make(importing.source())
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
    importing: Importing, origin: Path, rev: str, error: type[Exception]
) -> None:
    await importing.refused(importing.source(rev=rev), error)


async def test_missing_sources_are_refused(importing: Importing, origin: Path) -> None:
    error = await importing.refused(importing.source("other.git"), SourceNotFound)
    assert error.url == importing.url("other.git")
    importing.server.pages["/page/info/refs"] = Page(b"<html>", headers={"Content-Type": "text/html"})
    await importing.refused(importing.source("page"), SourceNotFound)
    importing.server.pages["/forbidden/info/refs"] = Page(status=403)
    await importing.refused(importing.source("forbidden"), SourceUnauthorized)
    importing.server.pages["/broken/info/refs"] = Page(status=500)
    await importing.refused(importing.source("broken"), RequestFailed, "500")
    for bad in ("origin.git?x=1", "origin.git#x"):
        await importing.refused(importing.source(bad), SourceInvalid)
    for bad in (str(origin), f"file://{origin}", f"ext::sh -c touch% {origin}/x"):
        await importing.refused(importing.sources.source(bad), AddressRefused)
    await importing.refused(Imports(SsrfGuard()).source(importing.url()), AddressRefused)


async def test_source_credentials_are_used_and_not_stored(importing: Importing, origin: Path) -> None:
    importing.server.credentials = "agent:s3cret-t0ken"
    url = importing.server.url.replace("http://", "http://agent:{}@") + "/origin.git"
    await importing.refused(importing.source(), SourceUnauthorized)
    error = await importing.refused(importing.sources.source(url.format("wr0ng-one")), SourceUnauthorized)
    assert error.url == importing.url()
    assert "wr0ng" not in str(error)
    repository = await importing.make(importing.sources.source(url.format("s3cret-t0ken")))
    assert refs(repository)["refs/heads/trunk"] == refs(origin)["refs/heads/trunk"]
    encoded = "YWdlbnQ6czNjcmV0LXQwa2Vu"
    for file in repository.path.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        assert b"s3cret" not in content and encoded.encode() not in content


async def test_redirected_source_is_found_without_leaking_credentials(
    importing: Importing, origin: Path
) -> None:
    with serving(importing.server.folder) as other:
        other.credentials = "agent:secret"
        moved = importing.url("origin.git/info/refs?service=git-upload-pack")
        other.pages["/old/info/refs"] = redirect(moved, 301)
        url = other.url.replace("http://", "http://agent:secret@")
        await importing.make(importing.sources.source(f"{url}/old"))
        assert len(other.requests) == 1
        assert all("authorization" not in request.headers for request in importing.server.requests)
        other.pages["/old/info/refs"] = redirect("http://169.254.169.254/info/refs?service=git-upload-pack")
        await importing.refused(importing.sources.source(f"{url}/old"), AddressRefused)
        other.pages["/old/info/refs"] = redirect(importing.url("origin.git/HEAD"))
        await importing.refused(importing.sources.source(f"{url}/old"), SourceNotFound)


async def test_redirect_during_fetch_is_not_followed(importing: Importing, origin: Path) -> None:
    importing.server.pages["/origin.git/git-upload-pack"] = redirect(
        "http://127.0.0.1:1/git-upload-pack", 307
    )
    await importing.refused(importing.source(), RequestFailed)


async def test_dumb_http_source_is_refused(importing: Importing, origin: Path) -> None:
    """Dumb HTTP is refused, because objects would not be checked; also after a smart first response."""
    git(origin, "repack", "-adq")
    git(origin, "update-server-info")
    for file in (each for each in origin.rglob("*") if each.is_file()):
        importing.server.pages[f"/dumb/{file.relative_to(origin)}"] = Page(file.read_bytes())
    git(importing.server.folder, "clone", "-q", "--bare", importing.url("dumb"), "copy.git")
    await importing.refused(importing.source("dumb"), SourceNotFound)
    listed = (origin / "info" / "refs").read_bytes()
    smart = {"Content-Type": "application/x-git-upload-pack-advertisement"}
    answers = iter([Page(headers=smart)])
    importing.server.pages["/dumb/info/refs"] = lambda: next(answers, Page(listed))
    await importing.refused(importing.source("dumb"), SourceNotFound)


async def test_source_size_limit(importing: Importing) -> None:
    place = importing.server.init("large.git")
    add(place, "main", "large", content=random.Random(1).randbytes(3 << 20))
    await importing.refused(importing.limited(most_bytes=1 << 20).source("large.git"), TooLarge)
    await importing.make(importing.limited(most_bytes=8 << 20).source("large.git"))


async def test_source_time_limit(importing: Importing, origin: Path) -> None:
    importing = importing.limited(timeout=0.7)
    slow = Page(b"fff0" + b"x" * 100_000, pause=0.05)
    importing.server.pages["/origin.git/git-upload-pack"] = slow
    await importing.refused(importing.source(), RequestFailed, "timed out after")
    importing.server.pages["/slow/info/refs"] = importing.server.pages["/slow.tar"] = slow
    await importing.refused(importing.source("slow"), RepoError)
    await importing.refused(importing.archive("tar", "slow.tar"), RequestFailed, "timed out after")


async def test_cancelled_import_leaves_nothing(importing: Importing, origin: Path) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow() -> Page:
        loop.call_soon_threadsafe(asked.set)
        return Page(b"x" * 1_000_000, pause=0.05)

    importing.server.pages["/origin.git/git-upload-pack"] = importing.server.pages["/slow.tar"] = slow
    for fill in (
        importing.source(),
        importing.archive("tar", "slow.tar"),
    ):
        making = asyncio.create_task(importing.make(fill))
        async with asyncio.timeout(60):
            await asked.wait()
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        importing.nothing_is_left()
        asked.clear()


def broken(place: Path, kind: str, data: bytes) -> str:
    """Write an object that git itself would refuse."""
    return git(place, "hash-object", "-t", kind, "--literally", "-w", "--stdin", stdin=data)


def commit_of(place: Path, tree: str, who: str = "A <a@b> 1 +0000") -> str:
    return broken(place, "commit", f"tree {tree}\nauthor {who}\ncommitter {who}\n\nold\n".encode())


async def test_harmless_fsck_findings_are_accepted(importing: Importing) -> None:
    place = importing.server.init("old.git")
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
    repository = await importing.make(importing.source("old.git", all_branches=True))
    assert refs(repository) == refs(place)
    for branch in await repository.branches():
        assert (await repository.commit(branch.sha)).message == "old\n"
    # The final fsck of all repositories would fail on it.
    await importing.hosting.repos.delete(repository.id)


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
async def test_dangerous_fsck_findings_are_refused(importing: Importing, entry: bytes) -> None:
    place = importing.server.init("bad.git")
    blob = broken(place, "blob", b"x")
    bad = broken(place, "tree", entry + bytes.fromhex(blob))
    git(place, "update-ref", "refs/heads/main", commit_of(place, bad))
    await importing.refused(importing.source("bad.git"), SourceInvalid)
    await importing.refused(importing.sources.tree(importing.url("bad.git"), "all"), SourceInvalid)


async def test_submodules_are_not_fetched(importing: Importing, origin: Path) -> None:
    place = importing.server.init("outer.git")
    text = f'[submodule "m"]\n\tpath = m\n\turl = {importing.url()}\n'.encode()
    blob = broken(place, "blob", text)
    inner = refs(origin)["refs/heads/trunk"]
    entries = b"100644 .gitmodules\0" + bytes.fromhex(blob) + b"160000 m\0" + bytes.fromhex(inner)
    git(place, "update-ref", "refs/heads/main", commit_of(place, broken(place, "tree", entries)))
    repository = await importing.make(importing.source("outer.git"))
    assert files(repository) == {".gitmodules": "100644", "m": "160000"}
    assert not any("origin" in request.path for request in importing.server.requests)


async def test_import_git_revision_as_one_commit(importing: Importing, origin: Path) -> None:
    """Nothing else is imported: no history, other folders or tags."""
    url = importing.url()
    author = Author("Ada", "ada@example.org")
    first = git(origin, "rev-parse", "trunk~2")
    for rev, expected in (
        (None, "trunk"),
        ("feature/x", "feature/x"),
        ("v1", "v1"),
        (first, first),
        (first[:8], first),
    ):
        repository = await importing.make(importing.sources.tree(url, "Begin", rev=rev, author=author))
        assert tree(repository) == tree(origin, expected)
        assert list(refs(repository)) == ["refs/heads/main"]
        commit = await repository.commit(await repository.resolve(None))
        assert (commit.message, commit.author.name, commit.parents) == ("Begin\n", "Ada", ())
        assert sorted(each.name for each in repository.path.iterdir() if each.name != "packed-refs") == [
            "HEAD", "config", "objects", "refs"
        ]  # fmt: skip
        kept = git(repository, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)")
        assert set(kept.split()) == set(
            git(repository, "rev-list", "--objects", "--no-object-names", "--all").split()
        )


async def test_import_git_folder_as_one_commit(importing: Importing, origin: Path) -> None:
    url = importing.url()
    repository = await importing.make(
        importing.sources.tree(url, "Begin", folder="dir"), default_branch="trunk"
    )
    assert (set(files(repository)), repository.default_branch) == ({"three"}, "trunk")
    for missing, rev in (("dir", "v1"), ("one", None), ("nothing", None)):
        error = await importing.refused(
            importing.sources.tree(url, "Begin", folder=missing, rev=rev), SubdirNotFound
        )
        assert (error.source, error.folder) == (url, missing)
    await importing.refused(importing.sources.tree(url, "Begin", rev="missing"), ReferenceNotFound)
    importing.server.init("empty.git")
    await importing.refused(importing.sources.tree(importing.url("empty.git"), "Begin"), ReferenceNotFound)
