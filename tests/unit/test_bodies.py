"""Request bodies: sizes, counted values and bytes in flight, over ASGI messages without a server."""

import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message, Scope

from stead.api.bodies import JsonValues, RequestBody, check_values, json_body
from stead.api.declared import SMALL_BODY, BodyLimit
from stead.api.errors import ApiError
from stead.shares import KeyedLimit

JSON = "application/json"
texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def values(pieces: Sequence[bytes]) -> int:
    counted = JsonValues()
    for piece in pieces:
        counted.feed(piece)
    return counted.count


def size(value: Any) -> int:
    """Brackets, braces and commas outside of strings."""
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(size, value))
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(map(size, value.values()))
    return 0


@given(texts, st.integers(1, 9), st.booleans())
def test_values_are_counted_whatever_the_pieces(value: Any, step: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert values([text[at : at + step] for at in range(0, len(text), step)]) == size(value)
    assert values([text]) == size(value)


@given(st.lists(st.sampled_from([b'"', b"\\", b'\\"', b",", b"[", b"{", b"a", b'""'])), st.data())
def test_pieces_of_any_text_get_the_verdict_of_the_whole(parts: list[bytes], data: st.DataObject) -> None:
    text = b"".join(parts)
    whole = JsonValues()
    whole.feed(text)
    pieces, start = JsonValues(), 0
    while start < len(text):
        end = data.draw(st.integers(start + 1, len(text)))
        pieces.feed(text[start:end])
        start = end
    assert pieces.count == whole.count
    assert [pieces.exceeds(most) for most in range(5)] == [whole.exceeds(most) for most in range(5)]


@given(texts)
def test_the_strings_of_valid_json_are_never_too_many(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    counted = JsonValues()
    counted.feed(text)
    assert not counted.exceeds(counted.count)


@pytest.mark.parametrize(
    "text",
    [b'"' * 65536, b'"' + b'\\"' * 32768, b'"a\\' * 16384, b"[" * 65536, b'"",' * 21845, b"\\" * 65536],
)
def test_hostile_texts_are_counted_within_a_few_milliseconds(text: bytes) -> None:
    """The event loop counts them. A regular expression needs 20 ms for the quotes."""
    best = 1.0
    for _ in range(5):
        began = time.process_time()
        values([text] * 4)
        best = min(best, (time.process_time() - began) / 4)
    assert best < 0.01


def test_a_text_is_counted_only_until_it_has_too_many_values() -> None:
    bomb = b"[" * (64 << 20)
    began = time.process_time()
    with pytest.raises(ApiError):
        check_values(bomb)
    assert time.process_time() - began < 0.05


def request(
    body: Sequence[bytes],
    limit: BodyLimit,
    *,
    announced: int | None = None,
    kind: str = JSON,
    in_flight: KeyedLimit | None = None,
) -> RequestBody:
    length = sum(map(len, body)) if announced is None else announced
    framing = (
        [(b"content-length", str(length).encode())]
        if announced != -1
        else [(b"transfer-encoding", b"chunked")]
    )
    scope: Scope = {
        "headers": [(b"content-type", kind.encode()), *framing],
        "state": {"call": SimpleNamespace(share="account")},
    }
    messages: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": number + 1 < len(body)}
        for number, piece in enumerate(body)
    ]

    async def receive() -> Message:
        return messages.pop(0)

    return RequestBody(scope, receive, lambda _: limit, in_flight or KeyedLimit())


async def read(body: RequestBody) -> bytes:
    whole, more = b"", True
    while more:
        message = await body.receive()
        whole += message["body"]
        more = message["more_body"]
    return whole


async def refusal(body: RequestBody) -> tuple[int, int]:
    """Status, and the bytes that were received before."""
    with pytest.raises(ApiError) as error:
        await read(body)
    return error.value.status, body.received


async def test_a_body_above_64_kib_is_refused_unless_the_route_takes_more() -> None:
    assert SMALL_BODY == 64 << 10
    small, large = b" " * SMALL_BODY, b" " * (SMALL_BODY + 1)
    assert await read(request([small], BodyLimit())) == small
    assert await refusal(request([large], BodyLimit())) == (413, 0)
    assert await read(request([large], BodyLimit(1 << 20))) == large
    assert await read(request([large] * 100, BodyLimit(None))) == large * 100


@pytest.mark.parametrize("announced", [0, 10, -1])
async def test_a_body_longer_than_announced_is_refused_while_it_arrives(announced: int) -> None:
    body = request([b" " * 50_000] * 10, BodyLimit(), announced=announced)
    assert await refusal(body) == (413, 100_000)
    body = request([b" " * 50_000] * 10, BodyLimit(200_000), announced=announced)
    assert await refusal(body) == (413, 250_000)


async def test_a_body_of_many_values_is_refused_while_it_arrives() -> None:
    bomb = b'{"a":[' + b"[]," * 20_000
    status, received = await refusal(
        request([bomb[at : at + 1000] for at in range(0, 60_000, 1000)], BodyLimit())
    )
    assert (status, received < 20_000) == (413, True)
    text = json.dumps({"content": ",[{" * 20_000}).encode()
    quotes = b'"' * 60_000
    status, received = await refusal(
        request([quotes[at : at + 1000] for at in range(0, 60_000, 1000)], BodyLimit())
    )
    assert (status, received < 20_000) == (413, True)
    assert await read(request([text], BodyLimit())) == text
    assert await read(request([bomb], BodyLimit(), kind="application/x-tar")) == bomb


async def test_a_large_text_with_quotes_is_not_a_body_of_many_values() -> None:
    source = 'print("a \\"quoted\\" word")\n' * 400_000
    files = [{"path": f"{number}.py", "content": source[number:]} for number in range(2)]
    text = json.dumps({"message": "ten MB of code", "files": files}).encode()
    assert len(text) > 20 << 20
    pieces = [text[at : at + (1 << 16)] for at in range(0, len(text), 1 << 16)]
    assert await read(request(pieces, BodyLimit(64 << 20, 4000))) == text
    check_values(text, 4000)


async def test_bytes_in_flight_are_bounded_by_account_and_given_back() -> None:
    shared = KeyedLimit(8 << 20, 2 << 20, max_wait=0, busy=lambda: ApiError("SERVICE_UNAVAILABLE", "busy"))
    piece = b" " * (1 << 20)
    first = request([piece] * 2, BodyLimit(64 << 20), in_flight=shared)
    await read(first)
    assert shared.used == 2 << 20
    assert (await refusal(request([piece], BodyLimit(64 << 20), in_flight=shared))) == (503, 0)
    unannounced = request([piece] * 2, BodyLimit(64 << 20), announced=-1, in_flight=shared)
    assert (await refusal(unannounced))[0] == 503
    unannounced.release()
    first.release()
    assert shared.used == 0


async def test_small_and_streamed_bodies_are_not_counted_in_flight() -> None:
    shared = KeyedLimit(1, max_wait=0)
    assert await read(request([b" " * SMALL_BODY], BodyLimit(), in_flight=shared))
    assert await read(request([b" " * (1 << 20)] * 3, BodyLimit(None), in_flight=shared))
    assert shared.used == 0


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be", "latin-1"])
async def test_a_body_that_is_not_utf_8_is_refused(encoding: str) -> None:
    """In UTF-16 the letter ∀ has the byte of a quote, and what follows would not be counted."""
    letter = "ü" if encoding == "latin-1" else "∀"
    body = request([f'{{"{letter}": [[], [], []]}}'.encode(encoding)], BodyLimit())
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises((ApiError, RequestValidationError)):
        await json_body(Any).dependency(Request(scope, body.receive))
