"""Answers with a complete body: their JSON, or the error for them."""

import json
from typing import Any

import httpx2

from stead.sdk.error_answers import api_error
from stead.sdk.errors import SteadApiError, UnexpectedAnswer
from stead.sdk.requests import TRACE_HEADER


def decode_json(response: httpx2.Response, *, idempotent: bool = True) -> Any:
    """The JSON of a success, an empty object for an empty body; raises the error of any other answer."""
    if not response.is_success:
        raise decode_error(response, idempotent=idempotent)
    if not response.content.strip():
        return {}
    try:
        return json.loads(response.content)
    except ValueError:
        shown = response.text.strip()[:100]
        raise UnexpectedAnswer(f"the answer of {response.request.url} is not JSON: {shown!r}") from None


def decode_error(response: httpx2.Response, *, idempotent: bool = True) -> SteadApiError:
    """The error for an answer; see `api_error`."""
    try:
        body = json.loads(response.content)
    except ValueError:
        body = None
    trace_id = response.headers.get(TRACE_HEADER)
    return api_error(response.status_code, body, response.text, trace_id, idempotent=idempotent)
