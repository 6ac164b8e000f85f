"""Packets of many protocols, each with a label in its payload, and where they arrive."""

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address

from stead.host.namespaces import NamespaceThread

PORT = 7000
IPV4, ARP, IPV6 = 0x0800, 0x0806, 0x86DD
_UDP6_SOURCE = IPv6Address("fe80::7")
_NUMBERS = {"tcp": 6, "udp": 17, "icmp": 1, "gre": 47, "sctp": 132}
PROTOCOLS = (*_NUMBERS, "fragments")
_LABEL = re.compile(rb"<<([^>]+)>>")
_EVERYTHING = 0x0003
_OUTGOING = 4
_FRAGMENT = 1200


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _ipv4(number: int, source: IPv4Address, target: IPv4Address, body: bytes, offset: int = 0) -> bytes:
    """A packet; `offset` has the fragment's place and flag."""
    head = [0x45, 0, 20 + len(body), 0x1234, offset, 64, number, 0, source.packed, target.packed]
    form = "!BBHHHBBH4s4s"
    head[7] = _checksum(struct.pack(form, *head))
    return struct.pack(form, *head) + body


def ipv4(protocol: str, source: IPv4Address, target: IPv4Address, label: bytes) -> list[bytes]:
    """The packets of a probe: two for `fragments`, each with the label."""
    number = _NUMBERS.get(protocol, 17)
    if protocol == "tcp":
        pseudo = source.packed + target.packed + struct.pack("!HH", 6, 20 + len(label))
        head = struct.pack("!HHIIHHHH", 40_000, PORT, 1, 0, 0x5002, 65_535, 0, 0)
        sum_ = _checksum(pseudo + head + label)
        body = head[:16] + struct.pack("!H", sum_) + head[18:] + label
    elif protocol == "udp":
        body = struct.pack("!HHHH", 40_000, PORT, 8 + len(label), 0) + label
    elif protocol == "icmp":
        echo = struct.pack("!BBHHH", 8, 0, 0, 7, 1) + label
        body = echo[:2] + struct.pack("!H", _checksum(echo)) + echo[4:]
    elif protocol == "sctp":
        # The label is a parameter of the one chunk, INIT.
        parameter = struct.pack("!HH", 0x8000, 4 + len(label)) + label
        first = struct.pack("!BBHIIHHI", 1, 0, 20 + len(parameter), 1, 65_535, 1, 1, 1)
        chunks = first + parameter + b"\0" * (-len(parameter) % 4)
        head = struct.pack("!HHI", 40_000, PORT, 0)
        body = head + struct.pack("<I", _crc32c(head + bytes(4) + chunks)) + chunks
    elif protocol == "gre":
        body = struct.pack("!HH", 0, IPV4) + label
    else:
        text = (label * _FRAGMENT)[: _FRAGMENT - 8] + label * 3
        body = struct.pack("!HHHH", 40_000, PORT, 8 + len(text), 0) + text
        first = _ipv4(number, source, target, body[:_FRAGMENT], 0x2000)
        return [first, _ipv4(number, source, target, body[_FRAGMENT:], _FRAGMENT // 8)]
    return [_ipv4(number, source, target, body)]


def ipv6(target: IPv6Address, label: bytes) -> bytes:
    """A UDP datagram."""
    pseudo = _UDP6_SOURCE.packed + target.packed + struct.pack("!II", 8 + len(label), 17)
    head = struct.pack("!HHH", 40_000, PORT, 8 + len(label))
    body = head + struct.pack("!H", _checksum(pseudo + head + bytes(2) + label)) + label
    return struct.pack("!IHBB", 6 << 28, len(body), 17, 64) + _UDP6_SOURCE.packed + target.packed + body


def arp(source: IPv4Address, target: IPv4Address, mac: str, label: bytes) -> bytes:
    """Who has this address? The label is in the padding."""
    head = struct.pack("!HHBBH", 1, IPV4, 6, 4, 1)
    return head + _mac(mac) + source.packed + bytes(6) + target.packed + label


@dataclass
class Seen:
    """Where labels were seen: the parties that got them, and the parties that sent them."""

    arrived: dict[str, set[str]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)

    def note(self, party: str, data: bytes, *, outgoing: bool) -> None:
        for label in {found.decode() for found in _LABEL.findall(data)}:
            if outgoing:
                self.left.add(label)
            # Answers and errors quote what the party itself sent.
            elif not label.startswith(f"{party} "):
                self.arrived.setdefault(label, set()).add(party)


def label_of(source: str, target: str, protocol: str) -> str:
    return f"{source} to {target} by {protocol}"


def marked(label: str) -> bytes:
    return f"<<{label}>>".encode()


@dataclass(frozen=True)
class Wire:
    """An interface that a party sends frames on; without MAC addresses for a tunnel."""

    socket: socket.socket
    name: str
    source: str | None = None
    target: str | None = None

    def send(self, kind: int, packet: bytes, target: str | None = None) -> None:
        if self.source is None or self.target is None:
            self.socket.sendto(packet, (self.name, kind))
            return
        frame = _mac(target or self.target) + _mac(self.source) + struct.pack("!H", kind) + packet
        self.socket.sendto(frame, (self.name, kind))


@contextlib.asynccontextmanager
async def watched(
    seen: Seen, party: str, thread: NamespaceThread, interface: str, *, frames: bool = True
) -> AsyncIterator[socket.socket]:
    """Note everything that passes an interface; yields a socket that sends on it."""
    kind = socket.SOCK_RAW if frames else socket.SOCK_DGRAM

    def make(protocol: int) -> socket.socket:
        made = socket.socket(socket.AF_PACKET, kind, socket.htons(protocol))
        made.bind((interface, protocol))
        return made

    # A socket is not shown what it sends itself.
    with await thread.call(lambda: make(0)) as sender:
        async with _reading(seen, party, [await thread.call(lambda: make(_EVERYTHING))]):
            yield sender


@contextlib.asynccontextmanager
async def delivered(
    seen: Seen, party: str, thread: NamespaceThread, interface: str | None = None
) -> AsyncIterator[None]:
    """Note what a namespace takes for itself, after its rules."""

    def make() -> list[socket.socket]:
        made = [socket.socket(socket.AF_INET, socket.SOCK_RAW, number) for number in _NUMBERS.values()]
        made += [socket.socket(socket.AF_INET6, socket.SOCK_RAW, 17)]
        for each in made:
            if interface is not None:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        return made

    async with _reading(seen, party, await thread.call(make)):
        yield


@contextlib.asynccontextmanager
async def _reading(seen: Seen, party: str, sockets: Sequence[socket.socket]) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()

    def read(link: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, address = link.recvfrom(70_000)
                outgoing = link.family == socket.AF_PACKET and address[2] == _OUTGOING
                seen.note(party, data, outgoing=outgoing)

    with contextlib.ExitStack() as stack:
        for each in sockets:
            stack.enter_context(each)
            each.setblocking(False)
            loop.add_reader(each, read, each)
            stack.callback(loop.remove_reader, each)
        yield
