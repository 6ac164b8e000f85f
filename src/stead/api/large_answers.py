"""Large JSON answers, written in pieces: to encode tens of megabytes at once would hold the event loop."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from stead.api.wire import Wire
from stead.tasks import in_thread

_LARGE = 256 << 10
"""Characters of text in an answer that is written in pieces."""
_PIECE = 256 << 10
_MANY = 200
"""Items of a list that is built in a thread."""


def json_answer(model: Wire, *, exclude_none: bool = False) -> Response:
    """A model whose fields may hold long texts. Serialized here: FastAPI would validate it again."""
    fields = model.model_dump(by_alias=True, exclude_none=exclude_none)
    if sum(len(value) for value in fields.values() if isinstance(value, str)) <= _LARGE:
        return JSONResponse(fields)
    return StreamingResponse(_pieces(fields), media_type="application/json")


async def text_answer(size: int, build: Callable[[], Wire], *, exclude_none: bool = False) -> Response:
    """A model with texts of about `size` bytes; one with long texts is built in a thread."""
    model = build() if size <= _LARGE else await in_thread(build)
    return json_answer(model, exclude_none=exclude_none)


async def _pieces(fields: dict[str, Any]) -> AsyncIterator[bytes]:
    before = "{"
    for name, value in fields.items():
        yield f"{before}{_json(name)}:".encode()
        if isinstance(value, str) and len(value) > _PIECE:
            yield b'"'
            for start in range(0, len(value), _PIECE):
                yield _json(value[start : start + _PIECE])[1:-1].encode()
            yield b'"'
        else:
            yield _json(value).encode()
        before = ","
    yield b"}"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


async def list_answer(count: int, build: Callable[[], Wire], *, exclude_none: bool = False) -> Response:
    """A model with a list of `count` items; a long one is built and serialized in a thread."""

    def encode() -> str:
        return build().model_dump_json(by_alias=True, exclude_none=exclude_none)

    text = encode() if count <= _MANY else await in_thread(encode)
    return Response(text, media_type="application/json")
