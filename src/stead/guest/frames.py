"""Frames of the guest agent: an 8-byte header (type, three zero bytes, big-endian length) and a payload."""

from collections.abc import AsyncGenerator, Mapping

from stead.errors import GuestError, GuestUnreachable
from stead.guest.agent import Pacer

_HEADER = 8


class Frames:
    """Splits a stream into frames. Holds at most one, which is refused by its length before it is read.

    Frames of the types in `streamed` may be longer: they are handed on in pieces, as they arrive.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        what: str,
        limit: int,
        streamed: Mapping[int, int] | None = None,
    ) -> None:
        self._chunks = chunks
        self._what = what
        self._limit = limit
        self._streamed = streamed or {}
        self._left = 0
        """Bytes to come of a streamed frame."""
        self._kind = 0
        self._buffer = bytearray()
        self._pacer = Pacer()

    async def next(self) -> tuple[int, bytes] | None:
        """Type and payload of the next frame, or a piece of a streamed one; None at the end of the stream."""
        if self._left:
            return await self._piece()
        if not await self._fill(_HEADER):
            if self._buffer:
                raise self._lost()
            return None
        kind, zero = self._buffer[0], self._buffer[1:4]
        length = int.from_bytes(self._buffer[4:_HEADER], "big")
        if length > self._streamed.get(kind, self._limit) or any(zero):
            raise GuestError(
                "malformed_answer", f"the guest agent sent a frame of type {kind} with {length} bytes"
            )
        if length and kind in self._streamed:
            del self._buffer[:_HEADER]
            self._kind, self._left = kind, length
            return await self._piece()
        if not await self._fill(_HEADER + length):
            raise self._lost()
        payload = bytes(self._buffer[_HEADER : _HEADER + length])
        del self._buffer[: _HEADER + length]
        await self._pacer.consumed(length)
        return kind, payload

    @property
    def unfinished(self) -> bool:
        """More of the streamed frame follows the piece that `next` returned."""
        return self._left > 0

    async def _piece(self) -> tuple[int, bytes]:
        if not await self._fill(1):
            raise self._lost()
        payload = bytes(self._buffer[: self._left])
        del self._buffer[: self._left]
        self._left -= len(payload)
        await self._pacer.consumed(len(payload))
        return self._kind, payload

    async def expect(self) -> tuple[int, bytes]:
        """The next frame; GuestUnreachable at the end of the stream."""
        frame = await self.next()
        if frame is None:
            raise self._lost()
        return frame

    def _lost(self) -> GuestUnreachable:
        return GuestUnreachable(f"lost the connection to the guest agent during {self._what}")

    async def _fill(self, size: int) -> bool:
        while len(self._buffer) < size:
            try:
                self._buffer += await anext(self._chunks)
            except StopAsyncIteration:
                return False
        return True


def encode(kind: int, payload: bytes = b"") -> bytes:
    return kind.to_bytes(1, "big") + len(payload).to_bytes(7, "big") + payload
