"""Rows of accounts' GitHub Apps and of links between repositories and GitHub."""

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa

from stead.store.rows import Rows, table_of


@dataclass(frozen=True)
class AppRow:
    """`id` is that of the account: one App each. Its key and its secret are sealed."""

    id: str
    app: str
    private_key: str
    webhook_secret: str
    url: str
    api_url: str
    created_at: int = 0


@dataclass(frozen=True)
class LinkRow:
    """`id` is that of the repository: one link each. `left_over` is JSON."""

    id: str
    account: str
    github_id: str
    name: str
    state: str
    error: str | None = None
    left_over: str = "[]"
    synced_at: int | None = None
    created_at: int = 0


github_apps = table_of("github_apps", AppRow)
github_links = table_of("github_links", LinkRow)


class AppStore(Rows[AppRow]):
    table = github_apps
    row = AppRow

    async def put(self, row: AppRow) -> None:
        """Insert or replace the App of an account; its secrets are given in clear."""
        row = replace(
            row,
            private_key=self.seal(row.id, "private_key", row.private_key),
            webhook_secret=self.seal(row.id, "webhook_secret", row.webhook_secret),
            created_at=time.time_ns(),
        )
        await self.database.execute(
            github_apps.delete().where(github_apps.c.id == row.id),
            github_apps.insert().values(**row.__dict__),
        )

    def opened(self, row: AppRow) -> AppRow:
        """The row with its secrets in clear."""
        return replace(
            row,
            private_key=self.unseal(row.id, "private_key", row.private_key),
            webhook_secret=self.unseal(row.id, "webhook_secret", row.webhook_secret),
        )

    async def by_app_id(self, app: str) -> list[AppRow]:
        """The Apps of all accounts with this GitHub App id."""
        return await self._select(sa.select(github_apps).where(github_apps.c.app == app))


class LinkStore(Rows[LinkRow]):
    table = github_links
    row = LinkRow

    async def all(self) -> list[LinkRow]:
        return await self._select(
            sa.select(github_links).order_by(github_links.c.created_at, github_links.c.id)
        )

    async def to_github_repo(self, accounts: Collection[str], github_id: str) -> list[LinkRow]:
        """The links of these accounts to a repository at GitHub."""
        mine = github_links.c.account.in_(accounts), github_links.c.github_id == github_id
        return await self._select(sa.select(github_links).where(*mine))

    async def record(
        self, repo: str, state: str, *, error: str | None = None, left_over: Sequence[Any] | None = None
    ) -> None:
        """Record the result of a sync: the refs that were left out, or the error."""
        changes: dict[str, object] = {"state": state, "error": error}
        if left_over is not None:
            changes |= {"left_over": json.dumps(left_over), "synced_at": time.time_ns()}
        await self.update(repo, **changes)
