"""Plain git against the smart HTTP server, and invalid requests."""

import asyncio
import contextlib
import gzip
import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from stead.api.smart_http import is_streamed
from stead.processes import command_lines
from stead.repos.repos import RepoInfo
from stead.repos.transfer.serving import InvalidStream, PushCommands, TooManyCommands, packet
from support.git_client import GitClient, basic
from support.git_hosting import Recorder, Site, served
from support.waiting import until

NOWHERE = "0" * 40


@pytest_asyncio.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with served(tmp_path_factory.mktemp("hosting")) as site:
        yield site


@pytest_asyncio.fixture
async def host(site: Site) -> AsyncIterator[Site]:
    """The server; after each test its repositories pass fsck and no git process is left."""
    yield site
    await site.stage.check()
    for info in (await site.stage.repos.list(site.stage.ours, limit=1000)).items:
        await site.stage.repos.delete(info.id)
    assert _gits(site) == []


@pytest_asyncio.fixture
async def http(host: Site) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=host.url, timeout=30) as client:
        yield client


def _gits(site: Site) -> list[int]:
    """All git processes of these repositories, except pooled readers."""
    folder = str(site.stage.folder).encode()
    lines = [(pid, b" ".join(line)) for pid, line in command_lines()]
    return [pid for pid, line in lines if folder in line and b"cat-file" not in line]


_templates: dict[int, Path] = {}


@pytest_asyncio.fixture(scope="module", autouse=True)
async def _histories(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[None]:
    """Template work trees with this many commits, which tests copy."""
    home = tmp_path_factory.mktemp("histories")
    git = GitClient(home)
    work = await git.work_tree("work")
    for number in range(1, 7):
        _templates[number] = home / str(number)
        shutil.copytree(work, _templates[number])
        await git.commit(work, {f"file{number}": f"{number}\n" * 100})
    yield
    _templates.clear()


async def _filled(
    host: Site, git: GitClient, commits: int = 1, *, public: bool = False
) -> tuple[RepoInfo, Path]:
    """A repository with some commits on main, and the work tree that they came from."""
    repo = await host.repo(public=public)
    work = git.home / f"work-{repo.id[:8]}"
    shutil.copytree(_templates[commits], work)
    with (work / ".git" / "config").open("a") as config:
        config.write(
            f'[remote "origin"]\n\turl = {host.remote(repo)}\n\tfetch = +refs/heads/*:refs/remotes/origin/*\n'
        )
    for part in ("objects", "refs"):
        shutil.copytree(work / ".git" / part, host.path(repo) / part, dirs_exist_ok=True)
    return repo, work


# Clone, fetch, push


async def test_clone_of_empty_repository_has_its_default_branch(host: Site, git: GitClient) -> None:
    repo = await host.stage.repos.create(host.stage.ours, default_branch="trunk")
    ran = await git.run("clone", host.remote(repo), "mine")
    assert ran.status == 0, ran.err
    assert await git("symbolic-ref", "HEAD", cwd=git.home / "mine") == "refs/heads/trunk"


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_clone_and_push_with_every_protocol_version(host: Site, git: GitClient, version: int) -> None:
    """Clone, push and fetch behave the same in each version."""
    repo, work = await _filled(host, git, 3)
    setting = ("-c", f"protocol.version={version}")
    traced = await git.run(*setting, "clone", host.remote(repo), "mine", env={"GIT_TRACE_PACKET": "1"})
    assert traced.status == 0
    assert (f"version {version}" in traced.err) == (version > 0)
    mine = git.home / "mine"
    theirs = await git.commit(work, {"new": "1"})
    await git(*setting, "push", "-q", "origin", "main", cwd=work)
    await git(*setting, "fetch", "-q", cwd=mine)
    assert await git("rev-parse", "origin/main", cwd=mine) == theirs


@pytest.mark.parametrize("form", ["/{}", "/{}.git", "/git/{}", "/git/{}.git"])
async def test_clone_with_every_url_form(host: Site, git: GitClient, form: str) -> None:
    repo, work = await _filled(host, git)
    place = host.url.replace("http://", f"http://x:{host.key}@") + form.format(repo.id)
    assert (await git("ls-remote", place, "refs/heads/main")).split()[0] == await git(
        "rev-parse", "main", cwd=work
    )


async def test_advertisement_equals_git_http_backend(
    host: Site, git: GitClient, http: httpx2.AsyncClient
) -> None:
    """The same headers and bytes as from `git http-backend`, in all versions and for both services."""
    repo, _ = await _filled(host, git)
    settings = {"GIT_CONFIG_GLOBAL": str(host.stage.folder / "repos" / "gitconfig"), "GIT_CONFIG_COUNT": "2"}
    settings |= {"GIT_CONFIG_KEY_0": "uploadpack.allowAnySHA1InWant", "GIT_CONFIG_VALUE_0": "true"}
    settings |= {"GIT_CONFIG_KEY_1": "uploadpack.allowRefInWant", "GIT_CONFIG_VALUE_1": "false"}
    for protocol in ("", "version=1", "version=2"):
        for service in ("git-upload-pack", "git-receive-pack"):
            asked = {
                "GIT_PROJECT_ROOT": str(host.path(repo).parent),
                "GIT_HTTP_EXPORT_ALL": "1",
                "REMOTE_USER": "me",
                "PATH_INFO": f"/{repo.id}.git/info/refs",
                "QUERY_STRING": f"service={service}",
                "REQUEST_METHOD": "GET",
                "GIT_PROTOCOL": protocol,
            }
            expected = await git.run("http-backend", env=asked | settings)
            head, _, body = expected.out.partition("\r\n\r\n")
            headers = {"authorization": f"Bearer {host.key}", "git-protocol": protocol}
            if not protocol:
                del headers["git-protocol"]
            answer = await http.get(f"/{repo.id}/info/refs?service={service}", headers=headers)
            assert answer.status_code == 200
            assert answer.text == body
            for line in head.split("\r\n"):
                name, _, value = line.partition(": ")
                assert answer.headers[name] == value


async def test_shallow_clone_and_deepen(host: Site, git: GitClient) -> None:
    repo, _ = await _filled(host, git, 6)
    await git("clone", "-q", "--depth=1", host.remote(repo), "mine")
    mine = git.home / "mine"
    counts = [await git("rev-list", "--count", "HEAD", cwd=mine)]
    for argument in ("--deepen=2", "--unshallow"):
        await git("fetch", "-q", argument, cwd=mine)
        counts.append(await git("rev-list", "--count", "HEAD", cwd=mine))
    assert counts == ["1", "3", "6"]


async def test_push_from_shallow_clone(host: Site, git: GitClient) -> None:
    repo, work = await _filled(host, git, 4)
    await git("clone", "-q", "--depth=1", host.remote(repo), "mine")
    made = await git.commit(git.home / "mine", {"more": "1"})
    await git("push", "-q", "origin", "HEAD:main", cwd=git.home / "mine")
    await git("pull", "-q", "--ff-only", "origin", "main", cwd=work)
    assert await git("rev-parse", "HEAD", cwd=work) == made


@pytest.mark.parametrize("version", [0, 2])
async def test_partial_clone_fetches_missing_blobs(host: Site, git: GitClient, version: int) -> None:
    repo, work = await _filled(host, git, 5)
    setting = ("-c", f"protocol.version={version}")
    await git(*setting, "clone", "-q", "--filter=blob:none", "--no-checkout", host.remote(repo), "mine")
    mine = git.home / "mine"
    missing = await git("rev-list", "--objects", "--all", "--missing=print", cwd=mine)
    assert len([line for line in missing.splitlines() if line.startswith("?")]) == 5
    await git(*setting, "checkout", "-q", "main", cwd=mine)
    assert (mine / "file4").read_text() == (work / "file4").read_text()


async def test_force_push_delete_branch_and_push_tags(host: Site, git: GitClient) -> None:
    repo, work = await _filled(host, git, 2)
    await git("push", "-q", "origin", "main:side", cwd=work)
    await git("commit", "-q", "--amend", "-m", "otherwise", cwd=work)
    refused = await git.run("push", "origin", "main", cwd=work)
    assert refused.status == 1
    assert "non-fast-forward" in refused.err
    await git("push", "-q", "--force", "origin", "main", cwd=work)
    await git("tag", "light", cwd=work)
    await git("tag", "-a", "-m", "told", "heavy", cwd=work)
    await git("push", "-q", "origin", "--tags", cwd=work)
    await git("push", "-q", "origin", "--delete", "side", cwd=work)
    refs = (await git("ls-remote", host.remote(repo))).splitlines()
    assert {line.split("\t")[1] for line in refs} == {
        "HEAD",
        "refs/heads/main",
        "refs/tags/light",
        "refs/tags/heavy",
        "refs/tags/heavy^{}",
    }
    assert (await git("ls-remote", host.remote(repo), "main")).split()[0] == await git(
        "rev-parse", "main", cwd=work
    )


async def test_push_larger_than_post_buffer_is_chunked(host: Site, git: GitClient) -> None:
    repo, work = await _filled(host, git)
    await git.commit(work, {"large": os.urandom(5 << 20)})
    traced = await git.run("push", "origin", "main", cwd=work, env={"GIT_CURL_VERBOSE": "1"})
    assert traced.status == 0
    assert "Transfer-Encoding: chunked" in traced.err
    await git("clone", "-q", host.remote(repo), "mine")
    assert (git.home / "mine" / "large").read_bytes() == (work / "large").read_bytes()


async def test_push_hook_is_called_for_each_push(host: Site, git: GitClient) -> None:
    repo, work = await _filled(host, git)
    pushes = Recorder()
    host.stage.writer.subscribe(pushes)
    await git("clone", "-q", host.remote(repo), "mine")
    await git("push", "-q", "origin", "main:one", cwd=work)
    await git("push", "-q", "origin", "main:other", "main:third", cwd=work)
    assert pushes == [repo.id] * 2


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
async def test_many_refs_in_one_push(host: Site, git: GitClient, count: int) -> None:
    """Every ref is synced to disk before the push is acknowledged."""
    repo, work = await _filled(host, git)
    sha = await git("rev-parse", "main", cwd=work)
    names = [f"refs/tags/many/{number:04}" for number in range(count)]
    await git(
        "update-ref", "--stdin", cwd=work, stdin="".join(f"create {name} {sha}\n" for name in names).encode()
    )
    await git("push", "-q", "origin", "refs/tags/*:refs/tags/*", cwd=work)
    for version in (0, 2):
        listed = await git("-c", f"protocol.version={version}", "ls-remote", host.remote(repo), "refs/tags/*")
        assert [line.split("\t")[1] for line in listed.splitlines()] == names


@pytest.mark.parametrize("clients", [10, pytest.param(50, marks=pytest.mark.slow)], ids=["ten", "fifty"])
async def test_concurrent_pushes_to_one_branch_lose_nothing(host: Site, git: GitClient, clients: int) -> None:
    """Three rounds: all clients build on the same commit and push; each round has exactly one winner."""
    repo, work = await _filled(host, git)
    winners = []
    for number in range(3):
        base = await git("rev-parse", "HEAD", cwd=work)
        tree = await git("rev-parse", "HEAD^{tree}", cwd=work)
        made = [
            await git("commit-tree", tree, "-p", base, "-m", f"round {number} of {each}", cwd=work)
            for each in range(clients)
        ]
        # Separate clients that do not know of each other.
        rans = await asyncio.gather(
            *(
                git.run("push", host.remote(repo), f"{sha}:refs/heads/main", cwd=work, timeout=120)
                for sha in made
            )
        )
        won = [sha for sha, ran in zip(made, rans, strict=True) if ran.status == 0]
        assert len(won) == 1, [ran.err for ran in rans]
        winners += won
        await git("fetch", "-q", "origin", cwd=work)
        await git("reset", "-q", "--hard", "origin/main", cwd=work)
    history = await git("rev-list", "HEAD", cwd=work)
    assert history.splitlines()[:3] == winners[::-1]


# Access


async def test_access_levels_for_clone_and_push(host: Site, git: GitClient) -> None:
    """All callers against all kinds of repositories, with the real git."""
    private, work = await _filled(host, git)
    public, _ = await _filled(host, git, public=True)
    stranger = await host.stage.accounts.create(f"other-{private.id[:8]}")
    _, foreign = await host.stage.accounts.create_key(stranger.id)
    secrets = {
        "nobody": "",
        "owner": host.key,
        "stranger": foreign,
        "reader": await host.token(private, "read"),
        "writer": await host.token(private, "write"),
        "no rights": await host.token(),
        "wrong": "stid_" + "x" * 43,
    }
    may_read = {"private": {"owner", "reader", "writer"}, "public": set(secrets)}
    may_push = {"private": {"owner", "writer"}, "public": {"owner"}}
    for kind, repo in (("private", private), ("public", public)):
        tried = [git.run("ls-remote", host.remote(repo, secret)) for secret in secrets.values()]
        reads = dict(zip(secrets, await asyncio.gather(*tried), strict=True))
        assert {who for who, ran in reads.items() if ran.status == 0} == may_read[kind]
        tried = [
            git.run("push", host.remote(repo, secret), f"main:from-{number}", cwd=work)
            for number, secret in enumerate(secrets.values())
        ]
        pushes = dict(zip(secrets, await asyncio.gather(*tried), strict=True))
        assert {who for who, ran in pushes.items() if ran.status == 0} == may_push[kind]
        if kind == "private":
            assert "no write access" in pushes["reader"].err
            assert "or no access to it" in reads["stranger"].err
    branches = await git("ls-remote", "--heads", host.remote(public))
    assert [line.split("/")[-1] for line in branches.splitlines()] == ["from-1", "main"]


async def test_credentials_as_basic_or_bearer(host: Site, git: GitClient) -> None:
    repo, _ = await _filled(host, git)
    token = await host.token(repo)
    for secret in (host.key, token):
        for login in (f"x-access-token:{secret}", f"git:{secret}", f"{secret}:"):
            assert await git("ls-remote", host.url.replace("://", f"://{login}@") + f"/{repo.id}")
        header = f"http.extraHeader=Authorization: Bearer {secret}"
        assert await git("-c", header, "ls-remote", host.remote(repo, ""))


async def test_inaccessible_and_missing_repositories_look_alike(
    host: Site, git: GitClient, http: httpx2.AsyncClient
) -> None:
    private, _ = await _filled(host, git)
    missing = "12345678-1234-4234-8234-123456789abc"
    outsider = {"authorization": basic("x-access-token", await host.token())}
    wrong = {"authorization": basic("x-access-token", "stid_" + "y" * 43)}
    malformed = {"authorization": "Basic %%%"}
    for headers, status in (({}, 401), (wrong, 401), (malformed, 401), (outsider, 404)):
        for place in (
            "info/refs?service=git-upload-pack",
            "info/refs?service=git-receive-pack",
            "HEAD",
            "info/refs",
        ):
            answers = [await http.get(f"/{repo}/{place}", headers=headers) for repo in (private.id, missing)]
            assert [answer.status_code for answer in answers] == [status, status]
            assert answers[0].text.replace(private.id, missing) == answers[1].text
            assert ("www-authenticate" in answers[0].headers) == (status == 401)
        posts = [
            await http.post(f"/{repo}/git-upload-pack", headers=headers, content=b"0000")
            for repo in (private.id, missing)
        ]
        assert [post.status_code for post in posts] == [status, status]
    assert answers[0].headers["content-type"].startswith("text/plain")


async def test_revoked_permission_applies_to_the_next_request(host: Site, git: GitClient) -> None:
    repo, work = await _filled(host, git)
    identity = await host.stage.identities.create(host.stage.ours)
    await host.stage.access.grant(host.stage.ours, identity.id, repo.id, "write")
    info, token = await host.stage.identities.create_token(host.stage.ours, identity.id)
    place = host.remote(repo, token)
    await git("push", "-q", place, "main:a", cwd=work)
    await host.stage.access.change(identity.id, repo.id, "read")
    assert (await git.run("push", place, "main:b", cwd=work)).status != 0
    await git("ls-remote", place)
    await host.stage.access.revoke(identity.id, repo.id)
    assert "or no access to it" in (await git.run("ls-remote", place)).err
    await host.stage.access.grant(host.stage.ours, identity.id, repo.id, "read")
    await host.stage.identities.revoke_token(host.stage.ours, identity.id, info.id)
    assert "Authentication failed" in (await git.run("ls-remote", place)).err


# Refusals


async def test_push_to_reserved_refs_is_refused(host: Site, git: GitClient) -> None:
    """Internal refs are neither pushed nor listed, and invalid names are refused."""
    repo, work = await _filled(host, git)
    await git("--git-dir", str(host.path(repo)), "update-ref", "refs/stead/own", "refs/heads/main")
    for name in ("refs/stead/x", "refs/stead/own", "refs/remotes/origin/x", "refs/x/y"):
        ran = await git.run("push", "origin", f"main:{name}", cwd=work)
        assert ran.status == 1
        assert "hidden ref" in ran.err
    for name in ("refs/heads/x", "refs/tags/x", "refs/notes/x", "refs/pull/1/head"):
        await git("push", "-q", "origin", f"main:{name}", cwd=work)
    assert "refs/stead" not in await git("ls-remote", host.remote(repo))
    own = await git("--git-dir", str(host.path(repo)), "for-each-ref", "--format=%(refname)", "refs/stead")
    assert own == "refs/stead/own"


@pytest.mark.parametrize("name", [".git", "..", ".GIT", "git~1"])
async def test_push_of_malicious_tree_is_refused(host: Site, git: GitClient, name: str) -> None:
    repo, work = await _filled(host, git)
    blob = await git("hash-object", "-w", "--stdin", cwd=work, stdin=b"evil")
    inner = await git("mktree", cwd=work, stdin=f"100644 blob {blob}\tconfig\n".encode())
    tree = await git("mktree", cwd=work, stdin=f"040000 tree {inner}\t{name}\n".encode())
    commit = await git("commit-tree", tree, "-m", "evil", cwd=work)
    ran = await git.run("push", "origin", f"{commit}:refs/heads/evil", cwd=work)
    assert ran.status == 1
    assert "hasDot" in ran.err
    assert "evil" not in await git("ls-remote", host.remote(repo))
    found = await git.run("--git-dir", str(host.path(repo)), "cat-file", "-e", commit)
    assert found.status != 0


async def test_push_size_and_ref_limits(tmp_path: Path, git: GitClient) -> None:
    """Both refusals are printed by git, and nothing changes."""
    async with served(tmp_path / "hosting", max_push=1 << 20, max_commands=10) as host:
        repo, work = await _filled(host, git)
        await git.commit(work, {"large": os.urandom(3 << 20)})
        ran = await git.run("push", "origin", "main:large", cwd=work)
        assert ran.status != 0
        assert "exceeds maximum allowed size" in ran.err
        ran = await git.run(
            "push", "origin", *(f"main~1:refs/heads/b{number}" for number in range(11)), cwd=work
        )
        assert ran.status != 0
        assert "max 10" in ran.err
        await git("push", "-q", "origin", *(f"main~1:refs/heads/b{number}" for number in range(10)), cwd=work)
        assert len((await git("ls-remote", "--heads", host.remote(repo))).splitlines()) == 11
        await host.stage.check()


def test_push_commands_are_parsed_across_chunk_boundaries() -> None:
    one, other = "1" * 40, "2" * 40
    line = packet(f"{NOWHERE} {one} refs/heads/x\0 report-status side-band-64k".encode())
    more = packet(f"{NOWHERE} {one} refs/heads/y".encode())
    moved = packet(f"{one} {other} refs/heads/z\n".encode()) + packet(f"{one} {NOWHERE} refs/tags/z".encode())
    for size in (1, 3, 50, 10_000):
        data = line + more + moved + b"0000" + b"PACK of whatever 0004"
        commands = PushCommands(4)
        of_pack = sum(commands.feed(data[place : place + size]) for place in range(0, len(data), size))
        assert (commands.count, commands.complete, commands.created) == (4, True, 2)
        assert commands.superseded == [(one, other), (one, None)]
        assert of_pack == len(b"PACK of whatever 0004")
        commands = PushCommands(2)
        with pytest.raises(TooManyCommands):
            commands.feed(line + more * 2)
        assert commands.refusal("no")[4:5] == b"\x03"
    for nonsense in (b"PACK", b"00", b"0001", b"0004"):
        commands = PushCommands(2)
        if len(nonsense) == 4:
            with pytest.raises(InvalidStream):
                commands.feed(nonsense)
        assert not commands.complete


def test_only_packs_and_lfs_objects_are_streamed() -> None:
    """All other bodies are buffered and limited in size."""
    repo = "12345678-1234-4234-8234-123456789abc"
    calls = {
        ("POST", f"/{repo}/git-receive-pack"): True,
        ("POST", f"/git/{repo}.git/git-upload-pack"): True,
        ("PUT", f"/{repo}/info/lfs/objects/{'1' * 64}"): True,
        ("POST", f"/{repo}/info/lfs/objects/batch"): False,
        ("POST", "/git/v1/repo/x/git-receive-pack"): False,
        ("PUT", f"/{repo}/git-receive-pack"): False,
    }
    for (method, path), streamed in calls.items():
        assert is_streamed({"method": method, "path": path}) == streamed


async def test_invalid_smart_http_requests_are_refused(
    host: Site, git: GitClient, http: httpx2.AsyncClient
) -> None:
    repo, _ = await _filled(host, git)
    http.headers["authorization"] = f"Bearer {host.key}"
    upload, question = (
        f"/{repo.id}/git-upload-pack",
        {"content-type": "application/x-git-upload-pack-request"},
    )
    push = {"content-type": "application/x-git-receive-pack-request"}
    bad_push = http.build_request("POST", f"/{repo.id}/git-receive-pack", headers=push, content=b"nonsense")
    tries = [
        (http.build_request("GET", f"/{repo.id}/info/refs"), 403),
        (http.build_request("GET", f"/{repo.id}/HEAD"), 403),
        (http.build_request("GET", f"/{repo.id}/info/refs?service=git-upload-archive"), 403),
        (http.build_request("POST", f"/{repo.id}/info/refs?service=git-upload-pack"), 405),
        (http.build_request("GET", upload), 405),
        (http.build_request("POST", upload, content=b"0000"), 415),
        (http.build_request("POST", upload, headers=push, content=b"0000"), 415),
        (
            http.build_request("POST", upload, headers={**question, "content-encoding": "br"}, content=b"x"),
            415,
        ),
        (
            http.build_request(
                "POST", upload, headers={**question, "content-encoding": "gzip"}, content=b"x"
            ),
            400,
        ),
        (
            http.build_request(
                "POST", upload, headers={**question, "git-protocol": "version=2\t; x"}, content=b""
            ),
            400,
        ),
        (http.build_request("POST", upload, headers=question, content=b"nonsense"), 500),
        (bad_push, 400),
    ]
    for request, status in tries:
        answer = await http.send(request)
        assert answer.status_code == status, (request.method, request.url, answer.text)
        assert answer.headers["content-type"].startswith("text/plain")
        assert str(host.stage.folder) not in answer.text
    for path in ("/12345678-1234-1234-8234-123456789abc/info/refs", f"/{repo.id}"):
        answer = await http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json"), path


async def test_gzip_request_is_accepted_and_gzip_bomb_refused(
    host: Site, git: GitClient, http: httpx2.AsyncClient
) -> None:
    repo, work = await _filled(host, git, 3)
    sha = await git("rev-parse", "main", cwd=work)
    question = packet(f"want {sha} ofs-delta\n".encode()) + b"0000" + packet(b"done\n")
    headers = {"authorization": f"Bearer {host.key}", "content-type": "application/x-git-upload-pack-request"}
    plain = await http.post(f"/{repo.id}/git-upload-pack", headers=headers, content=question)
    headers["content-encoding"] = "gzip"
    zipped = await http.post(f"/{repo.id}/git-upload-pack", headers=headers, content=gzip.compress(question))
    assert plain.content.startswith(b"0008NAK\nPACK")
    assert zipped.content == plain.content
    bomb = gzip.compress(packet(f"want {sha}\n".encode()) * 400_000)
    refused = await http.post(f"/{repo.id}/git-upload-pack", headers=headers, content=bomb)
    assert refused.status_code == 413
    for broken in (gzip.compress(question)[:-5], gzip.compress(question) + b"more"):
        answer = await http.post(f"/{repo.id}/git-upload-pack", headers=headers, content=broken)
        assert answer.status_code == 400


async def test_long_negotiation_from_git_is_gzipped(host: Site, git: GitClient) -> None:
    """A client with many commits of its own negotiates with a long request."""
    repo, work = await _filled(host, git)
    await git("clone", "-q", host.remote(repo), "mine")
    mine = git.home / "mine"
    stream = "".join(
        f"commit refs/heads/own{branch}\ncommitter x <x@x> {2000000000 + branch} +0000\ndata 1\nx\n\n"
        for branch in range(100)
    )
    await git("fast-import", "--quiet", cwd=mine, stdin=stream.encode())
    made = await git.commit(work, {"new": "1"})
    await git("push", "-q", "origin", "main", cwd=work)
    traced = await git.run("fetch", "origin", cwd=mine, env={"GIT_CURL_VERBOSE": "1"})
    assert "Content-Encoding: gzip" in traced.err
    assert await git("rev-parse", "origin/main", cwd=mine) == made


async def test_fetch_of_missing_object_gets_git_error(host: Site, git: GitClient) -> None:
    _, work = await _filled(host, git)
    for version in (0, 2):
        ran = await git.run("-c", f"protocol.version={version}", "fetch", "origin", "1" * 40, cwd=work)
        assert ran.status != 0
        assert "not our ref" in ran.err


# Failures


@contextlib.asynccontextmanager
async def _half_a_push(host: Site, repo: str, size: int, body: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A client that announces more than it sends, and disconnects at the end of the block."""
    name, port = host.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    try:
        head = f"POST /{repo}/git-receive-pack HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {host.key}\r\n"
        head += f"Content-Type: application/x-git-receive-pack-request\r\nContent-Length: {size}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        yield reader
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_aborted_push_leaves_nothing(host: Site, git: GitClient) -> None:
    """No git process, object or lock is left, and the next push works."""
    repo, work = await _filled(host, git)
    before = sorted(str(path) for path in host.path(repo).rglob("*"))
    sha = await git("rev-parse", "main", cwd=work)
    new = await git.commit(work, {"large": os.urandom(8 << 20)})
    pack = await git.printed(
        "pack-objects", "--stdout", "--revs", "-q", cwd=work, stdin=f"{new}\n^{sha}\n".encode()
    )
    line = packet(f"{sha} {new} refs/heads/main\0 report-status side-band-64k\n".encode())
    body = line + b"0000" + pack
    async with _half_a_push(host, repo.id, len(body), body[: len(body) // 2]):

        async def receiving() -> bool:
            return any(host.path(repo).rglob("tmp_objdir*/**/*"))

        await until(receiving, 10)

    async def gone() -> bool:
        return not _gits(host)

    await until(gone, 5)
    assert sorted(str(path) for path in host.path(repo).rglob("*")) == before
    await git("push", "-q", "origin", "main", cwd=work)


async def test_aborted_clone_leaves_no_process(host: Site, git: GitClient) -> None:
    repo, work = await _filled(host, git)
    sha = await git.commit(work, {"large": os.urandom(24 << 20)})
    await git("push", "-q", "origin", "main", cwd=work)
    question = packet(f"want {sha} ofs-delta\n".encode()) + b"0000" + packet(b"done\n")
    headers = {"authorization": f"Bearer {host.key}", "content-type": "application/x-git-upload-pack-request"}
    async with (
        httpx2.AsyncClient(base_url=host.url) as http,
        http.stream("POST", f"/{repo.id}/git-upload-pack", headers=headers, content=question) as answer,
    ):
        await anext(answer.aiter_raw(1000))
        assert _gits(host)

    async def gone() -> bool:
        return not _gits(host)

    await until(gone, 5)


async def test_incomplete_git_response_aborts_the_connection(
    host: Site, git: GitClient, http: httpx2.AsyncClient
) -> None:
    """An object is corrupt: the client detects an incomplete pack, and the response has no host paths."""
    repo, work = await _filled(host, git)
    sha = await git("rev-parse", "main", cwd=work)
    blob = await git("rev-parse", "main:README", cwd=work)
    damaged = host.path(repo) / "objects" / blob[:2] / blob[2:]
    whole = damaged.read_bytes()
    damaged.chmod(0o644)
    damaged.write_bytes(whole[: len(whole) // 2])
    question = packet(f"want {sha} ofs-delta\n".encode()) + b"0000" + packet(b"done\n")
    headers = {"authorization": f"Bearer {host.key}", "content-type": "application/x-git-upload-pack-request"}
    with pytest.raises(httpx2.RemoteProtocolError):
        await http.post(f"/{repo.id}/git-upload-pack", headers=headers, content=question)
    ran = await git.run("clone", host.remote(repo), "mine")
    assert ran.status != 0
    assert str(host.stage.folder) not in ran.err
    damaged.write_bytes(whole)
    await git("clone", "-q", host.remote(repo), "again")


async def test_concurrency_limit_answers_retry_later(tmp_path: Path, git: GitClient) -> None:
    async with served(tmp_path / "hosting", per_repo=1, max_wait=0.2) as host:
        repo, work = await _filled(host, git)
        other, _ = await _filled(host, git)
        async with _half_a_push(host, repo.id, 100, b""):

            async def busy() -> bool:
                return bool(_gits(host))

            await until(busy, 5)
            async with httpx2.AsyncClient(base_url=host.url) as http:
                place = f"/{repo.id}/info/refs?service=git-receive-pack"
                answer = await http.get(place, headers={"authorization": f"Bearer {host.key}"})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            await git("ls-remote", host.remote(other))

        async def free() -> bool:
            return (await git.run("push", "origin", "main:next", cwd=work)).status == 0

        await until(free, 10)


async def test_transfer_has_a_time_limit(tmp_path: Path, git: GitClient) -> None:
    async with served(tmp_path / "hosting", timeout=0.5) as host:
        repo = await host.repo()

        async with _half_a_push(host, repo.id, 100, b"00") as reader:
            answer = await asyncio.wait_for(reader.read(4096), 10)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"timed out after 0.5 s" in answer
        assert _gits(host) == []


async def test_deleted_repository_is_gone_for_git(host: Site, git: GitClient) -> None:
    repo, work = await _filled(host, git)
    await git("ls-remote", host.remote(repo))
    await host.stage.repos.delete(repo.id)
    for version in (0, 2):
        ran = await git.run("-c", f"protocol.version={version}", "ls-remote", host.remote(repo))
        assert "or no access to it" in ran.err
    assert (await git.run("push", "origin", "main", cwd=work)).status != 0


# Slow tests


def _resident() -> int:
    """Resident memory of this process in KiB."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1])


@pytest.mark.slow
async def test_two_gigabytes_are_streamed_in_bounded_memory(host: Site, git: GitClient) -> None:
    """The server runs in this process: its peak memory is sampled during a 2 GB transfer."""
    repo, work = await _filled(host, git)
    for number in range(32):
        (work / f"large{number}").write_bytes(os.urandom(64 << 20))
    await git.run("-c", "core.compression=0", "add", "-A", cwd=work, timeout=300)
    await git.run("-c", "core.compression=0", "commit", "-q", "-m", "large", cwd=work, timeout=300)
    before = most = _resident()

    async def sample() -> None:
        nonlocal most
        while True:
            most = max(most, _resident())
            await asyncio.sleep(0.05)

    sampling = asyncio.create_task(sample())
    try:
        fast = ("-c", "core.compression=0", "-c", "pack.compression=0")
        pushed = await git.run(*fast, "push", "-q", "origin", "main", cwd=work, timeout=550)
        assert pushed.status == 0, pushed.err
        cloned = await git.run("clone", "-q", "--bare", host.remote(repo), "mine", timeout=550)
        assert cloned.status == 0, cloned.err
    finally:
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
    assert (most - before) / 1024 < 150
