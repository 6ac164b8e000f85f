"""Decompression bombs: small pushes with huge contents are stored or refused in bounded memory."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from stead.repos.repository import ZERO_SHA, Repository
from stead.repos.search.search import Search
from stead.repos.transfer.serving import packet
from support.git_client import GitClient
from support.git_hosting import RepoServer, served
from support.git_packs import Pack

pytestmark = pytest.mark.heavy

MIB = 1 << 20
FLAT = 150 * MIB


@dataclass
class Memory:
    """Peak memory growth of the server, and peak memory of a git process."""

    server: int = 0
    git: int = 0


@dataclass
class Bombed:
    repo_server: RepoServer
    http: httpx2.AsyncClient
    git: GitClient
    repository: Repository = field(init=False)

    async def push(self, pack: Pack, commit: str | None = None) -> str:
        """Push a pack; returns git's report."""
        self.repository = await self.repo_server.hosting.repository()
        line = f"{ZERO_SHA} {commit or '1' * 40} refs/heads/main\0 report-status"
        body = packet(line.encode()) + b"0000" + pack.data
        headers = {"content-type": "application/x-git-receive-pack-request"}
        answer = await self.http.post(
            f"/{self.repository.id}/git-receive-pack", headers=headers, content=body
        )
        assert answer.status_code == 200, answer.text
        return answer.text

    def api(self, path: str) -> str:
        return f"/git/v1/repo/{self.repository.id}/{path}"

    async def streamed(self, path: str) -> int:
        """The number of bytes of a response."""
        async with self.http.stream("GET", self.api(path)) as answer:
            assert answer.status_code == 200
            return sum([len(piece) async for piece in answer.aiter_raw()])

    @contextlib.asynccontextmanager
    async def watched(self) -> AsyncIterator[Memory]:
        memory = Memory()
        before = _resident("self")

        async def sample() -> None:
            while True:
                memory.server = max(memory.server, _resident("self") - before)
                for process in Path("/proc").glob("[0-9]*"):
                    with contextlib.suppress(OSError, ValueError):
                        if (
                            b"GIT_DIR=" + str(self.repo_server.hosting.folder).encode()
                            in (process / "environ").read_bytes()
                        ):
                            memory.git = max(memory.git, _resident(process.name))
                await asyncio.sleep(0.02)

        sampling = asyncio.create_task(sample())
        try:
            yield memory
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)


def _resident(process: str) -> int:
    """Private bytes of a process."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc", process, "status").read_text())
    if found is None:
        raise ValueError("it has no memory")
    return int(found[1]) * 1024


@pytest_asyncio.fixture
async def bombed(tmp_path: Path) -> AsyncIterator[Bombed]:
    async with served(tmp_path / "site") as repo_server:
        headers = {"authorization": f"Bearer {repo_server.key}"}
        async with httpx2.AsyncClient(base_url=repo_server.url, headers=headers, timeout=120) as http:
            (tmp_path / "home").mkdir()
            yield Bombed(repo_server, http, GitClient(tmp_path / "home"))


@pytest.mark.parametrize("size", [170 * MIB, pytest.param(5 << 30, marks=pytest.mark.slow)])
async def test_huge_file_of_zeros_uses_bounded_memory(bombed: Bombed, size: int) -> None:
    """Cloned as small as it was pushed; read, searched and archived in bounded memory."""
    pack = Pack()
    zeros, small = pack.zeros(size), pack.blob(b"a needle\n")
    commit = pack.commit(pack.tree({"small": small, "zeros": zeros}))
    async with bombed.watched() as memory:
        assert "ok refs/heads/main" in await bombed.push(pack, commit)
        for path in ("contents/zeros", f"git/blobs/{zeros}"):
            answer = await bombed.http.get(bombed.api(path))
            assert answer.status_code == 400
            assert f"has {size} bytes (max" in answer.json()["message"]
        listed = (await bombed.http.get(bombed.api("contents"))).json()["entries"]
        assert [entry["size"] for entry in listed] == [9, size]
        search = Search()
        found = await search.content(bombed.repository, "needle")
        assert ([file.path for file in found.files], found.stopped) == (["small"], False)
        changed = await search.diffs(bombed.repository, "needle")
        paths = [file.path for each in changed.commits for file in each.files]
        assert paths == ["small"] or changed.stopped
        assert size < await bombed.streamed("tarball") < size + MIB
        assert await bombed.streamed("zip") < size // 500
        login = ("-c", f"http.extraHeader=Authorization: Bearer {bombed.repo_server.key}")
        url = f"{bombed.repo_server.url}/{bombed.repository.id}"
        await bombed.git(*login, "clone", "-q", "--bare", url, "copy")
        await bombed.repo_server.hosting.repos.quotas.flush()
        await bombed.repo_server.hosting.repos.housekeeping.join()
    assert memory.server < FLAT
    assert memory.git < FLAT
    info = await bombed.repo_server.hosting.repos.get(bombed.repository.id)
    assert info.size is not None
    assert info.size < size // 500


async def test_delta_bomb_is_refused(bombed: Bombed) -> None:
    """20 kB that would need 2 GB of memory to parse."""
    pack = Pack()
    pack.copies(2 << 30)
    assert len(pack.data) < 30_000
    async with bombed.watched() as memory:
        assert "unpack index-pack abnormal exit" in await bombed.push(pack)
    assert memory.git < FLAT
    assert await bombed.repository.branches() == []


async def test_exponential_tree_is_stored_and_listings_are_limited(bombed: Bombed) -> None:
    """Ten folders in each of ten, ten levels deep: few objects, and too many paths to list."""
    pack = Pack()
    blob = pack.blob(b"x\n")
    top = pack.tree({f"file{number}": blob for number in range(10)})
    for _ in range(9):
        top = pack.tree({f"folder{number}": top for number in range(10)}, folders=True)
    async with bombed.watched() as memory:
        assert "ok refs/heads/main" in await bombed.push(pack, pack.commit(top))
        answer = await bombed.http.get(bombed.api("contents"))
        assert len(answer.json()["entries"]) == 10
        assert not any("entries" in each for each in answer.json()["entries"])
        answer = await bombed.http.get(bombed.api("contents"), params={"recursive": "true"})
        assert (answer.status_code, answer.json()["code"]) == (400, "GIT_INVALID_REQUEST")
        search = Search(timeout=2)
        assert (await search.content(bombed.repository, "needle")).stopped
        assert (await search.files(bombed.repository, "needle")).stopped
        for kind in ("tarball", "zip"):
            answer = await bombed.http.get(bombed.api(kind))
            assert (answer.status_code, answer.json()["code"]) == (400, "GIT_INVALID_REQUEST")
    assert memory.server < FLAT
    assert memory.git < 600 * MIB


async def test_too_deep_tree_is_refused_or_reported(bombed: Bombed) -> None:
    """Nested so deep that git itself may crash: the server reports it and keeps running."""
    for depth in (20_000, 100_000):
        pack = Pack()
        top = pack.tree({"file": pack.blob(b"x\n")})
        for _ in range(depth):
            top = pack.tree({"a": top}, folders=True)
        async with bombed.watched() as memory:
            pushed = "ok refs/heads/main" in await bombed.push(pack, pack.commit(top))
            assert pushed or depth == 100_000
            if pushed:
                answer = await bombed.http.get(bombed.api("contents"), params={"recursive": "true"})
                assert answer.status_code == 400
                assert (await bombed.http.get(bombed.api("contents"))).status_code == 200
        assert memory.server < FLAT
