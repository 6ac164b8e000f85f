"""The write path of repositories: quota, then the write, then the observers of refs. Without HTTP."""

import asyncio

import pytest

from stead.repos.committing import Change
from stead.repos.errors import ConflictingParent, TooLarge
from stead.repos.quotas import QuotaExceeded
from stead.repos.repository import Repository
from stead.repos.search.search import Search
from stead.repos.writer import RepoWriter
from support.git_hosting import Recorder, RepoHosting

FILE = [Change("file", b"needle\n")]


@pytest.fixture
def recorder(hosting: RepoHosting) -> Recorder:
    recorder = Recorder()
    hosting.writer.subscribe(recorder)
    return recorder


class Failing:
    async def refs_changed(self, repo_id: str) -> None:
        raise RuntimeError(repo_id)


async def test_observers_see_the_changed_refs_before_the_call_returns(hosting: RepoHosting) -> None:
    repository = await hosting.repository()
    seen: list[set[str]] = []

    class Reader:
        async def refs_changed(self, repo_id: str) -> None:
            assert repo_id == repository.id
            seen.append({branch.name for branch in await repository.branches()})

    hosting.writer.subscribe(Reader())
    made = await hosting.writer.commit(repository, FILE, "first")
    assert seen == [{"main"}]
    branch = await hosting.writer.create_branch(repository, "topic")
    assert (branch.sha, seen[1:]) == (made.sha, [{"main", "topic"}])


async def test_write_is_measured(hosting: RepoHosting) -> None:
    repository = await hosting.repository()
    await hosting.writer.commit(repository, FILE, "first")
    await hosting.repos.quotas.flush()
    assert (await hosting.repos.get(repository.id)).size


async def test_refused_writes_change_and_notify_nothing(hosting: RepoHosting, recorder: Recorder) -> None:
    repository = await hosting.repository()
    await hosting.accounts.set_limits(hosting.ours, {"repo_mib": 1})
    with pytest.raises(QuotaExceeded):
        await hosting.writer.commit(repository, [Change("large", b"x" * (1 << 20))], "over the quota")
    with pytest.raises(ConflictingParent):
        await hosting.writer.commit(repository, FILE, "conflict", expected="1" * 40)
    assert (await repository.branches(), recorder) == ([], [])
    await hosting.writer.commit(repository, FILE, "within the quota")
    assert recorder == [repository.id]


async def test_failing_observer_fails_neither_the_write_nor_the_others(hosting: RepoHosting) -> None:
    repository = await hosting.repository()
    recorder = Recorder()
    for observer in (Failing(), recorder):
        hosting.writer.subscribe(observer)
    made = await hosting.writer.commit(repository, FILE, "first")
    assert (await repository.branch("main")).sha == made.sha
    assert recorder == [repository.id]


async def test_observer_is_not_notified_of_its_own_write(hosting: RepoHosting, recorder: Recorder) -> None:
    repository = await hosting.repository()
    other = Recorder()
    hosting.writer.subscribe(other)
    async with hosting.writer.writing(repository.id, origin=other) as write:
        await write.refs_changed()
    assert (recorder, other) == ([repository.id], [])


async def test_cancelled_commit_that_moved_the_ref_is_notified(
    hosting: RepoHosting, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = await hosting.repository()
    moved, move = asyncio.Event(), Repository.move

    async def move_and_stall(self: Repository, branch: str, sha: str, expected: str | None) -> bool:
        await move(self, branch, sha, expected)
        moved.set()
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(Repository, "move", move_and_stall)
    commit = asyncio.create_task(hosting.writer.commit(repository, FILE, "first"))
    await moved.wait()
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert (len(await repository.branches()), recorder) == (1, [repository.id])


async def test_timed_out_git_that_moved_the_ref_is_notified(
    hosting: RepoHosting, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = await hosting.repository()
    move = Repository.move

    async def move_too_late(self: Repository, branch: str, sha: str, expected: str | None) -> bool:
        await move(self, branch, sha, expected)
        raise TooLarge("git update-ref timed out")

    monkeypatch.setattr(Repository, "move", move_too_late)
    with pytest.raises(TooLarge):
        await hosting.writer.commit(repository, FILE, "first")
    assert (len(await repository.branches()), recorder) == (1, [repository.id])


async def test_deleted_repository_leaves_the_search_cache(hosting: RepoHosting) -> None:
    search = Search()
    writer = RepoWriter(hosting.repos, search)
    repository = await hosting.repository()
    await writer.commit(repository, FILE, "first")
    assert (await search.content(repository, "needle")).total_files == 1
    assert search.cache.size
    await writer.delete(repository.id)
    assert search.cache.size == 0
