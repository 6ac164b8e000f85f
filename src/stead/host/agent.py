"""The host's end of the guest agent's protocol (docs/internals/agent-protocol.md): transport and errors."""

import asyncio
import contextlib
import copy
import json
import os
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import httpcore2

from stead.errors import GuestError, GuestUnreachable, InvalidRequest

Dial = Callable[[], Awaitable[tuple[socket.socket, tuple[Any, ...]]]]
Body = bytes | AsyncIterator[bytes]

CONNECT_TIMEOUT = 20.0
_CONNECT_ATTEMPT = 1.0
_RETRY_PAUSE = 0.05


class _Stream(httpcore2.AsyncNetworkStream):
    def __init__(self, link: socket.socket, open_links: set[socket.socket]) -> None:
        self._link = link
        self._open_links = open_links
        open_links.add(link)
        self._loop = asyncio.get_running_loop()

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            async with asyncio.timeout(timeout):
                return await self._loop.sock_recv(self._link, max(max_bytes, 262144))
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
        if info == "is_readable":
            # An idle connection that can be read has been closed by the other end.
            poll = select.poll()
            poll.register(self._link, select.POLLIN)
            return bool(poll.poll(0))
        return self._link if info == "socket" else None


class _Backend(httpcore2.AsyncNetworkBackend):
    def __init__(self, dial: Dial) -> None:
        self._dial = dial
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
                        return _Stream(await self._attempt(), self.open_links)
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

    def __init__(self, dial: Dial) -> None:
        self._backend = _Backend(dial)
        self.in_flight = 0
        """Calls in progress, including running commands."""
        self.last_used = 0.0
        """When a call last ended, by the loop's clock."""
        self._pool = httpcore2.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=16, network_backend=self._backend
        )

    def uncounted(self) -> "Agent":
        """A handle on the same connections whose calls do not count as activity of the VM.

        Idle detection does not see them: the VM may be suspended during such a call, which then fails.
        """
        handle = copy.copy(self)
        handle.in_flight = 0
        return handle

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
    ) -> AsyncIterator[httpcore2.Response]:
        """One request, whose response body the caller reads. Raises error responses."""
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
        self.in_flight += 1
        try:
            async with self._pool.stream(
                method,
                f"http://agent{target}",
                headers=list(sent.items()),
                content=body,
                extensions={"timeout": timeouts},
            ) as response:
                if response.status >= 400:
                    raise _error(response.status, await response.aread())
                yield response
        except (httpcore2.NetworkError, httpcore2.TimeoutException, httpcore2.ProtocolError) as error:
            what = self._backend.ended or str(error) or type(error).__name__
            raise GuestUnreachable(
                f"the guest agent did not answer {method} {target.split('?')[0]}: {what}"
            ) from error
        finally:
            self.in_flight -= 1
            self.last_used = asyncio.get_running_loop().time()

    async def call(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        user: str | None = None,
        body: Body | None = None,
        timeout: float | None = 30.0,
        connect_timeout: float = CONNECT_TIMEOUT,
    ) -> Any:
        """One request with a JSON response."""
        try:
            async with (
                asyncio.timeout(timeout),
                self.stream(
                    method, target, headers=headers, user=user, body=body, connect_timeout=connect_timeout
                ) as response,
            ):
                return json.loads(await response.aread() or b"{}")
        except TimeoutError as error:
            where = f"{method} {target.split('?')[0]}"
            raise GuestUnreachable(f"the guest agent did not answer {where} within {timeout:g} s") from error


def _error(status: int, body: bytes) -> GuestError:
    try:
        answer = json.loads(body)
        return GuestError(str(answer["code"]), str(answer["message"]))
    except (ValueError, KeyError, TypeError):
        return GuestError("internal", f"the guest agent answered with status {status}")
