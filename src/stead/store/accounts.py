"""Rows of accounts and of their API keys."""

import time
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.rows import Rows, table_of


@dataclass(frozen=True)
class AccountRow:
    """One account as recorded. `limits` is a JSON object of the limits that differ from the defaults."""

    id: str
    name: str
    limits: str = "{}"
    created_at: int = 0


@dataclass(frozen=True)
class KeyRow:
    """One API key as recorded: its hash, and a prefix of the key as a hint."""

    id: str
    account: str
    name: str | None
    hash: str
    hint: str
    created_at: int = 0
    used_at: int | None = None
    revoked_at: int | None = None


accounts = table_of("accounts", AccountRow)
api_keys = table_of("api_keys", KeyRow)
_VALID_KEY = sa.select(api_keys).where(
    api_keys.c.hash == sa.bindparam("wanted"), api_keys.c.revoked_at.is_(None)
)


class AccountStore(Rows[AccountRow]):
    table = accounts
    row = AccountRow

    async def by_name(self, name: str) -> AccountRow | None:
        return self._select_one(sa.select(accounts).where(accounts.c.name == name))

    async def list(self) -> list[AccountRow]:
        return await self._select(sa.select(accounts).order_by(accounts.c.created_at, accounts.c.id))

    async def delete_unless_owner(self, account_id: str) -> dict[str, int]:
        """Delete an account with its keys; what it still owns, if that is why it was not deleted."""
        return await self.database.write(lambda connection: _delete_unless_owner(connection, account_id))

    async def change_limits(self, account_id: str, before: str, after: str) -> AccountRow | None:
        """Compare-and-swap the limits; None when they changed since they were read."""
        statement = (
            accounts.update()
            .where(accounts.c.id == account_id, accounts.c.limits == before)
            .values(limits=after)
        )
        return await self._update_returning(statement)


_OWNED = {
    "VMs": "machines",
    "snapshots": "snapshots",
    "repositories": "repos",
    "identities": "identities",
    "VPCs": "vpcs",
    "domains": "domains",
    "mappings": "domain_mappings",
}
"""Tables of what an account owns, deleted VMs that can be created again included."""


def _delete_unless_owner(connection: sa.Connection, account_id: str) -> dict[str, int]:
    left = {}
    for what, name in _OWNED.items():
        owned = sa.table(name, sa.column("account"))
        count = sa.select(sa.func.count()).select_from(owned).where(owned.c.account == account_id)
        if found := connection.execute(count).scalar_one():
            left[what] = int(found)
    if not left:
        verifications = sa.table("domain_verifications", sa.column("account"))
        connection.execute(sa.delete(verifications).where(verifications.c.account == account_id))
        connection.execute(api_keys.delete().where(api_keys.c.account == account_id))
        connection.execute(accounts.delete().where(accounts.c.id == account_id))
    return left


class KeyStore(Rows[KeyRow]):
    table = api_keys
    row = KeyRow

    async def find_valid(self, key_hash: str) -> KeyRow | None:
        """The key with this hash, unless it was revoked."""
        return self._select_one(_VALID_KEY, wanted=key_hash)

    async def list(self, account: str | None = None) -> list[KeyRow]:
        statement = sa.select(api_keys).order_by(api_keys.c.created_at, api_keys.c.id)
        return await self._select(
            statement if account is None else statement.where(api_keys.c.account == account)
        )

    async def revoke(self, key_id: str) -> KeyRow | None:
        """Revoke a key; one that was revoked before keeps that time."""
        revoked_at = sa.func.coalesce(api_keys.c.revoked_at, time.time_ns())
        return await self.update(key_id, revoked_at=revoked_at)
