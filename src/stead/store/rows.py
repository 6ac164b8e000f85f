"""Rows of one table as frozen dataclasses. The schema is in `migrations/`."""

import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Generic, TypeVar, get_args

import sqlalchemy as sa

from stead.store.database import Database
from stead.store.sealing import Place

R = TypeVar("R")
T = TypeVar("T")
_SHORT = 64
_MOST_KEYS = 10_000
_TYPES: dict[object, type[sa.types.TypeEngine[Any]]] = {str: sa.Text, int: sa.BigInteger, bool: sa.Boolean}


def table_of(name: str, row: type[Any]) -> sa.TableClause:
    """A table with the fields of this dataclass as columns."""
    kinds = {field.name: (get_args(field.type) or (field.type,))[0] for field in dataclasses.fields(row)}
    return sa.table(name, *(sa.column(column, _TYPES[kind]) for column, kind in kinds.items()))


class Rows(Generic[R]):
    """Reads and writes the rows of one table by id; a write is durable when it returns."""

    table: ClassVar[sa.TableClause]
    row: ClassVar[type[Any]]
    stamps: ClassVar[tuple[str, ...]] = ("created_at",)
    """Columns that get the time of the insertion, unless the row has one."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._short_lists: set[Hashable] = set()
        """Keys whose list was short the last time. A thread would take longer than to read it."""
        # Cached: building a statement takes as long as running it.
        self._by_id = sa.select(self.table).where(self.table.c.id == sa.bindparam("wanted"))

    async def insert(self, row: R) -> R:
        now = time.time_ns()
        stamps = {name: getattr(row, name) or now for name in self.stamps}
        row = dataclasses.replace(row, **stamps)  # type: ignore[type-var]  # rows are dataclasses
        await self.database.execute(self.table.insert().values(**_values(row)))
        return row

    async def add(self, row: R) -> R | None:
        """Insert a row; None when one with its keys exists, or when one that it refers to does not."""
        try:
            return await self.insert(row)
        except sa.exc.IntegrityError:
            return None

    async def update(self, row_id: str, **changes: object) -> R | None:
        """Change a row and return it; None when there is no such row."""
        statement = self.table.update().where(self.table.c.id == row_id).values(**changes)
        return await self._update_returning(statement)

    async def delete(self, row_id: str) -> None:
        await self.database.execute(self.table.delete().where(self.table.c.id == row_id))

    def seal(self, row_id: str, column: str, secret: str) -> str:
        """A secret as it is stored in this column of the row."""
        return self.database.keys.seal(secret, Place(self.table.name, column, row_id))

    def unseal(self, row_id: str, column: str, sealed: str) -> str:
        """The secret that is stored in this column of the row; SealingError if its key is missing."""
        return self.database.keys.open(sealed, Place(self.table.name, column, row_id))

    async def named(self, account: str, name: str) -> list[R]:
        """The rows of an account that have this name, in a table with these columns."""
        columns = self.table.c
        return await self._select(
            sa.select(self.table).where(columns.account == account, columns.name == name)
        )

    async def get(self, row_id: str) -> R | None:
        return self._select_one(self._by_id, wanted=row_id)

    async def _update_returning(self, statement: sa.Update) -> R | None:
        """The row after a change; None when it matched none."""
        statement = statement.returning(self.table)
        return await self.database.write(lambda connection: self._one(connection.execute(statement)))

    def _select_one(self, statement: sa.Select[Any], **values: str) -> R | None:
        with self.database.look_up() as connection:
            return self._one(connection.execute(statement, values))

    async def _select(self, statement: sa.Select[Any]) -> list[R]:
        with self.database.look_up() as connection:
            return build_rows(self.row, connection.execute(statement))

    async def _select_many(
        self, key: Hashable, statement: sa.Select[Any], convert: Callable[[R], T]
    ) -> list[T]:
        """The converted rows of a list that may be long: read in a thread, unless that of `key` was short."""

        def read(connection: sa.Connection) -> list[T]:
            return [convert(row) for row in build_rows(self.row, connection.execute(statement))]

        if key in self._short_lists:
            with self.database.look_up() as connection:
                found = read(connection)
        else:
            found = await self.database.read(read)
        self._short_lists.discard(key)
        if len(found) <= _SHORT:
            if len(self._short_lists) >= _MOST_KEYS:
                self._short_lists.clear()
            self._short_lists.add(key)
        return found

    async def _page(self, statement: sa.Select[Any], limit: int, offset: int) -> tuple[list[R], int]:
        """One page, and the total count."""
        count = sa.select(sa.func.count()).select_from(statement.order_by(None).subquery())
        with self.database.look_up() as connection:
            total = connection.execute(count).scalar_one()
            return build_rows(self.row, connection.execute(statement.limit(limit).offset(offset))), total

    def _one(self, result: sa.CursorResult[Any]) -> R | None:
        found: list[R] = build_rows(self.row, result)
        if len(found) > 1:
            raise sa.exc.MultipleResultsFound("there is more than one such row")
        return found[0] if found else None


def build_rows(kind: type[R], result: sa.CursorResult[Any]) -> list[R]:
    """Rows of a result. Bypasses `__init__`, which is ten times slower: a list has a thousand rows."""
    names = tuple(result.keys())
    rows = []
    for values in result:
        row = object.__new__(kind)
        row.__dict__.update(zip(names, values, strict=True))
        rows.append(row)
    return rows


def _values(row: object) -> dict[str, Any]:
    return dataclasses.asdict(row)  # type: ignore[call-overload, no-any-return]  # rows are dataclasses
