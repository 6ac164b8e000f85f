"""Calls that take minutes: the server answers at once with a number, under which the result is asked for."""

import time
from collections.abc import Callable
from typing import Any

from stead.sdk._async.connection import AsyncConnection
from stead.sdk.answers import error_of, json_of
from stead.sdk.blocking import async_sleep
from stead.sdk.errors import ServerUnreachable, SteadException, UnexpectedAnswer
from stead.sdk.following import NewLines
from stead.sdk.models import LogEntry, LogPage
from stead.sdk.parsing import parse
from stead.sdk.requests import BACKGROUND_HEADER, BACKGROUND_ID_HEADER, Request, request

BACKGROUND = {BACKGROUND_HEADER: "5"}
"""Seconds after which the server should answer with a number."""
_PAUSES = (0.5, 1.0, 2.0)
_OUTAGE = 60.0
"""Seconds that the server may be away while a result is waited for: it goes on with its work after a
restart."""

Progress = Callable[[LogEntry], object]


async def call_in_background(connection: AsyncConnection, call: Request, progress: Progress | None) -> Any:
    """Make a call that may become a background one; `progress` is called with each line that it logs."""
    response = await connection.send(call)
    if response.status_code != 202:
        return json_of(response)
    accepted = json_of(response)
    said = accepted.get("requestId") if isinstance(accepted, dict) else None
    request_id = response.headers.get(BACKGROUND_ID_HEADER) or said
    if not isinstance(request_id, str):
        raise UnexpectedAnswer("the server put the call into the background but gave no number to ask with")
    lines = NewLines()
    heard = time.monotonic()
    turn = 0
    while True:
        result = await _poll(connection, request_id)
        if result is None:
            if time.monotonic() - heard > _OUTAGE:
                text = f"the server is away; the result of the call can be asked for as {request_id}"
                raise ServerUnreachable(text, sent=True)
        else:
            heard = time.monotonic()
            if progress is not None:
                await _report(connection, request_id, lines, progress)
            if result.status_code != 202:
                return json_of(result)
        await async_sleep(_PAUSES[min(turn, len(_PAUSES) - 1)])
        turn += 1


async def _poll(connection: AsyncConnection, request_id: str) -> Any:
    """What the server says about the call now, or None if it is not there to say it.

    "Unavailable" may be the call's result or the server's own state; it is the result if it stays.
    """
    poll = request("GET", "/auth/v1/background-requests/{}", request_id)
    try:
        response = await connection.send(poll)
    except ServerUnreachable:
        return None
    if not response.is_success and error_of(response).code is None:
        return None
    return response


async def _report(connection: AsyncConnection, request_id: str, lines: NewLines, progress: Progress) -> None:
    """Lines are a courtesy: that they cannot be read does not fail the call."""
    token: str | None = None
    while True:
        query = {"requestId": request_id, "startTime": lines.newest or None, "pageToken": token}
        try:
            page = parse(
                LogPage, await connection.call(request("GET", "/observability/v1/logs", query=query))
            )
        except SteadException:
            return
        for entry in lines.among(page):
            progress(entry)
        token = page.next_page_token
        if token is None:
            return
