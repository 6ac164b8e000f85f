"""Who am I, and what has become of what I asked for."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from stead.api.callers import AnyCaller
from stead.api.services import ServicesDep
from stead.api.wire import Wire

router = APIRouter(prefix="/auth/v1", tags=["account"])


class WhoAmI(Wire):
    account_id: str
    identity_id: str | None = None


@router.get("/whoami")
async def whoami(caller: AnyCaller) -> WhoAmI:
    """The account that a key or token belongs to."""
    return WhoAmI(account_id=caller.account, identity_id=caller.identity)


@router.get("/background-requests/{request_id}", response_class=JSONResponse)
async def background_request(request_id: str, caller: AnyCaller, services: ServicesDep) -> JSONResponse:
    """202 while a call that went on in the background is under way; then its own answer."""
    return await services.background.result(caller.account, request_id)
