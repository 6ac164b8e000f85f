"""Background requests: a call that takes long answers 202 with an id, by which its result can be polled."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.responses import JSONResponse

from stead.api.errors import ApiError, from_anything, from_product
from stead.errors import SteadError
from stead.logs import get_logger
from stead.machines.records import new_id
from stead.store.requests import RequestRow, RequestStore
from stead.tasks import TaskSet, cancel_and_wait

AFTER_HEADER = "x-freestyle-background-after-secs"
ID_HEADER = "x-freestyle-background-request-id"
_KEPT = 7 * 24 * 3600 * 10**9

log = get_logger("stead.requests")

Answer = dict[str, Any]
Work = Coroutine[Any, Any, Answer]


Finder = Callable[[str], Awaitable[Answer | None]]
"""Finds what a request had created before a crash, as the answer that the request would have had."""


def new_request_id() -> str:
    return f"ri-{new_id()}"


class BackgroundRequests:
    """Requests that outlast their HTTP call; results are stored, so they survive a restart."""

    def __init__(self, store: RequestStore) -> None:
        self._store = store
        self._tasks = TaskSet()

    async def run(
        self, account: str, request_id: str, after: float, work: Work, invalid: str
    ) -> JSONResponse:
        """Return the answer if it comes within `after` seconds; otherwise 202 with the request id."""
        task = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=after)
        except BaseException:
            # The client does not have the id yet, so it cannot ask for the result.
            await cancel_and_wait(task)
            raise
        if done:
            return JSONResponse(task.result())
        await self._store.insert(RequestRow(request_id, account))
        self._tasks.start(self._store_result(request_id, task, invalid), f"background request {request_id}")
        return _pending(request_id)

    async def _store_result(self, request_id: str, task: asyncio.Task[Answer], invalid: str) -> None:
        try:
            status, answer = 200, await task
        except asyncio.CancelledError:
            await cancel_and_wait(task)
            status, answer = _failed(_restarted())
        except ApiError as error:
            status, answer = _failed(error)
        except SteadError as error:
            status, answer = _failed(from_product(error, invalid))
        except Exception as error:
            status, answer = _failed(from_anything(error))
        await self._store.finish(request_id, status, json.dumps(answer))

    async def result(self, account: str, request_id: str) -> JSONResponse:
        row = await self._store.get(request_id)
        if row is None or row.account != account:
            raise ApiError("NOT_FOUND", f"background request {request_id} not found")
        if row.status is None or row.answer is None:
            return _pending(request_id)
        return JSONResponse(json.loads(row.answer), row.status)

    async def recover(self, find: Finder) -> None:
        """After a crash: answer with what had been created by then; fail the rest with a retryable error."""
        await self._store.prune(time.time_ns() - _KEPT)
        for row in await self._store.pending():
            try:
                found = await find(row.id)
            except Exception as error:
                log.error("cannot find what a request created", request=row.id, error=repr(error))
                found = None
            status, answer = (200, found) if found is not None else _failed(_restarted())
            await self._store.finish(row.id, status, json.dumps(answer))

    async def close(self) -> None:
        """Cancel running requests and store that they failed."""
        await self._tasks.close()


def _pending(request_id: str) -> JSONResponse:
    body = {"requestId": request_id, "status": "pending"}
    return JSONResponse(body, 202, {ID_HEADER: request_id})


def _restarted() -> ApiError:
    return ApiError("SERVICE_UNAVAILABLE", "the Stead server stopped during this request; send it again")


def _failed(error: ApiError) -> tuple[int, Answer]:
    return error.status, error.body()
