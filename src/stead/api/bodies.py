"""Request bodies in memory: bounded in bytes, in values and in all, and parsed off the event loop if large.

Routes of large bodies read them with `json_body`, after their other dependencies: the access of the caller is
checked before the first byte is read.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastapi import Depends
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.types import Message, Receive, Scope

from stead.api.declared import SMALL_BODY, BodyLimit
from stead.api.errors import ApiError
from stead.shares import KeyedLimit, Release
from stead.tasks import Threads

MAX_BODY = 64 << 20
"""Largest request body in bytes that any route reads into memory."""
MANY_VALUES = 100_000
"""Values of the largest JSON bodies: 10,000 files with their fields."""
_IN_FLIGHT = 512 << 20
_IN_FLIGHT_SHARE = 128 << 20
_STEP = 1 << 20
"""Bytes that are reserved at once for a body whose length is unknown."""
_MAX_WAIT = 10.0
_COUNTED = 64 << 10
"""Bytes whose values are counted at once."""
_UNCOUNTED = 8 << 10
"""Bytes of a body that cannot hold too many values."""


def limit_bytes_in_flight() -> KeyedLimit:
    """Bytes of large bodies that are in memory, in all and for an account, or an address without a caller."""

    def busy() -> ApiError:
        text = f"too many bytes of requests at once: max {_IN_FLIGHT_SHARE >> 20} MiB for an account,"
        text += f" {_IN_FLIGHT >> 20} MiB in all; retry later"
        return ApiError("SERVICE_UNAVAILABLE", text, headers={"Retry-After": "1"}, retryable=True)

    return KeyedLimit(_IN_FLIGHT, _IN_FLIGHT_SHARE, max_waiting=64, max_wait=_MAX_WAIT, busy=busy)


class JsonValues:
    """Counts the values and the strings of a JSON text while it arrives, without what is in its strings.

    It bounds the work of a parser, which would not stop before the end of the text.
    """

    def __init__(self) -> None:
        self.count = 0
        self._quotes = 0
        self._escaped = False
        """A backslash at the end of the last piece escapes the first quote or backslash of the next."""

    def exceeds(self, most: int) -> bool:
        """Whether the text has more than `most` values, or more strings than JSON with `most` values has.

        Each string follows a bracket, a brace, a comma or a colon, so there are at most two for each value.
        Quotes in strings are escaped and do not count.
        """
        return self.count > most or self._quotes > 2 * (2 * most + 1)

    def feed(self, piece: bytes) -> None:
        if self._escaped and piece:
            self._escaped = False
            piece = piece[1:] if piece[0] in b'"\\' else piece
        # Each step takes linear time in C, a tenth of what a regular expression takes for each string.
        if b"\\" in piece:
            piece = piece.replace(rb"\\", b"")
            self._escaped = piece.endswith(b"\\")
            piece = piece.replace(rb"\"", b"")
        parts = piece.split(b'"')
        in_string = self._quotes % 2
        self._quotes += len(parts) - 1
        outside = b"".join(parts[in_string::2])
        self.count += outside.count(b",") + outside.count(b"[") + outside.count(b"{")


def check_values(body: bytes, most: int = MANY_VALUES) -> None:
    """Raise an error if a whole JSON text has too many values."""
    values = JsonValues()
    for start in range(0, len(body), _COUNTED):
        values.feed(body[start : start + _COUNTED])
        if values.exceeds(most):
            raise too_many_values(most)


class RequestBody:
    """The body of one request as the application receives it, within the limits of its route."""

    def __init__(
        self, scope: Scope, receive: Receive, limit_of: Callable[[Scope], BodyLimit], in_flight: KeyedLimit
    ) -> None:
        self.received = 0
        """Bytes."""
        self.waiting = False
        """Whether the application waits for bytes of the client."""
        self._scope = scope
        self._receive = receive
        self._limit_of = limit_of
        self._in_flight = in_flight
        self._limit = BodyLimit()
        self._known = False
        self._complete = False
        self._values: JsonValues | None = None
        self._reserved = 0
        self._releases: list[Release] = []

    async def receive(self) -> Message:
        if self._complete:
            # Further calls wait for the end of the connection.
            return await self._receive()
        if not self._known:
            await self._find_limit()
        self.waiting = True
        try:
            message = await self._receive()
        finally:
            self.waiting = False
        piece = message.get("body", b"")
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        if piece:
            await self._accept(piece)
        return message

    def release(self) -> None:
        """The call has ended, and with it the body."""
        for release in self._releases:
            release()
        self._releases.clear()

    async def _find_limit(self) -> None:
        """Look at the headers: a body that is announced as too large is not read."""
        self._known = True
        headers = dict(self._scope["headers"])
        length = headers.get(b"content-length", b"")
        announced = int(length) if length.isdigit() and len(length) < 20 else 0
        if announced > SMALL_BODY:
            await self._exceed(announced)
        long = announced > _UNCOUNTED or b"transfer-encoding" in headers
        if long and self._limit.size is not None and b"json" in headers.get(b"content-type", b"").lower():
            self._values = JsonValues()

    async def _accept(self, piece: bytes) -> None:
        self.received += len(piece)
        if self.received > (self._limit.size or self.received):
            await self._exceed(self.received)
        while self._limit.size is not None and self._reserved and self.received > self._reserved:
            await self._reserve(_STEP)
        if self._values is not None:
            self._values.feed(piece)
            if self._values.exceeds(self._limit.values):
                raise too_many_values(self._limit.values)

    async def _exceed(self, size: int) -> None:
        """It has more bytes than a small body: find what its route takes."""
        self._limit = self._limit_of(self._scope)
        if self._limit.size is None:
            self._values = None
            return
        if size > self._limit.size:
            raise too_large(self._limit.size)
        await self._reserve(max(size, _STEP))

    async def _reserve(self, amount: int) -> None:
        call = self._scope["state"]["call"]
        self._releases.append(await self._in_flight.acquire(call.share, amount=amount))
        self._reserved += amount


def too_large(most: int) -> ApiError:
    shown = f"{most >> 20} MiB" if most >= 1 << 20 else f"{most >> 10} KiB"
    return ApiError("BAD_REQUEST", f"request body too large (max {shown} for this path)", 413)


def too_many_values(most: int) -> ApiError:
    text = f"request body has too many values (max {most} elements of lists and members of objects)"
    return ApiError("BAD_REQUEST", text, 413)


# Routes of large bodies

_MODELS: dict[Callable[..., Any], "JsonBodyModel"] = {}


@dataclass(frozen=True)
class JsonBodyModel:
    """What a route expects as its JSON body, for the OpenAPI description."""

    adapter: TypeAdapter[Any]
    required: bool


def json_body(model: Any) -> Any:
    """A parameter's annotation: the JSON body, read and validated after the parameters before it.

    FastAPI would read and parse a body before it solves the dependencies that check the caller's access.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    required = not _accepts_none(adapter)

    async def read(request: Request) -> Any:
        body = await request.body()
        if not body and not required:
            return None
        if not body:
            missing = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
            raise RequestValidationError([missing])
        as_json = _is_json(request.headers.get("content-type", ""))
        if len(body) <= SMALL_BODY:
            return _validated(adapter, body, as_json)
        return await Threads.PARSING.run(_validated, adapter, body, as_json)

    _MODELS[read] = JsonBodyModel(adapter, required)
    return Depends(read)


def json_body_of(dependencies: Iterable[Callable[..., Any] | None]) -> JsonBodyModel | None:
    """The JSON body among the dependencies of a route."""
    return next((_MODELS[each] for each in dependencies if each in _MODELS), None)


def _accepts_none(adapter: TypeAdapter[Any]) -> bool:
    try:
        adapter.validate_python(None)
    except ValidationError:
        return False
    return True


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _validated(adapter: TypeAdapter[Any], body: bytes, as_json: bool) -> Any:
    try:
        # UTF-8 only: `json` would find UTF-16 as well, in which quotes and brackets are not those that count.
        return adapter.validate_python(json.loads(body.decode("utf-8-sig")) if as_json else body)
    except json.JSONDecodeError as error:
        found = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise RequestValidationError([{**found, "ctx": {"error": error.msg}}]) from error
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in problems]) from None
    except (ValueError, RecursionError):
        # Not UTF-8, a number of too many digits, or lists in lists without end.
        raise ApiError("BAD_REQUEST", "request body is not valid JSON") from None
