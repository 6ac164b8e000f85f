"""Large JSON answers. Their long values are made while they are sent, piece by piece and off the event loop.

A call holds what the values are made of, which it has reserved, and the piece that its client is taking.
"""

import binascii
import codecs
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter
from starlette.responses import Response, StreamingResponse

from stead.api.answer_memory import SMALL_ANSWER
from stead.api.calls import Call
from stead.api.wire import Wire
from stead.tasks import Threads

_PIECE = 256 << 10
"""Bytes of an answer that are sent at once."""
_WHOLE = 1 << 20
"""Bytes of an answer that is sent whole, with its length."""
_TEXT_STEP = 48 << 10
"""Bytes of a text that are encoded at once: a multiple of 3, for base64. JSON may need six for each."""
_BATCH = 50
"""Items that are serialized at once."""
_SHORT = 200
"""Items that are made on the event loop, in about a millisecond."""
_JSON = "application/json"


class LongValue(ABC):
    """The value of a field that may be long."""

    @property
    @abstractmethod
    def weight(self) -> int:
        """How much work it is to make, in items of a list."""

    @abstractmethod
    def pieces(self) -> Iterator[bytes]:
        """Its JSON text."""


@dataclass(frozen=True)
class Text(LongValue):
    """A string: UTF-8, in which malformed bytes are replaced."""

    data: bytes

    @property
    def weight(self) -> int:
        return _weight(len(self.data))

    def pieces(self) -> Iterator[bytes]:
        if len(self.data) <= _TEXT_STEP:
            yield _json(self.data.decode(errors="replace"))
            return
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        yield b'"'
        for start in range(0, len(self.data), _TEXT_STEP):
            yield _json(decode(self.data[start : start + _TEXT_STEP]))[1:-1]
        yield _json(decode(b"", final=True))[1:-1]
        yield b'"'


@dataclass(frozen=True)
class Base64(LongValue):
    """A string of bytes in base64."""

    data: bytes

    @property
    def weight(self) -> int:
        return _weight(len(self.data))

    def pieces(self) -> Iterator[bytes]:
        yield b'"'
        for start in range(0, len(self.data), _TEXT_STEP):
            yield binascii.b2a_base64(self.data[start : start + _TEXT_STEP], newline=False)
        yield b'"'


@dataclass(frozen=True)
class Items(LongValue):
    """A list of `count` models of one type, which are made when they are sent."""

    kind: Any
    count: int
    models: Callable[[], Iterable[Any]]
    size: int = 0
    """Bytes of the texts in them, if these may be long."""
    exclude_none: bool = False

    @property
    def weight(self) -> int:
        return self.count + _weight(self.size)

    def pieces(self) -> Iterator[bytes]:
        yield b"["
        yield from _batches(_list_of(self.kind), list, self.models(), exclude_none=self.exclude_none)
        yield b"]"


@dataclass(frozen=True)
class Members(LongValue):
    """An object with `count` members of one type, which are made when they are sent. No name may repeat."""

    kind: Any
    count: int
    models: Callable[[], Iterable[tuple[str, Any]]]
    size: int = 0
    """Bytes of the texts in them, if these may be long."""

    @property
    def weight(self) -> int:
        return self.count + _weight(self.size)

    def pieces(self) -> Iterator[bytes]:
        yield b"{"
        yield from _batches(_object_of(self.kind), dict, self.models(), exclude_none=False)
        yield b"}"


@dataclass(frozen=True)
class Objects(LongValue):
    """A list of objects, whose fields are JSON values or long ones."""

    fields: Sequence[Mapping[str, object]]

    @property
    def weight(self) -> int:
        return sum(1 + _weight_of(each) for each in self.fields)

    def pieces(self) -> Iterator[bytes]:
        before = b"["
        for each in self.fields:
            yield before
            yield from _serialized(each)
            before = b","
        yield b"]" if self.fields else b"[]"


@dataclass(frozen=True)
class Serialized(LongValue):
    """A list whose items are JSON by now: each piece has some of them."""

    texts: Sequence[bytes]

    @property
    def weight(self) -> int:
        return _weight(sum(map(len, self.texts)))

    def pieces(self) -> Iterator[bytes]:
        before = b"["
        for text in self.texts:
            yield before
            yield text
            before = b","
        yield b"]" if self.texts else b"[]"


def _weight(size: int) -> int:
    """Of a text: one of 64 KiB is as much work as a short list."""
    return size * _SHORT // SMALL_ANSWER


def _weight_of(fields: Mapping[str, object]) -> int:
    return sum(value.weight for value in fields.values() if isinstance(value, LongValue))


def _batches(
    adapter: TypeAdapter[Any], collection: Callable[[Any], Any], models: Iterable[Any], *, exclude_none: bool
) -> Iterator[bytes]:
    left, before = iter(models), b""
    while batch := collection(itertools.islice(left, _BATCH)):
        yield before + adapter.dump_json(batch, by_alias=True, exclude_none=exclude_none)[1:-1]
        before = b","


@lru_cache
def _list_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(list[kind])


@lru_cache
def _object_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(dict[str, kind])


async def large_answer(call: Call, model: Wire, long: Mapping[str, LongValue]) -> Response:
    """A model whose fields `long`, by their names on the wire, have these values instead of its own.

    The caller has reserved memory for what the values are made of.
    """
    fields = model.model_dump(mode="json", by_alias=True)
    return await large_object(call, {**fields, **long})


async def large_object(call: Call, fields: Mapping[str, object]) -> Response:
    """An object whose fields are JSON values or long ones, as `large_answer`."""
    if _weight_of(fields) > _SHORT:
        await call.reserve(_WHOLE)
    return await reserved_object(fields)


async def reserved_object(
    fields: Mapping[str, object], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """As `large_object`, with a MiB that the caller has reserved for the pieces: it cannot fail."""
    pieces = _serialized(fields)
    if _weight_of(fields) <= _SHORT:
        return Response(b"".join(pieces), status, headers, media_type=_JSON)
    # Errors of the first piece are still answers.
    first, complete = await Threads.PARSING.run(_take, pieces, _WHOLE)
    if complete:
        return Response(first, status, headers, media_type=_JSON)
    return StreamingResponse(_rest(first, pieces), status, headers, media_type=_JSON)


def _serialized(fields: Mapping[str, object]) -> Iterator[bytes]:
    before = b"{"
    plain: dict[str, object] = {}
    for name, value in fields.items():
        if not isinstance(value, LongValue):
            plain[name] = value
            continue
        if plain:
            yield before + _json(plain)[1:-1]
            before, plain = b",", {}
        yield before + _json(name) + b":"
        yield from value.pieces()
        before = b","
    yield (before + _json(plain)[1:-1] if plain or before == b"{" else b"") + b"}"


async def _rest(piece: bytes, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    complete = False
    while not complete:
        yield piece
        piece, complete = await Threads.PARSING.run(_take, pieces, _PIECE)
    yield piece


def _take(pieces: Iterator[bytes], most: int) -> tuple[bytes, bool]:
    """The next pieces, about `most` bytes; and whether they were the last."""
    taken, size = [], 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size >= most:
            return b"".join(taken), False
    return b"".join(taken), True


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def _json(value: object) -> bytes:
    return _encode(value).encode()
