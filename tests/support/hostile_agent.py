"""A guest agent that guest root has replaced: answers every request with the same bytes."""

import asyncio
import contextlib
import socket
import socketserver
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from stead.guest.agent import Agent

_BATCH = 256 << 10
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def whole(body: bytes) -> list[bytes]:
    return [HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body]


def chunks(pieces: Iterator[bytes] | list[bytes]) -> Iterator[bytes]:
    yield CHUNKED
    for piece in pieces:
        yield b"%x\r\n%s\r\n" % (len(piece), piece)


def frame(kind: int, payload: bytes = b"") -> bytes:
    return struct.pack(">B3xI", kind, len(payload)) + payload


class _HostileServer(socketserver.ThreadingTCPServer):
    """Answers every request with the same bytes, from a thread: as fast as they are taken."""

    block_on_close = True
    request_queue_size = 64  # a connection for which the queue has no room is tried again after a second

    def __init__(self, answer: Callable[[], Iterator[bytes] | list[bytes]]) -> None:
        self.answer = answer
        super().__init__(("127.0.0.1", 0), _HostileConnection)


class _HostileConnection(socketserver.StreamRequestHandler):
    server: _HostileServer

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while self._read_request():
                for batch in _batches(iter(self.server.answer())):
                    self.request.sendall(batch)

    def _read_request(self) -> bool:
        length = 0
        while (line := self.rfile.readline()) not in (b"\r\n", b""):
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        self.rfile.read(length)
        return bool(line)


@contextlib.asynccontextmanager
async def hostile(answer: Callable[[], Iterator[bytes] | list[bytes]]) -> AsyncIterator[Agent]:
    server = _HostileServer(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    async def dial() -> tuple[socket.socket, tuple[Any, ...]]:
        link = socket.socket()
        link.setblocking(False)
        return link, server.server_address

    agent = Agent(dial, "testvm")
    try:
        yield agent
    finally:
        agent.abort("the test is over")
        await agent.close()
        server.shutdown()
        thread.join()
        server.server_close()


def _batches(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Many short pieces at once, and no more long ones than are sent."""
    batch, count = bytearray(), 0
    for piece in pieces:
        batch += piece
        count += 1
        if count == 5000 or len(batch) >= _BATCH:
            yield bytes(batch)
            batch.clear()
            count = 0
    yield bytes(batch)


@contextlib.asynccontextmanager
async def turning() -> AsyncIterator[list[float]]:
    """The lengths of the turns of the event loop during the block, in CPU time: other load does not count."""
    turns: list[float] = []

    async def watch_turns() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            turns.append(now - last)
            last = now

    task = asyncio.create_task(watch_turns())
    try:
        yield turns
    finally:
        task.cancel()
