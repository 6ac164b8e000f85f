"""Error answers: the status, code and message of every failure on every path.

Clients choose the class of an error by its code alone, and the npm client retries a create without end if the
answer has no code that it knows. So every error answer is made here.
"""

import errno
import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, NoReturn

import sqlalchemy as sa
from fastapi.exceptions import ValidationException
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse

from stead import errors as product
from stead.api.declared import invalid_code_of
from stead.api.error_codes import (
    LIMITS,
    OWN_STATUSES,
    RULES,
    SEARCHES,
    SIZE_LIMITS,
    STATES,
    STATUSES,
    failure_of,
)
from stead.api.streaming import TextError
from stead.api.wire.layers import WIRE_NAMES
from stead.builds.errors import Diagnostics, InvalidSpec, SetupFailed
from stead.github.errors import NotLinked
from stead.limits import LimitExceeded
from stead.logs import get_logger
from stead.repos.git import GitFailed
from stead.repos.search.query import EmptyQuery, InvalidPathPattern, InvalidQuery

log = get_logger("stead.api")
git_log = get_logger("stead.git")

_RETRY_LATER = {"Retry-After": "10"}
"""Sent with every 503, unless the call may have taken effect."""


class ApiError(Exception):
    """A failure as it goes over the wire; extras go into the body next to code and message."""

    def __init__(
        self,
        code: str,
        message: str,
        status: int | None = None,
        *,
        headers: dict[str, str] | None = None,
        **extras: Any,
    ) -> None:
        # Messages may repeat what a client sent, and JSON cannot encode lone surrogates.
        message = message.encode(errors="backslashreplace").decode()
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status or STATUSES.get(code) or OWN_STATUSES[code]
        if headers is None and self.status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers = _RETRY_LATER
        self.headers = headers
        self.extras = extras

    def body(self) -> dict[str, Any]:
        known = {"code": self.code, "error": self.code, "message": self.message, "description": self.message}
        return {**self.extras, **known}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def from_product(error: product.SteadError, invalid: str = "BAD_REQUEST") -> ApiError:
    """The error answer for an exception of Stead; `invalid` is the route's code for invalid requests."""
    text = str(error)
    match error:
        case InvalidSpec():
            return _invalid_spec(error)
        case product.WrongState():
            return ApiError(STATES.get(error.state, "VM_NOT_RUNNING"), text, vmId=error.machine_id)
        case LimitExceeded():
            return _limit(error)
        case product.GuestError():
            return _guest(error)
    failure = failure_of(error)
    if failure is None:
        if isinstance(error, product.InvalidRequest):
            return ApiError(invalid, text)
        log.error("call failed", error=text, kind=type(error).__name__)
        return ApiError("INTERNAL_ERROR", text)
    extras = {key: getattr(error, name) for key, name in failure.fields.items()}
    match error:
        case SetupFailed():
            found = None if error.diagnostics is None else _diagnostics(error.diagnostics)
            extras |= {"failedReason": text, "diagnostics": found}
        case EmptyQuery() | InvalidPathPattern() | InvalidQuery():
            failure = replace(failure, code=_search_code(error))
        case NotLinked():
            # The npm package looks for the number in this message.
            text = f"404: {text}"
    if failure.code == "GIT_ERROR":
        log.error("repository unusable", error=text)
    if isinstance(error, GitFailed):
        # The output of Git may hold paths of the host.
        text = "git failed; see the server's log"
    headers = None if failure.retry_after is None else {"Retry-After": str(failure.retry_after)}
    return ApiError(failure.code, text, failure.status, headers=headers, **_given(extras))


def to_git(error: product.SteadError) -> TextError:
    """The error answer in plain text, for git and git-lfs."""
    failure = failure_of(error)
    if failure is None or failure.git_status is None:
        git_log.warning("git request failed", error=str(error))
        return TextError(500, "git failed on the server; see the server log")
    headers = None if failure.retry_after is None else {"Retry-After": str(failure.retry_after)}
    return TextError(failure.git_status, str(error), headers)


def _invalid_spec(error: InvalidSpec) -> ApiError:
    def wire(name: str | None) -> str | None:
        return None if name is None else WIRE_NAMES.get(name, name)

    extras = {
        "depth": error.depth,
        "gotGb" if error.rule in ("memory_too_large", "disk_too_large") else "got": error.got,
        "min": error.lowest,
        "max": error.highest,
        "serviceName": error.service,
        "os": error.image,
    }
    if error.rule == "misplaced_field":
        extras["field"] = wire(error.field)
    elif error.other is not None:
        extras |= {"fieldA": wire(error.field), "fieldB": wire(error.other)}
    code = RULES.get(error.rule, error.rule.upper())
    return ApiError(code, error.worded(lambda name: WIRE_NAMES.get(name, name)), **_given(extras))


def _given(extras: Mapping[str, object]) -> dict[str, Any]:
    return {name: value for name, value in extras.items() if value is not None}


def _diagnostics(found: Diagnostics) -> dict[str, Any]:
    states = [
        {"activeState": each.active_state, "subState": each.sub_state, "services": each.services}
        for each in found.states
    ]
    logs = [{"unitName": each.unit, "log": each.log} for each in found.failed_logs]
    return {"serviceStates": states, "failedServiceLogs": logs}


def _search_code(error: EmptyQuery | InvalidPathPattern | InvalidQuery) -> str:
    codes = next(codes for kind, codes in SEARCHES.items() if isinstance(error, kind))
    prefix = {"commits": "COMMIT_", "diffs": "DIFF_"}.get(error.scope)
    return codes[error.scope] if prefix is None else f"{prefix}{codes['content']}"


def _limit(error: LimitExceeded) -> ApiError:
    code = LIMITS[error.limit_name]
    if error.limit_name in SIZE_LIMITS:
        return ApiError(code, str(error), got=error.requested, max=error.limit)
    return ApiError(code, str(error), limit=error.limit, current=error.current, requested=error.requested)


def _guest(error: product.GuestError) -> ApiError:
    text = str(error)
    match error.code:
        case "user_not_found":
            return ApiError("USER_NOT_FOUND", text)
        case "permission_denied":
            return ApiError("VM_ACCESS_DENIED", text)
        case "not_found":
            return ApiError("FILE_NOT_FOUND", text)
        case "no_space":
            return ApiError("FILES_BAD_REQUEST", f"disk of the VM is full: {text}", 507)
        case "internal":
            return ApiError("INTERNAL_ERROR", text)
        case _:
            return ApiError("FILES_BAD_REQUEST", text)


def from_anything(error: Exception) -> ApiError:
    """The answer for an unexpected exception; details go to the log only."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, sa.exc.OperationalError) and isinstance(error.orig, sqlite3.Error):
        full = error.orig.sqlite_errorcode == sqlite3.SQLITE_FULL
    if full:
        return ApiError("NO_LOCAL_STORAGE_CAPACITY", "disk of the host is full")
    log.error("unexpected exception", error=repr(error), exc_info=error)
    return ApiError("INTERNAL", "internal error: search the server's log for the trace id of this answer")


async def on_product_error(request: HTTPConnection, error: Exception) -> JSONResponse:
    assert isinstance(error, product.SteadError)  # noqa: S101
    return from_product(error, invalid_code_of(request.scope)).response()


async def on_api_error(_: HTTPConnection, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)  # noqa: S101
    return error.response()


async def on_invalid(request: HTTPConnection, error: Exception) -> JSONResponse:
    """A request that does not match its schema: names the field and the problem."""
    assert isinstance(error, ValidationException)  # noqa: S101
    problems = [
        f"{'.'.join(str(part) for part in each['loc'][1:])}: {each['msg']}" for each in error.errors()
    ]
    text = "; ".join(problem.removeprefix(": ") for problem in problems[:5])
    return ApiError(invalid_code_of(request.scope), f"invalid request: {text}").response()


async def on_anything(_: HTTPConnection, error: Exception) -> NoReturn:
    """Leave unexpected exceptions to the outer middleware; Starlette would answer in plain text."""
    raise error


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Errors of the router: no such path, no such method."""
    assert isinstance(error, HTTPException)  # noqa: S101
    if isinstance(error.__cause__, ApiError):
        # FastAPI wraps every exception during the reading of a body.
        return error.__cause__.response()
    path, status = request.url.path, error.status_code
    headers = dict(error.headers or {})
    if status == HTTPStatus.NOT_FOUND:
        return ApiError("NOT_FOUND", f"no such path: {path}", headers=headers).response()
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        text = f"method {request.method} not allowed on {path}"
        return ApiError("BAD_REQUEST", text, status, headers=headers).response()
    return ApiError("BAD_REQUEST", str(error.detail), status, headers=headers).response()
