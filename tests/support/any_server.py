"""An HTTP server that answers every request, with contents that fit most of them: for fuzz tests."""

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

VM = "abcdefghij0123456789"
SNAPSHOT = f"sc-{VM}"
VPC = f"vpc-{VM}"
UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"

_MOMENT = "2026-01-02T03:04:05Z"
_THING: dict[str, Any] = {
    "id": VM,
    "vmId": VM,
    "name": "thing\ud800\u202e",
    "state": "running",
    "status": "running",
    "createdAt": _MOMENT,
    "user": "root",
    "pid": 1,
    "command": ["ls"],
    "pty": False,
    "offset": 0,
    "start": 0,
    "exitStatus": "stopped",
    "stdout": "out",
    "stderr": "",
    "statusCode": 0,
    "url": "https://thing.stead.localhost",
    "domain": "thing.example.com",
    "cidr": "10.0.0.0/16",
    "snapshotId": SNAPSHOT,
    "repoId": UUID,
    "triggerId": UUID,
    "token": "secret",
    "path": "/x",
    "kind": "file",
    "size": 0,
    "total": 0,
}
_LISTS = (
    "vms snapshots repositories repos identities vpcs processes sessions files entries triggers deliveries "
    "builds phases logs "
    "permissions tokens clients terminals forks branches tags commits services users domains mappings chunks"
)
_ANSWERS: list[tuple[int, Any]] = [
    (404, {"code": "NOT_FOUND", "message": "nothing here"}),
    (200, {**_THING, **{name: [] for name in _LISTS.split()}}),
    (200, {}),
    (400, {"code": "INVALID_REQUEST", "message": "odd\nrequest \ud800"}),
    (200, []),
    (200, {**_THING, **{name: [_THING] for name in _LISTS.split()}}),
    (403, {}),
    (500, "no JSON"),
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for head and body
    server: "_Server"

    def _answer(self) -> None:
        with contextlib.suppress(ConnectionError):
            self._read_body()
            status, content = self.server.answers[next(self.server.turns) % len(self.server.answers)]
            body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    def _read_body(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                self.rfile.read(size + 2)
            self.rfile.readline()
        else:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = do_OPTIONS = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, answers: list[tuple[int, Any]]) -> None:
        self.answers = answers
        self.turns = count()
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, *_: object) -> None:
        """A client that leaves early is expected here."""


@contextlib.contextmanager
def any_server(content: Any = None) -> Iterator[str]:
    """The URL of a server that answers every request with this content, or with many kinds of answers."""
    with _Server(_ANSWERS if content is None else [(200, content)]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
