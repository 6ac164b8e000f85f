"""Streamed request and response bodies of Git and LFS traffic, with a minimum rate."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus

from starlette.types import Message, Receive, Send

from stead.repos.transfer import pace
from stead.repos.transfer.pace import ClientPace

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


def _new_pace() -> ClientPace:
    return ClientPace(pace.RATE, pace.GRACE, pace.MAX_CREDIT)


async def pieces(receive: Receive) -> AsyncGenerator[bytes, None]:
    """The chunks of a request body, which must arrive at a minimum rate."""
    client = _new_pace()
    more = True
    while more:
        try:
            async with asyncio.timeout(client.wait()):
                message = await receive()
        except TimeoutError:
            raise TextError(408, "request body arrives too slowly") from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body = message.get("body", b"")
        client.moved(len(body))
        if body:
            yield body
        more = message.get("more_body", False)


class PacedSend:
    """Sends a response to a client that must read it at a minimum rate."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pace = _new_pace()

    async def __call__(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._pace.wait()):
                await self._send(message)
        except TimeoutError:
            raise TextError(408, "the client reads the response too slowly") from None
        self._pace.moved(len(message.get("body", b"")))


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
    """A response with a minimum rate: a client that reads too slowly is disconnected."""

    def __init__(self, send: Send) -> None:
        self._paced_send = PacedSend(send)
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
        await self._paced_send(message)
