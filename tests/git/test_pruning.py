"""Pruning: unreachable objects are removed after the grace period, reachable ones never."""

import asyncio
import os
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from stead.repos.committing import Change, commit
from stead.repos.git import Finished, GitFailed
from stead.repos.maintenance import housekeeping
from stead.repos.maintenance.pruning import EVERY, GRACE
from stead.repos.repository import Repository
from stead.store.repos import RepoRow, RepoStore
from support.git_client import GitClient
from support.git_hosting import RepoHosting, open_hosting, served
from support.waiting import until

NO_GRACE = -2.0
"""Seconds: also prunes objects that became unreachable in this second."""


async def superseded(repository: Repository, size: int = 1 << 20, name: str = "side") -> str:
    """An unreachable commit with this many unique bytes."""
    made = await commit(repository, [Change("large", os.urandom(size))], "lost", branch=name)
    await repository.git.run(repository.path, "update-ref", "-d", f"refs/heads/{name}")
    return made.sha


def has(repository: Repository, sha: str) -> bool:
    """Whether a commit exists with all objects that it refers to."""
    command = ["git", "--git-dir", str(repository.path), "rev-list", "--objects", "--quiet", sha]
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


async def row_of(hosting: RepoHosting, repository: Repository) -> RepoRow:
    row = await RepoStore(hosting.database).get(repository.id)
    assert row is not None
    return row


@pytest.mark.parametrize("races", [2, 3])
async def test_a_prune_that_races_with_pushes_repacks_again(
    hosting: RepoHosting, monkeypatch: pytest.MonkeyPatch, races: int
) -> None:
    """git cannot index packs while a push moves a ref: nothing is lost, and it is tried three times."""
    repository = await hosting.repository()
    kept = await commit(repository, [Change("kept", b"kept")], "kept")
    lost = await superseded(repository, 1 << 10)
    run, repacks = repository.git.run, 0

    async def run_and_race(path: Path, *arguments: str, **options: Any) -> bytes:
        nonlocal repacks
        printed = await run(path, *arguments, **options)
        if "repack" in arguments:
            repacks += 1
            if repacks <= races:
                raise GitFailed("repack", Finished(1, b"", "error: could not write multi-pack bitmap\n"))
        return printed

    monkeypatch.setattr(repository.git, "run", run_and_race)
    if races == 3:
        with pytest.raises(GitFailed):
            await hosting.repos.pruning.prune(repository, NO_GRACE)
        assert has(repository, lost)
    else:
        await hosting.repos.pruning.prune(repository, NO_GRACE)
        assert not has(repository, lost)
    assert repacks == 3
    assert has(repository, kept.sha)


async def test_unreachable_objects_are_removed_after_the_grace_period(hosting: RepoHosting) -> None:
    """The grace period starts when an object is found unreachable, whatever its age. Bitmaps stay."""
    repository = await hosting.repository()
    kept = await commit(repository, [Change("kept", os.urandom(2 << 20))], "kept")
    lost = await superseded(repository)
    packs = repository.path / "objects" / "pack"
    for pack in packs.iterdir():
        os.utime(pack, (1, 1))
    await hosting.repos.quotas.measure(repository.id)
    before = await row_of(hosting, repository)
    for _ in range(2):
        assert await hosting.repos.pruning.prune(repository) == GRACE
        assert has(repository, lost)
        assert list(packs.glob("*.bitmap"))
    more = await superseded(repository)
    assert await hosting.repos.pruning.prune(repository, NO_GRACE) is None
    assert not has(repository, lost) and not has(repository, more)
    assert has(repository, kept.sha)
    assert list(packs.glob("*.bitmap")) and not list(packs.glob("*.mtimes"))
    assert not list(repository.path.glob("expired-*"))
    after = await row_of(hosting, repository)
    assert before.size is not None and after.size is not None
    assert 0.9 < (before.size - after.size) / (1 << 20) < 1.1


async def test_repack_keeps_cruft_packs(hosting: RepoHosting, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = await hosting.repository()
    lost = await superseded(repository)
    await commit(repository, [Change("a", b"1")], "a")
    await hosting.repos.pruning.prune(repository)
    waiting = list(repository.path.glob("objects/pack/*.mtimes"))
    assert waiting
    monkeypatch.setattr(housekeeping, "MAX_PACKS", 0)
    for number in range(3):
        await commit(repository, [Change("a", b"more %d" % number)], "a")
        hosting.repos.housekeeping.schedule(repository)
        await hosting.repos.housekeeping.join()
    assert list(repository.path.glob("objects/pack/*.mtimes")) == waiting
    assert has(repository, lost)
    assert await hosting.repos.pruning.prune(repository, NO_GRACE) is None
    assert not has(repository, lost)


async def test_objects_referenced_again_are_restored(
    hosting: RepoHosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a writer that had seen it before it was moved aside."""
    repository = await hosting.repository()
    await commit(repository, [Change("kept", b"kept")], "kept")
    lost = await superseded(repository)
    run = repository.git.run

    async def refer(path: Path, command: str, *arguments: str, **options: Any) -> bytes:
        printed = await run(path, command, *arguments, **options)
        if command == "repack":
            assert not has(repository, lost)
            (path / "refs" / "heads" / "back").write_text(f"{lost}\n")
        return printed

    monkeypatch.setattr(repository.git, "run", refer)
    assert await hosting.repos.pruning.prune(repository, NO_GRACE) == EVERY
    assert has(repository, "refs/heads/back")
    assert not list(repository.path.glob("expired-*"))


async def test_prune_waits_for_writers(hosting: RepoHosting, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may reference it at their end; nothing is removed before."""
    repository = await hosting.repository()
    await commit(repository, [Change("kept", b"kept")], "kept")
    lost = await superseded(repository)
    quiet = hosting.repos.quotas.wait_for_writers
    waiting = asyncio.Event()

    async def wait(repo_id: str) -> None:
        waiting.set()
        await quiet(repo_id)

    monkeypatch.setattr(hosting.repos.quotas, "wait_for_writers", wait)
    async with hosting.repos.quotas.reserving(repository.id):
        pruning = asyncio.create_task(hosting.repos.pruning.prune(repository, NO_GRACE))
        await asyncio.wait_for(waiting.wait(), 60)
        assert not has(repository, lost)
        (repository.path / "refs" / "heads" / "back").write_text(f"{lost}\n")
    assert await pruning == EVERY
    assert has(repository, "refs/heads/back")


async def test_interrupted_prune_is_undone(tmp_path: Path) -> None:
    async with open_hosting(tmp_path) as hosting:
        repository = await hosting.repository()
        sha = (await commit(repository, [Change("a", b"1")], "a")).sha
    for part in (repository.path / "objects" / "pack").iterdir():
        part.rename(repository.path / part.name.replace("pack-", "expired-"))
    assert not has(repository, sha)

    async with open_hosting(tmp_path):
        await until(lambda: has(repository, sha), 60)


async def test_prune_schedule_survives_restart(tmp_path: Path) -> None:
    """Unreachable objects then wait for their grace period; afterwards nothing is due."""
    async with open_hosting(tmp_path) as hosting:
        repositories = [await hosting.repository() for _ in range(2)]
        store = RepoStore(hosting.database)
        for number, repository in enumerate(repositories):
            await commit(repository, [Change("a", b"1")], "a")
            if number:
                await superseded(repository)
            await store.prune_by(repository.id, time.time_ns() - 1)
    async with open_hosting(tmp_path) as hosting:

        async def pruned() -> bool:
            clean, other = [await row_of(hosting, repository) for repository in repositories]
            waits = other.prune_at is not None and other.prune_at > time.time_ns() + (GRACE - 3600) * 1e9
            return clean.prune_at is None and waits

        await until(pruned, 60)
        assert list(repositories[1].path.glob("objects/pack/*.mtimes"))


# Scheduling


@dataclass
class User:
    """A user who pushes to a repository, from a work tree with one commit."""

    hosting: RepoHosting
    repository: Repository
    git: GitClient
    work: Path
    http: httpx2.AsyncClient

    async def write(self, branch: str, content: str) -> httpx2.Response:
        files = [{"path": "file", "content": content}]
        wanted = {"message": branch, "files": files, "branch": branch}
        return await self.http.post(f"/git/v1/repo/{self.repository.id}/commits", json=wanted)


@pytest_asyncio.fixture
async def user(tmp_path: Path) -> AsyncIterator[User]:
    async with served(tmp_path) as repo_server:
        repository = await repo_server.hosting.repository()
        (tmp_path / "home").mkdir()
        git = GitClient(tmp_path / "home")
        work = await git.work_tree("work")
        await git("remote", "add", "origin", f"{repo_server.url}/{repository.id}", cwd=work)
        headers = {"authorization": f"Bearer {repo_server.key}"}
        await git("config", "http.extraHeader", f"Authorization: {headers['authorization']}", cwd=work)
        async with httpx2.AsyncClient(base_url=repo_server.url, headers=headers, timeout=60) as http:
            yield User(repo_server.hosting, repository, git, work, http)


async def test_non_fast_forward_updates_schedule_a_prune(user: User) -> None:
    """By forced pushes, deletions and commits that lost a race; not by fast-forwards."""
    hosting, git, work = user.hosting, user.git, user.work

    async def noticed(*push: str) -> bool:
        await RepoStore(hosting.database).update(user.repository.id, prune_at=None)
        await git("push", "-q", "origin", *push, cwd=work)
        await hosting.repos.quotas.flush()
        at = (await row_of(hosting, user.repository)).prune_at
        assert at is None or abs(at - time.time_ns() - EVERY * 1e9) < 60e9
        return at is not None

    assert not await noticed("main", "main:side")
    await git.commit(work, {"more": "1"})
    await git.commit(work, {"more": "2"})
    assert not await noticed("main", "main:side")
    await git("commit", "-q", "--amend", "-m", "otherwise", cwd=work)
    assert await noticed("--force", "main")
    assert await noticed("--delete", "side")

    await RepoStore(hosting.database).update(user.repository.id, prune_at=None)
    answers = await asyncio.gather(*(user.write("main", str(number)) for number in range(4)))
    assert 200 in {answer.status_code for answer in answers}
    await hosting.repos.quotas.flush()
    assert (await row_of(hosting, user.repository)).prune_at is not None


async def test_prune_races_with_writers_lose_nothing(user: User) -> None:
    """Without grace period, with objects that are being removed: every accepted write is complete."""
    git, work, repository = user.git, user.work, user.repository
    await git("push", "-q", "origin", "main", cwd=work)
    again = "".join(f"{number}\n" for number in range(1000))
    accepted: dict[str, str] = {}

    async def push(branch: str) -> None:
        sha = await git("rev-parse", "main", cwd=work)
        if (await git.run("push", "origin", f"{sha}:refs/heads/{branch}", cwd=work)).status == 0:
            accepted[branch] = sha

    async def write(branch: str) -> None:
        answer = await user.write(branch, again)
        if answer.status_code == 200:
            accepted[branch] = answer.json()["commit"]["sha"]

    for number in range(5):
        await commit(repository, [Change("file", again.encode())], "lost", branch="lost")
        await git("push", "-q", "origin", "--delete", "lost", cwd=work)
        await git.commit(work, {f"file{number}": os.urandom(100_000)})
        await asyncio.gather(
            user.hosting.repos.pruning.prune(repository, NO_GRACE),
            *(push(f"pushed{number}-{each}") for each in range(2)),
            *(write(f"written{number}-{each}") for each in range(3)),
        )
        branches = {branch.name: branch.sha for branch in await repository.branches()}
        assert accepted.items() <= branches.items()
        assert has(repository, "--all")
    assert len(accepted) > 5
