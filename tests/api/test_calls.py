"""The middleware around every call, with a small application instead of VMs: a server stop during a call."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stead.api.calls import Call, Calls
from stead.api.errors import ApiError
from stead.api.guests import error_event
from stead.api.server import running_app
from stead.settings import Settings

Handler = Callable[[Call], Awaitable[Response]]


@contextlib.asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[tuple[httpx2.AsyncClient, Calls]]:
    """One handler behind the middleware, on a real socket."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = Request(scope).scope["state"]["call"]
        response = await handler(call)
        await response(scope, receive, send)

    calls = Calls(app, 10)
    async with (
        running_app(Settings(listen="127.0.0.1:0"), calls, calls) as url,
        httpx2.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield http, calls


async def forever() -> AsyncIterator[bytes]:
    yield b'{"type": "stdout"}\n'
    await asyncio.Event().wait()


async def test_json_stream_cut_by_a_stop_ends_with_an_error_event() -> None:
    async def handler(call: Call) -> Response:
        call.streaming(error_event)
        return StreamingResponse(forever(), media_type="application/x-ndjson")

    async with served(handler) as (http, calls), http.stream("POST", "/") as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["type"] == "stdout"
        await calls.stop(0.01)
        # The client raises unless the chunked body ends properly.
        (last,) = [json.loads(line) async for line in lines]
    assert (last["type"], last["code"]) == ("error", "SERVICE_UNAVAILABLE")


async def test_byte_stream_cut_by_a_stop_is_aborted() -> None:
    """A proper end would make a truncated file look complete."""

    async def handler(call: Call) -> Response:
        return StreamingResponse(forever(), media_type="application/octet-stream")

    async with served(handler) as (http, calls), http.stream("GET", "/") as answer:
        chunks = answer.aiter_bytes()
        assert await anext(chunks)
        await calls.stop(0.01)
        with pytest.raises(httpx2.HTTPError):
            await anext(chunks)


@pytest.mark.parametrize("started", [False, True])
async def test_only_calls_without_effect_are_told_to_retry(started: bool) -> None:
    begun = asyncio.Event()

    async def handler(call: Call) -> Response:
        if started:
            call.not_retryable()
        begun.set()
        await asyncio.Event().wait()
        return JSONResponse({})

    async with served(handler) as (http, calls):
        asking = asyncio.create_task(http.post("/"))
        await begun.wait()
        await calls.stop(0.01)
        answer = await asking
    assert (answer.status_code, answer.json()["code"]) == (503, "SERVICE_UNAVAILABLE")
    assert ("retry-after" in answer.headers) is not started
    assert answer.json().get("retryable") is (False if started else None)


async def test_no_error_after_a_command_started_asks_for_a_retry() -> None:
    async def handler(call: Call) -> Response:
        call.not_retryable()
        raise ApiError("NO_LOCAL_STORAGE_CAPACITY", "disk of the host is full")

    async with served(handler) as (http, _):
        answer = await http.post("/")
    assert answer.status_code == 503
    assert "retry-after" not in answer.headers
