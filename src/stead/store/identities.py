"""Identities, their tokens and their permissions as rows."""

import time
from dataclasses import dataclass, replace
from typing import TypeVar

import sqlalchemy as sa

from stead.store.rows import Rows
from stead.store.tables import identities, machines, tokens, vm_permissions

R = TypeVar("R")


@dataclass(frozen=True)
class IdentityRow:
    """One identity as it is recorded. With it go its tokens and permissions."""

    id: str
    account: str
    managed: bool = False
    created_at: int = 0


@dataclass(frozen=True)
class TokenRow:
    """One token as it is recorded: its hash, never the token."""

    id: str
    identity: str
    hash: str
    created_at: int = 0
    used_at: int | None = None


@dataclass(frozen=True)
class Holder:
    """Who a token stands for."""

    token: str
    identity: str
    account: str
    used_at: int | None


@dataclass(frozen=True)
class PermissionRow:
    """What an identity may do with a machine. `allowed_users` is a JSON array; None allows every user."""

    id: str
    identity: str
    machine: str
    allowed_users: str | None
    granted_by: str
    granted_at: int = 0


_HOLDER = (
    sa.select(tokens.c.id, identities.c.id, identities.c.account, tokens.c.used_at)
    .join(identities, identities.c.id == tokens.c.identity)
    .where(tokens.c.hash == sa.bindparam("wanted"))
)


class IdentityStore(Rows[IdentityRow]):
    table = identities
    row = IdentityRow

    async def add(self, row: IdentityRow) -> IdentityRow | None:
        """Record an identity; None when there is no such account."""
        try:
            return await self.insert(replace(row, created_at=time.time_ns()))
        except sa.exc.IntegrityError:
            return None

    async def find(self, account: str, identity: str) -> IdentityRow | None:
        statement = sa.select(identities).where(identities.c.id == identity, identities.c.account == account)
        return self._look_up(statement)

    async def page(
        self, account: str, limit: int, offset: int, *, managed: bool
    ) -> tuple[list[IdentityRow], int]:
        """Some of an account's, oldest first, and how many there are; managed ones only if wanted."""
        statement = sa.select(identities).where(identities.c.account == account)
        if not managed:
            statement = statement.where(identities.c.managed.is_(False))
        return await self._page(statement.order_by(identities.c.created_at, identities.c.id), limit, offset)

    async def remove(self, account: str, identity: str) -> bool:
        """Remove an identity with all that it has, unless it is managed; tells whether it was removed."""
        statement = identities.delete().where(
            identities.c.id == identity, identities.c.account == account, identities.c.managed.is_(False)
        )
        return await self.database.execute(statement) > 0


class TokenStore(Rows[TokenRow]):
    table = tokens
    row = TokenRow

    async def add(self, row: TokenRow) -> TokenRow | None:
        """Record a token; None when its identity is gone."""
        try:
            return await self.insert(replace(row, created_at=time.time_ns()))
        except sa.exc.IntegrityError:
            return None

    async def holder(self, token_hash: str) -> Holder | None:
        with self.database.look_up() as connection:
            found = connection.execute(_HOLDER, {"wanted": token_hash}).one_or_none()
        return None if found is None else Holder(*found)

    async def list(self, identity: str) -> list[TokenRow]:
        statement = sa.select(tokens).where(tokens.c.identity == identity)
        return await self._select(statement.order_by(tokens.c.created_at, tokens.c.id))

    async def remove(self, identity: str, token: str) -> bool:
        """Tells whether the identity had this token."""
        statement = tokens.delete().where(tokens.c.id == token, tokens.c.identity == identity)
        return await self.database.execute(statement) > 0


class PermissionStore(Rows[PermissionRow]):
    table = vm_permissions
    row = PermissionRow

    async def add(self, row: PermissionRow) -> PermissionRow | None:
        """Record a permission; None when there is one already, or when its identity is gone."""
        try:
            return await self.insert(replace(row, granted_at=time.time_ns()))
        except sa.exc.IntegrityError:
            return None

    async def find(self, identity: str, machine: str) -> PermissionRow | None:
        return self._look_up(sa.select(vm_permissions).where(*_of(identity, machine)))

    async def page(self, identity: str, limit: int, offset: int) -> tuple[list[PermissionRow], int]:
        """Some of an identity's, oldest first, and how many there are."""
        statement = sa.select(vm_permissions).where(vm_permissions.c.identity == identity)
        order = vm_permissions.c.granted_at, vm_permissions.c.id
        return await self._page(statement.order_by(*order), limit, offset)

    async def machines(self, identity: str) -> set[str]:
        statement = sa.select(vm_permissions.c.machine).where(vm_permissions.c.identity == identity)
        return await self.database.read(lambda connection: set(connection.execute(statement).scalars()))

    async def change(self, identity: str, machine: str, allowed_users: str | None) -> PermissionRow | None:
        statement = vm_permissions.update().where(*_of(identity, machine))
        return await self._changed(statement.values(allowed_users=allowed_users))

    async def remove(self, identity: str, machine: str) -> bool:
        """Tells whether the identity had the permission."""
        return await self.database.execute(vm_permissions.delete().where(*_of(identity, machine))) > 0

    async def forget_missing(self) -> None:
        """Remove every permission on a machine that has no row any more."""
        known = sa.select(machines.c.id)
        await self.database.execute(vm_permissions.delete().where(vm_permissions.c.machine.not_in(known)))

    async def forget(self, machine: str) -> None:
        """Remove every permission on a machine."""
        await self.database.execute(vm_permissions.delete().where(vm_permissions.c.machine == machine))


def _of(identity: str, machine: str) -> tuple[sa.ColumnElement[bool], ...]:
    return vm_permissions.c.identity == identity, vm_permissions.c.machine == machine
