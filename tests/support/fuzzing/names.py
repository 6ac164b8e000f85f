"""DNS queries of VMs, DNS answers about domains and about hosts of tenants, user names of SSH logins."""

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import cast
from unittest import mock

import dns.asyncbackend
import dns.asyncresolver
import dns.message
import dns.rcode

from stead.domains import verification
from stead.domains.errors import DnsUnavailable
from stead.edge.private_names import answer
from stead.edge.ssh.user_names import parse_user_name
from stead.repos.name_lookups import NameLookups
from support.fuzzing.runs import Feed, Target, in_event_loop

_SLOT = 7
_MEMBERS = [IPv4Address("10.0.0.2"), IPv4Address("10.0.0.3")]
_LARGEST_RECORDS = 64
"""Bytes that records of these names add to a query."""


_OPCODE, _CODE = 0x78, 0x0F


class _Table:
    def addresses(self, slot: int, label: str) -> Sequence[IPv4Address]:
        return _MEMBERS if label == "db" else ()

    def name(self, slot: int, address: IPv4Address) -> str | None:
        return "db.internal" if address == _MEMBERS[0] else None


@contextlib.contextmanager
def _queries() -> Iterator[Feed]:
    """An answer has the query's id, is not much longer than the query, and dnspython reads it."""

    def feed(data: bytes) -> None:
        made = answer(data, _SLOT, _Table(), lambda name: name == "stead.internal")
        if made is None:
            return
        assert made[:2] == data[:2] and made[2] & 0x80
        assert len(made) <= len(data) + _LARGEST_RECORDS
        if made[2] & _OPCODE:
            assert made[3] & _CODE == dns.rcode.NOTIMP
        else:
            dns.message.from_wire(made)

    yield feed


class _Server(asyncio.DatagramProtocol):
    """Answers with given bytes after the id and the question of a query."""

    def __init__(self) -> None:
        self.data = b""
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str | object, int]) -> None:
        assert self._transport is not None
        whole, rest = self.data[:1] == b"\1", self.data[1:]
        question = data[12 : data.index(b"\0", 12) + 5]
        made = data[:2] + (rest[2:] if whole else rest[2:12] + question + rest[12:])
        self._transport.sendto(made, address)


async def _no_pause(_self: object, _seconds: float) -> None:
    await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def _answers() -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(_Server, local_addr=("127.0.0.1", 0))
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers, resolver.port = ["127.0.0.1"], transport.get_extra_info("sockname")[1]

    async def feed(data: bytes) -> None:
        server.data = data
        with contextlib.suppress(DnsUnavailable):
            for record in await verification.lookup_txt("_code.example.com"):
                record.encode()

    with (
        mock.patch.object(dns.asyncresolver, "Resolver", lambda: resolver),
        mock.patch.object(type(dns.asyncbackend.get_default_backend()), "sleep", _no_pause),
        mock.patch.object(verification, "_TIMEOUT", 0.02),
    ):
        yield feed
    transport.close()


@contextlib.asynccontextmanager
async def _lookups() -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """A tenant's name server answers about the host of a webhook: with addresses, or it is an OSError."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        _Server, local_addr=("127.0.0.1", 0)
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(type(dns.asyncbackend.get_default_backend()), "sleep", _no_pause),
    ):
        resolvers = Path(folder) / "resolv.conf"
        resolvers.write_text("nameserver 127.0.0.1\n")
        port = transport.get_extra_info("sockname")[1]
        lookups = NameLookups(hosts=Path(folder) / "hosts", resolvers=resolvers, port=port, timeout=0.02)

        async def feed(data: bytes) -> None:
            server.data = data
            with contextlib.suppress(OSError):
                for address in await lookups.addresses("account", "host.example.com"):
                    assert str(ip_address(address)) == address

        yield feed
    transport.close()


@contextlib.contextmanager
def _user_names() -> Iterator[Feed]:
    def feed(data: bytes) -> None:
        found = parse_user_name(data.decode(errors="replace"))
        if found is None:
            return
        assert re.fullmatch("[a-z0-9]{1,20}", found.vm)
        assert found.token is None or re.fullmatch("[A-Za-z0-9_-]{1,512}", found.token)
        assert found.user is None or not re.search(r"[:,\s]", found.user)
        assert "token=" not in repr(found)

    yield feed


_DNS = (
    *(
        b"\2db\x08internal\0",
        b"\7in-addr\4arpa\0",
        b"\0\1\0\1",
        b"\0\x0c\0\1",
        b"\0\x10\0\1",
        b"\0\xff\0\xff",
    ),
    *(b"\xc0\x0c", b"\xc0\0", b"\xff\xff", b"\x3f", b"\0\0\x29\4\xd0\0\0\0\0\0\0", b"\1\0\0\1\0\0\0\0\0\0"),
    *(
        b"\0\5\0\1\0\0\0\x3c\0\2\xc0\x0c",
        b"\0\x10\0\1\0\0\0\x3c\0\4\3abc",
        b"\0\1\0\1\0\0\0\x3c\0\4\x0a\0\0\1",
        b"\0\x1c\0\1\0\0\0\x3c\0\x10" + bytes(15) + b"\1",
        b"\x83\x80",
        b"\x81\x80",
        b"\x81\x83",
    ),
)
_LOGINS = (b":", b",", b"+", b"vm", b"root", b"\0", b"\n", "ä".encode(), b"\xff", b"st_", b"a" * 300, b" ")

QUERIES = Target("dns-queries", _queries, _DNS, longest=1500, inputs=20_000)
LOOKUPS = Target("dns-answers", in_event_loop(_answers), _DNS, longest=4096, inputs=150)
HOSTS = Target("lookups", in_event_loop(_lookups), _DNS, longest=4096, inputs=150)
USER_NAMES = Target("ssh-user-names", _user_names, _LOGINS, longest=2048, inputs=50_000)
