"""Rows of background requests: calls whose client polls for the answer."""

import time
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.rows import Rows, table_of


@dataclass(frozen=True)
class RequestRow:
    """One call. `result` is what it made, or why it failed, as JSON."""

    id: str
    account: str
    state: str = "pending"
    result: str | None = None
    created_at: int = 0
    finished_at: int | None = None


background_requests = table_of("background_requests", RequestRow)


class RequestStore(Rows[RequestRow]):
    table = background_requests
    row = RequestRow

    async def finish(self, request_id: str, result: str) -> None:
        await self.update(request_id, state="done", result=result, finished_at=time.time_ns())

    async def pending(self) -> list[RequestRow]:
        return await self._select(
            sa.select(background_requests).where(background_requests.c.state == "pending")
        )

    async def prune(self, before: int) -> None:
        await self.database.execute(
            background_requests.delete().where(background_requests.c.finished_at < before)
        )
