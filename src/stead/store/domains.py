"""Rows of domains, of pending verifications and of mappings to VMs."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.rows import Rows, build_rows, table_of


@dataclass(frozen=True)
class DomainRow:
    """A domain and its owner. `implicit` for a name of a preview zone, owned while it is mapped."""

    id: str
    domain: str
    account: str
    implicit: bool = False
    created_at: int = 0


@dataclass(frozen=True)
class VerificationRow:
    """A verification that is not completed: `code` is what the TXT record must contain."""

    id: str
    account: str
    domain: str
    code: str
    created_at: int = 0


@dataclass(frozen=True)
class MappingRow:
    """A host name that leads to a port of a VM. It is deleted with the VM's row."""

    id: str
    domain: str
    account: str
    ownership: str
    """The id of the domain that gives the account the right to the name."""
    machine: str
    port: int
    created_at: int = 0


domains = table_of("domains", DomainRow)
domain_verifications = table_of("domain_verifications", VerificationRow)
domain_mappings = table_of("domain_mappings", MappingRow)


class DomainStore(Rows[DomainRow]):
    table = domains
    row = DomainRow

    async def all(self) -> list[DomainRow]:
        statement = sa.select(domains)
        return await self.database.read(
            lambda connection: build_rows(self.row, connection.execute(statement))
        )

    async def page(self, account: str, limit: int, offset: int, *, implicit: bool) -> list[DomainRow]:
        """An account's domains, oldest first; those of preview zones only if wanted."""
        statement = sa.select(domains).where(domains.c.account == account)
        if not implicit:
            statement = statement.where(domains.c.implicit.is_(False))
        statement = statement.order_by(domains.c.created_at, domains.c.id)
        return await self._select(statement.limit(limit).offset(offset))

    async def count(self, account: str) -> int:
        """The number of an account's verified domains."""
        mine = domains.c.account == account, domains.c.implicit.is_(False)
        statement = sa.select(sa.func.count()).select_from(domains).where(*mine)
        with self.database.look_up() as connection:
            return connection.execute(statement).scalar_one()

    async def claim(self, row: DomainRow, verification: str) -> DomainRow | None:
        """Insert a verified domain and delete its verification; None if it has an owner already."""
        row = dataclasses.replace(row, created_at=time.time_ns())
        insert = domains.insert().values(**dataclasses.asdict(row))
        delete = domain_verifications.delete().where(domain_verifications.c.id == verification)
        try:
            await self.database.execute(insert, delete)
        except sa.exc.IntegrityError:
            return None
        return row

    async def delete_unused(self, ids: Sequence[str] | None = None) -> None:
        """Delete implicit domains without a mapping: all, or those of these ids."""
        used = sa.select(domain_mappings.c.ownership)
        statement = domains.delete().where(domains.c.implicit.is_(True), domains.c.id.not_in(used))
        if ids is not None:
            statement = statement.where(domains.c.id.in_(ids))
        await self.database.execute(statement)


class VerificationStore(Rows[VerificationRow]):
    table = domain_verifications
    row = VerificationRow

    async def find(self, account: str, domain: str) -> VerificationRow | None:
        mine = domain_verifications.c.account == account, domain_verifications.c.domain == domain
        return self._select_one(sa.select(domain_verifications).where(*mine))

    async def list(self, account: str) -> list[VerificationRow]:
        statement = sa.select(domain_verifications).where(domain_verifications.c.account == account)
        order = domain_verifications.c.created_at, domain_verifications.c.id
        return await self._select(statement.order_by(*order))


class MappingStore(Rows[MappingRow]):
    table = domain_mappings
    row = MappingRow

    async def all(self) -> list[MappingRow]:
        statement = sa.select(domain_mappings)
        return await self.database.read(
            lambda connection: build_rows(self.row, connection.execute(statement))
        )

    async def page(
        self, account: str, limit: int, offset: int, *, domain: str | None, ownership: str | None
    ) -> list[MappingRow]:
        """An account's mappings, oldest first: all, or those of one name or one owned domain."""
        statement = sa.select(domain_mappings).where(domain_mappings.c.account == account)
        if domain is not None:
            statement = statement.where(domain_mappings.c.domain == domain)
        if ownership is not None:
            statement = statement.where(domain_mappings.c.ownership == ownership)
        order = domain_mappings.c.created_at, domain_mappings.c.id
        return await self._select(statement.order_by(*order).limit(limit).offset(offset))

    async def count(self, account: str) -> int:
        statement = sa.select(sa.func.count()).select_from(domain_mappings)
        with self.database.look_up() as connection:
            return connection.execute(statement.where(domain_mappings.c.account == account)).scalar_one()

    async def put(self, owned: Sequence[DomainRow], mapped: Sequence[MappingRow]) -> bool:
        """Insert domains and mappings, which replace those of the same names, in one transaction.

        False, and no change, when the VM has no row any more or a new domain has another owner.
        """
        names = [row.domain for row in mapped]
        statements: list[sa.Executable] = [
            domains.insert().values(**dataclasses.asdict(row)) for row in owned
        ]
        statements.append(domain_mappings.delete().where(domain_mappings.c.domain.in_(names)))
        statements += [domain_mappings.insert().values(**dataclasses.asdict(row)) for row in mapped]
        try:
            await self.database.execute(*statements)
        except sa.exc.IntegrityError:
            return False
        return True

    async def remove(self, domain: str) -> None:
        await self.database.execute(domain_mappings.delete().where(domain_mappings.c.domain == domain))
