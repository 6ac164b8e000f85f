"""Transfers that are aborted, limited or incomplete."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from stead.repos.places import GitPlaces, RepoPlaces, Work
from stead.repos.transfer.serving import packet
from support.git_client import GitClient
from support.git_hosting import RepoServer, served
from support.smart_http import filled, gits_in
from support.waiting import until


@contextlib.asynccontextmanager
async def _half_a_push(
    host: RepoServer, repo: str, size: int, body: bytes
) -> AsyncIterator[asyncio.StreamReader]:
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


async def test_aborted_push_leaves_nothing(host: RepoServer, git: GitClient) -> None:
    """No git process, object or lock is left, and the next push works."""
    repo, work = await filled(host, git)
    before = sorted(str(path) for path in host.path(repo).rglob("*"))
    sha = await git("rev-parse", "main", cwd=work)
    new = await git.commit(work, {"large": os.urandom(8 << 20)})
    pack = await git.printed(
        "pack-objects", "--stdout", "--revs", "-q", cwd=work, stdin=f"{new}\n^{sha}\n".encode()
    )
    line = packet(f"{sha} {new} refs/heads/main\0 report-status side-band-64k\n".encode())
    body = line + b"0000" + pack
    async with _half_a_push(host, repo.id, len(body), body[: len(body) // 2]):
        await until(lambda: any(host.path(repo).rglob("tmp_objdir*/**/*")), 60)

    await until(lambda: not gits_in(host), 60)
    assert sorted(str(path) for path in host.path(repo).rglob("*")) == before
    await git("push", "-q", "origin", "main", cwd=work)


async def test_aborted_clone_leaves_no_process(host: RepoServer, git: GitClient) -> None:
    repo, work = await filled(host, git)
    sha = await git.commit(work, {"large": os.urandom(24 << 20)})
    await git("push", "-q", "origin", "main", cwd=work)
    question = packet(f"want {sha} ofs-delta\n".encode()) + b"0000" + packet(b"done\n")
    headers = {"authorization": f"Bearer {host.key}", "content-type": "application/x-git-upload-pack-request"}
    async with (
        httpx2.AsyncClient(base_url=host.url) as http,
        http.stream("POST", f"/{repo.id}/git-upload-pack", headers=headers, content=question) as answer,
    ):
        await anext(answer.aiter_raw(1000))
        assert gits_in(host)

    await until(lambda: not gits_in(host), 60)


async def test_incomplete_git_response_aborts_the_connection(
    host: RepoServer, git: GitClient, http: httpx2.AsyncClient
) -> None:
    """An object is corrupt: the client detects an incomplete pack, and the response has no host paths."""
    repo, work = await filled(host, git)
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
    assert str(host.hosting.folder) not in ran.err
    damaged.write_bytes(whole)
    await git("clone", "-q", host.remote(repo), "again")


async def test_concurrency_limit_answers_retry_later(tmp_path: Path, git: GitClient) -> None:
    places = RepoPlaces({work: GitPlaces(work, 3, max_wait=0.2) for work in Work})
    async with served(tmp_path / "hosting", places=places) as host:
        repo, work = await filled(host, git)
        other = await host.hosting.repos.create(host.hosting.theirs)
        async with _half_a_push(host, repo.id, 100, b""):
            await until(lambda: bool(gits_in(host)), 60)
            async with httpx2.AsyncClient(base_url=host.url) as http:
                place = f"/{repo.id}/info/refs?service=git-receive-pack"
                answer = await http.get(place, headers={"authorization": f"Bearer {host.key}"})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            await git("ls-remote", host.remote(other, host.their_key))

        async def free() -> bool:
            return (await git.run("push", "origin", "main:next", cwd=work)).status == 0

        await until(free, 60)


async def test_transfer_has_a_time_limit(tmp_path: Path, git: GitClient) -> None:
    async with served(tmp_path / "hosting", timeout=0.5) as host:
        repo = await host.repo()

        async with _half_a_push(host, repo.id, 100, b"00") as reader:
            answer = await asyncio.wait_for(reader.read(4096), 60)
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"timed out after 0.5 s" in answer
        assert gits_in(host) == []


async def test_deleted_repository_is_gone_for_git(host: RepoServer, git: GitClient) -> None:
    repo, work = await filled(host, git)
    await git("ls-remote", host.remote(repo))
    await host.hosting.repos.delete(repo.id)
    for version in (0, 2):
        ran = await git.run("-c", f"protocol.version={version}", "ls-remote", host.remote(repo))
        assert "or no access to it" in ran.err
    assert (await git.run("push", "origin", "main", cwd=work)).status != 0
