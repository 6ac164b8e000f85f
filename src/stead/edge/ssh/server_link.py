"""The gateway's end of the link to the server, by which one client is let into one VM."""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from stead.edge.ssh.messages import (
    Accepted,
    Asleep,
    Authenticate,
    Awake,
    EndClient,
    Failed,
    Hold,
    Leave,
    LoggedIn,
    Look,
    Message,
    NotWoken,
    OfServer,
    Open,
    Opened,
    Refused,
    Sign,
    Signed,
    Touch,
    Wake,
)
from stead.edge.ssh.packets import Packets, ProtocolViolation
from stead.errors import SteadError

_Answer = tuple[Message, socket.socket | None]

_DECODER = msgspec.msgpack.Decoder(OfServer)
_TOUCH_INTERVAL = 1.0
"""Seconds between two reports that the client is active."""
_HOLD_LONGER = 0.5
"""Seconds for which the VM is held after a request was answered: the next one may come at once."""
_GONE = "the server is restarting"
_MAX_REASON = 1000


class VmUnreachable(SteadError):
    """The VM cannot be used; the message is for the client, which may use this VM."""


@dataclass(frozen=True)
class OpenedVm:
    """A connection to the SSH server of a VM, and the keys of both ends."""

    connection: socket.socket
    host_keys: list[str]
    public_key: bytes


class ServerLink:
    def __init__(self, link: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._packets: Packets[OfServer] = Packets(
            link, _DECODER, self._received, self._lost, descriptors=True
        )
        self._answers: deque[asyncio.Future[_Answer]] = deque()
        """For requests that the server has not answered, in their order."""
        self._woken: asyncio.Future[None] | None = None
        self._holds = 0
        self._unholding: asyncio.TimerHandle | None = None
        self._touched = float("-inf")
        self._touching: asyncio.TimerHandle | None = None
        self._looking = False
        self.suspended: asyncio.Future[str] = self._loop.create_future()
        """Done while the VM does not run, with the reason."""
        self.on_awake: Callable[[], None] = lambda: None
        self.on_end: Callable[[str], None] = lambda reason: None
        """Called when the client must be disconnected, with the reason."""

    @property
    def asleep(self) -> bool:
        """Whether the VM does not run, by all that the server has said up to now."""
        self._packets.receive()
        return self.suspended.done()

    def close(self, reason: str) -> None:
        """The client has left."""
        self.on_end = lambda reason: None
        self._packets.send(Leave(reason[:_MAX_REASON]))
        self._packets.close()

    def catch_up(self) -> None:
        """Handle what the server has said: why a connection to the VM has ended, for one."""
        self._packets.receive()

    # Requests

    async def authenticate(self, request: Authenticate) -> Accepted | Refused:
        answer, _ = await self._ask(request)
        if isinstance(answer, Accepted | Refused):
            return answer
        raise VmUnreachable(_GONE)

    async def open(self) -> OpenedVm:
        """Connect to the VM; it is woken or started. Raises VmUnreachable."""
        answer, connection = await self._ask(Open())
        if isinstance(answer, Opened) and connection is not None:
            return OpenedVm(connection, answer.host_keys, answer.public_key)
        raise VmUnreachable(answer.reason if isinstance(answer, Failed) else _GONE)

    async def sign(self, data: bytes) -> bytes:
        answer, _ = await self._ask(Sign(data))
        if isinstance(answer, Signed):
            return answer.value
        raise VmUnreachable(answer.reason if isinstance(answer, Failed) else _GONE)

    async def _ask(self, message: Message) -> _Answer:
        if not self._packets.open:
            raise VmUnreachable(_GONE)
        answer: asyncio.Future[_Answer] = self._loop.create_future()
        self._answers.append(answer)
        self._packets.send(message)
        return await answer

    def logged_in(self) -> None:
        self._packets.send(LoggedIn())

    # Use of the VM

    async def wake(self) -> None:
        """Wait until the VM runs. Concurrent wakes are one. Raises VmUnreachable."""
        if self._woken is None:
            self._woken = self._loop.create_future()
            self._packets.send(Wake())
        await asyncio.shield(self._woken)

    def look(self) -> None:
        """Ask whether another use has woken the VM."""
        if not self._looking:
            self._looking = True
            self._packets.send(Look())

    def touch(self) -> None:
        """Report that the client is active, not more often than each second."""
        if self._touching is None:
            wait = self._touched + _TOUCH_INTERVAL - self._loop.time()
            if wait > 0:
                self._touching = self._loop.call_later(wait, self._report)
            else:
                self._report()

    def _report(self) -> None:
        self._touching, self._touched = None, self._loop.time()
        self._packets.send(Touch())

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Inside the block, the VM is not suspended for being idle."""
        self._holds += 1
        if self._unholding is not None:
            self._unholding.cancel()
            self._unholding = None
        elif self._holds == 1:
            self._packets.send(Hold(True))
        try:
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._unholding = self._loop.call_later(_HOLD_LONGER, self._unhold)

    def _unhold(self) -> None:
        self._unholding = None
        self._packets.send(Hold(False))

    # What the server says

    def _received(self, message: OfServer, passed: socket.socket | None) -> None:
        match message:
            case Asleep():
                if not self.suspended.done():
                    self.suspended.set_result(message.reason)
                self._looking = False
            case Awake():
                if self.suspended.done():
                    self.suspended = self._loop.create_future()
                self._finish_wake(None)
                self.on_awake()
            case NotWoken():
                self._finish_wake(VmUnreachable(message.reason))
            case EndClient():
                self.on_end(message.reason)
            case _:
                self._answered(message, passed)

    def _answered(self, message: Message, passed: socket.socket | None) -> None:
        answer = self._answers.popleft() if self._answers else None
        if isinstance(message, Opened) and self.suspended.done():
            self.suspended = self._loop.create_future()
        if answer is not None and not answer.done():
            answer.set_result((message, passed))
            return
        # The caller has left meanwhile.
        if passed is not None:
            passed.close()
        if answer is None:
            raise ProtocolViolation

    def _finish_wake(self, error: SteadError | None) -> None:
        woken, self._woken = self._woken, None
        self._looking = False
        if woken is not None and not woken.done():
            if error is None:
                woken.set_result(None)
            else:
                woken.set_exception(error)
                # Every waiter may have left.
                woken.exception()

    def _lost(self) -> None:
        for timer in (self._touching, self._unholding):
            if timer is not None:
                timer.cancel()
        self._finish_wake(VmUnreachable(_GONE))
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(VmUnreachable(_GONE))
                answer.exception()
        self.on_end(_GONE)
