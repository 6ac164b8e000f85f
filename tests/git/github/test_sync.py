"""GitHub sync in both directions, conflicts and races."""

import asyncio
from typing import Any

import pytest

from stead.github import sync
from stead.github.links import LinkState
from stead.repos.git import Git
from stead.repos.lfs.client import LfsClient
from stead.repos.lfs.store import LfsObjects
from stead.repos.ssrf import SsrfGuard
from stead.repos.transfer.remotes import Remotes
from support.github_link import LIMIT, LOOPBACK, NAME, LinkedRepo

pytestmark = pytest.mark.heavy


# Both directions


async def test_sync_in_both_directions(linked_repo: LinkedRepo) -> None:
    first = await linked_repo.commit("README")
    link = await linked_repo.enable()
    assert (link.name, link.state, link.error, link.conflicts) == (NAME, LinkState.SYNCED, None, [])
    assert linked_repo.there == {"refs/heads/main": first}
    folder = await linked_repo.clone()
    second = await linked_repo.person.commit(folder, {"web.ts": "let there = 1;\n"})
    await linked_repo.person("tag", "-a", "v1", "-m", "one", cwd=folder)
    await linked_repo.push(folder, "main", "v1", "main:refs/heads/deep/topic")
    link = await linked_repo.sync()
    assert link.state is LinkState.SYNCED and link.synced_at is not None
    assert (await linked_repo.here())["refs/heads/main"] == second
    assert set(await linked_repo.here()) == {"refs/heads/main", "refs/heads/deep/topic", "refs/tags/v1"}
    assert await linked_repo.same()
    assert linked_repo.followed == [linked_repo.repository.id]
    assert (await linked_repo.repository.tag("v1")).message == "one\n"


async def test_empty_repository_is_filled_from_github(linked_repo: LinkedRepo) -> None:
    linked_repo.github.git(NAME, "symbolic-ref", "HEAD", "refs/heads/trunk")
    folder = await linked_repo.person.work_tree("work")
    await linked_repo.person(
        "push", "-q", linked_repo.github.url(NAME), "main:trunk", "main:topic", cwd=folder
    )
    await linked_repo.enable()
    assert await linked_repo.same()
    assert linked_repo.repository.default_branch == "trunk"


async def test_two_empty_repositories_are_synced(linked_repo: LinkedRepo) -> None:
    assert (await linked_repo.enable()).state is LinkState.SYNCED


async def test_deletions_sync_in_both_directions(linked_repo: LinkedRepo) -> None:
    sha = await linked_repo.commit("README")
    for branch in ("one", "two"):
        await linked_repo.repository.create_branch(branch)
    await linked_repo.repository.git.run(linked_repo.repository.path, "update-ref", "refs/tags/old", sha)
    await linked_repo.repository.git.run(linked_repo.repository.path, "update-ref", "refs/tags/older", sha)
    await linked_repo.enable()
    assert len(linked_repo.there) == 5
    folder = await linked_repo.clone()
    await linked_repo.push(folder, ":one", ":refs/tags/old")
    await linked_repo.delete("refs/heads/two")
    await linked_repo.delete("refs/tags/older")
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert await linked_repo.here() == linked_repo.there == {"refs/heads/main": sha}
    # A new ref with the same name is new.
    await linked_repo.repository.create_branch("two/inner")
    await linked_repo.push(folder, "main:one")
    await linked_repo.sync()
    assert (
        set(linked_repo.there)
        == set(await linked_repo.here())
        == {
            "refs/heads/main",
            "refs/heads/one",
            "refs/heads/two/inner",
        }
    )


async def test_deleted_ref_frees_its_name_for_nested_refs(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.repository.create_branch("topic")
    await linked_repo.repository.create_branch("other")
    await linked_repo.enable()
    folder = await linked_repo.clone()
    await linked_repo.push(folder, ":topic")
    await linked_repo.push(folder, "main:topic/inner")
    await linked_repo.delete("refs/heads/other")
    await linked_repo.repository.create_branch("other/inner")
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert await linked_repo.same()
    assert set(linked_repo.there) == {f"refs/heads/{name}" for name in ("main", "topic/inner", "other/inner")}


# Conflicts


async def test_conflicting_changes_are_reported_and_left(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    folder = await linked_repo.clone()
    theirs = await linked_repo.person.commit(folder, {"there": "there\n"})
    await linked_repo.push(folder, "main", "main:topic")
    ours = await linked_repo.commit("here")
    link = await linked_repo.sync()
    assert link.state is LinkState.DIVERGED
    (left,) = link.conflicts
    assert (left.ref, left.here, left.there) == ("refs/heads/main", ours, theirs)
    assert "both sides" in left.reason
    assert (await linked_repo.here())["refs/heads/main"] == ours
    assert linked_repo.there["refs/heads/main"] == theirs
    # Other refs still sync.
    assert (await linked_repo.here())["refs/heads/topic"] == theirs
    # A user merges the two.
    await linked_repo.person("fetch", "-q", str(linked_repo.repository.path), "main", cwd=folder)
    await linked_repo.person("merge", "-q", "-m", "both", "FETCH_HEAD", cwd=folder)
    await linked_repo.push(folder, "main")
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert await linked_repo.same()


async def test_rewritten_github_branch_is_not_pulled(linked_repo: LinkedRepo) -> None:
    first = await linked_repo.commit("README")
    await linked_repo.commit("more")
    await linked_repo.enable()
    folder = await linked_repo.clone()
    before = await linked_repo.here()
    await linked_repo.person("commit", "-q", "--amend", "-m", "another past", cwd=folder)
    await linked_repo.push(folder, "main", force=True)
    link = await linked_repo.sync()
    assert [each.reason for each in link.conflicts] == ["rewritten on GitHub"]
    assert await linked_repo.here() == before
    await linked_repo.push(folder, f"{first}:main", force=True)
    link = await linked_repo.sync()
    assert [each.reason for each in link.conflicts] == ["moved back on GitHub"]
    assert await linked_repo.here() == before


async def test_rewritten_local_branch_is_not_force_pushed(linked_repo: LinkedRepo) -> None:
    first = await linked_repo.commit("README")
    await linked_repo.commit("more")
    await linked_repo.enable()
    before = linked_repo.there
    await linked_repo.repository.git.run(linked_repo.repository.path, "update-ref", "refs/heads/main", first)
    await linked_repo.commit("another past")
    link = await linked_repo.sync()
    assert [each.reason for each in link.conflicts] == ["rewritten here"]
    assert linked_repo.there == before


async def test_moved_tag_is_left(linked_repo: LinkedRepo) -> None:
    first = await linked_repo.commit("README")
    await linked_repo.repository.git.run(linked_repo.repository.path, "update-ref", "refs/tags/v1", first)
    await linked_repo.enable()
    folder = await linked_repo.clone()
    await linked_repo.person.commit(folder, {"there": "there\n"})
    await linked_repo.person("tag", "-f", "v1", cwd=folder)
    await linked_repo.push(folder, "main", "v1", force=True)
    link = await linked_repo.sync()
    assert [(each.ref, each.reason) for each in link.conflicts] == [("refs/tags/v1", "tag moved on GitHub")]
    assert (await linked_repo.here())["refs/tags/v1"] == first


async def test_rejected_push_to_github_is_reported(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    linked_repo.github.protect(NAME, "refs/heads/main")
    sha = await linked_repo.commit("more")
    await linked_repo.repository.create_branch("topic")
    link = await linked_repo.sync()
    assert link.state is LinkState.DIVERGED
    assert [each.ref for each in link.conflicts] == ["refs/heads/main"]
    assert "GitHub rejected it" in link.conflicts[0].reason and "hook declined" in link.conflicts[0].reason
    assert linked_repo.there["refs/heads/topic"] == sha


@pytest.mark.parametrize("emptied", ["here", "there"])
async def test_emptied_side_deletes_nothing(linked_repo: LinkedRepo, emptied: str) -> None:
    """The two are joined as in the first sync."""
    await linked_repo.commit("README")
    await linked_repo.repository.create_branch("topic")
    await linked_repo.enable()
    before = await linked_repo.here()
    for branch in ("main", "topic"):
        if emptied == "here":
            await linked_repo.delete(f"refs/heads/{branch}")
        else:
            linked_repo.github.git(NAME, "update-ref", "-d", f"refs/heads/{branch}")
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert await linked_repo.here() == linked_repo.there == before


async def test_renamed_github_branch_is_renamed_here(linked_repo: LinkedRepo) -> None:
    sha = await linked_repo.commit("README", branch="old")
    await linked_repo.enable()
    linked_repo.github.git(NAME, "branch", "-m", "old", "new")
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert await linked_repo.here() == linked_repo.there == {"refs/heads/new": sha}


# Races


async def test_concurrent_pushes_on_both_sides_lose_nothing(linked_repo: LinkedRepo) -> None:
    await linked_repo.commit("README")
    await linked_repo.enable()
    folder = await linked_repo.clone()

    async def theirs() -> None:
        for number in range(5):
            await linked_repo.person.commit(folder, {f"there{number}": "there\n"})
            await linked_repo.push(folder, "HEAD:refs/heads/theirs")

    async def ours() -> None:
        for number in range(10):
            await linked_repo.commit(f"here{number}", branch="ours")
            await linked_repo.links.refs_changed(linked_repo.repository.id)

    async def looks() -> None:
        for _ in range(6):
            await linked_repo.sync()

    await asyncio.gather(theirs(), ours(), looks())
    assert (await linked_repo.sync()).state is LinkState.SYNCED
    assert await linked_repo.same()
    assert set(linked_repo.there) == {f"refs/heads/{name}" for name in ("main", "ours", "theirs")}


async def test_late_github_push_is_not_overwritten(linked_repo: LinkedRepo) -> None:
    """A push between fetch and push: git refuses, and the sync retries."""
    await linked_repo.commit("README")
    await linked_repo.repository.create_branch("topic")
    await linked_repo.enable()
    folder = await linked_repo.clone()
    theirs = await linked_repo.person.commit(folder, {"there": "there\n"})
    pushed = False
    judge = linked_repo.github.server.judge
    assert judge is not None

    def push_first(question: Any) -> Any:
        nonlocal pushed
        if question.path.endswith("/git-receive-pack") and not pushed:
            pushed = True
            linked_repo.github.git(NAME, "fetch", "-q", str(folder), "main:main", "main:topic")
        return judge(question)

    linked_repo.github.server.judge = push_first
    ours = await linked_repo.commit("here")
    await linked_repo.delete("refs/heads/topic")
    link = await linked_repo.sync()
    assert pushed
    assert linked_repo.there == {"refs/heads/main": theirs, "refs/heads/topic": theirs}
    assert (await linked_repo.here())["refs/heads/main"] == ours
    assert {each.ref for each in link.conflicts} == {"refs/heads/main", "refs/heads/topic"}


class Killed(BaseException):
    """The server was killed."""


async def test_interrupted_sync_is_completed_by_the_next(
    linked_repo: LinkedRepo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every git command of a sync, with all kinds of changes on both sides."""
    await linked_repo.commit("README")
    await linked_repo.enable()
    folder = await linked_repo.clone()
    finish = Git.finish
    url = linked_repo.github.url(NAME)
    guard = SsrfGuard(LOOPBACK)
    remotes = Remotes(guard, most_bytes=1 << 30, timeout=LIMIT)

    async def bring_into_step() -> sync.SyncResult:
        async with linked_repo.hosting.writer.writing(
            linked_repo.repository.id, origin=linked_repo.links
        ) as write:
            objects = LfsObjects(linked_repo.repository, linked_repo.hosting.repos.quotas)
            large_files = LfsClient(guard, linked_repo.repository, objects, write.quota, LIMIT)
            return await sync.sync_refs(linked_repo.repository, remotes, url, write, large_files)

    for moment in range(100):
        await linked_repo.repository.create_branch(f"gone-there-{moment}")
        await linked_repo.repository.create_branch(f"gone-here-{moment}")
        await bring_into_step()
        await linked_repo.commit(f"here-{moment}", branch="ours")
        await linked_repo.person.commit(folder, {f"there-{moment}": "there\n"})
        await linked_repo.push(folder, "HEAD:theirs", f":gone-there-{moment}")
        await linked_repo.delete(f"refs/heads/gone-here-{moment}")
        left = moment

        async def finish_or_die(git: Git, *arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == -1:
                raise Killed
            return await finish(git, *arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(Git, "finish", finish_or_die)
            try:
                await bring_into_step()
                survived = True
            except Killed:
                survived = False
        outcome = await bring_into_step()
        assert outcome.conflicts == [] and await linked_repo.same()
        assert set(linked_repo.there) == {f"refs/heads/{name}" for name in ("main", "ours", "theirs")}
        if survived:
            break
    assert 5 < moment < 99
