"""Rows of repositories and of permissions on them."""

from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.rows import Rows, build_rows, table_of


@dataclass(frozen=True)
class RepoRow:
    """One repository as recorded. Bytes and refs are those of the last measurement, None before it."""

    id: str
    account: str
    name: str | None
    public: bool
    created_at: int = 0
    size: int | None = None
    lfs_size: int | None = None
    """Bytes of LFS objects, which `size` does not include."""
    refs: int | None = None
    prune_at: int | None = None
    """When unreachable objects are pruned next."""

    @property
    def whole_size(self) -> int | None:
        return None if self.size is None or self.lfs_size is None else self.size + self.lfs_size


@dataclass(frozen=True)
class RepoOwnerRow:
    id: str
    account: str


@dataclass(frozen=True)
class GitPermissionRow:
    id: str
    identity: str
    repo: str
    level: str
    granted_at: int = 0


repos = table_of("repos", RepoRow)
git_permissions = table_of("git_permissions", GitPermissionRow)

# Every write of Git asks these: building a statement takes as long as running it.
_OWNED = repos.c.account == sa.bindparam("owner")
_TOTAL_SIZE = sa.select(sa.func.total(repos.c.size + repos.c.lfs_size)).where(_OWNED)
_UNMEASURED = sa.select(repos.c.id).where(_OWNED, repos.c.size.is_(None))


class RepoStore(Rows[RepoRow]):
    table = repos
    row = RepoRow

    async def count(self, account: str) -> int:
        with self.database.look_up() as connection:
            statement = sa.select(sa.func.count()).where(repos.c.account == account)
            return connection.execute(statement).scalar_one()

    async def owners(self) -> list[RepoOwnerRow]:
        """All repositories with their accounts, oldest first."""
        statement = sa.select(repos.c.id, repos.c.account).order_by(repos.c.created_at, repos.c.id)
        return await self.database.read(
            lambda connection: build_rows(RepoOwnerRow, connection.execute(statement))
        )

    async def total_size(self, account: str) -> int:
        """Bytes of all repositories of an account that were measured."""
        with self.database.look_up() as connection:
            return int(connection.execute(_TOTAL_SIZE, {"owner": account}).scalar_one())

    async def sizes(self) -> dict[str, int]:
        """Bytes of all repositories of each account, LFS objects included, as far as they were measured."""
        size = sa.func.coalesce(repos.c.size, 0) + sa.func.coalesce(repos.c.lfs_size, 0)
        statement = sa.select(repos.c.account, sa.func.total(size)).group_by(repos.c.account)
        return await self.database.read(
            lambda connection: {account: int(size) for account, size in connection.execute(statement)}
        )

    async def unmeasured(self, account: str) -> list[str]:
        with self.database.look_up() as connection:
            return list(connection.execute(_UNMEASURED, {"owner": account}).scalars())

    async def ids(self, after: str, limit: int) -> list[str]:
        """One page of all repositories, by id."""
        statement = sa.select(repos.c.id).where(repos.c.id > after).order_by(repos.c.id).limit(limit)
        with self.database.look_up() as connection:
            return list(connection.execute(statement).scalars())

    async def due(self, now: int) -> list[RepoRow]:
        """Repositories whose pruning is due, the longest overdue first."""
        return await self._select(sa.select(repos).where(repos.c.prune_at <= now).order_by(repos.c.prune_at))

    async def prune_by(self, repo_id: str, at: int) -> None:
        """Schedule pruning, unless it is scheduled earlier."""
        later = repos.c.prune_at.is_(None) | (repos.c.prune_at > at)
        await self.database.execute(repos.update().where(repos.c.id == repo_id, later).values(prune_at=at))

    async def page(
        self,
        account: str,
        limit: int,
        offset: int,
        *,
        search: str | None = None,
        only: Collection[str] | None = None,
    ) -> tuple[list[RepoRow], int]:
        """One page of an account's repositories, newest first, and the total count."""
        statement = sa.select(repos).where(repos.c.account == account)
        if search:
            part = repos.c.name.icontains(search, autoescape=True)
            statement = statement.where(part | repos.c.id.icontains(search, autoescape=True))
        if only is not None:
            statement = statement.where(repos.c.id.in_(only))
        return await self._page(statement.order_by(repos.c.created_at.desc(), repos.c.id), limit, offset)


class GitPermissionStore(Rows[GitPermissionRow]):
    table = git_permissions
    row = GitPermissionRow
    stamps = ("granted_at",)

    async def find(self, identity: str, repo: str) -> GitPermissionRow | None:
        return self._select_one(sa.select(git_permissions).where(*_of(identity, repo)))

    async def page(self, identity: str, limit: int, offset: int) -> tuple[list[GitPermissionRow], int]:
        """One page of an identity's permissions, oldest first, and the total count."""
        statement = sa.select(git_permissions).where(git_permissions.c.identity == identity)
        order = git_permissions.c.granted_at, git_permissions.c.id
        return await self._page(statement.order_by(*order), limit, offset)

    async def repos(self, identity: str) -> set[str]:
        statement = sa.select(git_permissions.c.repo).where(git_permissions.c.identity == identity)
        with self.database.look_up() as connection:
            return set(connection.execute(statement).scalars())

    async def change(self, identity: str, repo: str, level: str) -> GitPermissionRow | None:
        statement = git_permissions.update().where(*_of(identity, repo)).values(level=level)
        return await self._update_returning(statement)

    async def remove(self, identity: str, repo: str) -> bool:
        """Delete a permission; returns whether it existed."""
        return await self.database.execute(git_permissions.delete().where(*_of(identity, repo))) > 0


def _of(identity: str, repo: str) -> tuple[sa.ColumnElement[bool], ...]:
    return git_permissions.c.identity == identity, git_permissions.c.repo == repo
