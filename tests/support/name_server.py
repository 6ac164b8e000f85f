"""A DNS server that has one address for every name, and remembers the questions."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from typing import cast

_ADDRESS = 1


class NameServer(asyncio.DatagramProtocol):
    def __init__(self, known: IPv4Address) -> None:
        self.known = known
        self.asked: list[bytes] = []
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str | object, int]) -> None:
        assert self.transport is not None
        end = data.index(b"\0", 12) + 5
        question = data[12:end]
        self.asked.append(question)
        answers = question[-4:-2] == struct.pack("!H", _ADDRESS)
        head = data[:2] + struct.pack("!HHHHH", 0x8180, 1, answers, 0, 0)
        record = b"\xc0\x0c" + struct.pack("!HHIH", _ADDRESS, 1, 60, 4) + self.known.packed
        self.transport.sendto(head + question + (record if answers else b""), address)


def dns_socket(address: IPv4Address) -> socket.socket:
    """Port 53 of an address, in the network namespace of the calling thread."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    made.bind((str(address), 53))
    return made


@contextlib.asynccontextmanager
async def name_server(listening: socket.socket, known: IPv4Address) -> AsyncIterator[NameServer]:
    """Answer what arrives at a socket, during a block."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: NameServer(known), sock=listening
    )
    try:
        yield server
    finally:
        transport.close()
