"""What users can read of what happened to their things."""

import asyncio
import time

import sqlalchemy as sa

from stead.logs import get_logger
from stead.store.logs import LogQuery, LogRow, LogStore

KEPT = 7 * 24 * 3600
"""Seconds after which a line is forgotten."""
_PRUNE_EVERY = 3600.0
_GATHER = 0.05
"""Lines that come within this time are written together."""
_MAX_WAITING = 10_000
MAX_MESSAGE = 16_384

log = get_logger("stead.logbook")


class Logbook:
    """Takes lines in at once and writes them in the background, in order.

    A line is for people who look for a cause; nothing is decided by it. So a full disk costs lines, not work.
    """

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._waiting: list[LogRow] = []
        self._last = 0
        self._wanted = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._writer = asyncio.create_task(self._work())

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.cancel()
            await asyncio.gather(self._writer, return_exceptions=True)
        await self._flush()

    async def write(
        self,
        account: str,
        message: str,
        *,
        level: str = "info",
        source: str | None = None,
        machine: str | None = None,
        service: str | None = None,
        request: str | None = None,
        build: str | None = None,
    ) -> None:
        """Note a line; it can be read as soon as this returns, if not before long in the database."""
        # Two lines never have the same time: readers that ask again tell them apart by it.
        self._last = max(time.time_ns(), self._last + 1000)
        if len(self._waiting) >= _MAX_WAITING:
            return
        text = message[:MAX_MESSAGE]
        self._waiting.append(
            LogRow(account, self._last, text, level, source, machine, service, request, build)
        )
        self._wanted.set()

    async def find(self, query: LogQuery) -> list[LogRow]:
        await self._flush()
        return await self._store.find(query)

    async def _work(self) -> None:
        pruned = 0.0
        while True:
            await self._wanted.wait()
            await asyncio.sleep(_GATHER)
            await self._flush()
            if time.monotonic() - pruned > _PRUNE_EVERY:
                pruned = time.monotonic()
                await self._store.prune(time.time_ns() - KEPT * 10**9)

    async def _flush(self) -> None:
        self._wanted.clear()
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        try:
            await self._store.add(rows)
        except sa.exc.DBAPIError as error:
            log.error("log lines could not be written", lines=len(rows), error=str(error.orig))
