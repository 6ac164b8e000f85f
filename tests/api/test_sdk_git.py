"""Git repositories with the SDK: requests and parsed answers, against a scripted server.

Each test runs with both clients.
"""

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from stead import Stead
from stead.sdk import (
    Author,
    Branch,
    FileChange,
    FileEntry,
    FilesImport,
    GithubSync,
    GitImport,
    RepoFile,
    RepoFolder,
    Source,
    TarImport,
    ZipImport,
    errors,
)
from support import sdk_clients
from support.scripted_server import Drop, Pieces, Reply, Seen, Step, scripted
from support.sdk_clients import Client, close, done

REPO = "0f8fad5b-d9cb-469f-a165-70867728950e"
ROOT = f"/git/v1/repo/{REPO}"
ONE, TWO, THREE = "1" * 40, "2" * 40, "3" * 40
WHO = {"name": "Ann", "email": "ann@example.com", "date": "2026-01-31T12:00:00+02:00"}


async def attempt(client: Client, call: Callable[[Any], Any], *steps: Step) -> tuple[Any, list[Seen]]:
    """The result or the error of a call on a repository, and the requests that it sent."""
    return await sdk_clients.attempt(client, lambda stead: call(stead.git.repos.ref(REPO)), *steps)


def query(seen: Seen) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(seen.target).query).items()}


def commit(sha: str, *parents: str) -> dict[str, Any]:
    return {
        "sha": sha,
        "message": f"commit {sha[0]}",
        "author": WHO,
        "committer": WHO,
        "tree": {"sha": THREE},
        "parents": [{"sha": each} for each in parents],
    }


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


# Branches, tags, commits


async def test_branches_have_short_names(client: Client) -> None:
    """Names have no `refs/heads/` prefix, and may contain slashes."""
    listed = {"branches": [{"name": "main", "commit": ONE}, {"name": "a/b", "commit": None}]}
    found, seen = await attempt(client, lambda repo: repo.branches.list(), Reply(content=listed))
    assert found == [Branch("main", ONE), Branch("a/b")]
    assert seen[0].target == f"{ROOT}/git/refs/heads/"
    one = Reply(content={"name": "refs/heads/a/b", "sha": TWO})
    found, seen = await attempt(client, lambda repo: repo.branches.get("a/b"), one)
    assert found == Branch("a/b", TWO)
    assert seen[0].target == f"{ROOT}/git/refs/heads/a%2Fb"
    found, seen = await attempt(client, lambda repo: repo.branches.create("a/b"), one)
    assert found == Branch("a/b", TWO) and seen[0].json == {}
    _, seen = await attempt(client, lambda repo: repo.branches.create("a/b", TWO), one)
    assert (seen[0].method, seen[0].target, seen[0].json) == (
        "POST",
        f"{ROOT}/git/refs/heads/a%2Fb",
        {"sha": TWO},
    )
    found, _ = await attempt(
        client, lambda repo: repo.branches.get_default(), Reply(content={"defaultBranch": "trunk"})
    )
    assert found == "trunk"
    _, seen = await attempt(client, lambda repo: repo.branches.set_default("a/b"), Drop(), Reply())
    assert [(each.method, each.json) for each in seen] == [("PUT", {"defaultBranch": "a/b"})] * 2


async def test_tags(client: Client) -> None:
    tag = {"name": "v1", "sha": ONE, "target": {"sha": TWO}, "tagger": WHO, "message": "first"}
    light = {"name": "v0", "sha": TWO, "target": {"sha": TWO}, "tagger": None, "message": None}
    found, _ = await attempt(client, lambda repo: repo.tags.list(), Reply(content={"tags": [tag, light]}))
    assert [(each.name, each.sha, each.target, each.message) for each in found] == [
        ("v1", ONE, TWO, "first"),
        ("v0", TWO, TWO, None),
    ]
    found, seen = await attempt(client, lambda repo: repo.tags.get("rel/1"), Reply(content=tag))
    assert found.tagger.name == "Ann" and seen[0].target == f"{ROOT}/git/refs/tags/rel%2F1"


async def test_commits_are_paged(client: Client) -> None:
    page = {
        "commits": [commit(TWO, ONE), commit(ONE)],
        "count": 2,
        "limit": 2,
        "order": "desc",
        "total": 5,
        "next_commit": THREE,
    }
    found, seen = await attempt(
        client, lambda repo: repo.commits.list("dev", limit=2, until=TWO), Reply(content=page)
    )
    assert query(seen[0]) == {"branch": "dev", "limit": "2", "until": TWO}
    assert [each.sha for each in found] == [TWO, ONE]
    assert (found.total, found.next_commit, len(found)) == (5, THREE, 2)
    newest = found.commits[0]
    assert (newest.parents, newest.tree, newest.message) == ((ONE,), THREE, "commit 2")
    assert newest.author.date.utcoffset().total_seconds() == 7200
    found, seen = await attempt(client, lambda repo: repo.commits.get(ONE), Reply(content=commit(ONE)))
    assert found.sha == ONE and seen[0].target == f"{ROOT}/git/commits/{ONE}"


@pytest.mark.parametrize(
    ("order", "cursor", "other"), [("desc", "until", "since"), ("asc", "since", "until")]
)
async def test_iterate_fetches_all_pages_of_commits(
    client: Client, order: str, cursor: str, other: str
) -> None:
    """Each page names the first commit of the next; the other end of the range stays."""
    first = {"commits": [commit(ONE)], "next_commit": TWO}
    second = {"commits": [commit(TWO)], "next_commit": None}
    found, seen = await attempt(
        client,
        lambda repo: repo.commits.iterate(order=order, page_size=1, **{other: THREE}),
        Reply(content=first),
        Drop(),
        Reply(content=second),
    )
    assert [each.sha for each in found] == [ONE, TWO]
    common = {"limit": "1", "order": order, other: THREE, "disableTotalCount": "true"}
    assert [query(each) for each in seen] == [common, {**common, cursor: TWO}, {**common, cursor: TWO}]


async def test_commit_sends_file_changes(client: Client) -> None:
    def make(repo: Any) -> Any:
        return repo.commits.create(
            "why",
            {"a.txt": "text", "b.bin": b"\xff\x00", "old": None},
            branch="dev",
            author=Author("Ann", "ann@example.com"),
            expected_sha=ONE,
        )

    made, seen = await attempt(client, make, Reply(content={"commit": commit(TWO, ONE)}))
    assert made.sha == TWO and made.parents == (ONE,)
    files = [
        {"path": "a.txt", "content": "text", "encoding": "utf8"},
        {"path": "b.bin", "content": "/wA=", "encoding": "base64"},
        {"path": "old", "deleted": True},
    ]
    assert seen[0].json == {
        "message": "why",
        "files": files,
        "branch": "dev",
        "author": {"name": "Ann", "email": "ann@example.com"},
        "expectedSha": ONE,
    }
    changes = [FileChange("a.txt", "text"), FileChange("b.bin", b"\xff\x00"), FileChange("old", None)]
    _, seen = await attempt(
        client, lambda repo: repo.commits.create("why", changes), Reply(content={"commit": commit(TWO)})
    )
    assert seen[0].json == {"message": "why", "files": files}


async def test_commit_is_not_retried_once_sent(client: Client) -> None:
    error, seen = await attempt(
        client,
        lambda repo: repo.commits.create("m", {"a": "b"}, expected_sha=ONE),
        Drop(),
        Reply(content={"commit": commit(TWO)}),
    )
    assert isinstance(error, errors.ServerUnreachable) and error.sent and len(seen) == 1


async def test_revisions_are_compared(client: Client) -> None:
    answer = {
        "status": "diverged",
        "ahead_by": 2,
        "behind_by": 1,
        "total_commits": 2,
        "files": [
            {
                "filename": "b",
                "status": "renamed",
                "additions": 1,
                "deletions": 2,
                "changes": 3,
                "sha": ONE,
                "previous_filename": "a",
            }
        ],
    }
    found, seen = await attempt(client, lambda repo: repo.compare("main", "a/b"), Reply(content=answer))
    assert query(seen[0]) == {"base": "main", "head": "a/b"}
    assert (found.status, found.ahead_by, found.behind_by, found.total_commits) == ("diverged", 2, 1, 2)
    (file,) = found.files
    assert (file.path, file.previous_path, file.additions, file.deletions) == ("b", "a", 1, 2)


# Search


def content_page(*paths: str, more: bool) -> Reply:
    match = {
        "lineNumber": 3,
        "line": "say 😀 hello",
        "startColumn": 7,
        "endColumn": 12,
        "contextBefore": ["before"],
        "contextAfter": [],
    }
    files = [{"path": path, "extension": "py", "size": 9, "matches": [match]} for path in paths]
    return Reply(content={"totalFiles": 3, "totalMatches": 3, "hasMore": more, "files": files})


async def test_match_columns_count_characters(client: Client) -> None:
    """On the wire, columns are UTF-16 code units."""

    def search(repo: Any) -> Any:
        return repo.search(
            "hello",
            rev="v1",
            path_pattern="src/**",
            exclude_pattern="*.js",
            case_sensitive=True,
            is_regex=True,
            whole_word=True,
            max_results=2,
            offset=4,
        )

    found, seen = await attempt(client, search, Drop(), content_page("a.py", more=True))
    assert urlsplit(seen[1].target).path == f"{ROOT}/search"
    assert query(seen[1]) == {
        "query": "hello",
        "ref": "v1",
        "pathPattern": "src/**",
        "excludePattern": "*.js",
        "caseSensitive": "true",
        "isRegex": "true",
        "wholeWord": "true",
        "maxResults": "2",
        "offset": "4",
    }
    assert (found.total_files, found.total_matches, found.has_more, found.stopped_early) == (
        3,
        3,
        True,
        False,
    )
    (match,) = found.files[0].matches
    assert match.line[match.start_column : match.end_column] == "hello"
    assert (match.line_number, match.context_before, match.context_after) == (3, ("before",), ())


async def test_iterate_search_fetches_all_pages(client: Client) -> None:
    found, seen = await attempt(
        client,
        lambda repo: repo.iterate_search("hello", page_size=2),
        content_page("a", "b", more=True),
        content_page("c", more=False),
    )
    assert [each.path for each in found] == ["a", "b", "c"]
    assert [query(each) for each in seen] == [
        {"query": "hello", "maxResults": "2"},
        {"query": "hello", "maxResults": "2", "offset": "2"},
    ]


async def test_iterate_search_ends_at_an_empty_page(client: Client) -> None:
    found, seen = await attempt(
        client, lambda repo: repo.iterate_search("x"), content_page("a", more=True), content_page(more=True)
    )
    assert len(found) == 1 and len(seen) == 2


async def test_search_in_names_messages_and_diffs(client: Client) -> None:
    files = {"totalFiles": 1, "hasMore": False, "files": [{"path": "Makefile", "extension": None, "size": 4}]}
    for call in (lambda repo: repo.search_files("make"), lambda repo: repo.iterate_search_files("make")):
        found, seen = await attempt(client, call, Reply(content=files))
        assert [(each.path, each.extension) for each in found] == [("Makefile", None)]
        assert urlsplit(seen[0].target).path == f"{ROOT}/search/files"
    about = {"sha": ONE, "message": "fix", "authorName": "Ann", "authorEmail": "a@x"}
    about["timestamp"] = "2026-01-31T12:00:00Z"
    answer = {"totalCommits": 1, "hasMore": False, "commits": [{**about, "fullMessage": "fix\n\nmore"}]}
    for call in (lambda repo: repo.search_commits("fix"), lambda repo: repo.iterate_search_commits("fix")):
        found, seen = await attempt(client, call, Reply(content=answer))
        (one,) = found
        assert (one.message, one.full_message, one.author_name) == ("fix", "fix\n\nmore", "Ann")
        assert one.timestamp == datetime(2026, 1, 31, 12, tzinfo=UTC)
        assert urlsplit(seen[0].target).path == f"{ROOT}/search/commits"
    line = {"line": "old()", "lineNumber": 4, "startColumn": 0, "endColumn": 3, "isAddition": False}
    changed = {**about, "files": [{"path": "a.py", "matches": [line]}]}
    answer = {"totalCommits": 1, "hasMore": False, "stoppedEarly": True, "commits": [changed]}
    found, seen = await attempt(client, lambda repo: repo.search_diffs("old"), Reply(content=answer))
    (match,) = found.commits[0].files[0].matches
    assert (match.line[:3], match.is_addition, found.stopped_early) == ("old", False, True)
    assert urlsplit(seen[0].target).path == f"{ROOT}/search/diffs"
    found, _ = await attempt(client, lambda repo: repo.iterate_search_diffs("old"), Reply(content=answer))
    assert [each.sha for each in found] == [ONE]


# Triggers and GitHub


async def test_triggers(client: Client) -> None:
    def make(repo: Any) -> Any:
        return repo.triggers.create("https://x.test/hook", branches=["main"], globs=["*.js"])

    trigger_id, seen = await attempt(client, make, Reply(content={"triggerId": "t-1"}))
    assert trigger_id == "t-1" and seen[0].target == f"{ROOT}/trigger"
    assert seen[0].json == {
        "trigger": {"event": "push", "branches": ["main"], "globs": ["*.js"]},
        "action": {"action": "webhook", "endpoint": "https://x.test/hook"},
    }
    _, seen = await attempt(
        client, lambda repo: repo.triggers.create("https://x.test/"), Reply(content={"triggerId": "t"})
    )
    assert seen[0].json["trigger"] == {"event": "push"}
    row = {
        "id": "t-1",
        "repositoryId": REPO,
        "managed": False,
        "createdAt": "2026-01-31T12:00:00Z",
        "trigger": {"event": "push", "branches": ["main"]},
        "action": {"action": "webhook", "endpoint": "https://x.test/hook"},
    }
    (found,), _ = await attempt(client, lambda repo: repo.triggers.list(), Reply(content={"triggers": [row]}))
    assert (found.id, found.event, found.branches, found.globs) == ("t-1", "push", ("main",), None)
    assert (found.action, found.endpoint, found.repository_id) == ("webhook", "https://x.test/hook", REPO)
    sent = {"id": "d-1", "state": "failed", "body": "{}", "attempts": 9, "status": 500, "error": "500"}
    answer = {"deliveries": [sent], "offset": 3, "total": 4}
    found, seen = await attempt(
        client, lambda repo: repo.triggers.deliveries("t-1", limit=1, offset=3), Reply(content=answer)
    )
    assert seen[0].target == f"{ROOT}/trigger/t-1/deliveries?limit=1&offset=3"
    assert found.total == 4 and [(each.id, each.status) for each in found] == [("d-1", 500)]
    again = sent | {"id": "d-2", "state": "waiting", "redeliveryOf": "d-1"}
    found, seen = await attempt(
        client, lambda repo: repo.triggers.redeliver("t-1", "d-1"), Reply(content=again)
    )
    assert found.redelivery_of == "d-1"
    assert (seen[0].method, seen[0].target) == ("POST", f"{ROOT}/trigger/t-1/deliveries/d-1/redeliver")
    _, seen = await attempt(client, lambda repo: repo.triggers.delete("t-1"), Reply())
    assert (seen[0].method, seen[0].target) == ("DELETE", f"{ROOT}/trigger/t-1")


async def test_github_sync_is_none_if_not_enabled(client: Client) -> None:
    """A missing repository is an error."""
    for absent in (Reply(404, b"404 not configured"), Reply(404, {"code": "NOT_FOUND", "message": "404"})):
        found, _ = await attempt(client, lambda repo: repo.github_sync.get(), absent)
        assert found is None
    gone = Reply(404, {"code": "REPO_NOT_FOUND", "message": "no repository"})
    error, _ = await attempt(client, lambda repo: repo.github_sync.get(), gone)
    assert isinstance(error, errors.RepoNotFound)
    found, _ = await attempt(
        client, lambda repo: repo.github_sync.get(), Reply(content={"githubRepoName": "me/web"})
    )
    assert found == GithubSync("me/web")
    _, seen = await attempt(client, lambda repo: repo.github_sync.enable("me/web"), Reply())
    assert (seen[0].method, seen[0].json) == ("POST", {"githubRepoName": "me/web"})
    told = {
        "githubRepoName": "me/web",
        "state": "diverged",
        "divergences": [{"ref": "refs/heads/main", "here": ONE, "there": None, "reason": "deleted"}],
        "lastSyncedAt": "2026-01-31T12:00:00Z",
    }
    found, seen = await attempt(client, lambda repo: repo.github_sync.run(), Reply(content=told))
    assert (seen[0].method, seen[0].target) == ("POST", f"{ROOT}/github-sync/run")
    assert (found.state, found.divergences[0].here, found.divergences[0].there) == ("diverged", ONE, None)
    _, seen = await attempt(client, lambda repo: repo.github_sync.disable(), Reply())
    assert (seen[0].method, seen[0].target) == ("DELETE", f"{ROOT}/github-sync")


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
