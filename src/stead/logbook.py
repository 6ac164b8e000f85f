"""The log that users read: one line per event of a VM, a build or a request."""

import asyncio
import time

import sqlalchemy as sa

from stead.logs import get_logger
from stead.store.logs import LogQuery, LogRow, LogStore
from stead.tasks import TaskSet

KEPT = 7 * 24 * 3600
"""Retention of log lines in seconds."""
_PRUNE_EVERY = 3600.0
_GATHER = 0.05
"""Batching: lines that arrive within this many seconds are written in one transaction."""
_MAX_WAITING = 10_000
MAX_MESSAGE = 16_384
CONSOLE = "console"
"""The source of the lines that hold what a guest wrote to its console before its run failed."""

log = get_logger("stead.logbook")

__all__ = ["LogQuery", "LogRow", "Logbook"]


class Logbook:
    """Queues lines and writes them in batches in the background, in order.

    Nothing depends on log lines: if they cannot be written (a full disk), they are dropped.
    """

    def __init__(self, store: LogStore) -> None:
        self._store = store
        self._waiting: list[LogRow] = []
        self._last = 0
        self._wanted = asyncio.Event()
        self._tasks = TaskSet()

    def start(self) -> None:
        self._tasks.start(self._work(), "logbook writer")

    async def close(self) -> None:
        await self._tasks.close()
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
        instance: str | None = None,
    ) -> None:
        """Queue a line. `find` sees it at once; the database has it a moment later."""
        # Unique to the microsecond: clients that poll again from the newest time they saw deduplicate by it.
        self._last = max(time.time_ns(), self._last + 1000)
        if len(self._waiting) >= _MAX_WAITING:
            return
        text = message[:MAX_MESSAGE]
        self._waiting.append(
            LogRow(account, self._last, text, level, source, machine, service, request, build, instance)
        )
        self._wanted.set()

    async def find(self, query: LogQuery) -> list[LogRow]:
        await self._flush()
        return await self._store.find(query)

    async def console(self, account: str, machine: str) -> str | None:
        """The console of the last run of a VM that failed."""
        await self._flush()
        row = await self._store.newest(account, machine, CONSOLE)
        return None if row is None else row.message

    async def delete_consoles(self, account: str, machine: str) -> None:
        await self._flush()
        await self._store.delete(account, machine, CONSOLE)

    async def runs(self, account: str, machine: str) -> list[tuple[str, int]]:
        await self._flush()
        return await self._store.runs(account, machine)

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
            log.error("log lines dropped", lines=len(rows), error=str(error.orig))
