"""Client of the guest agent's protocol (docs/internals/agent.md): transport, limits and errors.

Guest root can replace the agent, so every answer is hostile: bounded in bytes, time and pieces before it is
parsed. Reading yields to the event loop after a few pieces, however fast they arrive, and `watchdog.py` ends
an exchange that still holds the loop for too long.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import httpcore2

from stead.deadlines import scaled
from stead.errors import GuestError, GuestUnreachable, InvalidRequest, SteadError
from stead.guest import watchdog
from stead.tasks import Threads

T = TypeVar("T")
Dial = Callable[[], Awaitable[tuple[socket.socket, tuple[Any, ...]]]]
Body = bytes | AsyncIterator[bytes]

CONNECT_TIMEOUT = scaled(20.0)
_CALL_TIMEOUT = scaled(30.0)
_CONNECT_ATTEMPT = scaled(1.0)
_RETRY_PAUSE = 0.05
HEADER_TIMEOUT = scaled(300.0)
"""Seconds from the end of a request to the headers of its answer, in a call without a time-out."""
_ERROR_TIMEOUT = scaled(30.0)
_HEADER_READ = 16 << 10
_BODY_READ = 256 << 10
_PIECES_PER_TURN = 64
"""A body may be cut into one-byte chunks: after this many, other tasks of the event loop get their turn."""
_FREE_PIECES = 10_000
_SMALL_PIECE = 64
_SLOWED = 0.005
MAX_ANSWER = 1 << 20
"""Bytes of a JSON answer, unless the call expects more. Parsing this much takes some 10 ms."""
MAX_LINE = 64 << 10
_MAX_LIST = 64 << 20
_MAX_OBJECTS = 250_000
_SMALL_LIST = 16 << 10
"""Bytes of a list that are parsed on the event loop, in about a millisecond."""
_BETWEEN = b"},{"
_MAX_ERROR = 16 << 10
_LARGEST = (1 << 63) - 1
_SLOWEST = 64 << 10
"""Bytes of a request that a guest takes in a second, at the least."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


@contextlib.contextmanager
def parsing(what: str) -> Iterator[None]:
    """Anything that goes wrong while a guest's answer is parsed is a GuestError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError):
        raise GuestError("malformed_answer", f"the guest agent sent a malformed answer to {what}") from None


class Pacer:
    """Lets other tasks run while a guest's data is processed piece by piece.

    Each piece costs the same however short it is. A guest that sends very many short ones is slowed down, so
    that it takes a part of the CPU and not all of it.
    """

    def __init__(self) -> None:
        self._pieces = 0
        self._bytes = 0

    async def consumed(self, size: int) -> None:
        self._pieces += 1
        self._bytes += size
        if self._pieces % _PIECES_PER_TURN == 0:
            crumbs = self._pieces > _FREE_PIECES and self._bytes < _SMALL_PIECE * self._pieces
            await asyncio.sleep(_SLOWED if crumbs else 0)


class Answer:
    """The answer to one request. Its body is read by the caller, once."""

    def __init__(self, response: httpcore2.Response, what: str) -> None:
        self._response = response
        self._what = what

    @property
    def content_type(self) -> bytes:
        return next((value for name, value in self._response.headers if name.lower() == b"content-type"), b"")

    def switched(self) -> httpcore2.AsyncNetworkStream:
        """The connection, which the guest agreed to use for another protocol."""
        stream = self._response.extensions.get("network_stream")
        if self._response.status != 101 or not isinstance(stream, httpcore2.AsyncNetworkStream):
            raise GuestError("malformed_answer", f"the guest agent refused to upgrade {self._what}")
        return stream

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body in pieces, as they arrive."""
        pacer = Pacer()
        async for piece in self._response.aiter_stream():
            yield piece
            await pacer.consumed(len(piece))

    async def read(self, limit: int = MAX_ANSWER) -> bytes:
        """The whole body; GuestError when it is longer than `limit`."""
        body = bytearray()
        async for piece in self.chunks():
            body += piece
            if len(body) > limit:
                raise GuestError(
                    "answer_too_large", f"the guest agent answered {self._what} with more than {limit} bytes"
                )
        return bytes(body)

    async def batches(
        self, name: str, convert: Callable[[list[dict[str, Any]]], T]
    ) -> AsyncGenerator[T, None]:
        """The flat objects in the one list `name` of a JSON answer, as they arrive.

        They are parsed and converted in a thread, some hundreds at a time.
        """
        begin, begun = b'{"%s":[' % name.encode(), False
        rest, size, count = bytearray(), 0, 0

        def parse(text: bytes) -> T:
            nonlocal count
            with parsing(self._what):
                found = _parse_flat(text)
            count += len(found)
            return convert(found)

        async for piece in self.chunks():
            rest += piece
            size += len(piece)
            if size > _MAX_LIST or count > _MAX_OBJECTS:
                what = f"a list of more than {_MAX_OBJECTS} entries, or {_MAX_LIST >> 20} MiB"
                raise GuestError("answer_too_large", f"the guest agent answered {self._what} with {what}")
            if len(rest) <= MAX_LINE:
                continue
            end = rest.rfind(_BETWEEN) + 1
            if not end or (not begun and not rest.startswith(begin)):
                raise self._malformed()
            text = bytes(rest[0 if begun else len(begin) : end])
            del rest[: end + 1]
            begun = True
            yield await Threads.PARSING.run(parse, text)
        if not rest.endswith(b"]}") or not (begun or rest.startswith(begin)):
            raise self._malformed()
        text = bytes(rest[0 if begun else len(begin) : -2])
        if text or begun:
            yield parse(text) if len(text) <= _SMALL_LIST else await Threads.PARSING.run(parse, text)

    def _malformed(self) -> GuestError:
        return GuestError("malformed_answer", f"the guest agent sent a malformed answer to {self._what}")

    async def lines(self, limit: int = MAX_LINE) -> AsyncGenerator[bytes, None]:
        """The lines of the body, without their ends; GuestError when one is longer than `limit`."""
        rest = bytearray()
        pacer = Pacer()
        async for piece in self.chunks():
            rest += piece
            if b"\n" not in piece and len(rest) <= limit:
                continue
            *lines, last = rest.split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if len(line) > limit:
                    break
                yield bytes(line)
                await pacer.consumed(len(line))
            else:
                if len(rest) <= limit:
                    continue
            raise GuestError(
                "answer_too_large",
                f"the guest agent answered {self._what} with a line of more than {limit} bytes",
            )
        if rest:
            yield bytes(rest)


class Upgraded:
    """A connection after the answer 101: bytes both ways. One task may read while others write."""

    def __init__(self, stream: httpcore2.AsyncNetworkStream, what: str, backend: "_Backend") -> None:
        self._stream = stream
        self._what = what
        self._backend = backend
        self._pacer = Pacer()
        self._writing = asyncio.Lock()

    async def read(self) -> bytes:
        """The next bytes; b"" at the end of what the guest sends."""
        with self._failing():
            data = await self._stream.read(_BODY_READ)
        if not data and self._backend.ended is not None:
            raise self._lost(self._backend.ended)
        await self._pacer.consumed(len(data))
        return data

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        while data := await self.read():
            yield data

    async def write(self, data: bytes) -> None:
        """Send all of `data`; waits for as long as the guest takes no more."""
        async with self._writing:
            with self._failing():
                await self._stream.write(data)

    async def write_eof(self) -> None:
        """Half-close: the guest reads the end, and may still send."""
        async with self._writing:
            with contextlib.suppress(OSError):
                self._stream.get_extra_info("socket").shutdown(socket.SHUT_WR)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except httpcore2.NetworkError as error:
            raise self._lost(self._backend.ended or str(error) or type(error).__name__) from error

    def _lost(self, reason: str) -> GuestUnreachable:
        return GuestUnreachable(f"lost the connection to the guest agent during {self._what}: {reason}")


class _Stream(httpcore2.AsyncNetworkStream):
    def __init__(self, link: socket.socket, open_links: set[socket.socket], guest: str) -> None:
        self._link = link
        self._guest = guest
        self._open_links = open_links
        open_links.add(link)
        self._loop = asyncio.get_running_loop()
        self.read_size = _HEADER_READ
        """Small before a body: a flood of informational responses is parsed without a turn for others."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                data = await self._loop.sock_recv(self._link, self.read_size)
                # sock_recv returns at once while there is data: a fast guest would never let the loop go.
                await asyncio.sleep(0)
            watchdog.parsing(self._guest, self._link)
            return data
        except TimeoutError as error:
            raise httpcore2.ReadTimeout from error
        except OSError as error:
            raise httpcore2.ReadError(str(error)) from error

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if not buffer:
            return
        try:
            async with asyncio.timeout(timeout):
                await self._loop.sock_sendall(self._link, buffer)
        except TimeoutError as error:
            raise httpcore2.WriteTimeout from error
        except OSError as error:
            raise httpcore2.WriteError(str(error)) from error

    async def aclose(self) -> None:
        self._open_links.discard(self._link)
        self._link.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "stream":
            return self
        if info == "is_readable":
            # An idle connection that can be read has been closed by the other end.
            poll = select.poll()
            poll.register(self._link, select.POLLIN)
            return bool(poll.poll(0))
        return self._link if info == "socket" else None


class _Backend(httpcore2.AsyncNetworkBackend):
    def __init__(self, dial: Dial, guest: str) -> None:
        self._dial = dial
        self._guest = guest
        self.open_links: set[socket.socket] = set()
        self.ended: str | None = None

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect, retrying while the connection is refused: guest or agent may be starting."""
        try:
            async with asyncio.timeout(timeout):
                while self.ended is None:
                    with contextlib.suppress(OSError, TimeoutError):
                        return _Stream(await self._attempt(), self.open_links, self._guest)
                    await asyncio.sleep(_RETRY_PAUSE)
        except TimeoutError as error:
            raise httpcore2.ConnectTimeout from error
        raise httpcore2.ConnectError(self.ended)

    async def _attempt(self) -> socket.socket:
        link, address = await self._dial()
        try:
            async with asyncio.timeout(_CONNECT_ATTEMPT):
                await asyncio.get_running_loop().sock_connect(link, address)
        except BaseException:
            link.close()
            raise
        return link


def path_query(path: str | bytes | os.PathLike[str]) -> str:
    """A guest path for a query string: any bytes a file name can have pass unchanged."""
    return quote(os.fsencode(path), safe="/")


class Agent:
    """HTTP to one guest over its management link."""

    def __init__(self, dial: Dial, guest: str) -> None:
        self._backend = _Backend(dial, guest)
        self._pool = httpcore2.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=16, network_backend=self._backend
        )

    def abort(self, reason: str) -> None:
        """The guest has ended: fail every call in progress with the first reason that was given."""
        self._backend.ended = self._backend.ended or reason
        for link in list(self._backend.open_links):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        await self._pool.aclose()

    @contextlib.asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        user: str | None = None,
        body: Body | None = None,
        connect_timeout: float = CONNECT_TIMEOUT,
        read_timeout: float | None = None,
        header_timeout: float | None = HEADER_TIMEOUT,
    ) -> AsyncIterator[Answer]:
        """One request, whose response body the caller reads. Raises error responses.

        `header_timeout` begins when the request is sent, however long its body takes.
        """
        what = f"{method} {target.split('?')[0]}"
        sent: dict[str, str | bytes] = {"Host": "agent", **(headers or {})}
        if user is not None:
            if not user.isprintable() or not user:
                raise InvalidRequest(f"invalid Linux user name {user!r}")
            sent["X-Stead-User"] = user.encode()
        if isinstance(body, bytes):
            sent["Content-Length"] = str(len(body))
        elif body is not None and "Content-Length" not in sent:
            sent["Transfer-Encoding"] = "chunked"
        elif body is None and method != "GET":
            sent["Content-Length"] = "0"
        timeouts = {"connect": connect_timeout, "read": read_timeout, "write": None}
        try:
            async with contextlib.AsyncExitStack() as exchange:
                sending = _sending(body, connect_timeout, header_timeout)
                try:
                    async with sending as content:
                        opening = self._pool.stream(
                            method,
                            f"http://agent{target}",
                            headers=list(sent.items()),
                            content=content,
                            extensions={"timeout": timeouts},
                        )
                        response = await exchange.enter_async_context(opening)
                except _NoAnswer as error:
                    raise GuestUnreachable(
                        f"the guest agent did not answer {what} within {header_timeout:g} s"
                    ) from error
                answer = Answer(response, what)
                if response.status >= 400:
                    raise await _error(response.status, answer)
                with _reading_in_bulk(response):
                    yield answer
        except (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError) as error:
            reason = self._backend.ended or str(error) or type(error).__name__
            raise GuestUnreachable(f"the guest agent did not answer {what}: {reason}") from error

    @contextlib.asynccontextmanager
    async def upgrade(
        self,
        target: str,
        protocol: str,
        *,
        user: str | None = None,
        connect_timeout: float = CONNECT_TIMEOUT,
        header_timeout: float | None = HEADER_TIMEOUT,
    ) -> AsyncIterator[Upgraded]:
        """Switch a connection to another protocol (HTTP Upgrade). Raises error responses."""
        what = f"GET {target.split('?')[0]}"
        async with self.stream(
            "GET",
            target,
            headers={"Connection": "Upgrade", "Upgrade": protocol},
            user=user,
            connect_timeout=connect_timeout,
            header_timeout=header_timeout,
        ) as answer:
            yield Upgraded(answer.switched(), what, self._backend)

    async def call(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        user: str | None = None,
        body: Body | None = None,
        timeout: float | None = _CALL_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
        header_timeout: float | None = HEADER_TIMEOUT,
    ) -> dict[str, Any]:
        """One request with a JSON object as response; `header_timeout` counts only without `timeout`."""
        what = f"{method} {target.split('?')[0]}"
        try:
            async with (
                asyncio.timeout(timeout),
                self.stream(
                    method,
                    target,
                    headers=headers,
                    user=user,
                    body=body,
                    connect_timeout=connect_timeout,
                    header_timeout=header_timeout if timeout is None else None,
                ) as answer,
            ):
                return parse_object(await answer.read() or b"{}", what)
        except TimeoutError as error:
            raise GuestUnreachable(f"the guest agent did not answer {what} within {timeout:g} s") from error


class _NoAnswer(Exception):
    """The headers of an answer did not come in time."""


@contextlib.asynccontextmanager
async def _sending(
    body: Body | None, connect_timeout: float, header_timeout: float | None
) -> AsyncIterator[Body | None]:
    """Send a request and wait for the headers of its answer in this block; yields the body to send."""
    try:
        async with asyncio.timeout(None) as deadline:
            if header_timeout is None:
                yield body
            elif body is None or isinstance(body, bytes):
                allowed = connect_timeout + header_timeout + len(body or b"") / _SLOWEST
                deadline.reschedule(asyncio.get_running_loop().time() + allowed)
                yield body
            else:
                yield _then_expect(body, deadline, header_timeout)
    except TimeoutError as error:
        if deadline.expired():
            raise _NoAnswer from error
        raise


async def _then_expect(
    body: AsyncIterator[bytes], deadline: asyncio.Timeout, header_timeout: float
) -> AsyncGenerator[bytes, None]:
    try:
        async for piece in body:
            yield piece
        deadline.reschedule(asyncio.get_running_loop().time() + header_timeout)
    finally:
        if isinstance(body, AsyncGenerator):
            await body.aclose()


@contextlib.contextmanager
def _reading_in_bulk(response: httpcore2.Response) -> Iterator[None]:
    connection = response.extensions.get("network_stream")
    stream = connection.get_extra_info("stream") if connection is not None else None
    if not isinstance(stream, _Stream):
        yield
        return
    stream.read_size = _BODY_READ
    try:
        yield
    finally:
        stream.read_size = _HEADER_READ


def small(value: Any) -> int:
    """An integer of a guest's answer; ValueError when 64 bits cannot hold it."""
    number = int(value)
    if not -_LARGEST <= number <= _LARGEST:
        raise ValueError
    return number


def parse_object(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object that a guest sent; GuestError for anything else."""
    with parsing(what):
        found = _DECODER.decode(text.decode())
        if not isinstance(found, dict):
            raise TypeError
        if b"\\u" in text:
            # UnicodeEncodeError for a lone surrogate, which no answer or database could hold.
            json.dumps(found, ensure_ascii=False).encode()
        return found


def _parse_flat(text: bytes) -> list[dict[str, Any]]:
    """The objects in a part of a JSON list."""
    found: list[dict[str, Any]] = _DECODER.decode(f"[{text.decode()}]")
    if not all(isinstance(each, dict) for each in found):
        raise TypeError
    if b"\\u" in text:
        # As in `parse_object`.
        json.dumps(found, ensure_ascii=False).encode()
    return found


async def _error(status: int, answer: Answer) -> SteadError:
    try:
        async with asyncio.timeout(_ERROR_TIMEOUT):
            told = parse_object(await answer.read(_MAX_ERROR), "a request")
        return GuestError(str(told["code"]), str(told["message"]))
    except TimeoutError:
        return GuestUnreachable(f"the guest agent did not end its error within {_ERROR_TIMEOUT:g} s")
    except (GuestError, KeyError):
        return GuestError("internal", f"the guest agent answered with status {status}")
