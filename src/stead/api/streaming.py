"""Bodies in pieces, in and out, for what is too large or too fast to go through a framework."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, Mapping
from http import HTTPStatus

from starlette.types import Message, Receive, Send

IDLE = 120.0
"""Seconds for which a client may neither send nor take anything."""
_STEP = 256 << 10
_MAX_RATIO = 100
_RATIO_AFTER = 1 << 20


class Refused(Exception):
    """An answer that says no."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = HTTPStatus(status)
        self.headers = dict(headers or {})


class ClientLeft(Exception):
    """There is nobody any more to answer."""


async def pieces(receive: Receive) -> AsyncGenerator[bytes, None]:
    """The body of a call, as it comes."""
    more = True
    while more:
        try:
            async with asyncio.timeout(IDLE):
                message = await receive()
        except TimeoutError:
            raise Refused(408, f"nothing came for {IDLE:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientLeft
        if body := message.get("body", b""):
            yield body
        more = message.get("more_body", False)


async def unzipped(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """What a compressed body holds, a little at a time. One that holds absurdly much is refused."""
    inflating = zlib.decompressobj(zlib.MAX_WBITS | 16)
    came = made = 0
    async with contextlib.aclosing(body):
        async for piece in body:
            came += len(piece)
            rest, more = piece, True
            while more:
                if inflating.eof:
                    raise Refused(400, "the compressed body goes on after its end")
                try:
                    out = inflating.decompress(rest, _STEP)
                except zlib.error:
                    raise Refused(400, "the body is not compressed with gzip") from None
                rest = inflating.unconsumed_tail or inflating.unused_data
                # It may hold back something although all that came is used up.
                more = bool(rest) or (len(out) == _STEP and not inflating.eof)
                made += len(out)
                if made > _RATIO_AFTER and made > came * _MAX_RATIO:
                    raise Refused(413, f"the body unpacks to more than {_MAX_RATIO} times its size")
                if out:
                    yield out
    if not inflating.eof:
        raise Refused(400, "the compressed body ends too early")


async def whole(body: AsyncGenerator[bytes, None], most: int) -> bytes:
    """A body that is small."""
    parts = []
    size = 0
    async for piece in body:
        size += len(piece)
        if size > most:
            raise Refused(413, f"a body has at most {most} bytes here")
        parts.append(piece)
    return b"".join(parts)


class Answer:
    """What goes back to the client. A client that takes nothing for too long is given up."""

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

    async def say(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """An answer in one piece."""
        await self.begin(status, {**headers, "Content-Length": str(len(body))})
        await self.end(body)

    async def _send(self, message: Message) -> None:
        try:
            async with asyncio.timeout(IDLE):
                await self._send_message(message)
        except TimeoutError:
            raise Refused(408, f"the client took nothing for {IDLE:g} s") from None
