"""Background requests: the server answers a long call with a request id; the client polls for the result."""

import time
from collections.abc import Callable
from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk.answers import decode_error, decode_json
from stead.sdk.blocking import async_finish, async_sleep
from stead.sdk.errors import ServerUnreachable, SteadException, UnexpectedAnswer
from stead.sdk.log_deduplication import LogDeduplicator
from stead.sdk.models import LogEntry, LogPage
from stead.sdk.parsing import parse
from stead.sdk.requests import BACKGROUND_HEADER, BACKGROUND_ID_HEADER, Request, request

BACKGROUND = {BACKGROUND_HEADER: "5"}
"""Seconds after which the server answers with a request id."""
_PAUSES = (0.5, 1.0, 2.0)
_OUTAGE = 60.0
"""Seconds that the server may be unreachable while the client polls: it continues the build after a
restart."""

_CANCEL_TIMEOUT = 10.0

Progress = Callable[[LogEntry], object]


async def call_in_background(
    connection: AsyncConnection,
    call: Request,
    progress: Progress | None,
    undo: Callable[[Any], Request] | None = None,
) -> Any:
    """Make a call that may become a background request; `progress` is called with each line that it logs.

    With `undo`, a request whose caller is interrupted is cancelled. If it has finished by then, the request
    that `undo` makes of its answer is sent.
    """
    response = await connection.send(call)
    if response.status_code != 202:
        return decode_json(response, idempotent=call.idempotent)
    accepted = decode_json(response)
    said = accepted.get("requestId") if isinstance(accepted, dict) else None
    request_id = response.headers.get(BACKGROUND_ID_HEADER) or said
    if not isinstance(request_id, str):
        raise UnexpectedAnswer("the server answered 202 without a background request id")
    try:
        result = await _result(connection, request_id, progress)
    except SteadException:
        raise
    except BaseException as error:
        if undo is not None:
            await async_finish(_cancel, connection, request_id, undo, error)
        raise
    return decode_json(result, idempotent=call.idempotent)


async def _result(connection: AsyncConnection, request_id: str, progress: Progress | None) -> Any:
    """The last answer of the polls for a background request."""
    lines = LogDeduplicator()
    heard = time.monotonic()
    turn = 0
    while True:
        result = await _poll(connection, request_id)
        if result is None:
            if time.monotonic() - heard > _OUTAGE:
                text = f"the server is unreachable; background request {request_id} may still be running"
                raise ServerUnreachable(text, sent=True)
        else:
            heard = time.monotonic()
            if progress is not None:
                await _report(connection, request_id, lines, progress)
            if result.status_code != 202:
                return result
        await async_sleep(_PAUSES[min(turn, len(_PAUSES) - 1)])
        turn += 1


async def _cancel(
    connection: AsyncConnection,
    request_id: str,
    undo: Callable[[Any], Request],
    why: BaseException,
) -> None:
    path = "/auth/v1/background-requests/{}"
    try:
        answer = await connection.send(request("DELETE", path, request_id, timeout=_CANCEL_TIMEOUT))
        result = decode_json(answer)
        if answer.status_code != 202:
            await connection.call(undo(result))
    except SteadException:
        why.add_note(f"background request {request_id} could not be cancelled")


async def _poll(connection: AsyncConnection, request_id: str) -> Any:
    """The answer to one poll, or None if the server is unreachable.

    503 may be the result of the request or the server's own state; the connection repeats the poll, and an
    answer that stays is the result.
    """
    poll = request("GET", "/auth/v1/background-requests/{}", request_id)
    try:
        response = await connection.send(poll)
    except ServerUnreachable:
        return None
    if not response.is_success and decode_error(response).code is None:
        return None
    return response


async def _report(
    connection: AsyncConnection, request_id: str, lines: LogDeduplicator, progress: Progress
) -> None:
    """Call `progress` with the new lines. An error here does not fail the request."""
    token: str | None = None
    while True:
        query = {"requestId": request_id, "startTime": lines.newest or None, "pageToken": token}
        try:
            page = parse(
                LogPage, await connection.call(request("GET", "/observability/v1/logs", query=query))
            )
        except SteadException:
            return
        for entry in lines.unseen(page):
            progress(entry)
        token = page.next_page_token
        if token is None:
            return
