"""Background requests: creations that outlast their call; results are stored, so they survive a restart."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter

from stead.creation.results import BuiltSnapshot, CreatedVm, RequestFailure
from stead.errors import InvalidRequest, ServerStopping
from stead.logs import get_logger
from stead.machines.records import new_id
from stead.shares import KeyedLimit
from stead.store.requests import RequestRow, RequestStore
from stead.tasks import TaskSet, cancel_and_wait

_KEPT = 7 * 24 * 3600 * 10**9

log = get_logger("stead.requests")

Result = CreatedVm | BuiltSnapshot | RequestFailure
"""How a request ended."""
R = TypeVar("R", CreatedVm, BuiltSnapshot)
Failed = Callable[[Exception], RequestFailure]

_stored: TypeAdapter[Result] = TypeAdapter(Result)


class RequestInterrupted(ServerStopping):
    def __init__(self) -> None:
        Exception.__init__(self, "the Stead server stopped during this request; send it again")


class RequestCancelled(InvalidRequest):
    def __init__(self) -> None:
        super().__init__("the request was cancelled by its client")


@dataclass(frozen=True)
class BackgroundRequest:
    """A request that continues without its call; `result` is None while it runs."""

    id: str
    result: Result | None


@dataclass(frozen=True)
class _Running:
    work: "asyncio.Task[Any]"
    storing: "asyncio.Task[None]"
    """Waits for the work and stores its result."""


def new_request_id() -> str:
    return f"ri-{new_id()}"


class BackgroundRequests:
    def __init__(self, store: RequestStore, places: KeyedLimit | None = None) -> None:
        """`places` bounds the requests in progress, by account; default: no bound."""
        self._store = store
        self._places = places or KeyedLimit()
        self._tasks = TaskSet()
        self._running: dict[str, _Running] = {}

    async def run(
        self, account: str, request_id: str, after: float, work: Coroutine[Any, Any, R], failed: Failed
    ) -> R | None:
        """The result if it comes within `after` seconds; otherwise None, and `get` has it later."""
        try:
            release = await self._places.acquire(account)
        except BaseException:
            work.close()
            raise
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: release())
        try:
            done, _ = await asyncio.wait({task}, timeout=after)
            if done:
                return task.result()
            await self._store.insert(RequestRow(request_id, account))
        except BaseException:
            # The client does not have the id yet, so it cannot ask for the result.
            await cancel_and_wait(task)
            raise
        name = f"background request {request_id}"
        storing = self._tasks.start(self._store_result(request_id, task, failed), name)
        self._running[request_id] = _Running(task, storing)
        return None

    async def _store_result(self, request_id: str, task: asyncio.Task[R], failed: Failed) -> None:
        result: Result
        try:
            result = await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            stopping = current is not None and current.cancelling()
            await cancel_and_wait(task)
            result = failed(RequestInterrupted() if stopping else RequestCancelled())
        except Exception as error:
            result = failed(error)
        try:
            await self._finish(request_id, result)
        finally:
            self._running.pop(request_id, None)

    async def _finish(self, request_id: str, result: Result) -> None:
        await self._store.finish(request_id, _stored.dump_json(result).decode())

    def is_running(self, request_id: str) -> bool:
        """Whether a request continues without its call."""
        return request_id in self._running

    async def get(self, account: str, request_id: str) -> BackgroundRequest | None:
        """A request of this account; without a result while it runs."""
        row = await self._store.get(request_id)
        if row is None or row.account != account:
            return None
        return BackgroundRequest(row.id, None if row.result is None else _stored.validate_json(row.result))

    async def cancel(self, account: str, request_id: str) -> BackgroundRequest | None:
        """Cancel a request of this account: what it makes is undone in the background.

        Returns it: without a result if it was cancelled, with one if it had finished before.
        """
        found = await self.get(account, request_id)
        running = self._running.get(request_id)
        if found is None or running is None or running.work.cancel():
            return found
        await self._tasks.wait_for(running.storing)
        return await self.get(account, request_id)

    async def recover(self, find: Callable[[str], Awaitable[CreatedVm | None]], failed: Failed) -> None:
        """After a crash: answer with what had been created by then; fail the rest with a retryable error."""
        await self._store.prune(time.time_ns() - _KEPT)
        for row in await self._store.pending():
            try:
                found = await find(row.id)
            except Exception as error:
                log.error("cannot find what a request created", request=row.id, error=repr(error))
                found = None
            await self._finish(row.id, failed(RequestInterrupted()) if found is None else found)

    async def close(self) -> None:
        """Cancel running requests and store that they failed."""
        await self._tasks.close()
