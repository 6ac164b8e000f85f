"""WebSocket connections: how they are opened, and the classification of their failures."""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from websockets.exceptions import ConnectionClosed as ConnectionClosed
from websockets.exceptions import InvalidStatus, WebSocketException

from stead.sdk.arguments import as_bytes
from stead.sdk.connect_problems import connect_problem
from stead.sdk.error_answers import api_error
from stead.sdk.errors import NoAnswerInTime, ServerUnreachable
from stead.sdk.requests import TRACE_HEADER, ConnectionSettings, Request, Unset

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.sync.client import ClientConnection as SyncClientConnection

    AsyncSocket = ClientConnection
    Socket = SyncClientConnection
else:
    AsyncSocket = Socket = object


OPEN_TIMEOUT = 120.0
"""Seconds for a new connection: the server answers when the VM runs, and a stopped one boots first."""
FIRST_MESSAGE_TIMEOUT = 30.0
_LONGEST_MESSAGE = 17 << 20
"""The replay of a terminal's screen is one message of up to 16 MiB."""
_PIECE = 64 << 10
_PING_INTERVAL = 20.0


@dataclass(frozen=True)
class Closed:
    """Why a connection ended: the close code and the reason that the server sent."""

    code: int
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.reason or 'connection closed'} (code {self.code})"


DETACHED = Closed(1000, "detached")

Callback = Callable[..., object]
"""Called with an event. In the asynchronous client it may be a coroutine function."""


def closed(error: ConnectionClosed) -> Closed:
    """1006, as in browsers, if the connection broke without a close frame."""
    return (
        Closed(1006, "connection lost") if error.rcvd is None else Closed(error.rcvd.code, error.rcvd.reason)
    )


async def async_socket(settings: ConnectionSettings, request: Request, *, pings: bool = True) -> AsyncSocket:
    """Open a connection. Without `pings`, a peer that does not read for a while is not taken for dead."""
    from websockets.asyncio.client import connect

    with _classified(settings, request):
        return await connect(_url(settings, request), **_options(settings, request, pings))


def sync_socket(settings: ConnectionSettings, request: Request, *, pings: bool = True) -> Socket:
    from websockets.sync.client import connect

    with _classified(settings, request):
        # Entered, because websockets 17 deprecates connections that are not used as a context manager.
        connection = connect(_url(settings, request), **_options(settings, request, pings))
        return cast("SyncClientConnection", connection.__enter__())


async def async_first(socket: AsyncSocket) -> str | bytes:
    """The next message of a new connection, which the server sends at once."""
    import asyncio

    with _first():
        return await asyncio.wait_for(socket.recv(), FIRST_MESSAGE_TIMEOUT)


def sync_first(socket: Socket) -> str | bytes:
    with _first():
        return socket.recv(FIRST_MESSAGE_TIMEOUT)


@contextlib.contextmanager
def _first() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise NoAnswerInTime(f"no message from the server within {FIRST_MESSAGE_TIMEOUT:g} seconds") from None
    except ConnectionClosed as error:
        raise ServerUnreachable(f"the connection was closed: {closed(error)}", sent=True) from None


def _url(settings: ConnectionSettings, request: Request) -> str:
    query = f"?{urlencode(request.query)}" if request.query else ""
    return "ws" + settings.base_url.removeprefix("http") + request.path + query


def _options(settings: ConnectionSettings, request: Request, pings: bool) -> dict[str, Any]:
    headers = {**settings.headers, **request.headers}
    return {
        "user_agent_header": headers.pop("User-Agent", None),
        "additional_headers": headers,
        "proxy": None if settings.loopback else True,
        "compression": None,
        "open_timeout": OPEN_TIMEOUT if isinstance(request.timeout, Unset) else request.timeout,
        "close_timeout": 2.0,
        "ping_interval": _PING_INTERVAL,
        "ping_timeout": _PING_INTERVAL if pings else None,
        "max_size": _LONGEST_MESSAGE,
    }


@contextlib.contextmanager
def _classified(settings: ConnectionSettings, request: Request) -> Iterator[None]:
    """Raise failures to connect as errors of this library; an answer other than 101 is the server's error."""
    call = f"WebSocket {settings.base_url}{request.path}"
    try:
        yield
    except InvalidStatus as error:
        answer = error.response
        text = bytes(answer.body or b"").decode(errors="replace")
        raise api_error(
            answer.status_code,
            _json(text),
            text,
            answer.headers.get(TRACE_HEADER),
            idempotent=request.idempotent,
        ) from None
    except TimeoutError as error:
        raise NoAnswerInTime(f"{call}: no answer in time", retryable=request.idempotent) from error
    except OSError as error:
        reason = connect_problem(error, settings.base_url)
        raise ServerUnreachable(f"{call}: cannot connect: {reason}", sent=False, reason=reason) from error
    except WebSocketException as error:
        text = f"{call}: connection lost: {error}"
        raise ServerUnreachable(text, sent=True, retryable=request.idempotent) from error


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def pieces(data: str | bytes) -> Iterator[bytes]:
    """Input as messages that the server accepts: it refuses longer ones than 1 MiB."""
    content = as_bytes("data", data)
    for start in range(0, len(content), _PIECE):
        yield content[start : start + _PIECE]


def text_frame(kind: str, **facts: object) -> str:
    """A control message: `{"type": kind, ...}`."""
    return json.dumps({"type": kind, **facts})


def parse_frame(message: str) -> dict[str, Any]:
    """A control message as a JSON object; an empty one if it is none, which clients ignore."""
    found = _json(message)
    return found if isinstance(found, dict) else {}
