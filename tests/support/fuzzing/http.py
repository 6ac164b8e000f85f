"""Bytes on a connection to the API server, over a loopback socket: HTTP/1.1 and the WebSocket handshake."""

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from support.fuzzing.runs import Target, in_event_loop
from support.git_hosting import RepoServer, served

_FIRST_ANSWER = 0.02
_END = 30.0
_PIECE = 1 << 20
_HEALTH_EVERY = 50
_HEALTH = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


_WITHOUT_VMS = b"this installation is open without VMs"


class _Problems(logging.Handler):
    """Errors that uvicorn logs: an exception that no part of the server turned into an answer."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(self.format(record))


async def _exchange(port: int, data: bytes, first_answer: float) -> bytes:
    """What the server answers until it closes the connection, after the client has sent all and its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    received = b""
    try:
        writer.write(data)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(first_answer):
                received = await reader.read(_PIECE)
        with contextlib.suppress(OSError):
            writer.write_eof()
        while piece := await reader.read(_PIECE):
            received += piece
    except ConnectionError:
        pass
    finally:
        writer.close()
    return received


async def _feed(server: RepoServer, data: bytes, *, check_health: bool) -> None:
    port = int(server.url.rpartition(":")[2])
    async with asyncio.timeout(_END):
        answer = await _exchange(port, data.replace(b"API_KEY", server.key.encode()), _FIRST_ANSWER)
        assert not answer or answer.startswith(b"HTTP/1."), answer[:200]
        assert b"HTTP/1.1 500" not in answer or _WITHOUT_VMS in answer, answer[:500]
        if check_health:
            healthy = await _exchange(port, _HEALTH, _END)
            assert healthy.startswith(b"HTTP/1.1 200"), healthy[:500]


@contextlib.asynccontextmanager
async def _server() -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """The API without VMs. Every answer is HTTP, none is an internal error, and the next client is served."""
    problems, logger, count = _Problems(), logging.getLogger("uvicorn.error"), 0
    with tempfile.TemporaryDirectory() as folder:
        async with served(Path(folder)) as server:

            async def feed(data: bytes) -> None:
                nonlocal count
                count += 1
                await _feed(server, data, check_health=count % _HEALTH_EVERY == 0)
                if problems.found:
                    raise RuntimeError(problems.found.pop())

            logger.addHandler(problems)
            try:
                yield feed
            finally:
                logger.removeHandler(problems)


_TOKENS = (
    *(
        b"GET ",
        b"POST ",
        b"OPTIONS ",
        b"CONNECT ",
        b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n",
        b" HTTP/2.0\r\n",
        b"\r\n",
    ),
    *(b"Host: a\r\n", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(
        b"Connection: Upgrade\r\n",
        b"Upgrade: websocket\r\n",
        b"Upgrade: h2c\r\n",
        b"Expect: 100-continue\r\n",
    ),
    *(b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n", b"Sec-WebSocket-Version: 13\r\n"),
    *(b"Authorization: Bearer API_KEY\r\n", b"Authorization: Basic ", b"Content-Type: application/json\r\n"),
    *(
        b"5\r\nhello\r\n",
        b"0\r\n\r\n",
        b"ffffffffffffffff\r\n",
        b"\0",
        b"\xff\xfe",
        b"%00",
        b"%ff",
        b"/../",
        b"?a=%",
    ),
    *(b"/git/v1/repo", b"/v1/vms", b"/healthz", b"/identity/v1/identities", b"/observability/v1/logs", b"@"),
    *(
        b"Origin: null\r\n",
        b"Range: bytes=0-\r\n",
        b"/info/refs?service=git-upload-pack",
        b'{"a":',
        b"[" * 900,
    ),
)

CALLS = Target("http", in_event_loop(_server), _TOKENS, inputs=600, cpu=5.0, growth_mib=128)
