"""A WebSocket server that plays a script, one step for each connection, and records the requests."""

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

Session = Callable[[ServerConnection], None]
"""What the server does on a connection, which is closed with 1000 when it returns."""


@dataclass(frozen=True)
class Answer:
    """An HTTP answer instead of the upgrade, or to a GET."""

    status: int = 200
    content: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Opened:
    """A received request."""

    path: str
    query: dict[str, str]
    headers: Headers


@dataclass(frozen=True)
class Sockets:
    """A running server; `seen` has the requests so far."""

    url: str
    seen: list[Opened]


@contextlib.contextmanager
def sockets(*steps: Session | Answer) -> Iterator[Sockets]:
    """Start a server that plays these steps. A connection after the last step is refused with 404."""
    left, lock, seen = deque(steps), threading.Lock(), list[Opened]()
    chosen: dict[ServerConnection, Session] = {}

    def choose(connection: ServerConnection, request: Request) -> Response | None:
        url = urlsplit(request.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        with lock:
            seen.append(Opened(url.path, query, request.headers))
            missing = Answer(404, {"code": "SESSION_NOT_FOUND", "message": "the script is at its end"})
            step = left.popleft() if left else missing
        if isinstance(step, Answer):
            content = json.dumps(step.content).encode()
            headers = Headers({"Content-Length": str(len(content)), "Connection": "close"})
            return Response(step.status, "Whatever", headers, content)
        chosen[connection] = step
        return None

    def play(connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            chosen.pop(connection)(connection)

    with serve(play, "127.0.0.1", 0, process_request=choose, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Sockets(f"http://127.0.0.1:{server.socket.getsockname()[1]}", seen)
        finally:
            server.shutdown()
            thread.join()


def cut(connection: ServerConnection) -> None:
    """Break the TCP connection without a close frame, as a dropped network does."""
    connection.socket.shutdown(2)


def control(kind: str, **facts: object) -> str:
    return json.dumps({"type": kind, **facts})
