"""The rules of the taps' namespace and of the host, on links that stand for those of VMs."""

import asyncio
import contextlib
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
import pytest_asyncio
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple, NFCTSocket

from stead.addresses import AGENT_ADDRESS, AGENT_PORT, GATEWAY, HOST_LINK_ADDRESS, NOT_THE_INTERNET
from stead.host.connections import (
    delete_connections,
    delete_each,
    delete_tracked,
    translated_connections,
)
from stead.host.firewall import MAX_CONNECTIONS, host_rules, namespace_rules, routing_rules
from stead.host.sockets import destroy_connections, destroy_orphans
from support.links import CERTAIN, PROBE, Side, echoed, echoing, link, namespace, plug_in
from support.waiting import until

pytestmark = pytest.mark.root
_PORT = 40_000
_SLOW = b"slow"
_TRACKED_OF_VMS = 131_072
_LINKS = ("sm0", "sm1")


async def _bound(side: Side, link: str, address: str, port: int) -> socket.socket:
    """A socket bound to a link-local address of a side."""

    def bind() -> socket.socket:
        made = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port, 0, socket.if_nametoindex(link)))
        return made

    return await side.thread.call(bind)


async def _connected(
    side: Side, link: str, source: tuple[str, int], target: tuple[str, int], wait: float = CERTAIN
) -> socket.socket:
    made = await _bound(side, link, *source)
    index = await side.thread.call(lambda: socket.if_nametoindex(link))
    try:
        async with asyncio.timeout(wait):
            await asyncio.get_running_loop().sock_connect(made, (*target, 0, index))
    except BaseException:
        made.close()
        raise
    return made


@dataclass(frozen=True)
class Network:
    host: Side
    guests: list[Side]


@pytest.fixture
def network() -> Iterator[Network]:
    """The host's namespace with its rules, and two guests behind management links with the same addresses."""
    with contextlib.ExitStack() as stack:
        host, *guests = [stack.enter_context(namespace(role)) for role in ("h", "a", "b")]
        for name, guest in zip(_LINKS, guests, strict=True):
            link(host, name, guest, name)
            for side, address in ((host, HOST_LINK_ADDRESS), (guest, AGENT_ADDRESS)):
                side.ip("addr", "add", f"{address}/64", "dev", name, "nodad")
        yield Network(host, guests)


@dataclass(frozen=True)
class Slow:
    """An answer that waits."""

    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


@contextlib.asynccontextmanager
async def _echoing(side: Side, link: str, address: str, port: int) -> AsyncIterator[Slow]:
    slow = Slow()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            if data == _SLOW:
                slow.arrived.set()
                await slow.released.wait()
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, sock=await _bound(side, link, address, port)):
        yield slow


async def _echoed(link: socket.socket, data: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        await loop.sock_sendall(link, data)
        return await loop.sock_recv(link, 100)


def _load_rules(network: Network) -> None:
    network.host.load(namespace_rules("up0", [], [], _TRACKED_OF_VMS))


async def test_connections_to_two_vms_from_one_port_do_not_disturb_each_other(network: Network) -> None:
    """Their packets have the same addresses and ports, and differ in the interface only."""
    _load_rules(network)
    for state in ("fin_wait", "last_ack", "time_wait", "close"):
        await network.host.sysctl(f"net/netfilter/nf_conntrack_tcp_timeout_{state}", "1")
    agent, here = (AGENT_ADDRESS, AGENT_PORT), (HOST_LINK_ADDRESS, _PORT)
    async with contextlib.AsyncExitStack() as stack:
        slow, _ = [
            await stack.enter_async_context(_echoing(guest, link, *agent))
            for link, guest in zip(_LINKS, network.guests, strict=True)
        ]
        with await _connected(network.host, "sm0", here, agent) as first:
            answer = asyncio.create_task(_echoed(first, _SLOW))
            async with asyncio.timeout(60):
                await slow.arrived.wait()
            with await _connected(network.host, "sm1", here, agent) as second:
                assert await _echoed(second, b"two") == b"two"
            await asyncio.sleep(2)  # conntrack, were it in use, would forget a closed connection
            slow.released.set()
            assert await answer == _SLOW


async def test_a_vm_opens_no_connection_to_its_host(network: Network) -> None:
    """Not even from the agent's port, from which its answers come."""
    guest, agent = network.guests[0], (AGENT_ADDRESS, AGENT_PORT)
    before, after = (HOST_LINK_ADDRESS, _PORT), (HOST_LINK_ADDRESS, _PORT + 1)
    async with _echoing(network.host, "sm0", *before), _echoing(network.host, "sm0", *after):
        with await _connected(guest, "sm0", agent, before) as without_rules:
            assert await _echoed(without_rules, b"in") == b"in"
        _load_rules(network)
        with pytest.raises(TimeoutError):
            await _connected(guest, "sm0", agent, after, PROBE)


async def test_a_vm_does_not_fill_the_neighbour_table_of_its_host(network: Network) -> None:
    """Solicitations from addresses other than the agent's add no entries."""
    guest = network.guests[0]

    def solicit(sources: range) -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as frames:
            frames.bind(("sm0", 0))
            for number in sources:
                frames.send(_solicitation(f"fe80::1:{number:x}"))

    def entries() -> int:
        return network.host.ip("-6", "neigh", "show", "dev", "sm0").count("fe80::1:")

    await guest.thread.call(lambda: solicit(range(1, 20)))
    await until(lambda: entries() > 10, 60)
    _load_rules(network)
    before = entries()
    await guest.thread.call(lambda: solicit(range(1000, 1100)))
    # The agent's own solicitation is answered, after the others.
    network.guests[0].ip("-6", "neigh", "flush", "dev", "sm0")
    agent, here = (AGENT_ADDRESS, AGENT_PORT), (HOST_LINK_ADDRESS, _PORT)
    async with _echoing(guest, "sm0", *agent):
        with await _connected(network.host, "sm0", here, agent) as connection:
            assert await _echoed(connection, b"up") == b"up"
    assert entries() <= before


def _solicitation(source: str) -> bytes:
    """A frame that asks for the host's MAC address, with the source's own."""
    pack, mac = socket.inet_pton, bytes.fromhex("020000000001")
    target = pack(socket.AF_INET6, HOST_LINK_ADDRESS)
    group = pack(socket.AF_INET6, "ff02::1:ff00:0")[:13] + target[13:]
    body = bytes(4) + target + b"\x01\x01" + mac
    header = pack(socket.AF_INET6, source) + group
    icmp = b"\x87\x00" + bytes(2) + body
    total = sum(
        struct.unpack(
            f"!{(len(header) + 8 + len(icmp)) // 2}H", header + struct.pack("!II", len(icmp), 58) + icmp
        )
    )
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    icmp = icmp[:2] + struct.pack("!H", ~total & 0xFFFF) + icmp[4:]
    ethernet = b"\x33\x33" + group[12:] + mac + b"\x86\xdd"
    return ethernet + struct.pack("!IHBB", 6 << 28, len(icmp), 58, 255) + header + icmp


# VMs behind data taps, with a way out


_OUTSIDE = "192.0.2.2"
_GUESTS = ("100.64.0.4", "100.64.0.5")


@dataclass(frozen=True)
class Cables:
    """The namespace of the taps, two VMs in it, and the way out."""

    taps: Side
    guests: list[Side]
    outside: Side

    def load_rules(self, opened: tuple[IPv4Network, ...] = (), tracked: int = _TRACKED_OF_VMS) -> None:
        self.taps.load(namespace_rules("up0", NOT_THE_INTERNET, opened, tracked))

    def set_account(self, guest: int, group: int) -> None:
        self.taps.ip("link", "set", f"sd{guest}", "group", str(group))

    async def tracked(self) -> int:
        return int(await self.taps.thread.call(_TRACKED.read_text))


_TRACKED = Path("/proc/sys/net/netfilter/nf_conntrack_count")


@pytest_asyncio.fixture
async def cables() -> AsyncIterator[Cables]:
    with contextlib.ExitStack() as stack:
        taps, outside, *guests = [stack.enter_context(namespace(role)) for role in ("t", "o", "a", "b")]
        taps.ip("addr", "add", f"{GATEWAY}/32", "dev", "lo")
        link(taps, "up0", outside, "in0")
        taps.ip("addr", "add", "192.0.2.1/24", "dev", "up0")
        outside.ip("addr", "add", f"{_OUTSIDE}/24", "dev", "in0")
        # Replies to packets that were not translated would find their way.
        outside.ip("route", "add", "100.64.0.0/10", "via", "192.0.2.1")
        for number, (guest, address) in enumerate(zip(guests, _GUESTS, strict=True)):
            plug_in(taps.name, f"sd{number}", guest, address)
        await taps.sysctl("net/ipv4/ip_forward", "1")
        await taps.sysctl("net/ipv4/conf/all/rp_filter", "1")
        yield Cables(taps, guests, outside)


async def test_a_vm_reaches_the_edge_and_the_resolver_at_the_gateway_only(cables: Cables) -> None:
    guest = cables.guests[0]
    async with contextlib.AsyncExitStack() as stack:
        for port in (22, 53, 80, 443, 2019, 8600):
            await stack.enter_async_context(echoing(await cables.taps.listener("0.0.0.0", port)))
        own = "192.0.2.1"
        assert await guest.reaches(str(GATEWAY), 8600, wait=CERTAIN), "nothing is closed yet"
        assert await guest.reaches(own, 443, wait=CERTAIN)
        cables.load_rules()
        targets = [(str(GATEWAY), port) for port in (22, 53, 80, 443, 2019, 8600)]
        # The address of the way out is the host's too.
        assert await guest.reached(*targets, (own, 443)) == [(str(GATEWAY), port) for port in (53, 80, 443)]
        # The processes of the namespace reach each other, and VMs.
        assert await cables.taps.reaches("127.0.0.1", 2019, wait=CERTAIN)
        async with echoing(await guest.listener(_GUESTS[0], 3000)):
            with await cables.taps.connect(_GUESTS[0], 3000) as connection:
                assert await echoed(connection, b"hello") == b"hello"


async def test_a_vm_has_a_bounded_share_of_connection_tracking(cables: Cables) -> None:
    cables.load_rules()

    def flood() -> None:
        for _ in range(MAX_CONNECTIONS + 2000):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
                each.sendto(b"x", (_OUTSIDE, 9))

    await cables.guests[0].thread.call(flood)
    assert MAX_CONNECTIONS - 200 < await cables.tracked() <= MAX_CONNECTIONS
    async with echoing(await cables.outside.listener(_OUTSIDE, 7000)):
        assert not await cables.guests[0].reaches(_OUTSIDE, 7000)
        with await cables.guests[1].connect(_OUTSIDE, 7000) as connection:
            assert await echoed(connection, b"mine") == b"mine"


async def test_all_vms_together_have_a_bounded_share_of_connection_tracking(cables: Cables) -> None:
    """The edge has room for its own connections to VMs."""
    most = 1024
    cables.load_rules(tracked=most)
    for number, guest in enumerate(cables.guests):
        cables.set_account(number, 1 + number)
        await guest.thread.call(_flood)
    assert most // 2 < await cables.tracked() <= most
    async with echoing(await cables.guests[0].listener(_GUESTS[0], 3000)):
        with await cables.taps.connect(_GUESTS[0], 3000) as connection:
            assert await echoed(connection, b"hello") == b"hello"


async def test_an_account_has_a_bounded_share_of_connection_tracking(cables: Cables) -> None:
    """All its VMs together have half of what all VMs have."""
    most = 2048
    cables.load_rules(tracked=most)
    for number, guest in enumerate(cables.guests):
        cables.set_account(number, 1)
        await guest.thread.call(_flood)
    assert most // 4 < await cables.tracked() <= most // 2
    async with echoing(await cables.outside.listener(_OUTSIDE, 7000)):
        assert not await cables.guests[1].reaches(_OUTSIDE, 7000)
        cables.set_account(1, 2)
        with await cables.guests[1].connect(_OUTSIDE, 7000) as connection:
            assert await echoed(connection, b"mine") == b"mine"


def _flood() -> None:
    for _ in range(4000):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
            each.sendto(b"x", (_OUTSIDE, 9))


async def test_a_vm_has_few_dns_connections(cables: Cables) -> None:
    cables.load_rules()
    async with echoing(await cables.taps.listener(str(GATEWAY), 53)):
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(await cables.guests[0].connect(str(GATEWAY), 53))
            with pytest.raises(ConnectionRefusedError):
                await cables.guests[0].connect(str(GATEWAY), 53)
            stack.enter_context(await cables.guests[1].connect(str(GATEWAY), 53))


async def test_metadata_services_and_private_networks_are_closed(cables: Cables) -> None:
    closed = ("169.254.169.254", "168.63.129.16", "100.100.100.200", "10.1.2.3")
    async with contextlib.AsyncExitStack() as stack:
        for address in closed:
            cables.outside.ip("addr", "add", f"{address}/32", "dev", "lo")
            cables.taps.ip("route", "add", f"{address}/32", "via", _OUTSIDE)
            await stack.enter_async_context(echoing(await cables.outside.listener(address, 80)))
            assert await cables.guests[0].reaches(address, 80, wait=CERTAIN), "nothing is closed yet"
        cables.load_rules()
        targets = [(address, 80) for address in closed]
        assert await cables.guests[0].reached(*targets) == []
        cables.load_rules((IPv4Network("10.1.0.0/16"),))
        assert await cables.guests[0].reached(*targets) == [("10.1.2.3", 80)]


async def test_arp_requests_add_no_neighbours(cables: Cables) -> None:
    """Requests from addresses that are not the VM's fail the reverse-path check."""
    cables.load_rules()
    own, guest = bytes.fromhex("020000000009"), cables.guests[0]

    def ask(first: str) -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as frames:
            frames.bind(("eth0", 0))
            for number in range(100):
                sender = (IPv4Address(first) + number).packed
                body = bytes.fromhex("0001080006040001") + own + sender + bytes(6) + GATEWAY.packed
                frames.send(b"\xff" * 6 + own + b"\x08\x06" + body)

    def entries(network: str) -> int:
        return cables.taps.ip("neigh", "show", "dev", "sd0").count(network)

    await cables.taps.sysctl("net/ipv4/conf/all/rp_filter", "0")
    await guest.thread.call(lambda: ask("100.64.8.0"))
    await until(lambda: entries("100.64.8.") == 100, 60)
    await cables.taps.sysctl("net/ipv4/conf/all/rp_filter", "1")
    await guest.thread.call(lambda: ask("100.64.9.0"))
    async with echoing(await cables.taps.listener(str(GATEWAY), 80)):
        assert await guest.reaches(str(GATEWAY), 80, wait=CERTAIN), (
            "packets that were sent later have arrived"
        )
    assert entries("100.64.9.") == 0


@pytest.mark.parametrize("one_by_one", [False, True])
async def test_connections_of_an_address_are_deleted(cables: Cables, one_by_one: bool) -> None:
    """In both directions, and no others: the next VM with the address inherits none."""
    cables.load_rules()

    def delete() -> None:
        if not one_by_one:
            delete_connections(IPv4Address(_GUESTS[0]))
            return
        with NFCTSocket() as conntrack:
            delete_each(conntrack, NFCTAttrTuple(saddr=_GUESTS[0]))
            delete_each(conntrack, NFCTAttrTuple(daddr=_GUESTS[0]))

    async with (
        echoing(await cables.outside.listener(_OUTSIDE, 7000)),
        echoing(await cables.guests[0].listener(_GUESTS[0], 3000)),
    ):
        with (
            await cables.guests[0].connect(_OUTSIDE, 7000) as outgoing,
            await cables.taps.connect(_GUESTS[0], 3000) as incoming,
            await cables.guests[1].connect(_OUTSIDE, 7000) as other,
        ):
            for connection in (outgoing, incoming, other):
                assert await echoed(connection, b"one") == b"one"
            assert await cables.tracked() == 3
            await cables.taps.thread.call(delete)
            assert await cables.tracked() == 1
            assert await echoed(other, b"two") == b"two"


async def test_the_host_forgets_the_connections_of_a_vm_that_is_deleted(cables: Cables) -> None:
    """Their ends on the host's side of the link are found by how the namespace translates them."""
    cables.load_rules()
    async with echoing(await cables.outside.listener(_OUTSIDE, 7000)):
        with (
            await cables.guests[0].connect(_OUTSIDE, 7000) as own,
            await cables.guests[1].connect(_OUTSIDE, 7000) as other,
        ):
            assert await echoed(own, b"one") == b"one" and await echoed(other, b"one") == b"one"
            # The other end of the link tracks the translated connections, as the host does.
            cables.outside.load(
                "table ip t { chain c { type filter hook input priority 0; ct state new; }; }"
            )
            assert await echoed(own, b"two") == b"two" and await echoed(other, b"two") == b"two"
            assert int(await cables.outside.thread.call(_TRACKED.read_text)) == 2
            found = await cables.taps.thread.call(lambda: translated_connections(IPv4Address(_GUESTS[0])))
            assert [each.saddr for each in found] == ["192.0.2.1"]
            await cables.outside.thread.call(lambda: delete_tracked(found))
            assert int(await cables.outside.thread.call(_TRACKED.read_text)) == 1


# Sockets of the namespace


def _states(side: Side, address: str) -> list[str]:
    """States of the TCP sockets to an address."""
    command = ["ip", "netns", "exec", side.name, "ss", "-Hnt", "dst", address]
    return [line.split()[0] for line in subprocess.check_output(command, text=True).splitlines()]


async def test_closed_connections_to_a_tap_that_is_gone_do_not_linger(cables: Cables) -> None:
    cables.load_rules()
    async with (
        echoing(await cables.guests[0].listener(_GUESTS[0], 3000)),
        echoing(await cables.guests[1].listener(_GUESTS[1], 3000)),
    ):
        kept = await cables.taps.connect(_GUESTS[0], 3000)
        closed, waiting = [await cables.taps.connect(address, 3000) for address in _GUESTS]
        assert await echoed(kept, b"hello") == b"hello"
        cables.guests[1].ip("link", "set", "eth0", "down")
        cables.taps.ip("link", "delete", "sd0")
        closed.close()
        waiting.close()
        assert sorted(_states(cables.taps, _GUESTS[0])) == ["ESTAB", "FIN-WAIT-1"]
        assert await cables.taps.thread.call(destroy_orphans) == 1
        assert _states(cables.taps, _GUESTS[0]) == ["ESTAB"], "a suspended VM may come back for it"
        assert _states(cables.taps, _GUESTS[1]) == ["FIN-WAIT-1"], "its tap is there"
        assert await cables.taps.thread.call(lambda: destroy_connections(IPv4Address(_GUESTS[0]))) == 1
        assert _states(cables.taps, _GUESTS[0]) == []
        kept.close()


async def test_closed_connections_to_the_agent_of_a_vm_that_is_gone_do_not_linger(network: Network) -> None:
    _load_rules(network)
    agent, here = (AGENT_ADDRESS, AGENT_PORT), (HOST_LINK_ADDRESS, _PORT)
    async with _echoing(network.guests[0], "sm0", *agent), _echoing(network.guests[1], "sm1", *agent):
        closed = await _connected(network.host, "sm0", here, agent)
        other = await _connected(network.host, "sm1", here, agent)
        network.host.ip("link", "delete", "sm0")
        closed.close()
        assert sorted(_states(network.host, "[fe80::2]")) == ["ESTAB", "FIN-WAIT-1"]
        assert await network.host.thread.call(destroy_orphans) == 1
        assert _states(network.host, "[fe80::2]") == ["ESTAB"]
        assert await _echoed(other, b"still") == b"still"
        other.close()


# The host: a way to the internet, a link to the namespace of the taps, and a network of its own


_HOST_LINK = IPv4Network("169.254.64.0/30")
_HOST = "203.0.113.1"
_INTERNET = "203.0.113.2"
_CONTAINER = "198.18.5.2"


@dataclass(frozen=True)
class Surroundings:
    host: Side
    taps: Side
    internet: Side
    container: Side

    def load_rules(self, opened: tuple[IPv4Network, ...] = (), tracked: int = _TRACKED_OF_VMS) -> None:
        self.host.load(host_rules("stead_test", "st0h", _HOST_LINK, [], ["eth0"], opened, tracked))


@pytest_asyncio.fixture
async def around() -> AsyncIterator[Surroundings]:
    with contextlib.ExitStack() as stack:
        host, taps, internet, container = [stack.enter_context(namespace(role)) for role in "htic"]
        link(host, "st0h", taps, "st0n")
        link(host, "eth0", internet, "in0")
        link(host, "br0", container, "in0")
        for side, name, address in (
            (host, "st0h", "169.254.64.1/30"),
            (taps, "st0n", "169.254.64.2/30"),
            (host, "eth0", f"{_HOST}/24"),
            (internet, "in0", f"{_INTERNET}/24"),
            (host, "br0", "198.18.5.1/24"),
            (container, "in0", f"{_CONTAINER}/24"),
        ):
            side.ip("addr", "add", address, "dev", name)
        taps.ip("route", "add", "default", "via", "169.254.64.1")
        container.ip("route", "add", "default", "via", "198.18.5.1")
        internet.ip("route", "add", "default", "via", _HOST)
        host.ip("route", "add", "default", "via", _INTERNET)
        for name in ("st0h", "eth0", "br0"):
            await host.sysctl(f"net/ipv4/conf/{name}/forwarding", "1")
        yield Surroundings(host, taps, internet, container)


async def test_services_that_the_host_publishes_are_closed_to_vms(around: Surroundings) -> None:
    published = f"""
table ip published {{
  chain prerouting {{
    type nat hook prerouting priority dstnat;
    tcp dport 8080 dnat to {_CONTAINER}:80
    tcp dport 8081 redirect to :22
  }}
}}
"""
    around.host.load(published)
    async with (
        echoing(await around.container.listener("0.0.0.0", 80)),
        echoing(await around.host.listener("0.0.0.0", 22)),
        echoing(await around.internet.listener("0.0.0.0", 80)),
    ):
        ports = (8080, 8081, 22)
        assert [await around.taps.reaches(_HOST, port, wait=CERTAIN) for port in ports] == [True, True, True]
        around.load_rules()
        assert await around.taps.reached(*((_HOST, port) for port in ports)) == []
        assert [await around.internet.reaches(_HOST, port, wait=CERTAIN) for port in ports] == [
            True,
            True,
            True,
        ]
        assert await around.taps.reaches(_INTERNET, 80, wait=CERTAIN)


async def test_networks_that_come_up_later_are_closed_to_vms(around: Surroundings) -> None:
    around.load_rules((IPv4Network("198.18.5.0/24"),))
    link(around.host, "late0", around.container, "late0")
    around.host.ip("addr", "add", "198.51.100.1/24", "dev", "late0")
    around.container.ip("addr", "add", "198.51.100.2/24", "dev", "late0")
    async with (
        echoing(await around.container.listener("0.0.0.0", 80)),
        echoing(await around.internet.listener("0.0.0.0", 80)),
    ):
        assert await around.host.reaches("198.51.100.2", 80, wait=CERTAIN)
        assert not await around.taps.reaches("198.51.100.2", 80)
        assert await around.taps.reaches(_CONTAINER, 80, wait=CERTAIN), "the network that was opened"
        assert await around.taps.reaches(_INTERNET, 80, wait=CERTAIN)


async def test_vms_do_not_fill_the_connection_tracking_of_the_host(around: Surroundings) -> None:
    most = 1024
    around.load_rules(tracked=most)

    def flood() -> None:
        for _ in range(4 * most):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
                each.sendto(b"x", (_INTERNET, 9))

    async with echoing(await around.internet.listener("0.0.0.0", 80)):
        assert await around.taps.reaches(_INTERNET, 80, wait=CERTAIN)
        await around.taps.thread.call(flood)
        tracked = int(await around.host.thread.call(_TRACKED.read_text))
        assert most // 2 < tracked <= most + 1
        reached = await around.taps.reached(*[(_INTERNET, 80)] * 3)
        assert len(reached) < 3, "VMs have used up their share"
        assert await around.host.reaches(_INTERNET, 80, wait=CERTAIN)


async def test_only_translated_packets_leave_the_host(around: Surroundings) -> None:
    around.taps.ip("addr", "add", f"{_GUESTS[0]}/32", "dev", "lo")
    around.host.ip("route", "add", f"{_GUESTS[0]}/32", "via", "169.254.64.2")
    async with echoing(await around.internet.listener("0.0.0.0", 80)):
        assert await around.taps.reaches(_INTERNET, 80, source=_GUESTS[0], wait=CERTAIN)
        around.load_rules()
        assert not await around.taps.reaches(_INTERNET, 80, source=_GUESTS[0])
        assert await around.taps.reaches(_INTERNET, 80, wait=CERTAIN)


async def test_the_host_does_not_become_a_router(around: Surroundings) -> None:
    """Forwarding is on for the replies to VMs; other hosts on that interface cannot use it."""
    around.load_rules()
    async with (
        echoing(await around.container.listener("0.0.0.0", 80)),
        echoing(await around.internet.listener("0.0.0.0", 80)),
    ):
        assert await around.internet.reaches(_CONTAINER, 80, wait=CERTAIN), "it is a router"
        around.host.load(routing_rules({"eth0"}))
        assert not await around.internet.reaches(_CONTAINER, 80)
        assert await around.taps.reaches(_INTERNET, 80, wait=CERTAIN)
