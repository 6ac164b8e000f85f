"""Repositories: create, delete, access, maintenance."""

import asyncio
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from stead.errors import HostError
from stead.identity.callers import Caller
from stead.limits import Limits
from stead.repos import contents, history, quotas
from stead.repos.access import RepoPermissionExists, RepoPermissionNotFound
from stead.repos.committing import Change, commit
from stead.repos.errors import BranchNotFound, ReferenceNotFound, RepoLimitExceeded, RepoNotFound
from stead.repos.maintenance import housekeeping
from stead.repos.maintenance.housekeeping import MAX_PACKS
from stead.repos.repos import Repos
from stead.repos.repository import Repository
from stead.repos.sizes import RepoSize, measure_repo
from support.git_hosting import RepoHosting, open_hosting
from support.git_repos import git, write
from support.waiting import until

NOBODY = 1_899_999_999


# Create and delete


async def test_new_repository_equals_git_init_bare(hosting: RepoHosting, tmp_path: Path) -> None:
    """Empty, with the requested branch; plain git accepts it."""
    repository = await hosting.repository(default_branch="trunk")
    assert repository.default_branch == "trunk"
    assert git(repository, "symbolic-ref", "HEAD") == "refs/heads/trunk"
    assert git(repository, "rev-parse", "--is-bare-repository") == "true"
    git(tmp_path, "clone", "-q", str(repository.path), "copy")
    assert await repository.branches() == []
    assert (await history.commits(repository)).commits == []
    for missing in (
        repository.resolve(None),
        repository.branch("trunk"),
        contents.read(repository, "", None),
    ):
        with pytest.raises((ReferenceNotFound, BranchNotFound)):
            await missing


async def test_repository_is_visible_to_its_account_only(hosting: RepoHosting) -> None:
    info = await hosting.repos.create(hosting.ours, name="mine")
    assert (await hosting.repos.owned(hosting.ours, info.id)).name == "mine"
    for account, repo in (
        (hosting.theirs, info.id),
        (hosting.ours, "no-such-id"),
        (hosting.ours, "../../etc"),
    ):
        with pytest.raises(RepoNotFound, match=f"^no repository {repo}$"):
            await hosting.repos.owned(account, repo)
    assert (await hosting.repos.list(hosting.theirs, limit=10)).total == 0


async def test_list_pages_and_searches_by_name(hosting: RepoHosting) -> None:
    made = [(await hosting.repos.create(hosting.ours, name=f"Project {number}")).id for number in range(5)]
    await hosting.repos.create(hosting.theirs, name="Project 9")
    pages = [await hosting.repos.list(hosting.ours, limit=2, offset=offset) for offset in (0, 2, 4)]
    assert [info.id for page in pages for info in page.items] == made[::-1]
    assert {page.total for page in pages} == {5}
    found = await hosting.repos.list(hosting.ours, limit=10, search="project 3")
    assert [info.id for info in found.items] == [made[3]]
    assert (await hosting.repos.list(hosting.ours, limit=10, search="100%_")).items == []
    assert [info.id for info in (await hosting.repos.list(hosting.ours, limit=10, only={made[1]})).items] == [
        made[1]
    ]


async def test_delete_removes_files(hosting: RepoHosting, repository: Repository) -> None:
    await commit(repository, [write("a")], "one")
    await contents.read(repository, "a", None)
    await hosting.repos.delete(repository.id)
    assert not repository.path.exists()
    with pytest.raises(RepoNotFound):
        await hosting.repos.get(repository.id)
    with pytest.raises(RepoNotFound):
        await hosting.repos.delete(repository.id)


async def test_account_repository_limit(hosting: RepoHosting) -> None:
    """Also with concurrent creates."""

    async def two(_: str) -> Limits:
        return Limits(repos=2)

    async with Repos.open(hosting.database, hosting.folder / "few", two) as repos:
        made = await asyncio.gather(*(repos.create(hosting.ours) for _ in range(6)), return_exceptions=True)
        assert sum(isinstance(each, RepoLimitExceeded) for each in made) == 4
        assert list((hosting.folder / "few" / "new").iterdir()) == []


async def test_crash_during_create_leaves_a_complete_repository_or_none(hosting: RepoHosting) -> None:
    """Interrupted at every step of create and delete."""
    folder = hosting.folder / "repos"
    recorded, whole, going = [await hosting.repository() for _ in range(3)]
    for each in (recorded, whole, going):
        await commit(each, [write("kept")], "kept")
    shutil.move(recorded.path, folder / "new" / recorded.id)
    shutil.move(going.path, folder / "gone" / going.id)
    (folder / "new" / "half-made").mkdir()
    async with open_hosting(hosting.folder) as again:
        for each in (recorded, whole):
            found = again.repos.repository(each.id)
            assert isinstance(await contents.read(found, "kept", None), contents.RepoFile)
        with pytest.raises(RepoNotFound):
            await again.repos.get(going.id)
        assert list((folder / "gone").iterdir()) == []
        assert list((folder / "new").iterdir()) == []


async def test_git_runs_as_its_own_user(open_folder: Path) -> None:
    """The git user cannot read files of others, and only root can read its files."""
    async with open_hosting(open_folder, range(NOBODY - 1, NOBODY + 1)) as hosting:
        repository = await hosting.repository()
        made = await commit(repository, [write("a")], "one")
        assert {path.lstat().st_uid for path in repository.path.rglob("*")} == {NOBODY}
        assert repository.path.stat().st_mode & 0o077 == 0
        secret = open_folder / "secret"
        secret.write_text("secret")
        secret.chmod(0o600)
        refused = await hosting.repos.git.finish(repository.path, "hash-object", str(secret))
        assert refused.status != 0 and "Permission denied" in refused.stderr
        assert (await repository.resolve("main")) == made.sha


async def test_untraversable_data_folder_is_reported(tmp_path: Path) -> None:
    above = tmp_path / "closed"
    above.mkdir(mode=0o700)
    (above / "data").mkdir()
    with pytest.raises(HostError, match=f"cannot traverse {above}: run chmod"):
        async with open_hosting(above / "data", range(NOBODY - 1, NOBODY + 1)):
            pass


# Access


async def test_access_levels_of_account_and_identities(hosting: RepoHosting) -> None:
    info = await hosting.repos.create(hosting.ours)
    public = await hosting.repos.create(hosting.ours, public=True)
    identity = await hosting.identities.create(hosting.ours)
    owner, holder, foreign = Caller(hosting.ours), Caller(hosting.ours, identity.id), Caller(hosting.theirs)

    async def levels(repo: str) -> list[str | None]:
        found = await hosting.repos.get(repo)
        return [await hosting.access.level(caller, found) for caller in (owner, holder, foreign, None)]

    assert await levels(info.id) == ["write", None, None, None]
    assert await levels(public.id) == ["write", "read", "read", "read"]
    await hosting.access.grant(hosting.ours, identity.id, info.id, "read")
    assert await levels(info.id) == ["write", "read", None, None]
    with pytest.raises(RepoPermissionExists):
        await hosting.access.grant(hosting.ours, identity.id, info.id, "write")
    await hosting.access.change(identity.id, info.id, "write")
    assert await levels(info.id) == ["write", "write", None, None]
    page = await hosting.access.all_granted(identity.id, 10, 0)
    assert [(each.id, level) for each, level in page.items] == [(info.id, "write")]
    await hosting.access.revoke(identity.id, info.id)
    assert await levels(info.id) == ["write", None, None, None]
    with pytest.raises(RepoPermissionNotFound):
        await hosting.access.revoke(identity.id, info.id)
    with pytest.raises(RepoNotFound):
        await hosting.access.grant(hosting.theirs, identity.id, info.id, "read")
    await hosting.access.grant(hosting.ours, identity.id, info.id, "read")
    await hosting.repos.delete(info.id)
    assert await hosting.access.repos_of(identity.id) == set()


# Maintenance


async def test_many_commits_are_repacked(hosting: RepoHosting, repository: Repository) -> None:
    """Repacked while readers and writers are active."""
    for number in range(MAX_PACKS + 3):
        await commit(repository, [write(f"file{number}", str(number))], str(number))
    packs = repository.path / "objects" / "pack"
    assert len(list(packs.glob("*.pack"))) > MAX_PACKS
    repack = hosting.repos.housekeeping.schedule(repository)
    assert repack is not None and repack is hosting.repos.housekeeping.schedule(repository)
    while not repack.done():
        found = await contents.read(repository, "file7", None)
        assert isinstance(found, contents.RepoFile) and found.content == b"7"
    await commit(repository, [write("last")], "last")
    assert len(list(packs.glob("*.pack"))) < 5
    assert (await history.commits(repository)).total == MAX_PACKS + 4
    deep = await contents.read(repository, "", None, recursive=True)
    assert isinstance(deep, contents.RepoFolder) and len(deep.entries) == MAX_PACKS + 4


async def test_repacks_of_an_account_do_not_delay_those_of_another(hosting: RepoHosting) -> None:
    repos = hosting.repos
    mine = repos.repository((await repos.create(hosting.ours)).id)
    theirs = repos.repository((await repos.create(hosting.theirs)).id)
    for repository in (mine, theirs):
        await commit(repository, [Change("large", os.urandom(2 << 20))], "large")
    async with repos.housekeeping.slots.hold(hosting.ours), asyncio.timeout(60):
        waiting, served = repos.housekeeping.schedule(mine), repos.housekeeping.schedule(theirs)
        assert waiting is not None and served is not None
        await served
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert list((theirs.path / "objects" / "pack").glob("*.bitmap"))
    await waiting


async def test_measurements_of_an_account_do_not_delay_those_of_another(
    hosting: RepoHosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = [(await hosting.repos.create(hosting.ours)).id for _ in range(2)]
    theirs = (await hosting.repos.create(hosting.theirs)).id
    begun, end = list[Path](), threading.Event()

    def slow(path: Path) -> RepoSize:
        if any(repo in str(path) for repo in mine):
            begun.append(path)
            assert end.wait(60)
        return measure_repo(path)

    monkeypatch.setattr(quotas, "measure_repo", slow)
    waiting = [asyncio.create_task(hosting.repos.quotas.measure(repo)) for repo in mine]
    try:
        await until(lambda: begun, 60)
        async with asyncio.timeout(60):
            assert await hosting.repos.quotas.measure(theirs) is not None
        assert len(begun) == 1 and not any(task.done() for task in waiting)
    finally:
        end.set()
    assert all(await asyncio.gather(*waiting))


async def test_large_repository_gets_bitmap_index(
    hosting: RepoHosting, repository: Repository, tmp_path: Path
) -> None:
    """git fsck accepts them; unreachable objects are kept."""
    orphan = git(repository, "hash-object", "-w", "--stdin", stdin=b"not referred to yet")
    await commit(repository, [Change("large", os.urandom(2 << 20))], "large")
    hosting.repos.housekeeping.schedule(repository)
    await hosting.repos.housekeeping.join()
    assert list((repository.path / "objects" / "pack").glob("*.bitmap"))
    git(repository, "multi-pack-index", "verify")
    git(repository, "commit-graph", "verify")
    assert git(repository, "cat-file", "-p", orphan) == "not referred to yet"
    assert hosting.repos.housekeeping.schedule(repository) is None
    git(tmp_path, "clone", "-q", str(repository.path), "copy")
    assert (tmp_path / "copy" / "large").stat().st_size == 2 << 20


HALF_DONE = (
    "packed-refs.lock",
    "packed-refs.new",
    "fast_import_crash_7",
    "refs/heads/main.lock",
    "objects/pack/multi-pack-index.lock",
    "objects/pack/pack-1.keep",
    "objects/pack/tmp_pack_1",
    "objects/pack/.tmp-7-pack-1.pack",
    "objects/info/commit-graphs/commit-graph-chain.lock",
    "objects/tmp_objdir-incoming-1/",
    "objects/tmp_objdir-commit-1/",
    "lfs/incoming/1",
)


@pytest.mark.parametrize("age", [1, -1])
async def test_leftovers_of_killed_processes_are_removed(
    hosting: RepoHosting, repository: Repository, age: int
) -> None:
    """Stale locks and temporary files are removed; current writes are left alone."""
    await commit(repository, [write("a")], "one")
    git(repository, "update-ref", "refs/heads/tmp_mine", "main")
    started = time.time()
    for name in HALF_DONE:
        place = repository.path / name
        (place if name.endswith("/") else place.parent).mkdir(parents=True, exist_ok=True)
        if not place.is_dir():
            place.touch()
        os.utime(place, (started - age, started - age))
    housekeeping.remove_stale_files(hosting.folder / "repos", started)
    left = [name for name in HALF_DONE if (repository.path / name).exists()]
    assert left == ([] if age > 0 else list(HALF_DONE))
    housekeeping.remove_stale_files(hosting.folder / "repos", started + 60)
    await commit(repository, [write("a", "2")], "two")
    git(repository, "pack-refs", "--all")
    git(repository, "update-ref", "-d", "refs/heads/tmp_mine")
    git(repository, "repack", "-q", "-a", "-d", "--write-midx")
    git(repository, "commit-graph", "write", "--reachable", "--split")
