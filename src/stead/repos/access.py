"""Access control: the permissions of accounts and identities on repositories."""

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
    """The identity has no permission on the repository, which may not exist."""

    def __init__(self, identity: str, repo: str) -> None:
        super().__init__(f"identity {identity} has no permission on repository {repo}")


class RepoPermissionExists(SteadError):
    def __init__(self, identity: str, repo: str) -> None:
        super().__init__(f"identity {identity} already has a permission on repository {repo}")


class RepoAccess:
    """An account has full access to its repositories, an identity only what was granted."""

    def __init__(self, database: Database, repos: Repos) -> None:
        self._store = GitPermissionStore(database)
        self._repos = repos

    async def level(self, caller: Caller | None, info: RepoInfo) -> Level | None:
        """The caller's access level; None if the repository must look missing to the caller."""
        if caller is not None and caller.identity is None and caller.account == info.account:
            return "write"
        if caller is not None and caller.identity is not None:
            row = await self._store.find(caller.identity, info.id)
            if row is not None:
                return _level(row)
        return "read" if info.public else None

    async def grant(self, account: str, identity: str, repo: str, level: Level) -> None:
        """Grant an identity of this account access to a repository. The identity must exist."""
        await self._repos.owned(account, repo)
        row = GitPermissionRow(str(uuid.uuid4()), identity, repo, level)
        if await self._store.add(row) is None:
            await self._repos.owned(account, repo)
            raise RepoPermissionExists(identity, repo)

    async def change(self, identity: str, repo: str, level: Level) -> None:
        if await self._store.change(identity, repo, level) is None:
            raise RepoPermissionNotFound(identity, repo)

    async def revoke(self, identity: str, repo: str) -> None:
        """Revoke an identity's access to a repository, from the next request on."""
        if not await self._store.remove(identity, repo):
            raise RepoPermissionNotFound(identity, repo)

    async def granted(self, identity: str, repo: str) -> Level:
        row = await self._store.find(identity, repo)
        if row is None:
            raise RepoPermissionNotFound(identity, repo)
        return _level(row)

    async def all_granted(self, identity: str, limit: int, offset: int) -> Page[tuple[RepoInfo, Level]]:
        """The permissions of an identity, oldest first."""
        rows, total = await self._store.page(identity, limit, offset)
        found = [(await self._repos.get(row.repo), _level(row)) for row in rows]
        return Page(found, offset, total)

    async def repos_of(self, identity: str) -> set[str]:
        return await self._store.repos(identity)


def _level(row: GitPermissionRow) -> Level:
    return "write" if row.level == "write" else "read"
