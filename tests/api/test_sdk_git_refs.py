"""Branches, tags, commits, search, triggers and GitHub sync by the SDK, with both clients."""

from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import pytest

from stead.sdk import Author, Branch, FileChange, GithubSync, errors
from support.scripted_server import Drop, Reply
from support.sdk_clients import Client
from support.sdk_git_calls import ONE, REPO, ROOT, THREE, TWO, WHO, attempt, commit, query

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

    made, seen = await attempt(client, make, Reply(content={"triggerId": "t-1"}))
    assert (made.id, str(made), made.branches, made.globs) == ("t-1", "t-1", ("main",), ("*.js",))
    assert (made.endpoint, made.repository_id) == ("https://x.test/hook", REPO)
    assert seen[0].target == f"{ROOT}/trigger"
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
        client, lambda repo: repo.triggers.deliveries(made, limit=1, offset=3), Reply(content=answer)
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
