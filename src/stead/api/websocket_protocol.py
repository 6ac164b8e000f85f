"""uvicorn's WebSocket protocol with bounds on what a client can make the server hold or wait for.

Chosen because it answers before the upgrade with any HTTP response (ASGI `websocket.http.response`), stops
reading while the application has a message to process, and waits in `send` while the client does not read.
"""

import email.utils
import logging
import socket
from asyncio.transports import BaseTransport
from http import HTTPStatus
from typing import Any, cast

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.datastructures import Headers
from websockets.exceptions import InvalidHandshake, InvalidState
from websockets.frames import Frame
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol
from websockets.typing import StatusLike

from stead.api.protocol import EXTENSION, error_body, is_from_edge, note_client

MORE = "stead.more"
"""Key of `websocket.send`: the next one continues this binary message."""
MAX_MESSAGE = 1 << 20
"""Bytes of a message from a client; a longer one closes the WebSocket with code 1009."""
PING_INTERVAL = 20.0
"""Seconds between pings: proxies keep connections on which bytes flow."""
PING_TIMEOUT = 60.0
"""Seconds without an answer to a ping after which the client is taken for dead."""
_CLOSE_TIMEOUT = 5.0
_READ = 32 << 10
"""Bytes read at once: thousands of tiny frames are parsed without a turn for other connections."""
_UNSENT = 128 << 10
"""Bytes that the kernel holds before they are sent: an answer to Ctrl-C waits behind no more than these."""

_log = logging.getLogger("stead.websockets")
_log.setLevel(logging.WARNING)  # uvicorn and websockets log paths with their query, which may hold a ticket


class SocketConnection:
    """The connection of one WebSocket."""

    def __init__(self, protocol: "WebSocketProtocol") -> None:
        self._protocol = protocol

    @property
    def lost(self) -> bool:
        """The client has disconnected."""
        return self._protocol.disconnected

    async def cut(self) -> None:
        """Abort the connection; what is not sent yet is dropped."""
        self._protocol.transport.abort()

    def processing(self) -> None:
        """Before the upgrade, a WebSocket client does not expect 102 Processing."""


class _Handshake(ServerProtocol):
    def process_request(self, request: Request) -> tuple[str, str | None, str | None]:
        try:
            return super().process_request(request)
        except UnicodeError:
            # websockets encodes the key as UTF-8, and would answer other bytes with status 500.
            raise InvalidHandshake("invalid Sec-WebSocket-Key header: not ASCII") from None

    def reject(self, status: StatusLike, text: str) -> Response:
        """Answer an invalid handshake with a JSON error, like every other error."""
        status = HTTPStatus(status)
        body = error_body(text.strip().partition("\n")[0])
        headers = {
            "Date": email.utils.formatdate(usegmt=True),
            "Connection": "close",
            "Content-Length": str(len(body)),
            "Content-Type": "application/json",
        }
        return Response(status.value, status.phrase, Headers(headers), body)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _log
        self.conn = _Handshake(max_size=self.config.ws_max_size, logger=_log)

    def connection_made(self, transport: BaseTransport) -> None:
        super().connection_made(transport)
        transport.max_size = _READ  # type: ignore[attr-defined]
        link = transport.get_extra_info("socket")
        if link is not None and link.family in (socket.AF_INET, socket.AF_INET6):
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # Not a GET request, or a header that is too long: nothing would ever be answered.
            self.handshake_initiated = self.handshake_complete = self.close_sent = True
            cause = self.conn.handshake_exc.__cause__
            refused = self.conn.reject(400, f"invalid WebSocket handshake: {cause}")
            self.transport.write(refused.serialize())
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            self.scope["extensions"][EXTENSION] = SocketConnection(self)  # type: ignore[assignment]
            if is_from_edge(self.transport):
                note_client(self.scope, "wss")

    def handle_cont(self, event: Frame) -> None:
        # Empty fragments do not count towards the size of a message, but would fill the list of its parts.
        if event.data or event.fin:
            super().handle_cont(event)

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            # A client that sends pings and reads no answers would fill the buffer.
            self.conn.data_to_send()

    def keepalive_timeout(self) -> None:
        if self.read_paused:
            # The answer is not read while the guest does not take the client's input.
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        # The close frame waits behind what the client does not read.
        self.transport.abort()

    async def _send_fragment(self, data: bytes, more: bool) -> None:
        """A piece of a message that is never whole in memory: a binary frame, then continuation frames."""
        await self.writable.wait()
        if self.disconnected or self.close_sent:
            raise ClientDisconnected
        try:
            if self.conn.expect_continuation_frame:
                self.conn.send_continuation(data, fin=not more)
            else:
                self.conn.send_binary(data, fin=not more)
        except InvalidState:
            raise ClientDisconnected from None
        self.transport.write(b"".join(self.conn.data_to_send()))

    def shutdown(self) -> None:
        """Leave the end to `Calls`, which tells the client why."""

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "websocket.send":
            more = bool(cast("dict[str, Any]", message).get(MORE))
            if more or self.conn.expect_continuation_frame:
                await self._send_fragment(message.get("bytes") or b"", more)
                return
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # by an HTTP response, which uvicorn would log as an error
        if self.close_timer is not None:
            self.close_timer.cancel()
            self.close_timer = self.loop.call_later(_CLOSE_TIMEOUT, self.transport.abort)
