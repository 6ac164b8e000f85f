"""Packets of the SSH gateway, whose process has no rights and parses what strangers send, to the server."""

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from stead.edge.ssh.messages import MAX_PACKET, MAX_TOKEN, Authenticate, FromGateway, OfClient, Sign
from stead.edge.ssh.packets import Packets, packet_pair
from support.fuzzing.runs import Target, in_event_loop

_DECODERS: tuple[msgspec.msgpack.Decoder[Any], ...] = (
    msgspec.msgpack.Decoder(OfClient),
    msgspec.msgpack.Decoder(FromGateway),
)
"""Of the link of a client and of the control socket; the first byte of an input is an index of these."""
_KNOWN = msgspec.msgpack.encode({"type": "Wake"}), msgspec.msgpack.encode({"type": "Pong"})
_MOST_SIGNED = 2000


def _check_bounds(message: object) -> None:
    match message:
        case Authenticate():
            assert len(message.vm) <= 20 and len(message.token) <= MAX_TOKEN and len(message.address) <= 64
            assert message.user is None or len(message.user) <= 256
            assert 0 <= message.port <= 65535 and len(message.trace) == 32
            assert message.token not in repr(message) or message.token in message.vm
        case Sign():
            assert len(message.data) <= _MOST_SIGNED


@contextlib.asynccontextmanager
async def _packets() -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """A packet is one message of a known kind, within its bounds, or it ends the link, once."""

    async def feed(data: bytes) -> None:
        index, packet = (data or b"\0")[0] % len(_DECODERS), data[1:]
        decoder, known = _DECODERS[index], _KNOWN[index]
        ours, theirs = packet_pair()
        received: list[Any] = []
        lost: list[bool] = []

        def receive(message: Any, passed: socket.socket | None) -> None:
            assert passed is None
            received.append(message)

        packets = Packets(ours, decoder, receive, lambda: lost.append(True))
        try:
            # What comes after a packet that ends the link is not read.
            for each in (known, packet or b"\0", known):
                theirs.send(each)
            packets.receive()
            assert len(received) == (1 if lost else 3) and len(lost) == (not packets.open)
            for message in received:
                _check_bounds(message)
                assert decoder.decode(msgspec.msgpack.encode(message)) == message
        finally:
            packets.close()
            theirs.close()

    yield feed


_AUTHENTICATE = {
    "type": "Authenticate",
    "vm": "abcdefghij0123456789",
    "user": None,
    "token": "stid_" + "x" * 43,
    "address": "192.0.2.1",
    "port": 1234,
    "trace": "0" * 32,
}
_TOKENS = (
    *(msgspec.msgpack.encode(each) for each in ("type", "vm", "user", "token", "address", "port", "trace")),
    *(msgspec.msgpack.encode({"type": each}) for each in ("Open", "LoggedIn", "Look", "Touch", "NewLink")),
    *(msgspec.msgpack.encode(each) for each in (None, -1, 65536, 1 << 63, 1.5, float("nan"), b"x" * 3000)),
    *(b"\x80", b"\x90", b"\xa0", b"\xc1", b"\xc4", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"),
    *(
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 2000,
        b"\x81\xa1a" * 500,
        b"\xd9\x01\xff",
        b"\xc9\xff\xff\xff\xff\1",
    ),
    msgspec.msgpack.encode(_AUTHENTICATE),
)

MESSAGES = Target("ssh-gateway", in_event_loop(_packets), _TOKENS, longest=MAX_PACKET // 4, inputs=10_000)
