"""`stead git` as typed by a user, with the real git and a real server."""

import asyncio
import json
import os
import pty
import re
import signal
import stat
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from stead import AsyncStead
from stead.cli.main import app
from stead.sdk import ConflictingParent, RepoFile, RepoFolder, RepoNotFound
from support.git_client import GitClient
from support.git_hosting import RepoServer, served
from support.process_tree import own_command_lines
from support.run_cli import PROGRAM, Result, Shell
from support.scripted_server import Pieces, Reply, scripted
from support.waiting import until

UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
NOWHERE = "00000000-0000-4000-8000-000000000000"


class Inside(Shell):
    """Runs commands in this process, which is faster than a new one."""

    async def try_(
        self, *arguments: str | Path, stdin: bytes = b"", environment: Mapping[str, str] | None = None
    ) -> Result:
        typed = [str(each) for each in arguments]
        told = {"STEAD_API_URL": self.url, "STEAD_API_KEY": self.key, **(environment or {})}
        ran = await asyncio.to_thread(CliRunner().invoke, app, typed, input=stdin, env=told)
        assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exc_info
        return Result(typed, ran.exit_code, ran.stdout, ran.stderr)


@pytest_asyncio.fixture(scope="module")
async def repo_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RepoServer]:
    async with served(tmp_path_factory.mktemp("site")) as repo_server:
        yield repo_server


@pytest_asyncio.fixture
async def shell(
    repo_server: RepoServer, git: GitClient, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Shell]:
    """A user with an account, whose repositories and identities are removed afterwards."""
    for name, value in git.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(git.home)
    yield Shell(repo_server.url, repo_server.key)
    async with AsyncStead(repo_server.key, base_url=repo_server.url) as stead:
        for repo in await stead.git.repos.list(limit=100):
            await stead.git.repos.delete(repo.id)
        for identity in await stead.identities.list():
            await stead.identities.delete(identity.id)


@pytest.fixture
def inside(shell: Shell) -> Inside:
    return Inside(shell.url, shell.key)


async def identities(repo_server: RepoServer) -> list[str]:
    async with AsyncStead(repo_server.key, base_url=repo_server.url) as stead:
        return [each.id for each in await stead.identities.list()]


async def filled(
    repo_server: RepoServer, *, name: str | None = None, public: bool = False, key: str = ""
) -> str:
    """A repository with a commit; returns its id."""
    async with AsyncStead(key or repo_server.key, base_url=repo_server.url) as stead:
        repo = await stead.git.repos.create(name=name, public=public)
        await repo.commits.create("first", {"README.md": "# Hello\n", "src/a.py": "print(1)\n"})
        return repo.id


async def exists(path: Path) -> None:
    await until(lambda: path.exists(), 60)


# Create, list, show, delete


async def test_create_show_and_delete_repository(inside: Inside, repo_server: RepoServer) -> None:
    result = await inside.try_("git", "create", "--name", "web", "--default-branch", "trunk")
    repo_id = result.stdout.strip()
    assert result.returncode == 0 and UUID4.fullmatch(repo_id)
    assert f"{repo_server.url}/{repo_id}" in result.stderr
    made = await inside.ask("git", "create", "--public")
    assert made["clone_url"] == f"{repo_server.url}/{made['id']}"

    table = (await inside.run("git", "list")).splitlines()
    assert table[0].split() == ["id", "name", "visibility", "default", "branches", "tags", "size", "created"]
    assert table[2].split()[:7] == [repo_id, "web", "private", "trunk", "0", "0", "0"]
    assert (await inside.run("git", "list", "--quiet")).split() == [made["id"], repo_id]
    assert (await inside.run("git", "list", "--search", "we", "-q")).split() == [repo_id]
    listed = await inside.ask("git", "list", "--limit", "1")
    assert listed["total"] == 2 and [each["id"] for each in listed["repos"]] == [made["id"]]
    assert "1 more: --offset 1" in (await inside.try_("git", "list", "--limit", "1")).stderr
    assert (await inside.run("git", "list", "--offset", "1", "-q")).split() == [repo_id]

    for given in (repo_id, repo_id[:6], "web"):
        assert (await inside.ask("git", "get", given))["id"] == repo_id
    described = await inside.run("git", "get", "web")
    assert re.search(r"^default branch +trunk$", described, re.M)
    assert re.search(rf"^clone +{repo_server.url}/{repo_id}$", described, re.M)

    assert await inside.run("git", "delete", "web") == f"deleted {repo_id}\n"
    assert (await inside.ask("git", "delete", made["id"])) == {"repos": [{"id": made["id"], "deleted": True}]}
    assert (await inside.try_("git", "list")).stderr == "no repositories\n"


async def test_get_shows_branches_and_tags(inside: Inside, repo_server: RepoServer) -> None:
    repo_id = await filled(repo_server)
    async with AsyncStead(repo_server.key, base_url=repo_server.url) as stead:
        for number in range(12):
            await stead.git.repos.ref(repo_id).branches.create(f"b{number:02}")
    described = await inside.run("git", "get", repo_id)
    assert re.search(r"^branches +b00, .*b09 and 3 more$", described, re.M)
    assert len((await inside.ask("git", "get", repo_id))["branches"]) == 13


async def test_missing_repository_is_a_one_line_error(inside: Inside, repo_server: RepoServer) -> None:
    assert await inside.refused("git", "get", "absent") == "error: no repository 'absent' (REPO_NOT_FOUND)\n"
    for command in ("get", "delete", "clone"):
        refusal = await inside.refused("git", command, NOWHERE)
        assert re.search(rf"{NOWHERE} \(REPO_NOT_FOUND, trace \w+\)", refusal)
    theirs = await filled(repo_server, key=repo_server.their_key)
    assert "REPO_NOT_FOUND" in await inside.refused("git", "clone", theirs)
    two = [(await inside.ask("git", "create", "--name", "twin"))["id"] for _ in range(2)]
    refusal = await inside.refused("git", "delete", "twin")
    assert "matches 2 repositories" in refusal and all(each in refusal for each in two)
    assert await identities(repo_server) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("git", "create", "--source-rev", "main"),
        ("git", "list", "--limit", "0"),
        ("git", "list", "--limit", "101"),
        ("git", "search", NOWHERE),
        ("git", "clone"),
        ("vm", "create", "--repo", "site"),
        ("vm", "create", "--repo", "https://git.test/a"),
        ("vm", "create", "--repo", ":/srv/a"),
        ("vm", "create", "--repo", "site:srv"),
    ],
)
def test_invalid_options_are_usage_errors(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr


async def test_create_sends_source_url_unchanged() -> None:
    with scripted(Reply(content={"repoId": NOWHERE})) as server:
        await Inside(server.url, "key").run(
            "git", "create", "--source-url", "https://git.test/a", "--source-rev", "v1"
        )
    assert server.seen[0].json == {"public": False, "source": {"url": "https://git.test/a", "rev": "v1"}}


async def test_vm_create_takes_repositories_by_name_id_or_url() -> None:
    web = "11111111-0000-4000-8000-000000000000"
    listed = {"repositories": [{"id": web, "name": "web"}], "total": 1, "offset": 0}
    clones = ("web#v1:/srv/web", f"{NOWHERE}:/srv/a b", "https://me:secret@git.test:8080/a.git#b/c:/srv/c")
    with scripted(Reply(content=listed), Reply(content={"id": "x" * 20})) as server:
        options = [part for each in clones for part in ("--repo", each)]
        assert await Shell(server.url, "key").run("vm", "create", *options) == "x" * 20 + "\n"
    assert server.seen[1].json["spec"]["snapshot"]["git"]["repos"] == [
        {"repo": web, "path": "/srv/web", "rev": "v1"},
        {"repo": NOWHERE, "path": "/srv/a b"},
        {"repo": "https://me:secret@git.test:8080/a.git", "path": "/srv/c", "rev": "b/c"},
    ]


# Clones


async def test_clone_can_fetch_and_push(shell: Shell, repo_server: RepoServer, git: GitClient) -> None:
    """From any folder in it, after a move, and from a worktree; without the API key."""
    repo_id = await filled(repo_server, name="web")
    result = await shell.try_("git", "clone", "web")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"cloned {repo_id} into {git.home / 'web'}\n"
    moved = (git.home / "web").rename(git.home / "moved")
    assert (moved / "README.md").read_text() == "# Hello\n"
    await git.commit(moved, {"new.txt": "new\n"})
    await git("push", "-q", "origin", "HEAD:main", cwd=moved / "src")
    await git("worktree", "add", "-q", str(git.home / "tree"), "-b", "other", cwd=moved)
    sha = await git.commit(git.home / "tree", {"more.txt": "more\n"})
    await git("push", "-q", "origin", "other", cwd=git.home / "tree")
    async with AsyncStead(repo_server.key, base_url=repo_server.url) as stead:
        repo = stead.git.repos.ref(repo_id)
        assert await repo.contents.read_text("new.txt") == "new\n"
        assert (await repo.branches.get("other")).sha == sha
        assert [each.name for each in await stead.identities.list()] == ["clone of web"]
        other = await stead.identities.create(name="other")
        await other.permissions.git.grant(repo_id)
        await repo.delete()
        assert [each.name for each in await stead.identities.list()] == ["other"], "made for another purpose"


async def test_clone_token_file_is_private(shell: Shell, repo_server: RepoServer, git: GitClient) -> None:
    """Not in the output, the remote's URL, the configuration, or the user's credential helpers."""
    helper = git.home / "helper"
    helper.write_text(f"#!/bin/sh\ncat >> {git.home / 'heard'}\n")
    helper.chmod(0o755)
    await git("config", "--global", "credential.helper", str(helper))
    repo_id = await filled(repo_server)
    result = await shell.try_("git", "clone", repo_id, "here", "--json")
    assert result.returncode == 0, result.stderr
    clone = git.home / "here"
    token = (clone / ".git" / "stead-token").read_text().strip()
    assert token.startswith("stid_")
    await git("fetch", cwd=clone)
    texts = [result.stdout, result.stderr, await git("config", "--list", cwd=clone)]
    texts.append(await git("remote", "-v", cwd=clone))
    assert not any(token in text or repo_server.key in text for text in texts)
    assert not (git.home / "heard").exists()
    assert stat.S_IMODE((clone / ".git" / "stead-token").stat().st_mode) == 0o600

    told = json.loads(result.stdout)
    assert told["permission"] == "write" and told["path"] == str(clone)
    assert [told["identity_id"]] == await identities(repo_server)
    for key, name in (("identity_id", "identityId"), ("token_id", "tokenId"), ("repo_id", "repoId")):
        assert await git("config", f"stead.{name}", cwd=clone) == told[key]
    await shell.run("identity", "delete", told["identity_id"])
    ran = await git.run("fetch", cwd=clone)
    assert ran.status != 0 and token not in ran.err


async def test_clone_token_is_not_in_command_lines(
    shell: Shell, repo_server: RepoServer, git: GitClient
) -> None:
    """A git helper blocks during the clone until the test has inspected the processes."""
    repo_id = await filled(repo_server)
    await git("config", "--global", "core.hooksPath", str(git.home))
    hook = git.home / "post-checkout"
    hook.write_text('#!/bin/sh\ntouch begun\nwhile test ! -e "$HOME/go"; do sleep 0.05; done\n')
    hook.chmod(0o755)
    running = asyncio.create_task(shell.try_("git", "clone", repo_id, "here"))
    try:
        await exists(git.home / "here" / "begun")
        lines = own_command_lines().values()
        assert any(repo_id.encode() in line and b"clone" in line for line in lines)
        assert not any(b"stid_" in line for line in lines)
    finally:
        (git.home / "go").touch()
    assert (await running).returncode == 0


async def test_readonly_clone_cannot_push(shell: Shell, repo_server: RepoServer, git: GitClient) -> None:
    repo_id = await filled(repo_server)
    told = await shell.ask("git", "clone", repo_id, "here", "--readonly")
    assert told["permission"] == "read"
    await git("fetch", cwd=git.home / "here")
    await git.commit(git.home / "here", {"new.txt": "new\n"})
    assert (await git.run("push", "origin", "HEAD", cwd=git.home / "here")).status != 0


async def test_failed_clone_leaves_nothing(shell: Shell, repo_server: RepoServer, git: GitClient) -> None:
    repo_id = await filled(repo_server)
    full = git.home / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    refusal = await shell.refused("git", "clone", repo_id, "full")
    assert "already exists" in refusal and "error: git clone failed with exit code 128" in refusal
    assert [each.name for each in full.iterdir()] == ["file"]
    no_git = git.home / "bin"
    no_git.mkdir()
    result = await shell.try_("git", "clone", repo_id, "there", environment={"PATH": str(no_git)})
    assert (result.returncode, result.stderr) == (
        1,
        "error: git is not installed: install it and try again\n",
    )
    assert await identities(repo_server) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_clone_leaves_nothing(
    shell: Shell, repo_server: RepoServer, git: GitClient, number: signal.Signals
) -> None:
    """The server never ends its response."""
    repo_id = await filled(repo_server)
    with scripted(Pieces([], hold=True)) as server:
        await git("config", "--global", f"url.{server.url}/.insteadOf", f"{repo_server.url}/{repo_id}")
        process = await shell.start("git", "clone", repo_id, "here")

        await until(lambda: bool(server.seen), 60)
        assert len(await identities(repo_server)) == 1
        process.send_signal(number)
        async with asyncio.timeout(60):
            _, errors = await process.communicate()
    assert process.returncode == 128 + number, errors
    assert not (git.home / "here").exists()
    assert await identities(repo_server) == []


async def test_clone_in_a_git_hook(shell: Shell, repo_server: RepoServer, git: GitClient) -> None:
    repo_id = await filled(repo_server)
    around = await git.work_tree("around")
    result = await shell.try_("git", "clone", repo_id, "here", environment={"GIT_DIR": str(around / ".git")})
    assert result.returncode == 0, result.stderr
    assert await git("config", "stead.repoId", cwd=git.home / "here") == repo_id
    assert (await git.run("config", "stead.repoId", cwd=around)).status == 1


async def test_identity_clones_with_its_own_token(
    shell: Shell, repo_server: RepoServer, git: GitClient
) -> None:
    repo_id = await filled(repo_server)
    async with AsyncStead(repo_server.key, base_url=repo_server.url) as stead:
        identity = await stead.identities.create()
        await identity.permissions.git.grant(repo_id, permission="write")
        token = (await identity.tokens.create()).token
    theirs = Shell(repo_server.url, token)
    assert (await theirs.run("git", "list", "-q")).split() == [repo_id]
    told = await theirs.ask("git", "clone", repo_id[:8], "here")
    assert told["identity_id"] is None
    await git.commit(git.home / "here", {"new.txt": "new\n"})
    await git("push", "-q", "origin", "HEAD", cwd=git.home / "here")
    assert await identities(repo_server) == [identity.id]


async def test_public_repository_is_cloned_without_token(
    shell: Shell, repo_server: RepoServer, git: GitClient
) -> None:
    repo_id = await filled(repo_server, public=True, key=repo_server.their_key)
    told = await shell.ask("git", "clone", repo_id)
    assert told["path"] == str(git.home / repo_id) and told["identity_id"] is None
    assert not (git.home / repo_id / ".git" / "stead-token").exists()
    assert await identities(repo_server) == []


async def test_clone_with_lfs(shell: Shell, repo_server: RepoServer, git: GitClient) -> None:
    """git-lfs asks for the credentials of the server, not of the repository."""
    repo_id = await filled(repo_server)
    await shell.run("git", "clone", repo_id, "one")
    await git("lfs", "install", cwd=git.home)
    await git("lfs", "track", "*.bin", cwd=git.home / "one")
    await git.commit(git.home / "one", {"a.bin": b"\0large"})
    await git("push", "-q", "origin", "HEAD", cwd=git.home / "one")
    await shell.run("git", "clone", repo_id, "two")
    assert (git.home / "two" / "a.bin").read_bytes() == b"\0large"


# Search

FOUND = {
    "totalFiles": 3,
    "totalMatches": 4,
    "hasMore": True,
    "files": [
        {
            "path": "src/a.py",
            "extension": "py",
            "size": 10,
            "matches": [
                {"lineNumber": 1, "line": "\tsay hello", "startColumn": 5, "endColumn": 10},
                {"lineNumber": 30, "line": "hello \x1b[2J", "startColumn": 0, "endColumn": 5},
            ],
        }
    ],
}


async def test_search_finds_lines(inside: Inside, repo_server: RepoServer) -> None:
    repo_id = await filled(repo_server, name="web")
    assert await inside.run("git", "search", "web", "hello") == "README.md:1:# Hello\n"
    assert await inside.run("git", "search", "web", "hello", "--case") == ""
    assert await inside.run("git", "search", repo_id, r"^print\(\d", "--regex") == "src/a.py:1:print(1)\n"
    assert await inside.run("git", "search", repo_id, "print", "--exclude", "*.py") == ""
    assert "EMPTY_QUERY" in await inside.refused("git", "search", repo_id, "")
    assert "INVALID_REGEX" in await inside.refused("git", "search", repo_id, "(", "--regex")
    assert "REFERENCE_NOT_FOUND" in await inside.refused("git", "search", repo_id, "x", "--rev", "absent")


async def test_search_prints_like_grep() -> None:
    """File contents cannot control the terminal."""
    with scripted(Reply(content=FOUND), Reply(content=FOUND)) as server:
        inside = Inside(server.url, "key")
        result = await inside.try_(
            "git",
            "search",
            NOWHERE,
            "hello",
            *("--rev", "v1", "--path", "src/**", "--exclude", "*.js"),
            *("--regex", "--word", "--case", "--limit", "1", "--offset", "1"),
        )
        assert await inside.ask("git", "search", NOWHERE, "hello") | {"files": []} == {
            "files": [],
            "total_files": 3,
            "total_matches": 4,
            "has_more": True,
            "stopped_early": False,
        }
    assert (result.returncode, result.stdout) == (0, "src/a.py:1:\tsay hello\nsrc/a.py:30:hello \\x1b[2J\n")
    assert result.stderr == "1 more files: --offset 2\n"
    target = server.seen[0].target
    for part in (
        "ref=v1",
        "isRegex=true",
        "wholeWord=true",
        "caseSensitive=true",
        "maxResults=1",
        "offset=1",
    ):
        assert part in target
    assert "pathPattern=src" in target and "excludePattern=" in target


async def test_search_without_matches() -> None:
    nothing = {"totalFiles": 0, "totalMatches": 0, "hasMore": False, "files": []}
    stopped = nothing | {"stoppedEarly": True}
    refused = {"code": "INVALID_REGEX", "message": "a ( is not closed"}
    with scripted(Reply(content=nothing), Reply(content=stopped), Reply(400, refused)) as server:
        inside = Inside(server.url, "key")
        result = await inside.try_("git", "search", NOWHERE, "x")
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "nothing found\n")
        assert "the search stopped early" in (await inside.try_("git", "search", NOWHERE, "x")).stderr
        assert "a ( is not closed (INVALID_REGEX)" in await inside.refused(
            "git", "search", NOWHERE, "(", "-E"
        )


async def test_search_matches_are_coloured_on_a_terminal() -> None:
    def on_a_terminal(environment: Mapping[str, str]) -> str:
        ours, theirs = pty.openpty()
        command = [str(PROGRAM), "git", "search", NOWHERE, "hello"]
        try:
            subprocess.run(command, stdout=theirs, check=True, env=environment, timeout=60)
            return os.read(ours, 4096).decode()
        finally:
            os.close(theirs)
            os.close(ours)

    with scripted(Reply(content=FOUND)) as server:
        printed = await asyncio.to_thread(on_a_terminal, Shell(server.url, "key").environment)
    assert "\x1b[31m\x1b[1mhello\x1b[0m" in printed
    assert "\x1b[2J" not in printed


# SDK against the same server


async def test_repository_with_the_sdk(shell: Shell, repo_server: RepoServer, tmp_path: Path) -> None:
    async with AsyncStead(repo_server.key, base_url=repo_server.url) as stead:
        repo = await stead.git.repos.create(name="app")
        first = await repo.commits.create("first", {"a/b.txt": "one\n", "c.bin": b"\xff\0"})
        second = await repo.commits.create(
            "second", {"a/b.txt": "two\n", "c.bin": None}, expected_sha=first.sha
        )
        with pytest.raises(ConflictingParent) as caught:
            await repo.commits.create("late", {"a/b.txt": "three\n"}, expected_sha=first.sha)
        assert caught.value.actual == second.sha

        assert await repo.contents.read_text("a/b.txt") == "two\n"
        assert await repo.contents.read_bytes("c.bin", rev=first.sha) == b"\xff\0"
        everything = await repo.contents.get(recursive=True)
        assert isinstance(everything, RepoFolder)
        (file,) = everything.files()
        assert file.path == "a/b.txt" and (await repo.blobs.get(file.sha)).content == b"two\n"
        assert isinstance(await repo.contents.get("a/b.txt"), RepoFile)
        assert [entry.path for entry in await repo.trees.get(second.tree)] == ["a"]

        assert [commit.sha async for commit in repo.commits.iterate(page_size=1)] == [second.sha, first.sha]
        oldest = [commit.sha async for commit in repo.commits.iterate(order="asc", page_size=1)]
        assert oldest == [first.sha, second.sha]
        assert (await repo.commits.list()).total == 2
        assert (await repo.commits.get(first.sha)).message == "first"

        await repo.branches.create("dev/x", first.sha)
        await repo.branches.set_default("dev/x")
        assert await repo.branches.get_default() == "dev/x"
        assert [branch.name for branch in await repo.branches.list()] == ["dev/x", "main"]
        assert await repo.tags.list() == []
        compared = await repo.compare("dev/x", "main")
        assert (compared.status, compared.ahead_by) == ("ahead", 1)
        assert {file.path: file.status for file in compared.files} == {
            "a/b.txt": "modified",
            "c.bin": "removed",
        }

        (found,) = await repo.search("TWO", rev="main")
        assert found.path == "a/b.txt" and found.matches[0].line == "two"
        assert [file.path async for file in repo.iterate_search_files("b", rev="main")] == ["a/b.txt"]
        assert [commit.sha for commit in await repo.search_commits("sec", rev="main")] == [second.sha]
        (changed,) = await repo.search_diffs("one", rev="main", path_pattern="a/**", max_results=1)
        assert changed.sha == second.sha and not changed.files[0].matches[0].is_addition

        target = await repo.contents.download_zip("main", to=tmp_path / "app.zip")
        assert target.read_bytes()[:2] == b"PK"
        assert b"two\n" in await repo.contents.download_tarball("main")
        info = await repo.info()
        assert (info.name, info.default_branch, info.branches["main"].sha) == ("app", "dev/x", second.sha)
        await repo.delete()
        with pytest.raises(RepoNotFound):
            await repo.info()
