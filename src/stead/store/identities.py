"""Database rows of identities, their tokens and their VM permissions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa

from stead.store.machines import machines
from stead.store.repos import git_permissions
from stead.store.rows import Rows, build_rows, table_of

T = TypeVar("T")


@dataclass(frozen=True)
class IdentityRow:
    """One row of the identities table. Its tokens and permissions are deleted with it."""

    id: str
    account: str
    managed: bool = False
    created_at: int = 0
    name: str | None = None
    machine: str | None = None
    """The VM that it was made for, and with which it is deleted."""
    repo: str | None = None
    """The repository that it was made for: the database deletes it with that."""


@dataclass(frozen=True)
class CountedIdentity(IdentityRow):
    """An identity with the number of its permissions."""

    vm_grants: int = 0
    repo_grants: int = 0


@dataclass(frozen=True)
class TokenRow:
    """One row of the tokens table. It has the hash of the secret, never the secret."""

    id: str
    identity: str
    hash: str
    created_at: int = 0
    used_at: int | None = None


@dataclass(frozen=True)
class Holder:
    """The identity and account of a token."""

    token: str
    identity: str
    account: str
    used_at: int | None


@dataclass(frozen=True)
class PermissionRow:
    """A VM permission. `allowed_users` is a JSON array of Linux users; None allows every user."""

    id: str
    identity: str
    machine: str
    allowed_users: str | None
    granted_by: str
    granted_at: int = 0


identities = table_of("identities", IdentityRow)
tokens = table_of("tokens", TokenRow)
vm_permissions = table_of("vm_permissions", PermissionRow)
_HOLDER = (
    sa.select(tokens.c.id, identities.c.id, identities.c.account, tokens.c.used_at)
    .join(identities, identities.c.id == tokens.c.identity)
    .where(tokens.c.hash == sa.bindparam("wanted"))
)


def _grants(table: sa.TableClause) -> sa.ScalarSelect[int]:
    return (
        sa.select(sa.func.count())
        .select_from(table)
        .where(table.c.identity == identities.c.id)
        .scalar_subquery()
    )


_COUNTED = sa.select(
    identities, _grants(vm_permissions).label("vm_grants"), _grants(git_permissions).label("repo_grants")
)


class IdentityStore(Rows[IdentityRow]):
    table = identities
    row = IdentityRow

    async def find(self, account: str, identity: str) -> CountedIdentity | None:
        statement = _COUNTED.where(identities.c.id == identity, identities.c.account == account)
        with self.database.look_up() as connection:
            found = build_rows(CountedIdentity, connection.execute(statement))
        return found[0] if found else None

    async def page(
        self, account: str, limit: int, offset: int, *, managed: bool
    ) -> tuple[list[CountedIdentity], int]:
        """A page of an account's identities, oldest first, and their total; managed ones only if wanted."""
        wanted = [identities.c.account == account]
        if not managed:
            wanted.append(identities.c.managed.is_(False))
        total = sa.select(sa.func.count()).select_from(identities).where(*wanted)
        page = _COUNTED.where(*wanted).order_by(identities.c.created_at, identities.c.id)
        with self.database.look_up() as connection:
            rows = build_rows(CountedIdentity, connection.execute(page.limit(limit).offset(offset)))
            return rows, connection.execute(total).scalar_one()

    async def count(self, account: str) -> int:
        """How many identities an account has, without the managed ones."""
        own = identities.c.account == account, identities.c.managed.is_(False)
        statement = sa.select(sa.func.count()).select_from(identities).where(*own)
        return await self.database.read(lambda connection: connection.execute(statement).scalar_one())

    async def remove(self, account: str, identity: str) -> bool:
        """Delete an identity unless it is managed; returns whether it was deleted."""
        statement = identities.delete().where(
            identities.c.id == identity, identities.c.account == account, identities.c.managed.is_(False)
        )
        return await self.database.execute(statement) > 0

    async def delete_for_machine(self, machine: str) -> None:
        """Delete the identities that were made for a VM."""
        await self.database.execute(identities.delete().where(identities.c.machine == machine))

    async def delete_orphans(self) -> None:
        """Delete the identities that were made for VMs that have no row."""
        known = sa.select(machines.c.id)
        orphans = identities.c.machine.is_not(None), identities.c.machine.not_in(known)
        await self.database.execute(identities.delete().where(*orphans))


class TokenStore(Rows[TokenRow]):
    table = tokens
    row = TokenRow

    async def find_holder(self, token_hash: str) -> Holder | None:
        with self.database.look_up() as connection:
            found = connection.execute(_HOLDER, {"wanted": token_hash}).one_or_none()
        return None if found is None else Holder(*found)

    async def count(self, account: str) -> int:
        """How many tokens the identities of an account have, without those of managed ones."""
        own = identities.c.account == account, identities.c.managed.is_(False)
        of = tokens.join(identities, identities.c.id == tokens.c.identity)
        statement = sa.select(sa.func.count()).select_from(of).where(*own)
        return await self.database.read(lambda connection: connection.execute(statement).scalar_one())

    async def of_identity(self, identity: str, convert: Callable[[TokenRow], T]) -> list[T]:
        """What the tokens of an identity are converted to, oldest first."""
        statement = sa.select(tokens).where(tokens.c.identity == identity)
        statement = statement.order_by(tokens.c.created_at, tokens.c.id)
        return await self._select_many(identity, statement, convert)

    async def remove(self, identity: str, token: str) -> bool:
        """Delete a token; returns whether the identity had it."""
        statement = tokens.delete().where(tokens.c.id == token, tokens.c.identity == identity)
        return await self.database.execute(statement) > 0


class PermissionStore(Rows[PermissionRow]):
    table = vm_permissions
    row = PermissionRow
    stamps = ("granted_at",)

    async def find(self, identity: str, machine: str) -> PermissionRow | None:
        return self._select_one(sa.select(vm_permissions).where(*_matching(identity, machine)))

    async def page(self, identity: str, limit: int, offset: int) -> tuple[list[PermissionRow], int]:
        """A page of an identity's permissions, oldest first, and their total."""
        statement = sa.select(vm_permissions).where(vm_permissions.c.identity == identity)
        order = vm_permissions.c.granted_at, vm_permissions.c.id
        return await self._page(statement.order_by(*order), limit, offset)

    async def machines(self, identity: str) -> set[str]:
        statement = sa.select(vm_permissions.c.machine).where(vm_permissions.c.identity == identity)
        return await self.database.read(lambda connection: set(connection.execute(statement).scalars()))

    async def set_allowed_users(
        self, identity: str, machine: str, allowed_users: str | None
    ) -> PermissionRow | None:
        statement = vm_permissions.update().where(*_matching(identity, machine))
        return await self._update_returning(statement.values(allowed_users=allowed_users))

    async def remove(self, identity: str, machine: str) -> bool:
        """Delete a permission; returns whether the identity had it."""
        return await self.database.execute(vm_permissions.delete().where(*_matching(identity, machine))) > 0

    async def delete_orphans(self) -> None:
        """Delete the permissions for VMs that have no row."""
        known = sa.select(machines.c.id)
        await self.database.execute(vm_permissions.delete().where(vm_permissions.c.machine.not_in(known)))

    async def delete_for_machine(self, machine: str) -> None:
        """Delete all permissions for a VM."""
        await self.database.execute(vm_permissions.delete().where(vm_permissions.c.machine == machine))


def _matching(identity: str, machine: str) -> tuple[sa.ColumnElement[bool], ...]:
    return vm_permissions.c.identity == identity, vm_permissions.c.machine == machine
