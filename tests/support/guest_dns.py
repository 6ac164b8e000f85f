"""Links that stand for VMs, and DNS queries that they send to the resolver of an installation."""

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import IPv4Address

import pytest

from stead import addresses
from stead.deadlines import scaled
from stead.host import network
from stead.host.network import Network, namespace_path
from stead.processes import ProcessId, of_user
from stead.settings import Settings
from support.installations import other_settings
from support.links import Side, ip, namespace, plug_in
from support.name_server import NameServer, dns_socket, name_server

A, AAAA, TXT = 1, 28, 16
NO_ERROR = 0
UPSTREAM = IPv4Address(f"10.202.{os.getpid() % 256}.53")
"""The host's resolver."""
PUBLIC = IPv4Address("192.0.2.80")
"""What the host's resolver answers to every question about an address."""


def _question(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return labels + b"\0" + struct.pack("!HH", kind, 1)


def query_for(name: str, kind: int = A) -> bytes:
    return struct.pack("!HHHHHH", secrets.randbits(16), 0x0100, 1, 0, 0, 0) + _question(name, kind)


@dataclass(frozen=True)
class Answer:
    code: int
    addresses: list[IPv4Address]


def parsed_answer(answer: bytes, query: bytes) -> Answer:
    assert answer[:2] == query[:2]
    count = struct.unpack("!H", answer[6:8])[0]
    records, found = answer[len(query) :], []
    for _ in range(count):
        kind, _, _, size = struct.unpack("!HHIH", records[2:12])
        if kind == A:
            found.append(IPv4Address(records[12 : 12 + size]))
        records = records[12 + size :]
    return Answer(answer[3] & 15, found)


@contextlib.asynccontextmanager
async def serving_dns(address: IPv4Address, known: IPv4Address) -> AsyncIterator[NameServer]:
    ip("addr", "add", f"{address}/32", "dev", "lo")
    try:
        async with name_server(dns_socket(address), known) as resolver:
            yield resolver
    finally:
        ip("addr", "delete", f"{address}/32", "dev", "lo")


@dataclass(frozen=True)
class NetworkWithTwoVms:
    """An installation's network with two VMs."""

    settings: Settings
    network: Network
    guests: list[Side]
    upstream: NameServer

    async def ask_once(self, name: str, kind: int = A, guest: int = 0) -> Answer:
        """One query; TimeoutError if it, or its answer, is lost."""
        query = query_for(name, kind)
        with await self.guests[guest].thread.call(datagram_socket) as asking:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(scaled(5)):
                await loop.sock_sendto(asking, query, (str(addresses.GATEWAY), 53))
                return parsed_answer(await loop.sock_recv(asking, 4096), query)

    async def ask(self, name: str, kind: int = A, guest: int = 0) -> Answer:
        query = query_for(name, kind)
        with await self.guests[guest].thread.call(datagram_socket) as asking:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(60):
                while True:
                    await loop.sock_sendto(asking, query, (str(addresses.GATEWAY), 53))
                    # Again, as any resolver: a query is lost while dnsmasq is restarted.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1):
                            return parsed_answer(await loop.sock_recv(asking, 4096), query)

    async def address_of(self, name: str) -> IPv4Address | None:
        """The address of a name; None without an answer."""
        try:
            return (await self.ask(name)).addresses[0]
        except (TimeoutError, OSError, IndexError):
            return None

    def processes(self) -> list[ProcessId]:
        return list(of_user(self.settings.resolver_uid))


def datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


@contextlib.asynccontextmanager
async def network_with_two_vms(settings: Settings) -> AsyncIterator[NetworkWithTwoVms]:
    """The network of another installation on this host, whose only name server is `UPSTREAM`."""
    async with serving_dns(UPSTREAM, PUBLIC) as upstream:
        with (
            pytest.MonkeyPatch.context() as patch,
            other_settings(settings) as other,
            contextlib.ExitStack() as stack,
        ):
            patch.setattr(addresses, "resolvers", lambda: [UPSTREAM])
            own = await Network.open(other)
            try:
                guests = [stack.enter_context(namespace(role)) for role in ("a", "b")]
                for slot, guest in enumerate(guests):
                    tap, address = addresses.data_tap(slot), str(addresses.machine_address(slot))
                    plug_in(namespace_path(other).name, tap, guest, address)
                yield NetworkWithTwoVms(other, own, guests, upstream)
            finally:
                await own.close()
                await network.remove(other)
