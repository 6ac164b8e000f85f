"""Raw HTTP/2: requests whose answers the client never takes, which libraries do not send."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Sequence

_DATA, _HEADERS, _SETTINGS, _END_STREAM, _END_HEADERS = 0, 1, 4, 1, 4
_INITIAL_WINDOW_SIZE = 4
MAX_STREAMS = 250
"""Streams that Caddy allows on one connection."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def fields(headers: Sequence[tuple[str, str]]) -> bytes:
    """A header block of HPACK literals, without Huffman coding."""
    return b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers)


def _literal(text: str) -> bytes:
    data = text.encode("latin-1")
    assert len(data) < 127
    return bytes([len(data)]) + data


class UnreadStreams:
    """A connection whose streams have a window of 0: the server may send headers, and no byte of a body."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next = 1
        self.statuses = 0
        """Answers that have begun."""
        self.ended = 0
        """Streams that the server has reset."""

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(
        cls, port: int, context: ssl.SSLContext, name: str, over: socket.socket | None = None
    ) -> AsyncIterator["UnreadStreams"]:
        """`over` is a connection that was made before, such as one from another namespace."""
        context.set_alpn_protocols(["h2"])
        where = {"host": "127.0.0.1", "port": port} if over is None else {"sock": over}
        reader, writer = await asyncio.open_connection(**where, ssl=context, server_hostname=name)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        writer.write(frame(_SETTINGS, 0, 0, _INITIAL_WINDOW_SIZE.to_bytes(2) + bytes(4)))
        streams = cls(reader, writer)
        reading = asyncio.create_task(streams._read())
        try:
            yield streams
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            writer.close()

    async def request(self, method: str, authority: str, path: str, **headers: str) -> None:
        pseudo = {":method": method, ":scheme": "https", ":authority": authority, ":path": path}
        block = fields([*pseudo.items(), *headers.items()])
        self._writer.write(frame(_HEADERS, _END_HEADERS | _END_STREAM, self._next, block))
        self._next += 2
        await self._writer.drain()

    async def _read(self) -> None:
        """Count what happens to the streams. Frames of the connection are small and always read."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                length = int.from_bytes(await self._reader.readexactly(3))
                kind, flags = await self._reader.readexactly(2)
                await self._reader.readexactly(4)
                await self._reader.readexactly(length)
                self.statuses += kind == _HEADERS
                self.ended += kind == 3 or (kind in (_DATA, _HEADERS) and bool(flags & _END_STREAM))
                if kind == _SETTINGS and not flags & 1:
                    self._writer.write(frame(_SETTINGS, 1, 0, b""))
