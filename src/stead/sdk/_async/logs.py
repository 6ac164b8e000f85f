"""Logs of VMs, builds and requests."""

from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.streams import AsyncStream
from stead.sdk.arguments import checks_arguments, seconds
from stead.sdk.blocking import async_sleep
from stead.sdk.log_deduplication import LogDeduplicator
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

    async def list(
        self,
        *,
        vm_id: str | None = None,
        vm_service: str | None = None,
        build_id: str | None = None,
        request_id: str | None = None,
        instance_id: str | None = None,
        resource_type: str | None = None,
        search: str | None = None,
        start_time: datetime | str | None = None,
        end_time: datetime | str | None = None,
        page_size: int | None = None,
        page_token: str | None = None,
    ) -> LogPage:
        """Log lines that match, oldest first, of the last day unless you give times.

        If there are more lines, `next_page_token` of the result is the `page_token` of the next page.
        """
        query = _query(vm_id, vm_service, build_id, request_id, instance_id, resource_type, search)
        query |= {
            "startTime": _moment(start_time),
            "endTime": _moment(end_time),
            "pageSize": page_size,
            "pageToken": page_token,
        }
        return await self._page(query)

    def stream(
        self,
        *,
        vm_id: str | None = None,
        vm_service: str | None = None,
        build_id: str | None = None,
        request_id: str | None = None,
        instance_id: str | None = None,
        resource_type: str | None = None,
        search: str | None = None,
        include_existing: bool = False,
        interval: float = 2.0,
    ) -> AsyncStream[LogEntry]:
        """Yield new lines as they are logged, until the stream is closed.

        With `include_existing`, the lines of the last day come first. The client polls every `interval`
        seconds.
        """
        query = _query(vm_id, vm_service, build_id, request_id, instance_id, resource_type, search)
        return AsyncStream(self._follow(query, include_existing, seconds("interval", interval)))

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


def _query(
    vm_id: str | None,
    vm_service: str | None,
    build_id: str | None,
    request_id: str | None,
    instance_id: str | None,
    resource_type: str | None,
    search: str | None,
) -> dict[str, Any]:
    return {
        "vmId": vm_id,
        "vmService": vm_service,
        "buildId": build_id,
        "requestId": request_id,
        "instanceId": instance_id,
        "resourceType": resource_type,
        "search": search,
    }


def _moment(time: datetime | str | None) -> str | None:
    if not isinstance(time, datetime):
        return time
    return (time if time.tzinfo else time.astimezone()).isoformat()
