"""A guest agent with large answers, in a process of its own: its memory is not the server's.

`/N` is a file of N MiB, `print N` a command that prints as much, `/folder/N` a folder of N entries, and a
recording of N lines is called `N`.
"""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from support.fake_api import FakeApi
from support.hostile_agent import frame

_CHUNK = 64 << 10
_ENTRY = {"name_b64": "YQ==", "size": 1, "mode": "0644", "uid": 0, "gid": 0, "mtime_ns": 5}


class _Guest(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        path = parse_qs(parts.query).get("path", [""])[0]
        number = path.rpartition("/")[2]
        match parts.path:
            case "/v1/stat":
                kind = "directory" if path.startswith("/folder/") else "file"
                size = int(number) << 20 if kind == "file" else 0
                self._answer([json.dumps({**_ENTRY, "type": kind, "size": size}).encode()])
            case "/v1/file":
                self._answer(itertools.repeat(b"x" * _CHUNK, int(number) << 4))
            case "/v1/directory":
                self._answer(_listing(int(number)))
            case _:
                self._answer(_recording(int(parts.path.rpartition("/")[2])))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(_printed(int(body["argv"][-1].removeprefix("print "))))

    def do_DELETE(self) -> None:
        self._answer([b"{}"])

    def _answer(self, pieces: Iterator[bytes] | list[bytes]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            for piece in pieces:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        pass


def _printed(size: int) -> Iterator[bytes]:
    yield frame(0, b'{"id": "one", "pid": 1}')
    yield from itertools.repeat(frame(1, b"x" * _CHUNK), size << 4)
    yield frame(3, b'{"exit_code": 0, "duration_us": 5}')


def _listing(count: int) -> Iterator[bytes]:
    entry = json.dumps({**_ENTRY, "type": "file"}, separators=(",", ":")).encode()
    yield b'{"entries":[' + entry
    for start in range(1, count, 1000):
        yield (b"," + entry) * min(1000, count - start)
    yield b"]}"


def _recording(lines: int) -> Iterator[bytes]:
    # 60,000 newlines in base64
    piece = json.dumps({"at_ms": 5, "data_b64": "CgoK" * 20_000}).encode() + b"\n"
    return itertools.repeat(piece, lines // 60_000)


@contextlib.asynccontextmanager
async def large_guest(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Every VM has this guest during the block."""
    tests = str(Path(__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        address = "127.0.0.1", int(await process.stdout.readline())

        async def dial(_: object) -> tuple[socket.socket, tuple[Any, ...]]:
            link = socket.socket()
            link.setblocking(False)
            return link, address

        with monkeypatch.context() as patch:
            patch.setattr(api.world, "dial", dial)
            for guest in api.world.processes.values():
                # Idle connections lead to the guest before.
                for link in guest.links:
                    link.transport.abort()
            yield
    finally:
        process.kill()
        await process.wait()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Guest)
    print(server.server_address[1], flush=True)
    server.serve_forever()
