"""JSON bodies: the values that are counted while a body arrives bound those that the parser makes of it."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.requests import Request
from starlette.types import Message, Scope

from stead.api.bodies import RequestBody, json_body, limit_bytes_in_flight
from stead.api.declared import SMALL_BODY, BodyLimit
from stead.api.errors import ApiError
from support.fuzzing.runs import Target, in_event_loop

_SIZE = 1 << 20
_INVALID, _TOO_MANY = "invalid", "too many values"


def _values(found: object) -> int:
    """As they are counted: brackets, braces and commas outside of strings."""
    match found:
        case list():
            return 1 + max(0, len(found) - 1) + sum(map(_values, found))
        case dict():
            return 1 + max(0, len(found) - 1) + sum(map(_values, found.values()))
        case _:
            return 0


@contextlib.asynccontextmanager
async def _bodies() -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """A body has the same result in pieces as whole, and none with more values than its route takes."""
    read: Callable[[Request], Awaitable[Any]] = json_body(Any).dependency
    in_flight = limit_bytes_in_flight()

    async def parsed(data: bytes, size: int, most: int) -> tuple[str, Any]:
        pieces = [data[at : at + size] for at in range(0, len(data), size)] or [b""]
        # For a body that is announced as large, the limits of its route count from the first byte.
        announced = str(SMALL_BODY + 1).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", announced)]
        state = {"call": SimpleNamespace(share="account")}
        scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "state": state}
        messages: list[Message] = [
            {"type": "http.request", "body": piece, "more_body": number < len(pieces)}
            for number, piece in enumerate(pieces, 1)
        ]

        async def receive() -> Message:
            return messages.pop(0)

        body = RequestBody(scope, receive, lambda _: BodyLimit(_SIZE, most), in_flight)
        try:
            found = await read(Request(scope, body.receive))
        except RequestValidationError:
            return _INVALID, None
        except ApiError as error:
            return (_TOO_MANY if error.status == 413 else _INVALID), None
        finally:
            body.release()
        return "", found

    async def feed(data: bytes) -> None:
        size, most, text = 1 + (data or b"\0")[0], (data[1:2] or b"\0")[0], data[2:]
        whole = await parsed(text, _SIZE, most)
        pieces = await parsed(text, size, most)
        assert repr(whole) == repr(pieces), f"another result in pieces of {size} bytes: {pieces[0]}"
        assert _values(whole[1]) <= most, f"more than {most} values"

    yield feed


_JSON = (
    *(b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b'\\"', b"\\\\", b'\\\\"', b'"a"', b'"\\u005c"'),
    *(b"[[],[],[]]", b'{"a":1,"b":[2]}', b"null", b"1e9", b"NaN", b"[" * 300, b",[]" * 100, b'"' * 99),
    *("é∀".encode(), b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xff\xfe", "[[],[]]".encode("utf-16-le"), b"\0"),
    *('"∀"'.encode("utf-16-le"), '"∀"'.encode("utf-32-be"), b"\\u2200"),
)

VALUES = Target("json-bodies", in_event_loop(_bodies), _JSON, inputs=5000)
