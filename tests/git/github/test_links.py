"""Links to GitHub repositories: what starts a sync, the command line, apps, tokens and names."""

import asyncio
import hashlib
import hmac
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from joserfc.jwk import RSAKey
from typer.testing import CliRunner

from stead import AsyncStead
from stead.api.github_sync import MAX_WEBHOOK
from stead.cli.main import app
from stead.errors import InvalidRequest
from stead.github.app import App, check_name
from stead.github.errors import GithubFailed, GithubNotConnected, GithubRefused, LinkConflict, NotLinked
from stead.github.links import Links, LinkState
from stead.repos.ssrf import SsrfGuard
from support.documents import commands, run_by
from support.git_client import GitClient
from support.git_hosting import RepoServer
from support.github import APP_ID, Github
from support.github_link import LIMIT, LOOPBACK, NAME, LinkedRepo, playing
from support.waiting import until

pytestmark = pytest.mark.heavy


# Events


async def test_local_change_starts_a_sync(repo_server: tuple[RepoServer, Github, GitClient]) -> None:
    """A commit and a branch that the API writes, in an installation as it is composed for users."""
    served, github, _ = repo_server
    github.webhook_url = None  # a webhook after the first push would start the second sync
    github.create(NAME)
    async with AsyncStead(served.key, base_url=served.url) as stead:
        repo = await stead.git.repos.create()
        await repo.github_sync.enable(NAME)
        await repo.github_sync.run()
        made = await repo.commits.create("first", {"README": "here\n"})
        await until(lambda: github.refs(NAME) == {"refs/heads/main": made.sha}, LIMIT)
        await repo.branches.create("topic")
        both = {"refs/heads/main": made.sha, "refs/heads/topic": made.sha}
        await until(lambda: github.refs(NAME) == both, LIMIT)


async def test_periodic_sync_without_webhooks(tmp_path: Path) -> None:
    async with playing(tmp_path, sync_every=0.2) as linked_repo:
        await linked_repo.enable()
        folder = await linked_repo.person.work_tree("work")
        await linked_repo.person("push", "-q", linked_repo.github.url(NAME), "main", cwd=folder)
        await until(linked_repo.same, LIMIT)


async def test_links_sync_at_start(linked_repo: LinkedRepo) -> None:
    await linked_repo.enable()
    folder = await linked_repo.person.work_tree("work")
    await linked_repo.person("push", "-q", linked_repo.github.url(NAME), "main", cwd=folder)
    again = Links(
        linked_repo.hosting.database,
        linked_repo.hosting.repos,
        linked_repo.hosting.writer,
        SsrfGuard(LOOPBACK),
    )
    async with again.running():
        await until(linked_repo.same, LIMIT)


async def test_webhook_and_push_start_a_sync(
    repo_server: tuple[RepoServer, Github, GitClient],
) -> None:
    """End to end: plain git on both sides, and the API."""
    served, github, person = repo_server
    github.create(NAME)
    async with AsyncStead(served.key, base_url=served.url) as stead:
        repo = await stead.git.repos.create()
        assert await repo.github_sync.get() is None
        await repo.github_sync.enable(NAME)
        work = await person.work_tree("work")
        await person("push", "-q", github.url(NAME), "main", cwd=work)
        here = f"{served.url.replace('://', f'://x-access-token:{served.key}@')}/{repo.id}"

        async def arrived() -> bool:
            theirs = await person("ls-remote", "--heads", here)
            return theirs == await person("ls-remote", "--heads", github.url(NAME))

        await until(arrived, LIMIT)
        assert set(github.sent) == {(NAME, 200)}
        pushed = await person.commit(work, {"more": "more\n"})
        await person("push", "-q", here, "main", "main:topic", cwd=work)

        await until(
            lambda: github.refs(NAME) == {"refs/heads/main": pushed, "refs/heads/topic": pushed}, LIMIT
        )
        link = await repo.github_sync.run()
        assert (link.github_repo_name, link.state, link.divergences) == (NAME, "in_step", ())
        # Visible to git and the API.
        assert "stead" not in await person("ls-remote", here)
        await repo.github_sync.disable()
        assert await repo.github_sync.get() is None


async def test_unsigned_webhook_is_refused(
    repo_server: tuple[RepoServer, Github, GitClient],
) -> None:
    _, github, _ = repo_server
    github.create(NAME)
    url = str(github.webhook_url)
    body, headers = github.webhook(NAME, "push")
    async with httpx2.AsyncClient() as client:
        answer = await client.post(url, content=body, headers=headers)
        assert (answer.status_code, answer.json()) == (200, {})
        for changed in (
            {"X-Hub-Signature-256": github.webhook(NAME, "push", "another secret")[1]["X-Hub-Signature-256"]},
            {"X-Hub-Signature-256": ""},
            {"X-GitHub-Hook-Installation-Target-ID": "1"},
        ):
            answer = await client.post(url, content=body, headers=headers | changed)
            assert (answer.status_code, answer.json()["code"]) == (401, "UNAUTHORIZED_ERROR")
        answer = await client.post(url, content=body + b" ", headers=headers)
        assert answer.status_code == 401
        answer = await client.post(url, content=b"x" * (MAX_WEBHOOK + 1), headers=headers)
        assert answer.status_code == 413
        # Signed, but without a repository.
        for odd in (b"{}", b"[]", b'{"repository": {"id": "x"}}', b"not JSON"):
            signed = hmac.new(github.webhook_secret.encode(), odd, hashlib.sha256).hexdigest()
            told = headers | {"X-Hub-Signature-256": f"sha256={signed}"}
            assert (await client.post(url, content=odd, headers=told)).status_code == 200


# Command line


async def test_connect_app_and_sync_with_the_cli(
    repo_server: tuple[RepoServer, Github, GitClient], tmp_path: Path
) -> None:
    served, github, _ = repo_server
    github.create(NAME)
    key = tmp_path / "key.pem"
    key.write_text(github.app.private_key)
    told = {
        "STEAD_DATA": str(tmp_path / "stead"),
        "STEAD_DIAL_PRIVATE": "127.0.0.0/8",
        "STEAD_GIT_URL": "https://git.example.com",
        "STEAD_API_URL": served.url,
        "STEAD_API_KEY": served.key,
    }

    async def typed(*arguments: str, status: int = 0) -> str:
        ran = await asyncio.to_thread(CliRunner().invoke, app, arguments, env=told)
        assert ran.exit_code == status, ran.output
        return ran.output if status else ran.stdout

    options = "--app-id", APP_ID, "--private-key", str(key), "--url", github.server.url
    made = json.loads(await typed("github", "connect", *options, "--account", "ours", "--json"))
    assert made["webhook_url"] == "https://git.example.com/github/webhooks"
    assert made["slug"] == "stead-tests" and len(made["webhook_secret"]) > 30
    shown = await typed("github", "show", "--account", "ours")
    assert APP_ID in shown and made["webhook_secret"] not in shown and "PRIVATE KEY" not in shown
    wrong = tmp_path / "wrong.pem"
    wrong.write_text(RSAKey.generate_key(2048).as_pem(private=True).decode())
    said = await typed("github", "connect", *options[:3], str(wrong), *options[4:], status=1)
    assert "rejected the App" in said

    async with AsyncStead(served.key, base_url=served.url) as stead:
        repo = await stead.git.repos.create()
        await repo.commits.create("first", {"README.md": "# Hello\n"})
    assert "GitHub sync is off" in await typed("git", "sync", repo.id)
    linked = json.loads(await typed("git", "sync", repo.id, "--with", NAME, "--now", "--json"))
    assert linked["github_sync"]["state"] == "in_step"
    assert list(github.refs(NAME)) == ["refs/heads/main"]
    assert NAME in await typed("git", "sync", repo.id)
    github.protect(NAME, "refs/heads/main")
    async with AsyncStead(served.key, base_url=served.url) as stead:
        await stead.git.repos.ref(repo.id).commits.create("second", {"README.md": "# Hello!\n"})
    assert "GitHub rejected it" in await typed("git", "sync", repo.id, "--now", status=1)
    assert "--off" in await typed("git", "sync", repo.id, "--off", "--now", status=2)
    assert "GitHub sync is off" in await typed("git", "sync", repo.id, "--off")
    await typed("github", "disconnect", "--account", "ours")
    assert "stead github connect" in await typed("github", "show", "--account", "ours", status=1)
    assert "stead github connect" in await typed("git", "sync", repo.id, "--with", NAME, status=1)


async def test_commands_and_program_of_the_page(
    repo_server: tuple[RepoServer, Github, GitClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the stand-in in the place of GitHub."""
    served, github, _ = repo_server
    connect, sync, program = run_by(__file__, "docs/github.md")
    github.create("owner/site")
    (tmp_path / "my-app.private-key.pem").write_text(github.app.private_key)
    monkeypatch.chdir(tmp_path)
    told = {
        "STEAD_DATA": str(tmp_path / "stead"),
        "STEAD_DIAL_PRIVATE": "127.0.0.0/8",
        "STEAD_API_URL": served.url,
        "STEAD_API_KEY": served.key,
    }

    async def typed(line: str, *more: str) -> str:
        words = [*shlex.split(line)[1:], *more]
        ran = await asyncio.to_thread(CliRunner().invoke, app, words, env=told)
        assert ran.exit_code == 0, ran.output
        return ran.stdout

    (line,) = (command.line for command in commands(connect.body))
    await typed(line.replace("123456", APP_ID), "--url", github.server.url, "--account", "ours")
    async with AsyncStead(served.key, base_url=served.url) as stead:
        repo = await stead.git.repos.create(name="site")
        await repo.commits.create("first", {"README.md": "# Hello\n"})
    start, show, end = [command.line for command in commands(sync.body)]
    assert "in_step" in await typed(start) and "owner/site" in await typed(show)
    assert list(github.refs("owner/site")) == ["refs/heads/main"]
    assert "GitHub sync is off" in await typed(end)
    async with AsyncStead(served.key, base_url=served.url) as stead:
        await stead.git.repos.ref(repo.id).commits.create("second", {"README.md": "# Hello!\n"})
    before = github.refs("owner/site")
    command = [sys.executable, "-c", program.body]
    ran = await asyncio.to_thread(
        subprocess.run, command, env=os.environ | told, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0 and "in_step" in ran.stdout, ran.stderr
    assert github.refs("owner/site") != before
    assert "GitHub sync is off" in await typed(show)


# Links


async def test_account_without_app_cannot_sync(linked_repo: LinkedRepo) -> None:
    info = await linked_repo.hosting.repos.create(linked_repo.hosting.theirs)
    with pytest.raises(GithubNotConnected, match="stead github connect"):
        await linked_repo.links.enable(linked_repo.hosting.theirs, info.id, NAME)


async def test_app_needs_installation_and_write_permission(linked_repo: LinkedRepo) -> None:
    hosted = linked_repo.github.repos[NAME]
    hosted.installed = False
    with pytest.raises(GithubRefused, match="install"):
        await linked_repo.links.enable(linked_repo.hosting.ours, linked_repo.repository.id, NAME)
    hosted.installed = True
    hosted.contents = "read"
    with pytest.raises(GithubRefused, match="may not write"):
        await linked_repo.links.enable(linked_repo.hosting.ours, linked_repo.repository.id, NAME)
    with pytest.raises(GithubRefused, match="octo/nothing"):
        await linked_repo.links.enable(linked_repo.hosting.ours, linked_repo.repository.id, "octo/nothing")
    with pytest.raises(NotLinked):
        await linked_repo.links.get(linked_repo.repository.id)


async def test_app_with_wrong_key_is_refused(linked_repo: LinkedRepo) -> None:
    known = linked_repo.github.app
    key = RSAKey.generate_key(2048).as_pem(private=True).decode()
    other = App(known.id, key, "secret", known.url, known.api_url)
    await linked_repo.links.apps.connect(linked_repo.hosting.ours, other)
    with pytest.raises(GithubRefused, match="rejected the App"):
        await linked_repo.links.enable(linked_repo.hosting.ours, linked_repo.repository.id, NAME)


async def test_unreachable_github_is_reported_and_retried(tmp_path: Path) -> None:
    async with playing(tmp_path, retry=[0.1]) as linked_repo:
        await linked_repo.enable()
        linked_repo.github.down = True
        with pytest.raises(GithubFailed, match="503"):
            await linked_repo.links.enable(linked_repo.hosting.ours, linked_repo.repository.id, "octo/other")
        await linked_repo.commit("README")
        link = await linked_repo.sync()
        assert link.state is LinkState.FAILED and "503" in str(link.error)
        linked_repo.github.down = False
        await until(linked_repo.same, LIMIT)

        async def well() -> bool:
            return (await linked_repo.links.get(linked_repo.repository.id)).state is LinkState.SYNCED

        await until(well, LIMIT)
        assert (await linked_repo.links.get(linked_repo.repository.id)).error is None


async def test_repository_has_at_most_one_link(linked_repo: LinkedRepo) -> None:
    linked_repo.github.create("octo/other")
    await linked_repo.enable()
    assert (
        await linked_repo.links.enable(linked_repo.hosting.ours, linked_repo.repository.id, f"{NAME}.git")
    ).name == NAME
    with pytest.raises(LinkConflict, match=NAME):
        await linked_repo.links.enable(linked_repo.hosting.ours, linked_repo.repository.id, "octo/other")
    second = await linked_repo.hosting.repository()
    with pytest.raises(LinkConflict, match="another repository"):
        await linked_repo.links.enable(linked_repo.hosting.ours, second.id, NAME)
    # Another account with its own App may have its own copy.
    await linked_repo.links.apps.connect(linked_repo.hosting.theirs, linked_repo.github.app)
    info = await linked_repo.hosting.repos.create(linked_repo.hosting.theirs)
    await linked_repo.links.enable(linked_repo.hosting.theirs, info.id, NAME)


async def test_disabled_sync_leaves_both_sides_alone(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    before = linked_repo.there
    await linked_repo.links.disable(linked_repo.repository.id)
    await linked_repo.commit("more")
    await linked_repo.links.refs_changed(linked_repo.repository.id)
    with pytest.raises(NotLinked):
        await linked_repo.sync()
    with pytest.raises(NotLinked):
        await linked_repo.links.disable(linked_repo.repository.id)
    kept = await linked_repo.repository.git.run(linked_repo.repository.path, "for-each-ref", "refs/stead/")
    assert kept == b"" and linked_repo.there == before
    # Enabled again, the two are still related.
    assert (await linked_repo.enable()).state is LinkState.SYNCED
    assert await linked_repo.same()


async def test_deleted_repository_has_no_link(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    before = linked_repo.there
    await linked_repo.hosting.repos.delete(linked_repo.repository.id)
    with pytest.raises(NotLinked):
        await linked_repo.sync()
    assert linked_repo.there == before
    second = await linked_repo.hosting.repository()
    await linked_repo.links.enable(linked_repo.hosting.ours, second.id, NAME)


async def test_renamed_github_repository_is_found(linked_repo: LinkedRepo) -> None:
    await linked_repo.enable()
    linked_repo.github.rename(NAME, "octo/site")
    link = await linked_repo.sync()
    assert link.state is LinkState.FAILED
    body, headers = linked_repo.github.webhook("octo/site", "repository")
    apps = await linked_repo.links.apps.by_app_id(linked_repo.github.app.id)
    assert not await linked_repo.links.receive_webhook(apps, headers["X-Hub-Signature-256"], body + b" ")
    assert await linked_repo.links.receive_webhook(apps, headers["X-Hub-Signature-256"], body)
    await linked_repo.commit("README")
    link = await linked_repo.sync()
    assert (link.name, link.state) == ("octo/site", LinkState.SYNCED)
    assert linked_repo.github.refs("octo/site") == await linked_repo.here()


# Tokens


async def test_token_is_cached_until_near_expiry(linked_repo: LinkedRepo) -> None:
    linked_repo.github.lifetime = 300
    await linked_repo.enable()
    nearly_over = linked_repo.github.given
    linked_repo.github.lifetime = 3600
    for _ in range(3):
        await linked_repo.sync()
    assert linked_repo.github.given == nearly_over + 1


async def test_revoked_token_is_replaced(linked_repo: LinkedRepo) -> None:
    await linked_repo.enable()
    linked_repo.github.tokens.clear()
    sha = await linked_repo.commit("README")
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert linked_repo.there == {"refs/heads/main": sha}
    linked_repo.github.repos[NAME].installed = False
    linked_repo.github.tokens.clear()
    link = await linked_repo.sync()
    assert link.state is LinkState.FAILED and "install" in str(link.error)


async def test_no_token_is_left_in_the_repository(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    (token,) = linked_repo.github.tokens
    for path in linked_repo.repository.path.rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes()
    assert token not in repr(await linked_repo.links.get(linked_repo.repository.id))
    assert linked_repo.github.app.private_key not in repr(linked_repo.github.app)


# Names


@pytest.mark.parametrize("name", ["octo/web", "a/b", "Octo-Cat/web.site_1", "octo/web.git", "octo/.github"])
def test_valid_github_names(name: str) -> None:
    assert check_name(name) == name.removesuffix(".git")


@pytest.mark.parametrize(
    "name",
    ["", "octo", "octo/", "/web", "octo/web/more", "octo/..", "-o/web", "o o/web", "octo/we b", "octo/web?x"],
)
def test_invalid_github_names(name: str) -> None:
    with pytest.raises(InvalidRequest, match="owner/name"):
        check_name(name)


@pytest.mark.parametrize(("app_id", "key"), [("", None), ("Iv1.47", None), ("4711", "no key"), ("4711", "")])
def test_app_id_and_key_are_validated(scene_key: str, app_id: str, key: str | None) -> None:
    with pytest.raises(InvalidRequest):
        App(app_id, scene_key if key is None else key, "secret")


@pytest.fixture(scope="module")
def scene_key() -> str:
    return RSAKey.generate_key(2048).as_pem(private=True).decode()
