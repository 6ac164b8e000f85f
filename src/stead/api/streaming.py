"""Streamed request and response bodies outside FastAPI, for Git and LFS traffic."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus

from starlette.types import Message, Receive, Send

IDLE = 120.0
"""Idle timeout: seconds without progress by the client."""
_STEP = 256 << 10
_MAX_RATIO = 100
_RATIO_AFTER = 1 << 20


class TextError(Exception):
    """An error answer in plain text."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = HTTPStatus(status)
        self.headers = dict(headers or {})


class ClientLeft(Exception):
    """The client disconnected."""


async def pieces(receive: Receive) -> AsyncGenerator[bytes, None]:
    """The chunks of a request body."""
    more = True
    while more:
        try:
            async with asyncio.timeout(IDLE):
                message = await receive()
        except TimeoutError:
            raise TextError(408, f"no request data for {IDLE:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        if body := message.get("body", b""):
            yield body
        more = message.get("more_body", False)


async def decompressed(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Decompress a gzip body in bounded steps; refuses decompression bombs."""
    inflating = zlib.decompressobj(zlib.MAX_WBITS | 16)
    received = inflated = 0
    async with contextlib.aclosing(body):
        async for piece in body:
            received += len(piece)
            rest, more = piece, True
            while more:
                if inflating.eof:
                    raise TextError(400, "data after the end of the gzip body")
                try:
                    out = inflating.decompress(rest, _STEP)
                except zlib.error:
                    raise TextError(400, "invalid gzip body") from None
                rest = inflating.unconsumed_tail or inflating.unused_data
                # zlib may hold back output although all input is consumed.
                more = bool(rest) or (len(out) == _STEP and not inflating.eof)
                inflated += len(out)
                if inflated > _RATIO_AFTER and inflated > received * _MAX_RATIO:
                    raise TextError(
                        413, f"gzip body too large: more than {_MAX_RATIO} times its compressed size"
                    )
                if out:
                    yield out
    if not inflating.eof:
        raise TextError(400, "truncated gzip body")


async def read_all(body: AsyncGenerator[bytes, None], most: int) -> bytes:
    """A whole body of at most `most` bytes."""
    parts = []
    size = 0
    async for piece in body:
        size += len(piece)
        if size > most:
            raise TextError(413, f"request body too large (max {most} bytes)")
        parts.append(piece)
    return b"".join(parts)


class StreamedAnswer:
    """A response with an idle timeout: a client that does not read is disconnected."""

    def __init__(self, send: Send) -> None:
        self._send_message = send
        self.begun = False

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.begun = True
        encoded = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, piece: bytes) -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, piece: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": piece, "more_body": False})

    async def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a whole response."""
        await self.begin(status, {**headers, "Content-Length": str(len(body))})
        await self.end(body)

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(IDLE):
                await self._send_message(message)
        except TimeoutError:
            raise TextError(408, f"client read nothing for {IDLE:g} s") from None
