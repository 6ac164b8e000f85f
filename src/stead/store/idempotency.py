"""Rows of idempotency keys: creates whose result a repeated call gets."""

import dataclasses
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.rows import Rows, table_of


@dataclass(frozen=True)
class IdempotencyRow:
    """One create. `id` is a hash of account and key, `content` one of the body: neither is stored itself."""

    id: str
    account: str
    target: str
    """Method and path."""
    content: str
    request: str
    """The id of the request, by which what it made is found after a crash."""
    result: str | None = None
    """What it made, as JSON; None while the create is under way."""
    created_at: int = 0


idempotency_keys = table_of("idempotency_keys", IdempotencyRow)


class IdempotencyStore(Rows[IdempotencyRow]):
    table = idempotency_keys
    row = IdempotencyRow

    async def begin(self, row: IdempotencyRow, expired: int, most: int) -> bool:
        """Insert a row, and remove rows from before `expired` and the oldest of the account beyond `most`.

        False, and nothing is inserted, if there is a row with its id.
        """
        keys = idempotency_keys
        own = sa.select(keys.c.id).where(keys.c.account == row.account, keys.c.result.is_not(None))
        surplus = own.order_by(keys.c.created_at.desc()).offset(most - 1)

        def insert(connection: sa.Connection) -> bool:
            connection.execute(keys.delete().where(keys.c.created_at < expired))
            connection.execute(keys.delete().where(keys.c.id.in_(surplus)))
            if connection.execute(sa.select(keys.c.id).where(keys.c.id == row.id)).first() is not None:
                return False
            connection.execute(keys.insert().values(**dataclasses.asdict(row)))
            return True

        return await self.database.write(insert)

    async def pending(self) -> list[IdempotencyRow]:
        return await self._select(sa.select(idempotency_keys).where(idempotency_keys.c.result.is_(None)))
