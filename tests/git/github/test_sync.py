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
from support.github_scene import LIMIT, LOOPBACK, NAME, Scene

pytestmark = pytest.mark.heavy


# Both directions


async def test_sync_in_both_directions(scene: Scene) -> None:
    first = await scene.commit("README")
    link = await scene.enable()
    assert (link.name, link.state, link.error, link.conflicts) == (NAME, LinkState.SYNCED, None, [])
    assert scene.there == {"refs/heads/main": first}
    folder = await scene.clone()
    second = await scene.person.commit(folder, {"web.ts": "let there = 1;\n"})
    await scene.person("tag", "-a", "v1", "-m", "one", cwd=folder)
    await scene.push(folder, "main", "v1", "main:refs/heads/deep/topic")
    link = await scene.sync()
    assert link.state is LinkState.SYNCED and link.synced_at is not None
    assert (await scene.here())["refs/heads/main"] == second
    assert set(await scene.here()) == {"refs/heads/main", "refs/heads/deep/topic", "refs/tags/v1"}
    assert await scene.same()
    assert scene.followed == [scene.repository.id]
    assert (await scene.repository.tag("v1")).message == "one\n"


async def test_empty_repository_is_filled_from_github(scene: Scene) -> None:
    scene.github.git(NAME, "symbolic-ref", "HEAD", "refs/heads/trunk")
    folder = await scene.person.work_tree("work")
    await scene.person("push", "-q", scene.github.url(NAME), "main:trunk", "main:topic", cwd=folder)
    await scene.enable()
    assert await scene.same()
    assert scene.repository.default_branch == "trunk"


async def test_two_empty_repositories_are_synced(scene: Scene) -> None:
    assert (await scene.enable()).state is LinkState.SYNCED


async def test_deletions_sync_in_both_directions(scene: Scene) -> None:
    sha = await scene.commit("README")
    for branch in ("one", "two"):
        await scene.repository.create_branch(branch)
    await scene.repository.git.run(scene.repository.path, "update-ref", "refs/tags/old", sha)
    await scene.repository.git.run(scene.repository.path, "update-ref", "refs/tags/older", sha)
    await scene.enable()
    assert len(scene.there) == 5
    folder = await scene.clone()
    await scene.push(folder, ":one", ":refs/tags/old")
    await scene.delete("refs/heads/two")
    await scene.delete("refs/tags/older")
    assert (await scene.sync()).state is LinkState.SYNCED
    assert await scene.here() == scene.there == {"refs/heads/main": sha}
    # A new ref with the same name is new.
    await scene.repository.create_branch("two/inner")
    await scene.push(folder, "main:one")
    await scene.sync()
    assert (
        set(scene.there)
        == set(await scene.here())
        == {
            "refs/heads/main",
            "refs/heads/one",
            "refs/heads/two/inner",
        }
    )


async def test_deleted_ref_frees_its_name_for_nested_refs(scene: Scene) -> None:
    await scene.commit("README")
    await scene.repository.create_branch("topic")
    await scene.repository.create_branch("other")
    await scene.enable()
    folder = await scene.clone()
    await scene.push(folder, ":topic")
    await scene.push(folder, "main:topic/inner")
    await scene.delete("refs/heads/other")
    await scene.repository.create_branch("other/inner")
    assert (await scene.sync()).state is LinkState.SYNCED
    assert await scene.same()
    assert set(scene.there) == {f"refs/heads/{name}" for name in ("main", "topic/inner", "other/inner")}


# Conflicts


async def test_conflicting_changes_are_reported_and_left(scene: Scene) -> None:
    await scene.commit("README")
    await scene.enable()
    folder = await scene.clone()
    theirs = await scene.person.commit(folder, {"there": "there\n"})
    await scene.push(folder, "main", "main:topic")
    ours = await scene.commit("here")
    link = await scene.sync()
    assert link.state is LinkState.DIVERGED
    (left,) = link.conflicts
    assert (left.ref, left.here, left.there) == ("refs/heads/main", ours, theirs)
    assert "both sides" in left.reason
    assert (await scene.here())["refs/heads/main"] == ours
    assert scene.there["refs/heads/main"] == theirs
    # Other refs still sync.
    assert (await scene.here())["refs/heads/topic"] == theirs
    # A user merges the two.
    await scene.person("fetch", "-q", str(scene.repository.path), "main", cwd=folder)
    await scene.person("merge", "-q", "-m", "both", "FETCH_HEAD", cwd=folder)
    await scene.push(folder, "main")
    assert (await scene.sync()).state is LinkState.SYNCED
    assert await scene.same()


async def test_rewritten_github_branch_is_not_pulled(scene: Scene) -> None:
    first = await scene.commit("README")
    await scene.commit("more")
    await scene.enable()
    folder = await scene.clone()
    before = await scene.here()
    await scene.person("commit", "-q", "--amend", "-m", "another past", cwd=folder)
    await scene.push(folder, "main", force=True)
    link = await scene.sync()
    assert [each.reason for each in link.conflicts] == ["rewritten on GitHub"]
    assert await scene.here() == before
    await scene.push(folder, f"{first}:main", force=True)
    link = await scene.sync()
    assert [each.reason for each in link.conflicts] == ["moved back on GitHub"]
    assert await scene.here() == before


async def test_rewritten_local_branch_is_not_force_pushed(scene: Scene) -> None:
    first = await scene.commit("README")
    await scene.commit("more")
    await scene.enable()
    before = scene.there
    await scene.repository.git.run(scene.repository.path, "update-ref", "refs/heads/main", first)
    await scene.commit("another past")
    link = await scene.sync()
    assert [each.reason for each in link.conflicts] == ["rewritten here"]
    assert scene.there == before


async def test_moved_tag_is_left(scene: Scene) -> None:
    first = await scene.commit("README")
    await scene.repository.git.run(scene.repository.path, "update-ref", "refs/tags/v1", first)
    await scene.enable()
    folder = await scene.clone()
    await scene.person.commit(folder, {"there": "there\n"})
    await scene.person("tag", "-f", "v1", cwd=folder)
    await scene.push(folder, "main", "v1", force=True)
    link = await scene.sync()
    assert [(each.ref, each.reason) for each in link.conflicts] == [("refs/tags/v1", "tag moved on GitHub")]
    assert (await scene.here())["refs/tags/v1"] == first


async def test_rejected_push_to_github_is_reported(scene: Scene) -> None:
    await scene.commit("README")
    await scene.enable()
    scene.github.protect(NAME, "refs/heads/main")
    sha = await scene.commit("more")
    await scene.repository.create_branch("topic")
    link = await scene.sync()
    assert link.state is LinkState.DIVERGED
    assert [each.ref for each in link.conflicts] == ["refs/heads/main"]
    assert "GitHub rejected it" in link.conflicts[0].reason and "hook declined" in link.conflicts[0].reason
    assert scene.there["refs/heads/topic"] == sha


@pytest.mark.parametrize("emptied", ["here", "there"])
async def test_emptied_side_deletes_nothing(scene: Scene, emptied: str) -> None:
    """The two are joined as in the first sync."""
    await scene.commit("README")
    await scene.repository.create_branch("topic")
    await scene.enable()
    before = await scene.here()
    for branch in ("main", "topic"):
        if emptied == "here":
            await scene.delete(f"refs/heads/{branch}")
        else:
            scene.github.git(NAME, "update-ref", "-d", f"refs/heads/{branch}")
    assert (await scene.sync()).state is LinkState.SYNCED
    assert await scene.here() == scene.there == before


async def test_renamed_github_branch_is_renamed_here(scene: Scene) -> None:
    sha = await scene.commit("README", branch="old")
    await scene.enable()
    scene.github.git(NAME, "branch", "-m", "old", "new")
    assert (await scene.sync()).state is LinkState.SYNCED
    assert await scene.here() == scene.there == {"refs/heads/new": sha}


# Races


async def test_concurrent_pushes_on_both_sides_lose_nothing(scene: Scene) -> None:
    await scene.commit("README")
    await scene.enable()
    folder = await scene.clone()

    async def theirs() -> None:
        for number in range(5):
            await scene.person.commit(folder, {f"there{number}": "there\n"})
            await scene.push(folder, "HEAD:refs/heads/theirs")

    async def ours() -> None:
        for number in range(10):
            await scene.commit(f"here{number}", branch="ours")
            await scene.links.refs_changed(scene.repository.id)

    async def looks() -> None:
        for _ in range(6):
            await scene.sync()

    await asyncio.gather(theirs(), ours(), looks())
    assert (await scene.sync()).state is LinkState.SYNCED
    assert await scene.same()
    assert set(scene.there) == {f"refs/heads/{name}" for name in ("main", "ours", "theirs")}


async def test_late_github_push_is_not_overwritten(scene: Scene) -> None:
    """A push between fetch and push: git refuses, and the sync retries."""
    await scene.commit("README")
    await scene.repository.create_branch("topic")
    await scene.enable()
    folder = await scene.clone()
    theirs = await scene.person.commit(folder, {"there": "there\n"})
    pushed = False
    judge = scene.github.server.judge
    assert judge is not None

    def push_first(question: Any) -> Any:
        nonlocal pushed
        if question.path.endswith("/git-receive-pack") and not pushed:
            pushed = True
            scene.github.git(NAME, "fetch", "-q", str(folder), "main:main", "main:topic")
        return judge(question)

    scene.github.server.judge = push_first
    ours = await scene.commit("here")
    await scene.delete("refs/heads/topic")
    link = await scene.sync()
    assert pushed
    assert scene.there == {"refs/heads/main": theirs, "refs/heads/topic": theirs}
    assert (await scene.here())["refs/heads/main"] == ours
    assert {each.ref for each in link.conflicts} == {"refs/heads/main", "refs/heads/topic"}


class Killed(BaseException):
    """The server was killed."""


async def test_interrupted_sync_is_completed_by_the_next(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every git command of a sync, with all kinds of changes on both sides."""
    await scene.commit("README")
    await scene.enable()
    folder = await scene.clone()
    finish = Git.finish
    url = scene.github.url(NAME)
    guard = SsrfGuard(LOOPBACK)
    remotes = Remotes(guard, most_bytes=1 << 30, timeout=LIMIT)

    async def bring_into_step() -> sync.SyncResult:
        async with scene.stage.writer.writing(scene.repository.id, origin=scene.links) as write:
            objects = LfsObjects(scene.repository, scene.stage.repos.quotas)
            large_files = LfsClient(guard, scene.repository, objects, write.quota, LIMIT)
            return await sync.sync_refs(scene.repository, remotes, url, write, large_files)

    for moment in range(100):
        await scene.repository.create_branch(f"gone-there-{moment}")
        await scene.repository.create_branch(f"gone-here-{moment}")
        await bring_into_step()
        await scene.commit(f"here-{moment}", branch="ours")
        await scene.person.commit(folder, {f"there-{moment}": "there\n"})
        await scene.push(folder, "HEAD:theirs", f":gone-there-{moment}")
        await scene.delete(f"refs/heads/gone-here-{moment}")
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
        assert outcome.conflicts == [] and await scene.same()
        assert set(scene.there) == {f"refs/heads/{name}" for name in ("main", "ours", "theirs")}
        if survived:
            break
    assert 5 < moment < 99
