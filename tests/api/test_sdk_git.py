"""Repositories and their contents by the SDK, with both clients."""

import base64
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stead import Stead
from stead.sdk import (
    Branch,
    FileEntry,
    FilesImport,
    GitImport,
    RepoFile,
    RepoFolder,
    Source,
    TarImport,
    ZipImport,
    errors,
)
from support.scripted_server import Drop, Pieces, Reply, scripted
from support.sdk_clients import Client, close, done
from support.sdk_git_calls import ONE, REPO, ROOT, THREE, TWO, attempt, query

# Repositories


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ({}, {"public": False}),
        (
            {"name": "web", "public": True, "default_branch": "trunk"},
            {"name": "web", "public": True, "defaultBranch": "trunk"},
        ),
        (
            {"source": "https://git.test/a"},
            {"public": False, "source": {"url": "https://git.test/a"}},
        ),
        (
            {"source": Source("https://git.test/a", rev="v1", depth=3, all_branches=True)},
            {
                "public": False,
                "source": {"url": "https://git.test/a", "rev": "v1", "depth": 3, "allBranches": True},
            },
        ),
        (
            {"import_": FilesImport(files={"a_b/c": "text"}, commit_message="m", author_name="Ann")},
            {
                "public": False,
                "import": {
                    "type": "files",
                    "files": {"a_b/c": "text"},
                    "commitMessage": "m",
                    "authorName": "Ann",
                },
            },
        ),
        (
            {"import_": TarImport(url="https://x.test/a.tar", dir="src", commit_message="m")},
            {
                "public": False,
                "import": {
                    "type": "tar",
                    "url": "https://x.test/a.tar",
                    "dir": "src",
                    "commitMessage": "m",
                },
            },
        ),
        (
            {"import_": ZipImport(url="https://x.test/a.zip", commit_message="m")},
            {"public": False, "import": {"type": "zip", "url": "https://x.test/a.zip", "commitMessage": "m"}},
        ),
        (
            {"import_": GitImport(url="https://x.test/a", rev="v1", commit_message="m")},
            {
                "public": False,
                "import": {"type": "git", "url": "https://x.test/a", "rev": "v1", "commitMessage": "m"},
            },
        ),
    ],
)
async def test_create_sends_the_description_of_a_repository(
    client: Client, options: dict[str, Any], body: dict[str, Any]
) -> None:
    with scripted(Reply(content={"repoId": REPO})) as server:
        stead = client(server.url)
        repo = await done(stead.git.repos.create(**options))
        assert repo.id == REPO and REPO in repr(repo)
        assert repo.clone_url() == f"{server.url}/{REPO}"
        await close(stead)
    assert (server.seen[0].method, server.seen[0].target) == ("POST", "/git/v1/repo")
    assert server.seen[0].json == body


async def test_create_is_not_retried_once_sent(client: Client) -> None:
    """A lost request and a lost answer look the same."""
    with scripted(Drop(), Reply(content={"repoId": REPO})) as server:
        stead = client(server.url)
        with pytest.raises(errors.ServerUnreachable) as caught:
            await done(stead.git.repos.create())
        with pytest.raises(ValueError, match="not both"):
            both = {"source": "u", "import_": FilesImport(files={}, commit_message="m")}
            await done(stead.git.repos.create(**both))
        await close(stead)
    assert caught.value.sent and len(server.seen) == 1


async def test_repositories_are_listed_with_their_branches_and_tags(client: Client) -> None:
    row = {
        "id": REPO,
        "repoId": REPO,
        "name": "web",
        "visibility": "private",
        "createdAt": "2026-01-31T12:00:00Z",
        "defaultBranch": "main",
        "branches": {
            "main": {"name": "main", "default": True, "target": ONE},
            "new": {"name": "new", "default": False},
        },
        "tags": {"v1": {"name": "v1", "target": TWO, "message": "first"}},
    }
    answer = {"repositories": [row, {"repoId": "other", "branches": {}, "tags": {}}], "total": 7, "offset": 2}
    with scripted(Reply(content=answer), Reply(content=row)) as server:
        stead = client(server.url)
        found = await done(stead.git.repos.list(limit=2, offset=2, search="we b"))
        info = await done(stead.git.repos.ref(REPO).info())
        await close(stead)
    assert [each.id for each in found] == [REPO, "other"]
    assert (len(found), found.total, found.offset) == (2, 7, 2)
    assert query(server.seen[0]) == {"limit": "2", "offset": "2", "search": "we b"}
    assert server.seen[1].target == ROOT
    assert info == found.repos[0]
    assert (info.name, info.visibility, info.default_branch) == ("web", "private", "main")
    assert info.created_at == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert info.branches == {"main": Branch("main", ONE), "new": Branch("new")}
    assert (info.tags["v1"].target, info.tags["v1"].message) == (TWO, "first")


async def test_retried_delete_that_finds_nothing_has_succeeded(client: Client) -> None:
    gone = Reply(404, {"code": "REPO_NOT_FOUND", "message": "no repository", "repoId": REPO})
    result, seen = await attempt(client, lambda repo: repo.delete(), Drop(), gone)
    assert result is None
    assert [(each.method, each.target) for each in seen] == [("DELETE", ROOT)] * 2
    error, _ = await attempt(client, lambda repo: repo.delete(), gone)
    assert isinstance(error, errors.RepoNotFound) and error.repo_id == REPO


@pytest.mark.parametrize(
    ("base", "options", "url"),
    [
        ("http://box:8600/", {}, f"http://box:8600/{REPO}"),
        ("https://box/below", {}, f"https://box/below/{REPO}"),
        ("https://box", {"token": "stid_a/b"}, f"https://x-access-token:stid_a%2Fb@box/{REPO}"),
        ("https://me:secret@box", {"token": "t"}, f"https://x-access-token:t@box/{REPO}"),
        ("https://box", {"base_url": "https://git.test/"}, f"https://git.test/{REPO}"),
    ],
)
def test_clone_url(base: str, options: dict[str, str], url: str) -> None:
    with Stead("key", base_url=base) as stead:
        assert stead.git.repos.ref(REPO).clone_url(**options) == url


# Contents


async def test_contents_of_a_file(client: Client) -> None:
    data = "grüße\n".encode()
    answer = {
        "type": "file",
        "name": "a b.txt",
        "path": "src/a b.txt",
        "sha": ONE,
        "size": len(data),
        "content": base64.b64encode(data).decode(),
    }
    for call, wanted in (
        (lambda repo: repo.contents.get("src/a b.txt", "v1"), None),
        (lambda repo: repo.contents.read_bytes("/src/a b.txt", rev="v1"), data),
        (lambda repo: repo.contents.read_text(Path("src/a b.txt"), rev="v1"), "grüße\n"),
    ):
        found, seen = await attempt(client, call, Drop(), Reply(content=answer))
        query = "rev=v1&recursive=false" if wanted is None else "rev=v1"
        assert [each.target for each in seen] == [f"{ROOT}/contents/src%2Fa%20b.txt?{query}"] * 2
        if wanted is None:
            assert isinstance(found, RepoFile)
            assert (found.content, found.text(), found.size) == (data, "grüße\n", len(data))
        else:
            assert found == wanted


async def test_contents_of_a_folder(client: Client) -> None:
    def file(path: str) -> dict[str, Any]:
        return {"type": "file", "name": path.rpartition("/")[2], "path": path, "sha": ONE, "size": 3}

    inner = {"type": "dir", "name": "b", "path": "a/b", "sha": TWO, "entries": [file("a/b/c")]}
    answer = {"type": "dir", "name": "a", "path": "a", "sha": THREE, "entries": [inner, file("a/d")]}
    found, seen = await attempt(
        client, lambda repo: repo.contents.get("a", recursive=True), Reply(content=answer)
    )
    assert seen[0].target == f"{ROOT}/contents/a?recursive=true"
    assert isinstance(found, RepoFolder) and len(found) == 2
    assert [type(entry) for entry in found] == [RepoFolder, FileEntry]
    assert [entry.path for entry in found.files()] == ["a/b/c", "a/d"]
    for root in ("", "/", "."):

        def get(repo: Any, path: str = root) -> Any:
            return repo.contents.get(path)

        _, seen = await attempt(client, get, Reply(content=answer))
        assert seen[0].target == f"{ROOT}/contents/?recursive=false"
    with pytest.raises(IsADirectoryError, match="a in the repository"):
        await attempt(client, lambda repo: repo.contents.read_text("a"), Reply(content=answer))


async def test_subfolder_that_was_not_listed_is_not_empty(client: Client) -> None:
    inner = {"type": "dir", "name": "b", "path": "a/b", "sha": TWO}
    empty = {"type": "dir", "name": "c", "path": "a/c", "sha": TWO, "entries": []}
    answer = {"type": "dir", "name": "a", "path": "a", "sha": THREE, "entries": [inner, empty]}
    found, _ = await attempt(client, lambda repo: repo.contents.get("a"), Reply(content=answer))
    unlisted, listed = found
    assert unlisted.entries is None and listed.entries == ()
    assert list(listed) == [] and list(found.files()) == []
    for use in (len, list, lambda folder: list(folder.files())):
        with pytest.raises(ValueError, match="entries of 'a/b' were not listed"):
            use(unlisted)


async def test_archive_is_returned_or_written_to_a_file(client: Client, tmp_path: Path) -> None:
    pieces = [b"one", b"two"]
    found, seen = await attempt(client, lambda repo: repo.contents.download_tarball("v1"), Pieces(pieces))
    assert found == b"onetwo" and seen[0].target == f"{ROOT}/tarball?rev=v1"
    target = tmp_path / "all.zip"
    found, seen = await attempt(client, lambda repo: repo.contents.download_zip(to=target), Pieces(pieces))
    assert found == target and target.read_bytes() == b"onetwo"
    assert seen[0].target == f"{ROOT}/zip"


async def test_interrupted_archive_download_keeps_the_old_file(client: Client, tmp_path: Path) -> None:
    target = tmp_path / "all.zip"
    target.write_text("old")
    broken = Pieces([b"half"], complete=False)
    error, _ = await attempt(client, lambda repo: repo.contents.download_zip(to=target), broken)
    assert isinstance(error, errors.ServerUnreachable)
    missing = Reply(404, {"code": "REFERENCE_NOT_FOUND", "message": "no v9"})
    error, _ = await attempt(client, lambda repo: repo.contents.download_zip("v9", to=target), missing)
    assert isinstance(error, errors.RevisionNotFound)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("all.zip", "old")]


async def test_blobs_and_trees_by_object_id(client: Client) -> None:
    blob = {"sha": ONE, "size": 2, "encoding": "base64", "content": "aGk="}
    found, seen = await attempt(client, lambda repo: repo.blobs.get(ONE), Reply(content=blob))
    assert found.content == b"hi" and seen[0].target == f"{ROOT}/git/blobs/{ONE}"
    tree = {
        "sha": TWO,
        "tree": [
            {"path": "a", "sha": ONE, "type": "blob", "size": 2, "mode": "100644"},
            {"path": "b", "sha": THREE, "type": "tree", "mode": "040000"},
        ],
    }
    found, seen = await attempt(client, lambda repo: repo.trees.get(TWO), Reply(content=tree))
    assert [(entry.path, entry.type, entry.size) for entry in found] == [
        ("a", "blob", 2),
        ("b", "tree", None),
    ]
    assert seen[0].target == f"{ROOT}/git/trees/{TWO}"


async def test_content_that_is_not_base64_is_an_unexpected_answer(client: Client) -> None:
    odd = {"type": "file", "name": "a", "path": "a", "sha": ONE, "size": 1, "content": "!"}
    error, _ = await attempt(client, lambda repo: repo.contents.get("a"), Reply(content=odd))
    assert isinstance(error, errors.UnexpectedAnswer)


# Errors


@pytest.mark.parametrize(
    ("status", "code", "kind", "family"),
    [
        (400, "INVALID_REVISION", errors.InvalidRevision, errors.InvalidRequest),
        (400, "AMBIGUOUS", errors.InvalidRevision, errors.InvalidGitRequest),
        (400, "BRANCH_NAME_EMPTY", errors.InvalidBranchName, errors.InvalidGitRequest),
        (400, "INVALID_FILE_PATH", errors.InvalidFileChange, errors.InvalidGitRequest),
        (400, "DIFF_INVALID_REGEX", errors.InvalidSearch, errors.InvalidRequest),
        (400, "SOURCE_UNAUTHORIZED", errors.InvalidSource, errors.InvalidRequest),
        (400, "GIT_INVALID_REQUEST", errors.InvalidGitRequest, errors.InvalidRequest),
        (403, "REPOSITORY_ACCESS_DENIED", errors.RepoAccessDenied, errors.Forbidden),
        (403, "GIT_REPO_LIMIT_EXCEEDED", errors.RepoLimitExceeded, errors.LimitExceeded),
        (404, "REPOSITORY_NOT_FOUND", errors.RepoNotFound, errors.NotFound),
        (404, "BRANCH_NOT_FOUND", errors.BranchNotFound, errors.RevisionNotFound),
        (404, "TAG_NOT_FOUND", errors.TagNotFound, errors.RevisionNotFound),
        (404, "COMMIT_NOT_FOUND", errors.CommitNotFound, errors.NotFound),
        (404, "BLOB_NOT_FOUND", errors.ObjectNotFound, errors.NotFound),
        (404, "PATH_NOT_FOUND", errors.PathNotFound, errors.NotFound),
        (409, "BRANCH_ALREADY_EXISTS", errors.BranchAlreadyExists, errors.AlreadyExists),
        (409, "REPO_ALREADY_EXISTS", errors.RepoAlreadyExists, errors.Conflict),
        (409, "CONFLICTING_PARENT", errors.ConflictingParent, errors.Conflict),
        (409, "GIT_HUB_SYNC_CONFLICT", errors.GithubSyncConflict, errors.Conflict),
        (500, "GIT_ERROR", errors.GitError, errors.ServerError),
    ],
)
async def test_git_error_codes_select_the_exception_class(
    client: Client,
    status: int,
    code: str,
    kind: type[errors.SteadApiError],
    family: type[errors.SteadApiError],
) -> None:
    step = Reply(status, {"code": code, "message": "this is why"})
    error, _ = await attempt(client, lambda repo: repo.commits.create("m", {}), step)
    assert type(error) is kind and isinstance(error, family) and not error.retryable


async def test_conflicting_parent_has_the_actual_commit(client: Client) -> None:
    facts = {"code": "CONFLICTING_PARENT", "message": "moved", "expected": ONE, "actual": TWO}
    error, _ = await attempt(
        client, lambda repo: repo.commits.create("m", {"a": "b"}, expected_sha=ONE), Reply(409, facts)
    )
    assert isinstance(error, errors.ConflictingParent)
    assert (error.expected, error.actual) == (ONE, TWO)
