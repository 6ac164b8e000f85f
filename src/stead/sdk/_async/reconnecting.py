"""A WebSocket that is opened again when it breaks."""

from collections import deque
from collections.abc import Callable

from stead.sdk._async.connection import AsyncConnection
from stead.sdk.blocking import async_event, async_lock, async_notify, async_sleep, async_wait
from stead.sdk.errors import NoAnswerInTime, ServerUnreachable, SessionClosed, SteadApiError
from stead.sdk.requests import Request
from stead.sdk.sockets import AsyncSocket, Callback, Closed, ConnectionClosed, async_socket, closed

DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each attempt to connect again."""
_QUEUED = 1 << 20
"""Bytes of messages that wait for the next connection."""


async def open_socket(connection: AsyncConnection, request: Request, *, pings: bool = True) -> AsyncSocket:
    """Open a WebSocket. A failure is repeated where that is safe, as for any request."""
    connection.check_open()
    attempt = 1
    while True:
        try:
            return await async_socket(connection.settings, request, pings=pings)
        except ServerUnreachable as error:
            delay = connection.policy.after_failure(
                attempt,
                sent=error.sent,
                idempotent=request.idempotent,
                timed_out=isinstance(error, NoAnswerInTime),
            )
            if delay is None:
                raise
        except SteadApiError as error:
            again = connection.policy.after_answer(
                attempt, error.status, error.code, {}, idempotent=request.idempotent
            )
            if again is None:
                raise
            delay = again
        attempt += 1
        await async_sleep(delay)


class AsyncReconnecting:
    """One connection after another to the same session, as the TypeScript SDK does it.

    A connection that ends before the session is replaced: up to 5 attempts, after 0.5 seconds, doubled each
    time up to 8. Messages that are sent meanwhile are queued.

    Args:
        again: returns the request of the next connection.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        socket: AsyncSocket,
        again: Callable[[], Request],
        *,
        reconnect: bool = True,
        on_disconnect: Callback | None = None,
        on_reconnect: Callback | None = None,
    ) -> None:
        self._connection = connection
        self._socket: AsyncSocket | None = socket
        self._again = again
        self._delays = DELAYS if reconnect else ()
        self._on_disconnect = on_disconnect
        self._on_reconnect = on_reconnect
        self._failed = 0
        self._outage = False
        self._queue: deque[str | bytes] = deque()
        self._lock = async_lock()
        self._closing = async_event()
        self._last = False
        self.greeting: list[str] = []
        """What a new connection begins with, before the queued messages."""
        self.closed: Closed | None = None
        """Why the first connection of the current outage, or the last one of all, ended."""

    @property
    def open(self) -> bool:
        """Whether messages can be sent, or are queued."""
        return not self._last and not self._closing.is_set()

    async def receive(self) -> str | bytes | None:
        """The next message; None after the last one, and after `aclose`.

        Raises the error that ends the attempts to connect again.
        """
        while not self._closing.is_set():
            socket = self._socket
            if socket is not None:
                try:
                    message = await socket.recv()
                except ConnectionClosed as error:
                    self._drop(socket, closed(error))
                    continue
                self._failed, self.closed = 0, None
                return message
            if self._last:
                return None
            if not self._outage:
                self._outage = True
                await async_notify(self._on_disconnect, self.closed)
            await self._reopen()
        return None

    def end(self) -> None:
        """The session has ended: the close of the connection follows, and is not a failure."""
        self._last = True

    async def send(self, message: str | bytes, *, keep: bool = True) -> None:
        """Send a message; while there is no connection, queue it, or with `keep` False drop it."""
        async with self._lock:
            if not self.open:
                raise SessionClosed("the session has ended, or this client has left it")
            delivered = self._socket is not None and await self._deliver(self._socket, message)
            if keep and not delivered:
                self._enqueue(message)

    async def aclose(self) -> None:
        """Close the connection. The session continues."""
        self._closing.set()
        socket = self._socket
        if socket is not None:
            await socket.close()

    def _drop(self, socket: AsyncSocket, why: Closed) -> None:
        if self._socket is socket:
            self._socket = None
            self.closed = self.closed or why

    def _enqueue(self, message: str | bytes) -> None:
        if sum(map(len, self._queue)) + len(message) > _QUEUED:
            raise ServerUnreachable(
                f"not connected, and {_QUEUED >> 10} KiB of input wait already", sent=False
            )
        self._queue.append(message)

    async def _reopen(self) -> None:
        """One more attempt. It returns if it may be repeated, and raises if it was the last."""
        if self._failed >= len(self._delays):
            raise ServerUnreachable(f"the connection to the session was lost: {self.closed}", sent=True)
        if await async_wait(self._closing, self._delays[self._failed]):
            return
        self._failed += 1
        try:
            socket = await async_socket(self._connection.settings, self._again())
        except ServerUnreachable:
            return
        except SteadApiError as error:
            if error.status >= 500 or error.retryable:
                return
            raise
        async with self._lock:
            if not self._closing.is_set():
                self._socket, self._outage = socket, False
                self._queue.extendleft(reversed(self.greeting))
                await self._deliver(socket)
        if self._closing.is_set():
            await socket.close()
        else:
            await async_notify(self._on_reconnect)

    async def _deliver(self, socket: AsyncSocket, *messages: str | bytes) -> bool:
        """Send what is queued, then these messages; False if the connection broke."""
        try:
            while self._queue:
                message = self._queue.popleft()
                try:
                    await socket.send(message)
                except ConnectionClosed:
                    self._queue.appendleft(message)
                    raise
            for message in messages:
                await socket.send(message)
        except ConnectionClosed as error:
            self._drop(socket, closed(error))
            return False
        return True
