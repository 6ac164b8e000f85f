"""GitHub sync links: one background task per linked repository, woken by pushes, webhooks and a timer."""

import asyncio
import contextlib
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self
from urllib.parse import quote, urlsplit, urlunsplit

from stead.errors import SteadError
from stead.github import sync
from stead.github.app import App, GithubClient, check_name
from stead.github.apps import Apps
from stead.github.errors import GithubFailed, GithubRefused, LinkConflict, NotLinked
from stead.github.sync import RefConflict, SyncResult
from stead.logs import get_logger
from stead.repos.errors import RepoNotFound
from stead.repos.lfs.client import LfsClient
from stead.repos.lfs.store import LfsObjects
from stead.repos.repos import Repos
from stead.repos.ssrf import RequestFailed, SsrfGuard
from stead.repos.transfer.imports import remotes_with_quota
from stead.repos.transfer.remotes import SourceNotFound, SourceUnauthorized
from stead.repos.writer import RepoWriter
from stead.shares import KeyedLimit
from stead.store.database import Database
from stead.store.github import LinkRow, LinkStore
from stead.tasks import TaskSet, cancel_and_wait

SYNC_EVERY = 600.0
"""Seconds between syncs without an event."""
RETRY = (5.0, 30.0, 120.0, SYNC_EVERY)
"""Backoff in seconds after each failure."""
MAX_BYTES = 4 << 30
"""Maximum bytes fetched from GitHub per sync."""
TIMEOUT = 1800.0
MAX_CONFLICTS = 1000
"""Conflicting refs listed per link."""
_AT_ONCE = 4
_PER_ACCOUNT = 2
"""Syncs at the same time."""

log = get_logger("stead.github")


class LinkState(StrEnum):
    PENDING = "pending"
    """Not synced yet."""
    SYNCED = "in_step"
    DIVERGED = "diverged"
    """Synced except for conflicting refs."""
    FAILED = "failed"
    """Failed; will be retried."""


@dataclass(frozen=True)
class Link:
    """A repository and the GitHub repository that it is synced with."""

    repo: str
    name: str
    state: LinkState
    error: str | None
    conflicts: Sequence[RefConflict]
    synced_at: float | None
    created_at: float


@dataclass
class _LinkTask:
    """The task of one link, and the event that wakes it."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    """Callers that wait for the end of a sync that starts after their request."""
    task: asyncio.Task[None] | None = None


class Links:
    """Manages the link tasks: each syncs when it is woken, and periodically."""

    def __init__(
        self,
        database: Database,
        repos: Repos,
        writer: RepoWriter,
        guard: SsrfGuard,
        *,
        sync_every: float = SYNC_EVERY,
        retry: Sequence[float] = RETRY,
    ) -> None:
        self.apps = Apps(database)
        self._store = LinkStore(database)
        self._repos = repos
        self._writer = writer
        self._guard = guard
        self._github = GithubClient(guard)
        self._sync_every = sync_every
        self._retry = retry
        self._link_tasks: dict[str, _LinkTask] = {}
        self._runs = KeyedLimit(_AT_ONCE, _PER_ACCOUNT)
        self._tasks = TaskSet()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Run the link tasks until the end of the block."""
        for row in await self._store.all():
            self._link_task(row.id)
        try:
            yield self
        finally:
            await self._tasks.close()

    # Enable, get, disable

    async def enable(self, account: str, repo: str, name: str) -> Link:
        """Enable sync with `owner/name`; the App must be installed there."""
        app = await self.apps.get(account)
        hosted = await self._github.find(app, check_name(name))
        row = LinkRow(repo, account, hosted.id, hosted.name, LinkState.PENDING)
        added = await self._store.add(row)
        if added is None:
            await self._repos.get(repo)
            known = await self._store.get(repo)
            if known is None:
                raise LinkConflict(f"{hosted.name} is already synced with another repository of this account")
            if known.github_id != hosted.id:
                raise LinkConflict(f"this repository is already synced with {known.name}: disable that first")
            added = known
        self._link_task(repo).wake.set()
        return _link(added)

    async def get(self, repo: str) -> Link:
        row = await self._store.get(repo)
        if row is None:
            raise NotLinked
        return _link(row)

    async def disable(self, repo: str) -> None:
        """Disable sync. Both repositories stay as they are."""
        await self.get(repo)
        await self._store.delete(repo)
        link_task = self._link_tasks.pop(repo, None)
        if link_task is not None and link_task.task is not None:
            await cancel_and_wait(link_task.task)
        with contextlib.suppress(RepoNotFound):
            await self._repos.get(repo)
            await sync.remove_hidden_refs(self._repos.repository(repo))

    async def sync(self, repo: str) -> Link:
        """Sync now and return the result."""
        await self.get(repo)
        done = asyncio.get_running_loop().create_future()
        link_task = self._link_task(repo)
        link_task.waiting.append(done)
        link_task.wake.set()
        await done
        return await self.get(repo)

    # Events

    async def refs_changed(self, repo_id: str) -> None:
        """A local repository changed: wake its link."""
        if (link_task := self._link_tasks.get(repo_id)) is not None:
            link_task.wake.set()

    async def receive_webhook(self, known: Mapping[str, App], signature: str, body: bytes) -> bool:
        """Handle a webhook for one of these Apps; returns False if none of their secrets signed it."""
        accounts = [account for account, app in known.items() if _is_signed(app, signature, body)]
        if not accounts:
            return False
        try:
            repository = json.loads(body)["repository"]
            github_id, name = str(int(repository["id"])), check_name(repository["full_name"])
        except (ValueError, KeyError, TypeError, SteadError):
            # An event about the App itself.
            return True
        for row in await self._store.to_github_repo(accounts, github_id):
            if row.name != name:
                await self._store.update(row.id, name=name)
            self._link_task(row.id).wake.set()
        return True

    # Sync

    def _link_task(self, repo: str) -> _LinkTask:
        link_task = self._link_tasks.get(repo)
        if link_task is None:
            link_task = self._link_tasks[repo] = _LinkTask()
            link_task.task = self._tasks.start(self._sync_until_removed(repo, link_task))
        return link_task

    async def _sync_until_removed(self, repo: str, link_task: _LinkTask) -> None:
        failures = 0
        try:
            while (row := await self._store.get(repo)) is not None:
                link_task.wake.clear()
                waiting, link_task.waiting = link_task.waiting, []
                try:
                    async with self._runs.hold(row.account):
                        settled = await self._attempt(row)
                except Exception as error:
                    log.error("github sync error", repo=repo, error=repr(error), exc_info=error)
                    settled = False
                finally:
                    _wake_waiters(waiting)
                failures = 0 if settled else min(failures + 1, len(self._retry))
                pause = self._retry[failures - 1] if failures else self._sync_every
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await link_task.wake.wait()
        finally:
            _wake_waiters(link_task.waiting)
            if self._link_tasks.get(repo) is link_task:
                del self._link_tasks[repo]

    async def _attempt(self, row: LinkRow) -> bool:
        """One sync run, with its result recorded; returns whether no retry is needed."""
        try:
            result = await self._sync_with_fresh_token(row)
        except RepoNotFound:
            return True
        except SteadError as error:
            log.info("github sync failed", repo=row.id, github=row.name, error=str(error))
            await self._store.record(row.id, LinkState.FAILED, error=str(error))
            return False
        state = LinkState.SYNCED if result.settled else LinkState.PENDING
        if result.conflicts:
            state = LinkState.DIVERGED
        conflicts = [asdict(each) for each in result.conflicts[:MAX_CONFLICTS]]
        await self._store.record(row.id, state, left_over=conflicts)
        return result.settled

    async def _sync_with_fresh_token(self, row: LinkRow) -> SyncResult:
        await self._repos.get(row.id)
        app = await self.apps.get(row.account)
        try:
            return await self._sync_once(app, row)
        except SourceUnauthorized:
            # The token may have been revoked.
            self._github.drop_token(app, row.name)
        try:
            return await self._sync_once(app, row)
        except SourceUnauthorized:
            raise GithubRefused(f"the GitHub App may not write {row.name}") from None

    async def _sync_once(self, app: App, row: LinkRow) -> SyncResult:
        repository = self._repos.repository(row.id)
        url = _address(app, row.name, await self._github.token(app, row.name))
        try:
            async with self._writer.writing(row.id, origin=self) as write:
                remotes = remotes_with_quota(self._guard, write.quota, MAX_BYTES, TIMEOUT)
                objects = LfsObjects(repository, self._repos.quotas)
                large_files = LfsClient(self._guard, repository, objects, write.quota, TIMEOUT)
                return await sync.sync_refs(repository, remotes, url, write, large_files)
        except SourceNotFound:
            raise GithubRefused(f"the GitHub App can no longer see {row.name}") from None
        except RequestFailed as error:
            raise GithubFailed(str(error)) from error


def _wake_waiters(waiting: Sequence[asyncio.Future[None]]) -> None:
    for each in waiting:
        if not each.done():
            each.set_result(None)


def _address(app: App, name: str, token: str) -> str:
    parts = urlsplit(app.url)
    netloc = f"x-access-token:{quote(token, safe='')}@{parts.netloc}"
    return urlunsplit(parts._replace(netloc=netloc, path=f"{parts.path.rstrip('/')}/{name}.git"))


def _is_signed(app: App, signature: str, body: bytes) -> bool:
    wanted = hmac.new(app.webhook_secret.encode(), body, hashlib.sha256).hexdigest()
    return hmac.compare_digest(signature.encode(), f"sha256={wanted}".encode())


def _link(row: LinkRow) -> Link:
    left: list[dict[str, Any]] = json.loads(row.left_over)
    return Link(
        row.id,
        row.name,
        LinkState(row.state),
        row.error,
        [RefConflict(**each) for each in left],
        None if row.synced_at is None else row.synced_at / 1e9,
        row.created_at / 1e9,
    )
