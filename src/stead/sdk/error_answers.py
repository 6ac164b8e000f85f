"""Turns an error answer into the exception for its code or HTTP status."""

from collections.abc import Mapping
from typing import Any

from stead.sdk.errors import (
    Conflict,
    Forbidden,
    Gone,
    InvalidRequest,
    NotFound,
    ServerError,
    ServiceUnavailable,
    SteadApiError,
    TooManyRequests,
    Unauthorized,
)
from stead.sdk.exceptions import ERRORS_BY_CODE

_BY_STATUS: dict[int, type[SteadApiError]] = {
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    406: NotFound,
    409: Conflict,
    410: Gone,
    429: TooManyRequests,
    502: ServiceUnavailable,
    503: ServiceUnavailable,
    504: ServiceUnavailable,
}


def error_class(code: str | None, status: int) -> type[SteadApiError]:
    """The class for an error answer: by its code, else by its HTTP status."""
    if code is not None and code in ERRORS_BY_CODE:
        return ERRORS_BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status >= 500:
        return ServerError
    return InvalidRequest if 400 <= status < 500 else SteadApiError


def api_error(
    status: int, body: object, text: str, trace_id: str | None, *, idempotent: bool = True
) -> SteadApiError:
    """The error for an answer with this body; `text` is shown if it was not JSON.

    After a request that is not idempotent (a command, a create), an error is not retryable if the server may
    have executed the request. An answer with `"retryable": false` is not retryable either, and one with
    `"retryable": true` says that the server refused the request before it began to execute it.
    """
    facts: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    found = facts.get("code")
    code = found if isinstance(found, str) else None
    said = facts.get("message") or facts.get("description") or facts.get("error")
    if not isinstance(said, str):
        said = f"HTTP status {status}"
        if not facts and text.strip():
            said += f": {text.strip()[:200]}"
    error = error_class(code, status)(said, code=code, status=status, body=facts, trace_id=trace_id)
    if facts.get("retryable") is False or not (idempotent or error.nothing_done or error.refused):
        error.retryable = False
    return error
