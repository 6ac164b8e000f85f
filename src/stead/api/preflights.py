"""Preflights of CORS, which are answered outside of `Calls`: they count as calls without a credential."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stead.api.admission import Admission
from stead.api.calls import address_of
from stead.api.errors import ApiError


class CountedPreflights:
    """ASGI middleware in front of the one that answers preflights."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_preflight(scope):
            try:
                self._admission.count_anonymous(address_of(scope))
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_preflight(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "OPTIONS":
        return False
    headers = Headers(scope=scope)
    return "origin" in headers and "access-control-request-method" in headers
