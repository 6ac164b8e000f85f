"""Repository quotas: bytes and refs, for every kind of write."""

import asyncio
import base64
import hashlib
import itertools
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from stead.repos import quotas
from stead.repos.errors import RepoBusy
from stead.repos.maintenance import housekeeping
from stead.repos.repos import Repos
from stead.repos.transfer import serving as native
from stead.shares import KeyedLimit
from stead.store.repos import RepoStore
from support.git_client import GitClient
from support.git_hosting import RepoServer, served
from support.git_server import Page, serving

MIB = 1 << 20
REPOS = "/git/v1/repo"
_names = itertools.count()


@pytest_asyncio.fixture(scope="module")
async def repo_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RepoServer]:
    async with served(tmp_path_factory.mktemp("site"), [ip_network("127.0.0.0/8")]) as repo_server:
        yield repo_server


@dataclass
class User:
    """A new account with an API client and git."""

    repo_server: RepoServer
    account: str
    key: str
    http: httpx2.AsyncClient
    git: GitClient

    @property
    def repos(self) -> Repos:
        return self.repo_server.hosting.repos

    async def limit(self, **limits: int | None) -> None:
        await self.repo_server.hosting.accounts.set_limits(self.account, limits)

    async def create(self, **wanted: Any) -> str:
        made = await self.http.post(REPOS, json=wanted)
        assert made.status_code == 200, made.text
        repo: str = made.json()["repoId"]
        return repo

    def remote(self, repo: str) -> str:
        return self.repo_server.url.replace("http://", f"http://x:{self.key}@") + f"/{repo}"

    async def work_tree(self, repo: str, size: int = 0) -> Path:
        """With one commit on main that is not pushed yet."""
        work = await self.git.work_tree(f"work{next(_names)}", {"first": os.urandom(size)})
        await self.git("remote", "add", "origin", self.remote(repo), cwd=work)
        return work

    async def commit(self, repo: str, size: int, branch: str = "main") -> httpx2.Response:
        content = base64.b64encode(os.urandom(size)).decode()
        file = {"path": f"file{next(_names)}", "content": content, "encoding": "base64"}
        wanted = {"message": "change", "files": [file], "branch": branch}
        return await self.http.post(f"{REPOS}/{repo}/commits", json=wanted)

    async def size(self, repo: str) -> int:
        """As the API reports it, after all measurements."""
        await self.repos.quotas.flush()
        await self.repos.housekeeping.join()
        size: int = (await self.http.get(f"{REPOS}/{repo}")).json()["sizeBytes"]
        return size


@pytest_asyncio.fixture
async def user(repo_server: RepoServer, tmp_path: Path) -> AsyncIterator[User]:
    account = (await repo_server.hosting.accounts.create(f"user{next(_names)}")).id
    _, key = await repo_server.hosting.accounts.create_key(account)
    headers = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=repo_server.url, headers=headers, timeout=30) as http:
        yield User(repo_server, account, key, http, GitClient(tmp_path))
    await repo_server.hosting.repos.quotas.flush()
    await repo_server.hosting.repos.housekeeping.join()


def refused(answer: httpx2.Response, limit: int) -> None:
    assert (answer.status_code, answer.json()["code"]) == (403, "LIMIT_EXCEEDED"), answer.text
    assert answer.json()["limit"] == limit
    assert answer.json()["current"] >= 0


# Measurement


async def test_size_is_measured_after_every_kind_of_write(user: User) -> None:
    """By push, API, LFS and import; also in the list."""
    repo = await user.create()
    assert await user.size(repo) == 0
    work = await user.work_tree(repo, 2 * MIB)
    await user.git("push", "-q", "origin", "main", cwd=work)
    pushed = await user.size(repo)
    assert 2 * MIB < pushed < 2.1 * MIB
    assert (await user.commit(repo, MIB)).status_code == 200
    committed = await user.size(repo)
    assert MIB < committed - pushed < 1.1 * MIB
    large = os.urandom(MIB)
    place = f"/{repo}/info/lfs/objects/{hashlib.sha256(large).hexdigest()}"
    for _ in range(2):
        assert (await user.http.put(place, content=large)).status_code == 200
        assert await user.size(repo) == committed + MIB
    text = base64.b64encode(os.urandom(MIB)).decode()
    imported = await user.create(**{"import": {"type": "files", "commitMessage": "x", "files": {"a": text}}})
    sizes = {row["id"]: row["sizeBytes"] for row in (await user.http.get(REPOS)).json()["repositories"]}
    assert sizes[repo] == committed + MIB
    assert MIB < sizes[imported] < 1.1 * MIB


async def test_unknown_sizes_are_measured_at_start(user: User) -> None:
    """For rows of an older version, and after a crash before a measurement was recorded."""
    repo = await user.create()
    work = await user.work_tree(repo, MIB)
    await user.git("push", "-q", "origin", "main", cwd=work)
    size = await user.size(repo)
    store = RepoStore(user.repo_server.hosting.database)
    await store.update(repo, size=None, lfs_size=None, refs=None)
    await user.limit(total_repos_mib=2)
    refused(await user.commit(await user.create(), 2 * MIB), 2 * MIB)
    assert await user.size(repo) == size
    await store.update(repo, size=7, refs=7)
    await user.repos.quotas.measure_all()
    row = await store.get(repo)
    assert row is not None
    assert (row.whole_size, row.refs) == (size, 1)


# Bytes


async def test_push_over_quota_is_refused_and_leaves_nothing(user: User) -> None:
    """A large push is refused before it is sent; smaller pushes and deletions still work."""
    await user.limit(repo_mib=2)
    repo = await user.create()
    work = await user.work_tree(repo, MIB)
    await user.git("push", "-q", "origin", "main", "main:side", cwd=work)
    size = await user.size(repo)
    for number, more in enumerate((MIB, 40 * MIB)):
        await user.git("switch", "-q", "-c", f"large{number}", "main", cwd=work)
        await user.git.commit(work, {"more": os.urandom(more)})
        ran = await user.git.run("push", "origin", "HEAD", cwd=work)
        assert ran.status != 0
        assert "repository quota exceeded: 1 of 2 MiB in use; raise the quota" in ran.err
    assert await user.size(repo) == size
    assert not list(user.repos.repository(repo).path.rglob("*tmp_*"))
    await user.git("switch", "-q", "main", cwd=work)
    await user.git.commit(work, {"small": "small"})
    await user.git("push", "-q", "origin", "main", cwd=work)
    await user.limit(repo_mib=1)
    await user.git.commit(work, {"small": "again"})
    assert "quota exceeded" in (await user.git.run("push", "origin", "main", cwd=work)).err
    await user.git("push", "-q", "origin", "--delete", "side", cwd=work)
    assert "side" not in await user.git("ls-remote", user.remote(repo))


async def test_concurrent_pushes_share_the_quota(user: User) -> None:
    await user.limit(repo_mib=8)
    repo = await user.create()
    works = [await user.work_tree(repo, 3 * MIB) for _ in range(4)]
    pushes = (
        user.git.run("push", "origin", f"main:b{number}", cwd=work) for number, work in enumerate(works)
    )
    statuses = [ran.status for ran in await asyncio.gather(*pushes)]
    assert 1 <= statuses.count(0) <= 2
    assert await user.size(repo) <= 8 * MIB
    heads = await user.git("ls-remote", "--heads", user.remote(repo))
    assert len(heads.splitlines()) == statuses.count(0)


async def test_completed_thin_pack_is_limited_too(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small delta against a large file: git stores the whole file again."""
    monkeypatch.setattr(native, "_COMPLETION", 0)
    await user.limit(repo_mib=3)
    repo = await user.create()
    work = await user.work_tree(repo, 2 * MIB)
    await user.git("push", "-q", "origin", "main", cwd=work)
    size = await user.size(repo)
    (work / "first").write_bytes((work / "first").read_bytes() + b"x")
    compares = ("-c", "core.bigFileThreshold=1g")
    await user.git(*compares, "commit", "-q", "-a", "-m", "x", cwd=work)
    ran = await user.git.run(*compares, "push", "origin", "main", cwd=work)
    assert "index-pack" in ran.err
    assert await user.size(repo) == size
    await user.limit(repo_mib=5)
    await user.git(*compares, "push", "-q", "origin", "main", cwd=work)


async def test_repositories_share_the_account_quota(user: User) -> None:
    await user.limit(total_repos_mib=3)
    one, other = await user.create(), await user.create()
    work = await user.work_tree(one, 2 * MIB)
    await user.git("push", "-q", "origin", "main", cwd=work)
    refused(await user.commit(other, MIB), 3 * MIB)
    small = await user.commit(other, MIB // 2)
    assert small.status_code == 200
    answers = await asyncio.gather(*(user.commit(other, MIB // 4, f"b{number}") for number in range(4)))
    assert [answer.status_code for answer in answers].count(200) == 1
    ran = await user.git.run("push", user.remote(other), "main:pushed", cwd=work)
    assert "account quota exceeded" in ran.err
    await user.http.delete(f"{REPOS}/{one}")
    await user.git("push", "-q", user.remote(other), "main:pushed", cwd=work)


async def test_compressed_commit_counts_its_size_on_disk(user: User) -> None:
    """Commits in quick succession are counted uncompressed, but not refused for that."""
    await user.limit(repo_mib=2)
    repo = await user.create()
    for number in range(4):
        file = {"path": "zeros", "content": str(number) + "0" * (MIB - 1)}
        wanted = {"message": "change", "files": [file]}
        assert (await user.http.post(f"{REPOS}/{repo}/commits", json=wanted)).status_code == 200
    assert await user.size(repo) < MIB


async def test_import_over_quota_is_refused(user: User, tmp_path: Path) -> None:
    """By the account quota; nothing is left."""
    source = await user.git.work_tree("source", {"large": os.urandom(3 * MIB)})
    (tmp_path / "served").mkdir()
    with serving(tmp_path / "served") as server:
        await user.git("clone", "-q", "--bare", str(source), str(tmp_path / "served" / "large.git"))
        await user.limit(repo_mib=2)
        for wanted in (
            {"source": {"url": f"{server.url}/large.git"}},
            {"import": {"type": "git", "url": f"{server.url}/large.git", "commitMessage": "x"}},
        ):
            refused(await user.http.post(REPOS, json=wanted), 2 * MIB)
        text = base64.b64encode(os.urandom(3 * MIB)).decode()
        files = {"import": {"type": "files", "commitMessage": "x", "files": {"a": text}}}
        refused(await user.http.post(REPOS, json=files), 2 * MIB)
        await user.limit(repo_mib=None, total_repos_mib=4)
        wanted = {"source": {"url": f"{server.url}/large.git"}}
        made = await asyncio.gather(*(user.http.post(REPOS, json=wanted) for _ in range(2)))
        assert sorted(answer.status_code for answer in made) == [200, 403]
        await user.limit(total_repos_mib=3)
        refused(await user.http.post(REPOS, json=wanted), 3 * MIB)
    assert (await user.http.get(REPOS)).json()["total"] == 1
    assert list((user.repo_server.hosting.folder / "repos" / "new").iterdir()) == []


async def test_concurrent_imports_per_account_limit(
    user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One import over the limit waits, then is refused with retry later; other accounts are not affected."""
    limit = KeyedLimit(8, 1, max_wait=0.2, busy=lambda: RepoBusy("imports"))
    monkeypatch.setattr(user.repos, "_imports", limit)
    files = {"import": {"type": "files", "commitMessage": "x", "files": {"a": "1"}}}
    with serving(tmp_path) as server:
        begun, go_on = threading.Event(), threading.Event()

        def slow() -> Page:
            begun.set()
            go_on.wait(20)
            return Page(b"", 404)

        server.pages["/slow"] = slow
        archive = {"import": {"type": "tar", "url": f"{server.url}/slow", "commitMessage": "x"}}
        importing = asyncio.create_task(user.http.post(REPOS, json=archive))
        try:
            await asyncio.to_thread(begun.wait, 20)
            busy = await user.http.post(REPOS, json=files)
            assert (busy.status_code, busy.json()["code"]) == (503, "SERVICE_UNAVAILABLE")
            assert int(busy.headers["retry-after"]) > 0
            await user.create()
            theirs = {"authorization": f"Bearer {user.repo_server.their_key}"}
            assert (await user.http.post(REPOS, json=files, headers=theirs)).status_code == 200
        finally:
            go_on.set()
        assert (await importing).json()["code"] == "SOURCE_NOT_FOUND"
    assert (await user.http.post(REPOS, json=files)).status_code == 200


async def test_lfs_quota_before_and_during_upload(user: User) -> None:
    """A batch offers the objects that fit; existing objects are not counted twice."""
    await user.limit(repo_mib=2)
    repo = await user.create()
    contents = [os.urandom(MIB), os.urandom(MIB), b"small"]
    objects = [{"oid": hashlib.sha256(each).hexdigest(), "size": len(each)} for each in contents]

    async def batch() -> list[dict[str, Any]]:
        body = {"operation": "upload", "objects": objects}
        answer = await user.http.post(f"/{repo}/info/lfs/objects/batch", json=body)
        found: list[dict[str, Any]] = answer.json()["objects"]
        return found

    async def put(number: int) -> int:
        place = f"/{repo}/info/lfs/objects/{objects[number]['oid']}"
        return (await user.http.put(place, content=contents[number])).status_code

    first, second, third = await batch()
    assert first["actions"] and second["actions"]
    assert third["error"]["code"] == 507
    assert "quota exceeded" in third["error"]["message"]
    assert await put(0) == 200
    assert (await user.commit(repo, MIB // 2)).status_code == 200
    first, second, third = await batch()
    assert "actions" not in first and "error" not in first
    assert second["error"]["code"] == 507
    assert third["actions"]
    assert await put(1) == 507
    assert await put(2) == 200
    assert not list(user.repos.repository(repo).path.glob("lfs/incoming/*"))
    assert 1.5 * MIB < await user.size(repo) < 1.6 * MIB


async def test_small_lfs_objects_count_for_their_inodes(user: User) -> None:
    """ext4 has one inode for 16 KiB: as many small objects as fit the quota leave enough of them."""
    await user.limit(repo_mib=1)
    repo = await user.create()
    small = [f"object {number}".encode() for number in range(4)]
    places = [f"/{repo}/info/lfs/objects/{hashlib.sha256(each).hexdigest()}" for each in small]
    for place, content in zip(places[:3], small, strict=False):
        assert (await user.http.put(place, content=content)).status_code == 200
    assert 48 << 10 <= await user.size(repo) < 64 << 10
    assert (await user.commit(repo, MIB - (60 << 10))).status_code == 200
    full = await user.http.put(places[3], content=small[3])
    assert full.status_code == 507, full.text
    assert not list(user.repos.repository(repo).path.glob("lfs/incoming/*"))


# Refs


async def test_ref_limit(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    """By push and API, with a message; existing refs can be updated and deleted."""
    monkeypatch.setattr(quotas, "MAX_REFS", 5)
    repo = await user.create()
    work = await user.work_tree(repo)
    await user.git("push", "-q", "origin", *(f"main:b{number}" for number in range(4)), cwd=work)
    await user.repos.quotas.flush()
    ran = await user.git.run("push", "origin", "main:b4", "main:refs/tags/t", cwd=work)
    assert "this repository has 4 branches and tags (max 5); delete some" in ran.err
    assert len((await user.git("ls-remote", user.remote(repo))).splitlines()) == 4
    branches = f"{REPOS}/{repo}/git/refs/heads"
    start = {"sha": await user.git("rev-parse", "main", cwd=work)}
    assert (await user.http.post(f"{branches}/new", json=start)).status_code == 200
    refused(await user.http.post(f"{branches}/more", json={}), 5)
    refused(await user.commit(repo, 10, "more"), 5)
    assert (await user.commit(repo, 10, "b0")).status_code == 200
    await user.git("push", "-q", "origin", "--delete", "b1", "b2", cwd=work)
    await user.git("push", "-q", "origin", "main:b5", "main:b6", cwd=work)
    assert await user.size(repo)


async def test_many_refs_are_packed(user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = await user.create()
    work = await user.work_tree(repo)
    await user.git("push", "-q", "origin", *(f"main:tmp_{number}" for number in range(20)), cwd=work)
    monkeypatch.setattr(housekeeping, "MAX_LOOSE_REFS", 10)
    user.repos.quotas.measure_soon(repo)
    await user.repos.quotas.flush()
    await user.repos.housekeeping.join()
    path = user.repos.repository(repo).path
    assert not [each for each in path.glob("refs/**/*") if each.is_file()]
    await user.git.commit(work, {"a": "1"})
    await user.git("push", "-q", "origin", "main:tmp_3", "main:tmp_20", "main:tmp_21", cwd=work)
    await user.git("push", "-q", "origin", "--delete", "tmp_4", cwd=work)
    await user.repos.quotas.flush()
    row = await RepoStore(user.repo_server.hosting.database).get(repo)
    assert row is not None
    assert row.refs == 21
