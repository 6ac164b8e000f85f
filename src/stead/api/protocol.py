"""uvicorn's HTTP/1.1 protocol, with 102 Processing, aborted responses and JSON errors for malformed input.

Requests that come over a Unix socket were forwarded by the edge: it says who sent them, and how.
"""

import asyncio
import json
import socket
from http import HTTPStatus
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "stead.connection"
_PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"


class Connection:
    """The connection of one call."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def lost(self) -> bool:
        """The client has disconnected."""
        return self._cycle.disconnected

    @property
    def unsent(self) -> int:
        """Bytes of the answer that wait here for the client; the kernel holds some more."""
        return self._cycle.transport.get_write_buffer_size()

    @property
    def full(self) -> bool:
        """So many bytes wait for the client that the call may not send more."""
        return self._cycle.flow.write_paused

    async def cut(self) -> None:
        """Abort the connection in the middle of a response, so that the client sees that it is incomplete."""
        if not self.lost:
            self._cycle.message_event.clear()
            self._cycle.transport.abort()
            await self._cycle.message_event.wait()

    def processing(self) -> None:
        """Send 102 Processing, which resets the client's timeout for headers."""
        cycle = self._cycle
        if cycle.response_started or cycle.disconnected or cycle.scope["http_version"] != "1.1":
            return
        cycle.transport.write(_PROCESSING)


def is_from_edge(transport: asyncio.BaseTransport) -> bool:
    """Whether Caddy is on the other side: only its user can connect to the Unix socket."""
    link = transport.get_extra_info("socket")
    return link is not None and link.family == socket.AF_UNIX


def note_client(scope: Any, secure: str) -> None:
    """Set client and scheme of a request by the headers of the edge, which drops those of the client."""
    for name, value in scope["headers"]:
        if name == b"x-forwarded-for":
            scope["client"] = (value.decode("latin-1"), 0)
        elif name == b"x-forwarded-proto" and value == b"https":
            scope["scheme"] = secure


class Protocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._from_edge = is_from_edge(transport)

    def on_headers_complete(self) -> None:
        if self._from_edge:
            note_client(self.scope, "https")
        super().on_headers_complete()

    def timeout_keep_alive_handler(self) -> None:
        # `close` would wait for a client that does not take the rest of its last answer.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        extensions: dict[str, Any] = {EXTENSION: Connection(cycle)}
        cycle.scope["extensions"] = extensions
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with a JSON error, like every other error."""
        body = error_body(msg)
        status = HTTPStatus.BAD_REQUEST
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def error_body(text: str) -> bytes:
    """The JSON error of a request that no route sees."""
    return json.dumps(
        {"code": "BAD_REQUEST", "error": "BAD_REQUEST", "message": text, "description": text}
    ).encode()
