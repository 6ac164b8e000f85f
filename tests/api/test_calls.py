"""The middleware around every call, with a small application instead of VMs: a server stop during a call."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from stead.api import calls as calls_module
from stead.api.admission import Admission
from stead.api.calls import Call, Calls
from stead.api.errors import ApiError
from stead.api.guests import error_event
from stead.api.server import running_app
from stead.errors import MachineNotFound
from stead.guest.watchdog import watching_the_loop
from stead.settings import Settings
from support.waiting import until

Handler = Callable[[Call], Awaitable[Response]]


@contextlib.asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[tuple[httpx2.AsyncClient, Calls]]:
    """One handler behind the middleware, on a real socket."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = Request(scope).scope["state"]["call"]
        response = await handler(call)
        await response(scope, receive, send)

    calls = Calls(app, Admission(10, 1000, 1000))
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


async def test_stream_of_a_caller_that_lost_its_permission_ends_with_an_error_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_module, "PERMISSION_CHECK", 0.2)
    revoked = asyncio.Event()

    async def check() -> None:
        if revoked.is_set():
            raise ApiError("UNAUTHORIZED_ERROR", "the API key or token was revoked")

    async def handler(call: Call) -> Response:
        call.require(check)
        call.streaming(error_event)
        return StreamingResponse(forever(), media_type="application/x-ndjson")

    async with served(handler) as (http, _), http.stream("POST", "/") as answer:
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["type"] == "stdout"
        await asyncio.sleep(1)
        revoked.set()
        (last,) = [json.loads(line) async for line in lines]
    assert (last["type"], last["code"]) == ("error", "UNAUTHORIZED_ERROR")


async def test_work_that_outlives_its_call_is_cancelled_with_the_permission_of_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_module, "PERMISSION_CHECK", 0.05)
    revoked, cancelled, checked = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def check() -> None:
        checked.set()
        if revoked.is_set():
            raise MachineNotFound("vm")

    async def cancel() -> None:
        cancelled.set()

    async def handler(call: Call) -> Response:
        call.require(check)
        call.outlived_by(lambda: not cancelled.is_set(), cancel)
        return JSONResponse({})

    async with served(handler) as (http, _):
        assert (await http.post("/")).status_code == 200
        await asyncio.wait_for(checked.wait(), 60)
        assert not cancelled.is_set()
        revoked.set()
        await asyncio.wait_for(cancelled.wait(), 60)


async def test_work_whose_cancellation_fails_does_not_end_the_checks_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls_module, "PERMISSION_CHECK", 0.05)
    failed, revoked, cancelled = 0, asyncio.Event(), asyncio.Event()

    async def check() -> None:
        if revoked.is_set():
            raise MachineNotFound("vm")

    async def fail() -> None:
        nonlocal failed
        failed += 1
        raise RuntimeError("made up")

    async def cancel() -> None:
        cancelled.set()

    works = iter([(lambda: failed < 3, fail), (lambda: not cancelled.is_set(), cancel)])

    async def handler(call: Call) -> Response:
        call.require(check)
        call.outlived_by(*next(works))
        return JSONResponse({})

    async with served(handler) as (http, _):
        for _ in range(2):
            assert (await http.post("/")).status_code == 200
        revoked.set()
        await asyncio.wait_for(cancelled.wait(), 60)
        await until(lambda: failed == 3, 60)


async def test_a_call_that_cannot_be_watched_ends_and_others_are_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = list[Call](), list[Call]()

    async def handler(call: Call) -> Response:
        begun.append(call)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(call)
        return JSONResponse({})

    async with served(handler) as (http, _):
        broken = asyncio.create_task(http.post("/"))
        await until(lambda: len(begun) == 1, 60)
        monkeypatch.setattr(begun[0], "stalled", lambda now: 1 / 0)
        assert (await asyncio.wait_for(broken, 60)).status_code == 500
        leaving = asyncio.create_task(http.post("/"))
        await until(lambda: len(begun) == 2, 60)
        leaving.cancel()
        await until(lambda: ended == begun, 60)


async def test_an_answer_that_is_not_taken_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "STALLED_ANSWER", 1.0)
    ended = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)
            yield bytes(1 << 20)

    class Endless(StreamingResponse):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await super().__call__(scope, receive, send)
            finally:
                ended.set()

    async def handler(call: Call) -> Response:
        return Endless(endless(), media_type="application/octet-stream")

    async with served(handler) as (http, _), http.stream("GET", "/") as answer:
        pieces = answer.aiter_raw()
        assert await anext(pieces)
        await asyncio.wait_for(ended.wait(), 60)
        with pytest.raises(httpx2.HTTPError):
            async for _ in pieces:
                pass


async def test_an_idle_stream_of_a_client_that_reads_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "STALLED_ANSWER", 0.5)
    monkeypatch.setattr(calls_module, "STALLED_BODY", 0.5)

    async def slow() -> AsyncIterator[bytes]:
        yield b"first\n"
        await asyncio.sleep(3)
        yield b"last\n"

    async def handler(call: Call) -> Response:
        return StreamingResponse(slow(), media_type="application/x-ndjson")

    async with served(handler) as (http, _):
        assert (await http.get("/")).text == "first\nlast\n"


async def test_a_body_that_does_not_arrive_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "STALLED_BODY", 1.0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({"length": len(await Request(scope, receive).body())})(scope, receive, send)

    calls = Calls(app, Admission(10, 1000, 1000))
    async with running_app(Settings(listen="127.0.0.1:0"), calls, calls) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nsome")
        answer = await asyncio.wait_for(reader.read(), 60)  # the connection is closed
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request body too slow" in answer


async def test_no_error_after_a_command_started_asks_for_a_retry() -> None:
    async def handler(call: Call) -> Response:
        call.not_retryable()
        raise ApiError("NO_LOCAL_STORAGE_CAPACITY", "disk of the host is full")

    async with served(handler) as (http, _):
        answer = await http.post("/")
    assert answer.status_code == 503
    assert "retry-after" not in answer.headers


async def test_a_call_that_holds_the_event_loop_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(call: Call) -> Response:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            pass
        return JSONResponse({})

    with caplog.at_level(logging.WARNING, "stead.watchdog"):
        async with watching_the_loop(), served(handler) as (http, _):
            answer = await http.post("/v1/hold")
            trace = answer.headers["x-freestyle-trace-id"]

            def named() -> bool:
                return any(
                    "event loop was held" in line
                    and 'call="POST /v1/hold"' in line
                    and f"trace={trace}" in line
                    for line in caplog.messages
                )

            await until(named, 60)
