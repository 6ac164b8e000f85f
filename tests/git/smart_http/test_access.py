"""Who may clone and push, and what is refused."""

import asyncio
import gzip
import os
from pathlib import Path

import httpx2
import pytest

from stead.api.smart_http import git_body_limit
from stead.repos.transfer.serving import InvalidStream, PushCommands, TooManyCommands, packet
from support.git_client import GitClient, basic
from support.git_hosting import RepoServer, served
from support.smart_http import NOWHERE, filled

# Access


async def test_access_levels_for_clone_and_push(host: RepoServer, git: GitClient) -> None:
    """All callers against all kinds of repositories, with the real git."""
    private, work = await filled(host, git)
    public, _ = await filled(host, git, public=True)
    stranger = await host.hosting.accounts.create(f"other-{private.id[:8]}")
    _, foreign = await host.hosting.accounts.create_key(stranger.id)
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


async def test_credentials_as_basic_or_bearer(host: RepoServer, git: GitClient) -> None:
    repo, _ = await filled(host, git)
    token = await host.token(repo)
    for secret in (host.key, token):
        for login in (f"x-access-token:{secret}", f"git:{secret}", f"{secret}:"):
            assert await git("ls-remote", host.url.replace("://", f"://{login}@") + f"/{repo.id}")
        header = f"http.extraHeader=Authorization: Bearer {secret}"
        assert await git("-c", header, "ls-remote", host.remote(repo, ""))


async def test_inaccessible_and_missing_repositories_look_alike(
    host: RepoServer, git: GitClient, http: httpx2.AsyncClient
) -> None:
    private, _ = await filled(host, git)
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


async def test_revoked_permission_applies_to_the_next_request(host: RepoServer, git: GitClient) -> None:
    repo, work = await filled(host, git)
    identity = await host.hosting.identities.create(host.hosting.ours)
    await host.hosting.access.grant(host.hosting.ours, identity.id, repo.id, "write")
    info, token = await host.hosting.identities.create_token(host.hosting.ours, identity.id)
    place = host.remote(repo, token)
    await git("push", "-q", place, "main:a", cwd=work)
    await host.hosting.access.change(identity.id, repo.id, "read")
    assert (await git.run("push", place, "main:b", cwd=work)).status != 0
    await git("ls-remote", place)
    await host.hosting.access.revoke(identity.id, repo.id)
    assert "or no access to it" in (await git.run("ls-remote", place)).err
    await host.hosting.access.grant(host.hosting.ours, identity.id, repo.id, "read")
    await host.hosting.identities.revoke_token(host.hosting.ours, identity.id, info.id)
    assert "Authentication failed" in (await git.run("ls-remote", place)).err


# Refusals


async def test_push_to_reserved_refs_is_refused(host: RepoServer, git: GitClient) -> None:
    """Internal refs are neither pushed nor listed, and invalid names are refused."""
    repo, work = await filled(host, git)
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
async def test_push_of_malicious_tree_is_refused(host: RepoServer, git: GitClient, name: str) -> None:
    repo, work = await filled(host, git)
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
        repo, work = await filled(host, git)
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
        await host.hosting.check()


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
        limit = git_body_limit({"method": method, "path": path})
        assert (limit is not None and limit.size is None) == streamed


async def test_invalid_smart_http_requests_are_refused(
    host: RepoServer, git: GitClient, http: httpx2.AsyncClient
) -> None:
    repo, _ = await filled(host, git)
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
        assert str(host.hosting.folder) not in answer.text
    for path in ("/12345678-1234-1234-8234-123456789abc/info/refs", f"/{repo.id}"):
        answer = await http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (404, "application/json"), path


async def test_gzip_request_is_accepted_and_gzip_bomb_refused(
    host: RepoServer, git: GitClient, http: httpx2.AsyncClient
) -> None:
    repo, work = await filled(host, git, 3)
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


async def test_long_negotiation_from_git_is_gzipped(host: RepoServer, git: GitClient) -> None:
    """A client with many commits of its own negotiates with a long request."""
    repo, work = await filled(host, git)
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


async def test_fetch_of_missing_object_gets_git_error(host: RepoServer, git: GitClient) -> None:
    _, work = await filled(host, git)
    for version in (0, 2):
        ran = await git.run("-c", f"protocol.version={version}", "fetch", "origin", "1" * 40, cwd=work)
        assert ran.status != 0
        assert "not our ref" in ran.err
