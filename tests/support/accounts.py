"""A database of accounts, opened as one process does."""

import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import sqlalchemy as sa

from stead.errors import SteadError
from stead.identity.accounts import Account, Accounts
from stead.identity.callers import Callers
from stead.identity.identities import Identities
from stead.store.database import Database, open_database

T = TypeVar("T")
NOWHERE = "00000000-0000-4000-8000-000000000000"


class Installation:
    """A database, the services that use it, and VMs that exist only as ids."""

    def __init__(self, path: Path, database: Database) -> None:
        self.path = path
        self.database = database
        self.machines: dict[str, str] = {}
        self.accounts = Accounts(database)
        self.callers = Callers(database)
        self.identities = Identities(database, self.owns)

    async def owns(self, account: str, machine: str) -> bool:
        return self.machines.get(machine) == account

    def machine(self, account: Account | str, name: str = "m1") -> str:
        self.machines[name] = account if isinstance(account, str) else account.id
        return name

    async def count(self, table: sa.TableClause) -> int:
        with self.database.look_up() as connection:
            return connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()

    async def close(self) -> None:
        await self.callers.close()
        await self.database.dispose()


@contextlib.asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Installation]:
    installation = Installation(path, await open_database(path))
    try:
        yield installation
    finally:
        await installation.close()


async def attempt(work: Awaitable[T]) -> T | SteadError:
    try:
        return await work
    except SteadError as error:
        return error
