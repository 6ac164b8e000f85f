"""Clone, fetch and push with the real git."""

import asyncio
import os
import re
from pathlib import Path

import httpx2
import pytest

from support.git_client import GitClient
from support.git_hosting import Recorder, RepoServer
from support.smart_http import filled

# Clone, fetch, push


async def test_clone_of_empty_repository_has_its_default_branch(host: RepoServer, git: GitClient) -> None:
    repo = await host.hosting.repos.create(host.hosting.ours, default_branch="trunk")
    ran = await git.run("clone", host.remote(repo), "mine")
    assert ran.status == 0, ran.err
    assert await git("symbolic-ref", "HEAD", cwd=git.home / "mine") == "refs/heads/trunk"


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_clone_and_push_with_every_protocol_version(
    host: RepoServer, git: GitClient, version: int
) -> None:
    """Clone, push and fetch behave the same in each version."""
    repo, work = await filled(host, git, 3)
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
async def test_clone_with_every_url_form(host: RepoServer, git: GitClient, form: str) -> None:
    repo, work = await filled(host, git)
    place = host.url.replace("http://", f"http://x:{host.key}@") + form.format(repo.id)
    assert (await git("ls-remote", place, "refs/heads/main")).split()[0] == await git(
        "rev-parse", "main", cwd=work
    )


async def test_advertisement_equals_git_http_backend(
    host: RepoServer, git: GitClient, http: httpx2.AsyncClient
) -> None:
    """The same headers and bytes as from `git http-backend`, in all versions and for both services."""
    repo, _ = await filled(host, git)
    settings = {
        "GIT_CONFIG_GLOBAL": str(host.hosting.folder / "repos" / "gitconfig"),
        "GIT_CONFIG_COUNT": "2",
    }
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


async def test_shallow_clone_and_deepen(host: RepoServer, git: GitClient) -> None:
    repo, _ = await filled(host, git, 6)
    await git("clone", "-q", "--depth=1", host.remote(repo), "mine")
    mine = git.home / "mine"
    counts = [await git("rev-list", "--count", "HEAD", cwd=mine)]
    for argument in ("--deepen=2", "--unshallow"):
        await git("fetch", "-q", argument, cwd=mine)
        counts.append(await git("rev-list", "--count", "HEAD", cwd=mine))
    assert counts == ["1", "3", "6"]


async def test_push_from_shallow_clone(host: RepoServer, git: GitClient) -> None:
    repo, work = await filled(host, git, 4)
    await git("clone", "-q", "--depth=1", host.remote(repo), "mine")
    made = await git.commit(git.home / "mine", {"more": "1"})
    await git("push", "-q", "origin", "HEAD:main", cwd=git.home / "mine")
    await git("pull", "-q", "--ff-only", "origin", "main", cwd=work)
    assert await git("rev-parse", "HEAD", cwd=work) == made


@pytest.mark.parametrize("version", [0, 2])
async def test_partial_clone_fetches_missing_blobs(host: RepoServer, git: GitClient, version: int) -> None:
    repo, work = await filled(host, git, 5)
    setting = ("-c", f"protocol.version={version}")
    await git(*setting, "clone", "-q", "--filter=blob:none", "--no-checkout", host.remote(repo), "mine")
    mine = git.home / "mine"
    missing = await git("rev-list", "--objects", "--all", "--missing=print", cwd=mine)
    assert len([line for line in missing.splitlines() if line.startswith("?")]) == 5
    await git(*setting, "checkout", "-q", "main", cwd=mine)
    assert (mine / "file4").read_text() == (work / "file4").read_text()


async def test_force_push_delete_branch_and_push_tags(host: RepoServer, git: GitClient) -> None:
    repo, work = await filled(host, git, 2)
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


async def test_push_larger_than_post_buffer_is_chunked(host: RepoServer, git: GitClient) -> None:
    repo, work = await filled(host, git)
    await git.commit(work, {"large": os.urandom(5 << 20)})
    traced = await git.run("push", "origin", "main", cwd=work, env={"GIT_CURL_VERBOSE": "1"})
    assert traced.status == 0
    assert "Transfer-Encoding: chunked" in traced.err
    await git("clone", "-q", host.remote(repo), "mine")
    assert (git.home / "mine" / "large").read_bytes() == (work / "large").read_bytes()


async def test_push_hook_is_called_for_each_push(host: RepoServer, git: GitClient) -> None:
    repo, work = await filled(host, git)
    pushes = Recorder()
    host.hosting.writer.subscribe(pushes)
    await git("clone", "-q", host.remote(repo), "mine")
    await git("push", "-q", "origin", "main:one", cwd=work)
    await git("push", "-q", "origin", "main:other", "main:third", cwd=work)
    assert pushes == [repo.id] * 2


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.slow)])
async def test_many_refs_in_one_push(host: RepoServer, git: GitClient, count: int) -> None:
    """Every ref is synced to disk before the push is acknowledged."""
    repo, work = await filled(host, git)
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
async def test_concurrent_pushes_to_one_branch_lose_nothing(
    host: RepoServer, git: GitClient, clients: int
) -> None:
    """Three rounds: all clients build on the same commit and push; each round has exactly one winner."""
    repo, work = await filled(host, git)
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


# Slow tests


def _resident() -> int:
    """Resident memory of this process in KiB."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1])


@pytest.mark.slow
async def test_two_gigabytes_are_streamed_in_bounded_memory(host: RepoServer, git: GitClient) -> None:
    """The server runs in this process: its peak memory is sampled during a 2 GB transfer."""
    repo, work = await filled(host, git)
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
