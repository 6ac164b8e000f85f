"""The log that users read: one line per event of a VM, a build or a request."""

import asyncio
import time
from collections import Counter

import sqlalchemy as sa

from stead.logs import get_logger
from stead.shares import share_of
from stead.store.logs import LogQuery, LogRow, LogStore
from stead.supervision import repeat
from stead.tasks import TaskSet

KEPT = 7 * 24 * 3600
"""Retention of log lines in seconds."""
_PRUNE_EVERY = 3600.0
_GATHER = 0.05
"""Batching: lines that arrive within this many seconds are written in one transaction."""
_MAX_WAITING = 10_000
_SHARE_WAITING = share_of(_MAX_WAITING)
"""Of one account: a build that prints without end does not drop the lines of others."""
_MAX_LINES = 500_000
"""Lines that are kept of one account."""
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
        self._waiting_of: Counter[str] = Counter()
        self._added: Counter[str] = Counter()
        """Lines of each account since it was last pruned."""
        self._last = 0
        self._pruned = 0.0
        self._wanted = asyncio.Event()
        self._tasks = TaskSet()

    def start(self) -> None:
        self._tasks.start(repeat("logbook writer", self._work, 0.0, at_once=True), "logbook writer")

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
        if len(self._waiting) >= _MAX_WAITING or self._waiting_of[account] >= _SHARE_WAITING:
            return
        self._waiting_of[account] += 1
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
        await self._wanted.wait()
        await asyncio.sleep(_GATHER)
        await self._flush()
        if time.monotonic() - self._pruned > _PRUNE_EVERY:
            self._pruned = time.monotonic()
            await self._store.prune(time.time_ns() - KEPT * 10**9)

    async def _flush(self) -> None:
        self._wanted.clear()
        rows, self._waiting = self._waiting, []
        added, self._waiting_of = self._waiting_of, Counter()
        if not rows:
            return
        try:
            await self._store.add(rows)
            await self._prune(added)
        except sa.exc.DBAPIError as error:
            log.error("log lines dropped", lines=len(rows), error=str(error.orig))

    async def _prune(self, added: Counter[str]) -> None:
        """Delete the oldest lines of accounts with too many, now and then."""
        self._added += added
        for account in [each for each, count in self._added.items() if count >= _MAX_LINES // 10]:
            del self._added[account]
            await self._store.keep_newest(account, _MAX_LINES)
