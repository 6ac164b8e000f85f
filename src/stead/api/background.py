"""Answers of background requests: 202 with an id, by which the result can be polled."""

from starlette.responses import JSONResponse

from stead.api.errors import ApiError, from_anything, from_product
from stead.api.repeatable import answer_of
from stead.api.wire.snapshots import SnapshotCreated
from stead.api.wire.vms import Created
from stead.creation.background import BackgroundRequests, Failed, Result
from stead.creation.results import BuiltSnapshot, CreatedVm, RequestFailure
from stead.errors import SteadError

AFTER_HEADER = "x-freestyle-background-after-secs"
ID_HEADER = "x-freestyle-background-request-id"


def failed(invalid: str = "BAD_REQUEST") -> Failed:
    """How errors are stored; `invalid` is the path's code for bad requests."""

    def failure(error: Exception) -> RequestFailure:
        if isinstance(error, SteadError):
            error = from_product(error, invalid)
        elif not isinstance(error, ApiError):
            error = from_anything(error)
        return RequestFailure(error.code, error.message, error.status, error.extras)

    return failure


async def result(
    background: BackgroundRequests, account: str, request_id: str, *, cancel: bool = False
) -> JSONResponse:
    """The stored result; 202 if there is none yet. With `cancel` there will be none but an error."""
    found = await (background.cancel if cancel else background.get)(account, request_id)
    if found is None:
        raise ApiError("NOT_FOUND", f"background request {request_id} not found")
    return pending(request_id) if found.result is None else answer(found.result)


def answer(result: Result) -> JSONResponse:
    match result:
        case RequestFailure():
            error = ApiError(result.code, result.message, result.status)
            return JSONResponse({**result.details, **error.body()}, error.status)
        case CreatedVm():
            return answer_of(Created.of(result))
        case BuiltSnapshot():
            return answer_of(SnapshotCreated(snapshot_id=result.id))


def pending(request_id: str) -> JSONResponse:
    body = {"requestId": request_id, "status": "pending"}
    return JSONResponse(body, 202, {ID_HEADER: request_id})
