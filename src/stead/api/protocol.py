"""uvicorn's HTTP/1.1 protocol, with 102 Processing, aborted responses and JSON errors for malformed input."""

import json
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


class Protocol(HttpToolsProtocol):
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
