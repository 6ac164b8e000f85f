"""Names in VPCs: the rules that find the queries for them, and real packets of guests, also hostile ones."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

import dns.message
import dns.rcode
import pytest
import pytest_asyncio

from stead import addresses
from stead.edge.names import GuestResolver
from stead.host import network as host_network
from stead.host.firewall import PRIVATE_NAMES_PORT
from stead.host.interface import Nic, PrivateNetwork, VmSlot
from stead.host.network import Network
from stead.settings import Settings
from support.installations import other_settings
from support.links import ip
from support.name_server import dns_socket, name_server
from support.vpc_guests import Guest, guest

pytestmark = pytest.mark.root

CIDR = IPv4Network("10.78.0.0/24")
OURS, THEIRS = PrivateNetwork("vpc-ours", 1, CIDR), PrivateNetwork("vpc-theirs", 2, CIDR)
OUR_SLOT, THEIR_SLOT, OUTSIDE_SLOT = 11, 21, 30
DB, GONE = IPv4Address("10.78.0.9"), IPv4Address("10.78.0.10")
UPSTREAM = IPv4Address(f"10.203.{os.getpid() % 256}.53")
PUBLIC = IPv4Address("192.0.2.80")
"""What the host's resolver answers to every question about an address."""


class Table:
    """Names of our VPC: `db`, and every name without a vowel."""

    def addresses(self, slot: int, label: str) -> Sequence[IPv4Address]:
        known = label == "db" or not set(label) & set("aeiou")
        return [DB] if slot == OUR_SLOT and known else ()

    def name(self, slot: int, address: IPv4Address) -> str | None:
        return (
            f"vm-{str(address).replace('.', '-')}.internal" if slot == OUR_SLOT and address != GONE else None
        )


@dataclass
class VpcPair:
    ours: Guest
    theirs: Guest
    outside: Guest
    asked: list[bytes]
    """What the host's resolver was asked."""


@pytest_asyncio.fixture(scope="module")
async def vpc_pair(settings: Settings) -> AsyncIterator[VpcPair]:
    ip("addr", "add", f"{UPSTREAM}/32", "dev", "lo")
    try:
        with pytest.MonkeyPatch.context() as patch, other_settings(settings) as other:
            patch.setattr(addresses, "resolvers", lambda: [UPSTREAM])
            own = await Network.open(other)
            try:
                await own.vpcs.open([OURS, THEIRS], [], lambda machine: None)
                async with (
                    name_server(dns_socket(UPSTREAM), PUBLIC) as upstream,
                    guest(own, VmSlot("ours", OUR_SLOT, Nic(OURS.id, CIDR[1]))) as ours,
                    guest(own, VmSlot("theirs", THEIR_SLOT, Nic(THEIRS.id, CIDR[1]))) as theirs,
                    guest(own, VmSlot("outside", OUTSIDE_SLOT)) as outside,
                    GuestResolver.running(other, own, ("style.dev", "stead.internal"), Table()),
                ):
                    yield VpcPair(ours, theirs, outside, upstream.asked)
            finally:
                await own.close()
                await host_network.remove(other)
    finally:
        ip("addr", "delete", f"{UPSTREAM}/32", "dev", "lo")


def datagrams() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


async def exchange(source: Guest, packet: bytes, port: int = 53) -> bytes:
    with await source.side.thread.call(datagrams) as link:
        link.connect((str(addresses.GATEWAY), port))
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(link, packet)
        return await loop.sock_recv(link, 4096)


async def ask(source: Guest, name: str, kind: str = "A") -> tuple[str, list[str]]:
    """The code and the records of an answer."""
    query = dns.message.make_query(name, kind)
    async with asyncio.timeout(60):
        while True:
            # A query may be lost, as on any network: a guest asks again.
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(3):
                    found = dns.message.from_wire(await exchange(source, query.to_wire()))
                    break
    assert query.is_response(found)
    return dns.rcode.to_text(found.rcode()), [str(each) for section in found.answer for each in section]


async def test_a_name_is_seen_in_its_vpc_only(vpc_pair: VpcPair) -> None:
    assert await ask(vpc_pair.ours, "db.internal") == ("NOERROR", [str(DB)])
    assert await ask(vpc_pair.ours, "dB.iNtErNaL") == ("NOERROR", [str(DB)])
    assert await ask(vpc_pair.ours, "db.internal", "AAAA") == ("NOERROR", [])
    for source, name in (
        (vpc_pair.ours, "none.internal"),
        (vpc_pair.ours, "a.db.internal"),
        (vpc_pair.theirs, "db.internal"),
        (vpc_pair.outside, "db.internal"),
    ):
        for kind in ("A", "AAAA"):
            assert await ask(source, name, kind) == ("NXDOMAIN", []), (source.vm_slot, name)
    assert not [each for each in vpc_pair.asked if b"internal" in each.lower()]


async def test_names_of_every_length_are_found(vpc_pair: VpcPair) -> None:
    for size in range(1, 64):
        assert await ask(vpc_pair.ours, f"{'x' * size}.internal") == ("NOERROR", [str(DB)])


async def test_other_names_are_resolved_as_ever(vpc_pair: VpcPair) -> None:
    for source in (vpc_pair.ours, vpc_pair.outside):
        for name in ("example.com", "internal.example", "xinternal", "db.internals", "xx.xinternal"):
            assert await ask(source, name) == ("NOERROR", [str(PUBLIC)])
        for name in ("style.dev", "app.style.dev", "stead.internal", "app.stead.internal"):
            assert await ask(source, name) == ("NOERROR", [str(addresses.GATEWAY)])


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3",
        "10.78.0.9",
        "10.255.255.255",
        "172.16.0.1",
        "172.31.255.10",
        "192.168.1.2",
        "192.168.100.200",
    ],
)
async def test_a_private_address_has_a_name(vpc_pair: VpcPair, address: str) -> None:
    reverse = IPv4Address(address).reverse_pointer
    expected = f"vm-{address.replace('.', '-')}.internal."
    assert await ask(vpc_pair.ours, reverse, "PTR") == ("NOERROR", [expected])
    assert await ask(vpc_pair.theirs, reverse, "PTR") == ("NXDOMAIN", [])
    asked = dns.message.make_query(reverse, "PTR").to_wire()[12:]
    assert asked not in vpc_pair.asked
    # That of a VM without a VPC is for the host's resolver.
    assert expected not in (await ask(vpc_pair.outside, reverse, "PTR"))[1]
    assert asked in vpc_pair.asked
    vpc_pair.asked.remove(asked)


@pytest.mark.parametrize("address", ["8.8.8.8", "172.15.0.1", "172.32.0.1", "192.169.0.1", "110.0.0.1"])
async def test_names_of_public_addresses_are_asked_of_the_host_s_resolver(
    vpc_pair: VpcPair, address: str
) -> None:
    before = len(vpc_pair.asked)
    reverse = IPv4Address(address).reverse_pointer
    assert await ask(vpc_pair.ours, reverse, "PTR") == ("NOERROR", [])
    assert len(vpc_pair.asked) > before


async def test_an_address_without_a_vm_has_no_name(vpc_pair: VpcPair) -> None:
    assert await ask(vpc_pair.ours, GONE.reverse_pointer, "PTR") == ("NXDOMAIN", [])


async def test_hostile_packets_do_not_stop_the_answers(vpc_pair: VpcPair) -> None:
    query = dns.message.make_query("db.internal", "A").to_wire()
    packets = [
        query[:12] + b"\x02db\x08internal\0",  # no type
        query[:2] + b"\xff\xff" + query[4:],  # an answer, of another kind
        query[:4] + b"\xff\xff" * 4 + query[12:],
        query + b"\xc0\x0c" * 600,
        query[:12] + b"\x02\xff\xfe\x08internal\0\0\1\0\1",
        *(query[:size] for size in range(len(query))),
    ]
    with await vpc_pair.ours.side.thread.call(datagrams) as link:
        link.connect((str(addresses.GATEWAY), 53))
        for packet in packets:
            with contextlib.suppress(OSError):
                link.send(packet)
    assert await ask(vpc_pair.ours, "db.internal") == ("NOERROR", [str(DB)])
    assert await ask(vpc_pair.ours, "example.com") == ("NOERROR", [str(PUBLIC)])


async def test_the_port_of_private_names_is_closed_to_vms(vpc_pair: VpcPair) -> None:
    """Queries there would not be counted. They are let through at port 53 only."""
    query = dns.message.make_query("db.internal", "A").to_wire()
    assert await ask(vpc_pair.ours, "db.internal") == ("NOERROR", [str(DB)])
    for source in (vpc_pair.ours, vpc_pair.outside):
        with pytest.raises((TimeoutError, OSError)):
            async with asyncio.timeout(1):
                await exchange(source, query, PRIVATE_NAMES_PORT)
