"""Logs of VMs, builds and requests."""

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any, Unpack

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.streams import AsyncStream
from stead.sdk.arguments import checks_arguments, seconds
from stead.sdk.blocking import async_sleep
from stead.sdk.log_deduplication import LogDeduplicator
from stead.sdk.log_options import LogFilter, LogQuery, log_query
from stead.sdk.models import LogEntry, LogPage
from stead.sdk.parsing import parse
from stead.sdk.requests import request

_SKEW = timedelta(minutes=1)
"""The tolerated difference between the clocks of client and server."""


@checks_arguments
class AsyncLogs:
    """Log lines about VMs, builds and requests."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def list(self, **options: Unpack[LogQuery]) -> LogPage:
        """Log lines that match, oldest first, of the last day unless you give times.

        If there are more lines, `next_page_token` of the result is the `page_token` of the next page.
        """
        return await self._page(log_query(options))

    def stream(
        self,
        *,
        include_existing: bool = False,
        interval: float = 2.0,
        **options: Unpack[LogFilter],
    ) -> AsyncStream[LogEntry]:
        """Yield new lines as they are logged, until the stream is closed.

        With `include_existing`, the lines of the last day come first. The client polls every `interval`
        seconds.
        """
        every = seconds("interval", interval)
        return AsyncStream(self._follow(log_query(options), include_existing, every))

    async def _follow(
        self, query: dict[str, Any], include_existing: bool, interval: float
    ) -> AsyncGenerator[LogEntry]:
        lines = LogDeduplicator()
        start = None if include_existing else (datetime.now(UTC) - _SKEW).isoformat()
        if not include_existing:
            for page in [page async for page in self._pages(query, start)]:
                for _ in lines.unseen(page):
                    pass
        while True:
            async for page in self._pages(query, lines.newest or start):
                for entry in lines.unseen(page):
                    yield entry
            lines.prune()
            await async_sleep(interval)

    async def _pages(self, query: dict[str, Any], start: str | None) -> AsyncGenerator[LogPage]:
        token: str | None = None
        while True:
            page = await self._page({**query, "startTime": start, "pageToken": token})
            yield page
            token = page.next_page_token
            if token is None:
                return

    async def _page(self, query: dict[str, Any]) -> LogPage:
        return parse(
            LogPage, await self._connection.call(request("GET", "/observability/v1/logs", query=query))
        )
