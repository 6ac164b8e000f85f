"""The caller's account, and results of background requests."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from stead.api import background as background_answers
from stead.api.callers import AnyCaller, Owner
from stead.api.dependencies import BackgroundDep
from stead.api.wire import Wire

router = APIRouter(prefix="/auth/v1", tags=["account"])


class WhoAmI(Wire):
    account_id: str
    identity_id: str | None = None


@router.get("/whoami")
async def whoami(caller: AnyCaller) -> WhoAmI:
    """Get the account of an API key or access token, and the identity of a token."""
    return WhoAmI(account_id=caller.account, identity_id=caller.identity)


@router.get("/background-requests/{request_id}", response_class=JSONResponse)
async def background_request(request_id: str, caller: AnyCaller, background: BackgroundDep) -> JSONResponse:
    """Get the result of a background request: 202 while it runs, then the status and body of its answer."""
    return await background_answers.result(background, caller.account, request_id)


@router.delete("/background-requests/{request_id}", response_class=JSONResponse)
async def cancel_background_request(
    request_id: str, caller: Owner, background: BackgroundDep
) -> JSONResponse:
    """Cancel a background request: 202, and what it makes is deleted. One that has finished stays as it is,
    and is answered like GET."""
    return await background_answers.result(background, caller.account, request_id, cancel=True)
