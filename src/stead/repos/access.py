"""Who may read and write which repository."""

import uuid
from typing import Literal

from stead.errors import SteadError
from stead.identity.callers import Caller
from stead.identity.identities import Page
from stead.repos.repos import RepoInfo, Repos
from stead.store.database import Database
from stead.store.repos import GitPermissionRow, GitPermissionStore

Level = Literal["read", "write"]


class RepoPermissionNotFound(SteadError):
    """The identity has no permission on the repository, which need not exist."""

    code = "repo_permission_not_found"

    def __init__(self, identity: str, repo: str) -> None:
        super().__init__(f"identity {identity} has no permission on repository {repo}")


class RepoPermissionExists(SteadError):
    code = "repo_permission_exists"

    def __init__(self, identity: str, repo: str) -> None:
        super().__init__(f"identity {identity} already has a permission on repository {repo}")


class Access:
    """An account has all rights on its repositories, an identity those that it was granted."""

    def __init__(self, database: Database, repos: Repos) -> None:
        self._store = GitPermissionStore(database)
        self._repos = repos

    async def level(self, caller: Caller | None, info: RepoInfo) -> Level | None:
        """What somebody may do with a repository; None when it does not even exist for them."""
        if caller is not None and caller.identity is None and caller.account == info.account:
            return "write"
        if caller is not None and caller.identity is not None:
            row = await self._store.find(caller.identity, info.id)
            if row is not None:
                return _level(row)
        return "read" if info.public else None

    async def grant(self, account: str, identity: str, repo: str, level: Level) -> None:
        """Let an identity of this account use a repository of it. That there is such an identity is known."""
        await self._repos.owned(account, repo)
        row = GitPermissionRow(str(uuid.uuid4()), identity, repo, level)
        if await self._store.add(row) is None:
            await self._repos.owned(account, repo)
            raise RepoPermissionExists(identity, repo)

    async def change(self, identity: str, repo: str, level: Level) -> None:
        if await self._store.change(identity, repo, level) is None:
            raise RepoPermissionNotFound(identity, repo)

    async def revoke(self, identity: str, repo: str) -> None:
        """Take a repository away from an identity, from the next call on."""
        if not await self._store.remove(identity, repo):
            raise RepoPermissionNotFound(identity, repo)

    async def granted(self, identity: str, repo: str) -> Level:
        row = await self._store.find(identity, repo)
        if row is None:
            raise RepoPermissionNotFound(identity, repo)
        return _level(row)

    async def all_granted(self, identity: str, limit: int, offset: int) -> Page[tuple[RepoInfo, Level]]:
        """What an identity may use, oldest permission first."""
        rows, total = await self._store.page(identity, limit, offset)
        found = [(await self._repos.get(row.repo), _level(row)) for row in rows]
        return Page(found, offset, total)

    async def repos_of(self, identity: str) -> set[str]:
        return await self._store.repos(identity)


def _level(row: GitPermissionRow) -> Level:
    return "write" if row.level == "write" else "read"
