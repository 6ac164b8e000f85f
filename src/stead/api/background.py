"""Answers of background requests: 202 with an id, by which the result can be polled."""

import json

from starlette.responses import JSONResponse

from stead.api.errors import ApiError, from_anything, from_product
from stead.builds.background import Answer, BackgroundRequests, Work
from stead.errors import SteadError

AFTER_HEADER = "x-freestyle-background-after-secs"
ID_HEADER = "x-freestyle-background-request-id"


def failure(error: Exception, invalid: str = "BAD_REQUEST") -> tuple[int, Answer]:
    """The status and body of an error answer; `invalid` is the path's code for bad requests."""
    if isinstance(error, SteadError):
        error = from_product(error, invalid)
    elif not isinstance(error, ApiError):
        error = from_anything(error)
    return error.status, error.body()


async def run(
    background: BackgroundRequests, account: str, request_id: str, after: float, work: Work, invalid: str
) -> JSONResponse:
    """Return the answer if it comes within `after` seconds; otherwise 202 with the request id."""
    answer = await background.run(account, request_id, after, work, lambda error: failure(error, invalid))
    return pending(request_id) if answer is None else JSONResponse(answer)


async def result(
    background: BackgroundRequests, account: str, request_id: str, *, cancel: bool = False
) -> JSONResponse:
    """The stored answer; 202 if there is none yet. With `cancel` there will be none but an error."""
    row = await (background.cancel if cancel else background.get)(account, request_id)
    if row is None:
        raise ApiError("NOT_FOUND", f"background request {request_id} not found")
    if row.status is None or row.answer is None:
        return pending(request_id)
    return JSONResponse(json.loads(row.answer), row.status)


def pending(request_id: str) -> JSONResponse:
    body = {"requestId": request_id, "status": "pending"}
    return JSONResponse(body, 202, {ID_HEADER: request_id})
