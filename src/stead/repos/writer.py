"""The one write path of existing repositories: reserve quota, write, then notify what follows changed refs.

Pushes, commits and branches by API and GitHub sync all write through it. A repository is created and filled
by `Repos.create`: nothing can follow it yet. Uploads of LFS objects reserve quota and change no refs.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stead.errors import SteadError
from stead.logs import get_logger
from stead.repos import committing
from stead.repos.committing import Change
from stead.repos.errors import RepoDamaged, TooLarge
from stead.repos.fast_import import Author
from stead.repos.model import Branch, Commit
from stead.repos.quotas import QuotaReservation
from stead.repos.repos import Repos
from stead.repos.repository import Repository
from stead.repos.search.search import Search
from stead.tasks import finished

log = get_logger("stead.repos")


class RefObserver(Protocol):
    async def refs_changed(self, repo_id: str) -> None:
        """Refs may have changed. What must survive a crash is durable when this returns."""


@dataclass(frozen=True)
class Write:
    """One write in progress."""

    quota: QuotaReservation
    refs_changed: Callable[[], Awaitable[None]]
    """Notifies the observers. Call it before the client is told of success."""


class RepoWriter:
    def __init__(self, repos: Repos, search: Search) -> None:
        self._repos = repos
        self._search = search
        self._observers: list[RefObserver] = []

    def subscribe(self, observer: RefObserver) -> None:
        self._observers.append(observer)

    @contextlib.asynccontextmanager
    async def writing(self, repo_id: str, *, origin: RefObserver | None = None) -> AsyncIterator[Write]:
        """Context of a write, within the quota; its size is measured afterwards.

        `origin` is an observer that writes itself, and is not notified of it.
        """
        async with self._repos.quotas.reserving(repo_id) as quota:
            yield Write(quota, lambda: finished(self._notify(repo_id, origin)))

    async def _notify(self, repo_id: str, origin: RefObserver | None) -> None:
        for observer in self._observers:
            if observer is origin:
                continue
            try:
                await observer.refs_changed(repo_id)
            except Exception as error:
                # The refs have changed: the write succeeded.
                log.error("observer of refs failed", repo=repo_id, error=repr(error), exc_info=error)

    @contextlib.asynccontextmanager
    async def _changing_refs(self, repo_id: str) -> AsyncIterator[QuotaReservation]:
        async with self.writing(repo_id) as write:
            try:
                yield write.quota
            except BaseException as error:
                # A call that was cancelled, timed out or failed in git may have moved the ref.
                if not isinstance(error, SteadError) or isinstance(error, RepoDamaged | TooLarge):
                    await write.refs_changed()
                raise
            await write.refs_changed()

    async def commit(
        self,
        repository: Repository,
        changes: Sequence[Change],
        message: str,
        *,
        branch: str | None = None,
        author: Author | None = None,
        expected: str | None = None,
    ) -> Commit:
        """Commit file changes to a branch, see `committing.commit`."""
        async with repository.holding() as held, self._changing_refs(repository.id) as quota:
            return await committing.commit(
                held, changes, message, branch=branch, author=author, expected=expected, quota=quota
            )

    async def create_branch(self, repository: Repository, name: str, sha: str | None = None) -> Branch:
        """Create a branch at a commit; default: the head of the default branch."""
        async with repository.holding() as held, self._changing_refs(repository.id) as quota:
            await quota.reserve_refs(1)
            return await held.create_branch(name, sha)

    async def delete(self, repo_id: str) -> None:
        """Delete a repository permanently, with its cached search results."""
        await self._repos.delete(repo_id)
        self._search.drop_repo(repo_id)
