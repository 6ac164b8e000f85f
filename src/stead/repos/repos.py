"""Repository registry: create, find, list and delete the repositories of an installation."""

import asyncio
import contextlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from stead.disk_marks import writable
from stead.errors import HostError
from stead.files import exists, sync_folder, write_atomically
from stead.identity.identities import Page
from stead.logs import get_logger
from stead.names import check_name
from stead.processes import ProcessId, end_of
from stead.repos.confinement import Confinement
from stead.repos.errors import DiskFull, RepoBusy, RepoLimitExceeded, RepoNotFound
from stead.repos.git import SETTINGS, Git
from stead.repos.git_users import GitUsers, OwnedFolder
from stead.repos.maintenance.housekeeping import ORPHANS_GRACE, Housekeeping, remove_stale_files
from stead.repos.maintenance.pruning import Pruning
from stead.repos.names import check_branch
from stead.repos.objects import CatFilePool
from stead.repos.places import GitCaller, RepoPlaces, Work
from stead.repos.quotas import LimitsOf, QuotaReservation, RepoQuotas, SupersededRef
from stead.repos.repository import Repository
from stead.repos.sizes import RepoSize, measure_repo
from stead.shares import KeyedLimit, Reserve, unlimited
from stead.store.database import Database
from stead.store.repos import RepoRow, RepoStore
from stead.tasks import TaskSet, Threads, in_thread

Fill = Callable[[Repository, QuotaReservation], Awaitable[None]]
"""Fills a new repository before it is visible, within the quota."""
DEFAULT_BRANCH = "main"
log = get_logger("stead.repos")
MAX_NAME = 256
MAX_IMPORTS = 8
MAX_IMPORTS_PER_ACCOUNT = 2
"""Concurrent imports, which use much of the host."""
MAX_WAIT = 15.0
"""Seconds that an import waits for a place."""
_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = true\n"
_FOLDERS = ("objects", "objects/info", "objects/pack", "refs", "refs/heads", "refs/tags")


@dataclass(frozen=True)
class RepoInfo:
    id: str
    account: str
    name: str | None
    public: bool
    created_at: float
    size: int | None = None
    """Bytes on disk, as last measured."""


class Repos:
    """Each repository is a bare repository in a folder named by its id.

    Crash safety: a new repository is created in a staging folder and moved into place after its row is
    written; a deleted one is moved to the staging folder before its row is removed. At start, the rows decide
    what happens to the staging folder's contents.
    """

    def __init__(
        self, database: Database, folder: Path, limits_of: LimitsOf, confined: Confinement | None
    ) -> None:
        self.git = git = Git(folder / "gitconfig", confined)
        self.cat_files = CatFilePool(git)
        self.places = RepoPlaces()
        self._store = RepoStore(database)
        self._folder = folder
        self._limits_of = limits_of
        self._users = None if confined is None else GitUsers(confined.of_accounts, confined.nobody)
        self.quotas = RepoQuotas(self._store, self._path, limits_of, self._on_measured, folder)
        self.housekeeping = Housekeeping(git, self._account_of, self.quotas.measure)
        self.pruning = Pruning(
            self._store, self.quotas, self.housekeeping.slots, self._account_of, self.repository
        )
        self._imports = KeyedLimit(
            MAX_IMPORTS, MAX_IMPORTS_PER_ACCOUNT, max_wait=MAX_WAIT, busy=lambda: RepoBusy("imports")
        )
        self._creating = asyncio.Lock()
        self._removals = TaskSet()

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, database: Database, folder: Path, limits_of: LimitsOf, confined: Confinement | None = None
    ) -> AsyncIterator[Self]:
        """Open the repositories in a folder, after recovery from a crash.

        Confined, git runs as one user for each account, who owns its repositories; otherwise as the current
        user.
        """
        for each in (folder, folder / "new", folder / "gone"):
            each.mkdir(mode=0o711, exist_ok=True)
        if confined is not None:
            _check_reachable(folder)
        write_atomically(folder / "gitconfig", SETTINGS.encode(), 0o644)
        repos = cls(database, folder, limits_of, confined)
        orphans = await repos.git.end_orphans()
        started = time.time()
        await repos._recover()
        if repos._users is not None:
            folders = [OwnedFolder(row.account, repos._path(row.id)) for row in await repos._store.owners()]
            await Threads.TREES.run(repos._users.take_over, folders)
        try:
            async with TaskSet() as background:
                background.start(repos._clean_up_after_crash(started, orphans), "tidy up repositories")
                background.start(repos.pruning.run(folder), "prune repositories")
                yield repos
        finally:
            await repos.quotas.flush()
            await repos.housekeeping.close()
            await repos.cat_files.close()
            await repos.git.close()
            await repos._removals.join()

    async def _recover(self) -> None:
        for staged in list((self._folder / "new").iterdir()):
            try:
                await self._finish_creation(staged)
            except (HostError, OSError) as error:
                log.error("cannot recover a new repository", path=str(staged), error=str(error))
        for removed in list((self._folder / "gone").iterdir()):
            await self._store.delete(removed.name)
            await Threads.TREES.run(shutil.rmtree, removed, ignore_errors=True)

    async def _finish_creation(self, staged: Path) -> None:
        if await self._store.get(staged.name) is not None and not exists(self._path(staged.name)):
            self._publish(staged, self._path(staged.name))
        else:
            await Threads.TREES.run(shutil.rmtree, staged, ignore_errors=True)

    async def _clean_up_after_crash(self, started: float, orphans: Sequence[ProcessId]) -> None:
        """Remove incomplete writes in repositories after a crash, and measure their sizes."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ORPHANS_GRACE):
                await asyncio.gather(*(end_of(orphan) for orphan in orphans))
        await Threads.TREES.run(remove_stale_files, self._folder, started)
        await self.quotas.measure_all()

    def _path(self, repo_id: str) -> Path:
        return self._folder / repo_id[:2] / f"{repo_id}.git"

    # Create, find, delete

    async def create(
        self,
        account: str,
        *,
        name: str | None = None,
        public: bool = False,
        default_branch: str | None = None,
        fill: Fill | None = None,
        repo_id: str | None = None,
    ) -> RepoInfo:
        """Create a repository: empty, or filled by `fill` before it is visible."""
        check_name(name, MAX_NAME)
        branch = check_branch(default_branch or DEFAULT_BRANCH)
        await self._check_room(account)
        if not writable(self._folder):
            raise DiskFull
        repo_id = repo_id or str(uuid.uuid4())
        staged = self._folder / "new" / repo_id
        async with contextlib.AsyncExitStack() as stack:
            size = RepoSize(0, 0, 0)
            try:
                uid = None if self._users is None else self._users.of(account)
                await in_thread(self._init_bare, staged, branch, uid)
                if fill is not None:
                    await stack.enter_async_context(self._imports.hold(account))
                    holder = self.places.of(account, GitCaller(account))
                    await stack.enter_async_context(holder.hold(Work.TRANSFER))
                    quota = await stack.enter_async_context(self.quotas.creating(account))
                    size = await self._fill(
                        Repository(repo_id, staged, self.git, self.cat_files), fill, quota
                    )
                async with self._creating:
                    await self._check_room(account)
                    row = RepoRow(
                        repo_id, account, name, public, size=size.objects, lfs_size=0, refs=size.refs
                    )
                    row = await self._store.insert(row)
                await in_thread(self._publish, staged, self._path(repo_id))
            except BaseException:
                if not self._path(repo_id).exists():
                    await self._store.delete(repo_id)
                    await Threads.TREES.run(shutil.rmtree, staged, ignore_errors=True)
                raise
        return _info(row)

    async def _fill(self, repository: Repository, fill: Fill, quota: QuotaReservation) -> RepoSize:
        if quota.room == 0:
            raise quota.exceeded()
        try:
            await fill(repository, quota)
        finally:
            await self.cat_files.stop(repository.path)
        size = await Threads.TREES.run(measure_repo, repository.path)
        await quota.reserve(size.objects)
        await quota.reserve_refs(size.refs)
        return size

    async def _check_room(self, account: str) -> None:
        limit = (await self._limits_of(account)).repos
        if limit is not None and await self._store.count(account) >= limit:
            raise RepoLimitExceeded(f"too many repositories: this account has {limit} (its limit)")

    def _init_bare(self, path: Path, branch: str, uid: int | None) -> None:
        """Write what `git init --bare` would create, without a process."""
        path.mkdir(mode=0o700)
        for folder in _FOLDERS:
            (path / folder).mkdir(mode=0o755)
        for name, text in (("HEAD", f"ref: refs/heads/{branch}\n"), ("config", _CONFIG)):
            with (path / name).open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        if uid is not None:
            # The folder itself comes last: until then no other user can replace what is in it.
            for each in (*(path / folder for folder in _FOLDERS), path / "HEAD", path / "config", path):
                os.chown(each, uid, uid)
        sync_folder(path)
        # Create the target folder before the row is written, so that a full disk fails here.
        self._path(path.name).parent.mkdir(mode=0o711, exist_ok=True)

    def _publish(self, staged: Path, path: Path) -> None:
        path.parent.mkdir(mode=0o711, exist_ok=True)
        staged.rename(path)
        sync_folder(path.parent)

    async def _account_of(self, repo_id: str) -> str | None:
        row = await self._store.get(repo_id)
        return None if row is None else row.account

    async def get(self, repo_id: str) -> RepoInfo:
        row = await self._store.get(repo_id)
        if row is None:
            raise RepoNotFound(repo_id)
        return _info(row)

    async def named(self, account: str, name: str) -> Sequence[RepoInfo]:
        return [_info(row) for row in await self._store.named(account, name)]

    async def owned(self, account: str, repo_id: str) -> RepoInfo:
        """A repository of this account; those of others are treated as missing."""
        info = await self.get(repo_id)
        if info.account != account:
            raise RepoNotFound(repo_id)
        return info

    def repository(self, repo_id: str) -> Repository:
        """The contents of an existing repository, for background work."""
        return Repository(repo_id, self._path(repo_id), self.git, self.cat_files)

    def opened(self, info: RepoInfo, user: GitCaller, reserve: Reserve = unlimited) -> Repository:
        """The contents of an existing repository, as a caller uses it; `reserve` is asked for memory."""
        holder = self.places.of(info.account, user)
        return Repository(info.id, self._path(info.id), self.git, self.cat_files, holder, reserve)

    async def list(
        self,
        account: str,
        *,
        limit: int,
        offset: int = 0,
        search: str | None = None,
        only: set[str] | None = None,
    ) -> Page[RepoInfo]:
        """Repositories, newest first; only those in `only`, if given."""
        rows, total = await self._store.page(account, limit, offset, search=search, only=only)
        return Page([_info(row) for row in rows], offset, total)

    async def _on_measured(self, repo_id: str, size: RepoSize, superseded: Sequence[SupersededRef]) -> None:
        """Hook after a repository was written to and measured."""
        repository = self.repository(repo_id)
        await self.pruning.schedule_if_unreachable(repository, superseded)
        self.housekeeping.schedule(repository, size.loose_refs)

    async def delete(self, repo_id: str) -> None:
        """Delete a repository permanently, with everything that refers to it."""
        removed = self._folder / "gone" / repo_id
        try:
            self._path(repo_id).rename(removed)
        except FileNotFoundError:
            if await self._store.get(repo_id) is None:
                raise RepoNotFound(repo_id) from None
        sync_folder(removed.parent)
        await self._store.delete(repo_id)
        await self.cat_files.stop(self._path(repo_id))
        self._removals.start(Threads.TREES.run(shutil.rmtree, removed, ignore_errors=True))


def _check_reachable(folder: Path) -> None:
    """Check that the users of git can traverse the parent folders."""
    data, *others = folder.resolve().parents
    data.chmod(data.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH)
    for above in others:
        if not above.stat().st_mode & stat.S_IXOTH:
            raise HostError(f"the git user cannot traverse {above}: run chmod o+x on it")


def _info(row: RepoRow) -> RepoInfo:
    return RepoInfo(row.id, row.account, row.name, row.public, row.created_at / 1e9, row.whole_size)
