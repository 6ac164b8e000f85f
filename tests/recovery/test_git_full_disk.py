"""Repositories on a full disk."""

import base64
import io
import itertools
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from support.git_client import GitClient
from support.git_hosting import RepoServer, served
from support.git_objects import Objects
from support.git_server import GitServer, Page
from support.git_server import serving as serving_git
from support.installations import fill_up, small_disk
from support.serve_process import client_of

pytestmark = pytest.mark.heavy
LARGE = 3 << 20
_numbers = itertools.count()


@dataclass(frozen=True)
class Hosting:
    """A server on its own small disk, with a repository, and a user elsewhere."""

    disk: Path
    repo_server: RepoServer
    http: httpx2.AsyncClient
    objects: Objects
    source: GitServer
    repo: str
    tip: str

    @property
    def git(self) -> GitClient:
        return self.objects.git

    def remote(self) -> str:
        return self.repo_server.url.replace("://", f"://x:{self.repo_server.key}@") + f"/{self.repo}"

    async def push(self, sha: str, branch: str) -> "Said":
        ran = await self.git.run("push", self.remote(), f"{sha}:refs/heads/{branch}", cwd=self.objects.folder)
        return Said(ran.status == 0, ran.err)

    async def call(self, method: str, path: str, body: object) -> "Said":
        answer = await self.http.request(method, f"/git/v1/repo{path}", json=body)
        if answer.status_code != 200:
            assert (answer.status_code, answer.json()["code"]) == (503, "NO_LOCAL_STORAGE_CAPACITY")
            assert int(answer.headers["retry-after"]) > 0
        return Said(answer.status_code == 200, answer.text)

    async def settled(self) -> None:
        """Wait for measurements and maintenance."""
        await self.repo_server.hosting.repos.quotas.flush()
        await self.repo_server.hosting.repos.housekeeping.join()

    def files(self) -> dict[str, int]:
        return {str(path): path.stat().st_size for path in self.disk.glob("repos/**/*") if path.is_file()}

    async def read(self) -> None:
        """Reads still work."""
        with tempfile.TemporaryDirectory() as folder:
            await self.git("clone", "-q", "--bare", self.remote(), folder)
            assert await self.git("rev-parse", "main", cwd=Path(folder)) == self.tip
        for path in ("", f"/{self.repo}", f"/{self.repo}/contents/file", f"/{self.repo}/git/commits"):
            assert (await self.http.get(f"/git/v1/repo{path}")).status_code == 200


@dataclass(frozen=True)
class Said:
    """The message of a refusal."""

    done: bool
    words: str


@pytest_asyncio.fixture(scope="module")
async def hosting(root: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hosting]:
    home = tmp_path_factory.mktemp("home")
    (home / "served").mkdir()
    objects = await Objects.make(GitClient(home), "objects")
    tip = objects.commit(files={"file": b"content"})
    with small_disk(48) as disk, serving_git(home / "served") as source:
        other = objects.commit(files={"large": os.urandom(LARGE)})
        await objects.git(
            "push", "-q", str(source.init("source")), f"{other}:refs/heads/main", cwd=objects.folder
        )
        source.pages["/archive.tar"] = Page(_archive(os.urandom(LARGE)))
        async with (
            served(disk, [IPv4Network("127.0.0.1/32")]) as repo_server,
            client_of(repo_server.url, repo_server.key) as http,
        ):
            repo = (await http.post("/git/v1/repo")).json()["repoId"]
            made = Hosting(disk, repo_server, http, objects, source, repo, tip)
            assert (await made.push(tip, "main")).done
            yield made


def _archive(content: bytes) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        member = tarfile.TarInfo("large")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return written.getvalue()


async def _large_push(hosting: Hosting) -> Said:
    sha = hosting.objects.commit(hosting.tip, files={"large": os.urandom(LARGE)})
    return await hosting.push(sha, "large")


async def _small_push(hosting: Hosting) -> Said:
    return await hosting.push(hosting.objects.commit(hosting.tip), f"small-{next(_numbers)}")


async def _branch_by_push(hosting: Hosting) -> Said:
    return await hosting.push(hosting.tip, f"pushed-{next(_numbers)}")


async def _large_files(hosting: Hosting) -> Said:
    """With the real git-lfs."""
    git, work = hosting.git, hosting.git.home / "work"
    if not work.exists():
        await git.work_tree("work")
        await git("lfs", "install", "--local", cwd=work)
        await git("lfs", "track", "*.bin", cwd=work)
        await git("remote", "add", "origin", hosting.remote(), cwd=work)
        await git.commit(work, {"large.bin": os.urandom(LARGE)})
    ran = await git.run("push", "origin", "HEAD:refs/heads/lfs", cwd=work)
    return Said(ran.status == 0, ran.err)


def _commit(branch: str, size: int) -> dict[str, Any]:
    content = base64.b64encode(os.urandom(size)).decode()
    file = {"path": "new", "content": content, "encoding": "base64"}
    return {"message": "new", "branch": branch, "files": [file]}


async def _large_commit(hosting: Hosting) -> Said:
    return await hosting.call("POST", f"/{hosting.repo}/commits", _commit("large-commit", LARGE))


async def _small_commit(hosting: Hosting) -> Said:
    return await hosting.call("POST", f"/{hosting.repo}/commits", _commit("small-commit", 1))


async def _branch(hosting: Hosting) -> Said:
    return await hosting.call(
        "POST", f"/{hosting.repo}/git/refs/heads/branch-{next(_numbers)}", {"sha": hosting.tip}
    )


async def _default_branch(hosting: Hosting) -> Said:
    return await hosting.call("PUT", f"/{hosting.repo}/default-branch", {"defaultBranch": "main"})


async def _create(hosting: Hosting) -> Said:
    return await hosting.call("POST", "", {})


async def _import_files(hosting: Hosting) -> Said:
    files = {"large": base64.b64encode(os.urandom(LARGE)).decode()}
    return await hosting.call("POST", "", {"import": {"type": "files", "files": files, "commitMessage": "x"}})


async def _import_archive(hosting: Hosting) -> Said:
    archive = {"type": "tar", "url": f"{hosting.source.url}/archive.tar", "commitMessage": "x"}
    return await hosting.call("POST", "", {"import": archive})


async def _import_history(hosting: Hosting) -> Said:
    return await hosting.call("POST", "", {"source": {"url": f"{hosting.source.url}/source"}})


_SOME = 1 << 20
_LARGE = (_large_push, _large_files, _large_commit, _import_files, _import_archive, _import_history)
_SMALL = (_small_push, _branch_by_push, _small_commit, _branch, _default_branch, _create)


_BELOW_FLOOR = 512 << 10
"""Free bytes that are left to others: git would fit into them."""
_STORING = tuple(each for each in _SMALL if each is not _default_branch)


@pytest.mark.parametrize(
    ("attempt", "left"),
    [
        *((each, _SOME) for each in _LARGE),
        *((each, 0) for each in _SMALL),
        *((each, _BELOW_FLOOR) for each in _STORING),
    ],
)
async def test_full_disk_is_reported_and_leaves_nothing(
    hosting: Hosting, attempt: Callable[[Hosting], Awaitable[Said]], left: int
) -> None:
    """Reads work meanwhile, and with free space the same writes work again."""
    await hosting.settled()
    before = hosting.files()
    filler = fill_up(hosting.disk, left)
    try:
        refused = await attempt(hosting)
        assert not refused.done
        assert "disk of the host is full" in refused.words or "No space left on device" in refused.words
        assert hosting.files() == before
        await hosting.read()
    finally:
        filler.unlink()
    done = await attempt(hosting)
    assert done.done, done.words
