"""Answers whose body has been read: their JSON, or the error that they are."""

import json
from typing import Any

import httpx2

from stead.sdk.errors import SteadApiError, UnexpectedAnswer, api_error
from stead.sdk.requests import TRACE_HEADER


def json_of(response: httpx2.Response) -> Any:
    """The JSON of a success; an empty body counts as an empty object."""
    if not response.is_success:
        raise error_of(response)
    if not response.content.strip():
        return {}
    try:
        return json.loads(response.content)
    except ValueError:
        shown = response.text.strip()[:100]
        raise UnexpectedAnswer(
            f"{response.request.url} answered something that is not JSON: {shown!r}"
        ) from None


def error_of(response: httpx2.Response) -> SteadApiError:
    try:
        body = json.loads(response.content)
    except ValueError:
        body = None
    return api_error(response.status_code, body, response.text, response.headers.get(TRACE_HEADER))
