"""Routes of the compatible API that Stead does not implement: each answers 404 with a readable error."""

from typing import NoReturn

from fastapi import APIRouter

from stead.api.callers import AnyCaller
from stead.api.errors import ApiError

router = APIRouter(include_in_schema=False)

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_NEVER = {
    "/web/v1": "serverless deployments",
    "/execute": "serverless runs",
    "/v1/cron": "cron schedules",
}


def _refuse(text: str) -> NoReturn:
    raise ApiError("NOT_FOUND", text)


def _place(prefix: str, text: str) -> None:
    async def unimplemented(caller: AnyCaller) -> None:
        _refuse(text)

    for path in (prefix, f"{prefix}/{{rest:path}}"):
        router.add_api_route(path, unimplemented, methods=_METHODS)


for _prefix, _what in _NEVER.items():
    _place(_prefix, f"not implemented: {_what}; run the program in a VM instead")
_place("/dns/v1", "not implemented: DNS records; set them at the DNS provider of the domain")
