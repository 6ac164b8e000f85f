"""Typed packets over a pair of Unix sockets, with file descriptors from the server to the gateway."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from stead.edge.ssh.messages import MAX_PACKET, Message

M = TypeVar("M", bound=Message)

_MAX_QUEUED = 1000
_READS = 64
"""Packets that are handled in one turn of the event loop."""


class ProtocolViolation(Exception):
    """The peer has sent what it must not."""


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep the bounds of packets, and end with each other."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in pair:
        end.setblocking(False)
    return pair


class Packets(Generic[M]):
    """One end of a pair. Its owner is called for each packet, and once when the other end is gone."""

    def __init__(
        self,
        link: socket.socket,
        decoder: msgspec.msgpack.Decoder[M],
        received: Callable[[M, socket.socket | None], None],
        lost: Callable[[], None],
        *,
        descriptors: bool = False,
    ) -> None:
        """`received` may raise ProtocolViolation: the link is closed then. It owns the socket that it gets.

        Without `descriptors`, those that the peer sends are dropped.
        """
        self._link = link
        self._decoder = decoder
        self._received = received
        self._lost = lost
        self._descriptors = descriptors
        self._queue: deque[bytes] = deque()
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._loop.add_reader(link, self.receive)

    @property
    def open(self) -> bool:
        return self._open

    def receive(self) -> None:
        """Handle what has arrived. It is called when there is something, and may be called at any time."""
        for _ in range(_READS):
            if not self._open:
                return
            try:
                data, passed = self._read()
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, passed = b"", None
            if not data:
                self.close()
                return
            try:
                self._received(self._decoded(data), passed)
            except ProtocolViolation:
                self.close()

    def _decoded(self, data: bytes) -> M:
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            # msgspec has no errors of its own for text that is not UTF-8, and for lists in lists without end.
            raise ProtocolViolation from error

    def _read(self) -> tuple[bytes, socket.socket | None]:
        if not self._descriptors:
            return self._link.recv(MAX_PACKET), None
        data, passed, _, _ = socket.recv_fds(self._link, MAX_PACKET, 1)
        for extra in passed[1:]:
            os.close(extra)
        return data, socket.socket(fileno=passed[0]) if passed else None

    def send(self, message: Message, passed: socket.socket | None = None) -> None:
        """Send a packet. A peer that takes none is given up after a while."""
        if not self._open:
            return
        data = msgspec.msgpack.encode(message)
        if self._queue and passed is None:
            self._queue.append(data)
            if len(self._queue) > _MAX_QUEUED:
                self.close()
            return
        try:
            if passed is None:
                self._link.send(data)
            else:
                socket.send_fds(self._link, [data], [passed.fileno()])
        except BlockingIOError:
            if passed is not None:
                # It would have to be kept open meanwhile, and the gateway reads at once as a rule.
                self.close()
                return
            self._queue.append(data)
            self._loop.add_writer(self._link, self._flush)
        except OSError:
            self.close()

    def _flush(self) -> None:
        try:
            while self._queue:
                self._link.send(self._queue[0])
                self._queue.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        self._loop.remove_writer(self._link)

    def close(self) -> None:
        """Close the link; its owner is told."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._link)
            self._loop.remove_writer(self._link)
            self._link.close()
            self._lost()
