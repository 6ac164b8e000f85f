"""An HTTP server that plays a script of answers and broken connections, and records the requests."""

import contextlib
import json
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Seen:
    """A received request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Reply:
    """A complete answer, sent after `after` seconds."""

    status: int = 200
    content: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    after: float = 0.0

    def play(self, connection: socket.socket) -> None:
        time.sleep(self.after)
        content = self.content if isinstance(self.content, bytes) else json.dumps(self.content).encode()
        lines = [f"HTTP/1.1 {self.status} Whatever", "Connection: close", f"Content-Length: {len(content)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)


@dataclass(frozen=True)
class Drop:
    """Close the connection after reading the request, without an answer."""

    def play(self, connection: socket.socket) -> None:
        pass


@dataclass(frozen=True)
class Pieces:
    """A chunked answer; if not `complete`, the connection closes after the last piece."""

    pieces: list[bytes]
    complete: bool = True
    hold: bool = False
    """Stay open after the last piece until the client disconnects."""
    gone: threading.Event = field(default_factory=threading.Event)
    """Set when the client has disconnected."""

    def play(self, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for piece in self.pieces:
            connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
            time.sleep(0.002)
        if self.hold:
            with contextlib.suppress(OSError):
                while connection.recv(1024):
                    pass
            self.gone.set()
        elif self.complete:
            connection.sendall(b"0\r\n\r\n")


Step = Reply | Drop | Pieces


class _Handler(socketserver.StreamRequestHandler):
    server: "_Listener"

    def handle(self) -> None:
        line = self.rfile.readline().decode()
        if not line:
            return
        method, target, _ = line.split()
        headers = {}
        while (line := self.rfile.readline().decode().strip()) != "":
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(headers.get("content-length", 0)))
        exhausted = Reply(500, {"code": "INTERNAL", "message": "the script is at its end"})
        with self.server.lock:
            self.server.seen.append(Seen(method, target, headers, body))
            step = self.server.steps.popleft() if self.server.steps else exhausted
        with contextlib.suppress(OSError):
            step.play(self.connection)


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int, steps: list[Step]) -> None:
        self.lock = threading.Lock()
        self.steps = deque(steps)
        self.seen: list[Seen] = []
        super().__init__(("127.0.0.1", port), _Handler)


@dataclass(frozen=True)
class Script:
    """A running server; `seen` has the requests so far."""

    url: str
    seen: list[Seen]


@contextlib.contextmanager
def scripted(*steps: Step, port: int = 0) -> Iterator[Script]:
    """Start a server that plays these steps, one for each request."""
    with _Listener(port, list(steps)) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield Script(f"http://127.0.0.1:{listener.server_address[1]}", listener.seen)
        finally:
            listener.shutdown()
            thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
