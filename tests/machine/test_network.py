"""What a machine can reach: the internet. What it cannot: the host, its neighbours, private networks."""

import asyncio
import contextlib
import json
import os
import shlex
import socket
import subprocess
import urllib.parse
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
import pytest_asyncio

from stead import addresses
from stead.host.commands import run
from stead.host.namespaces import NamespaceThread
from stead.host.network import namespace_path
from stead.installation import open_machines
from stead.machines import Machine, Machines
from stead.settings import Settings
from support.guests import sh
from support.installations import another_installation, leftovers, local_host, other_settings
from support.links import ip
from support.waiting import until

# Another process may run tests on this host at the same time.
PRIVATE = IPv4Network(f"10.201.{os.getpid() % 256}.0/24")
_ALL_FRAMES = 0x0003


@dataclass
class Server:
    """Answers HTTP and notes datagrams; remembers who came."""

    port: int
    connections: int = 0
    datagrams: list[bytes] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello")
            await writer.drain()
        writer.close()

    async def datagram(self, payload: bytes, limit: float) -> None:
        """Wait until this datagram has come."""
        async with asyncio.timeout(limit):
            while payload not in self.datagrams:
                self.arrived.clear()
                await self.arrived.wait()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: Server) -> None:
        self._server = server

    def datagram_received(self, data: bytes, _: object) -> None:
        self._server.datagrams.append(data)
        self._server.arrived.set()


@contextlib.asynccontextmanager
async def serving(stream: socket.socket, datagrams: socket.socket | None = None) -> AsyncIterator[Server]:
    server = Server(stream.getsockname()[1])
    listener = await asyncio.start_server(server.answer, sock=stream)
    transport = None
    if datagrams is not None:
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(server), sock=datagrams)
    try:
        yield server
    finally:
        listener.close()
        await listener.wait_closed()
        if transport is not None:
            transport.close()


@pytest_asyncio.fixture(scope="module")
async def private() -> AsyncIterator[Server]:
    """A private network beside the host, in a namespace, with a server at its second address."""
    namespace, outer, inner = f"sttest{os.getpid()}", f"stt{os.getpid()}h", f"stt{os.getpid()}n"
    ip("netns", "add", namespace)
    try:
        ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
        ip("addr", "add", f"{PRIVATE[1]}/24", "dev", outer)
        ip("link", "set", outer, "up")
        ip("-n", namespace, "addr", "add", f"{PRIVATE[2]}/24", "dev", inner)
        ip("-n", namespace, "link", "set", inner, "up")
        ip("-n", namespace, "route", "add", "default", "via", str(PRIVATE[1]))
        thread = NamespaceThread.named(Path("/run/netns") / namespace)
        try:
            stream = await thread.call(lambda: socket.create_server((str(PRIVATE[2]), 0)))
            datagrams = await thread.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        finally:
            thread.close()
        datagrams.bind(stream.getsockname())
        async with serving(stream, datagrams) as server:
            yield server
    finally:
        ip("netns", "delete", namespace)


@pytest_asyncio.fixture(scope="module")
async def insider(settings: Settings, private: Server) -> AsyncIterator[Machine]:
    """A machine of an installation that may reach the private network."""
    async with another_installation(settings, allow_private=(PRIVATE,)) as installation:
        machines = installation.machines
        yield await machines.create()


async def reached(machine: Machine, urls: Iterable[str]) -> set[str]:
    """The addresses of these that answer a machine's HTTP request."""
    tries = [
        f"(curl -sg -o /dev/null --max-time 4 {quoted} && echo {quoted}) &"
        for quoted in map(shlex.quote, urls)
    ]
    return set((await sh(machine, f"{' '.join(tries)} wait")).split())


def slot_of(address: IPv4Address) -> int:
    return int(address) - int(addresses.machine_address(0))


def host_addresses() -> list[str]:
    found = json.loads(subprocess.run(["ip", "-j", "addr"], check=True, capture_output=True).stdout)
    return [
        entry["local"]
        for link in found
        for entry in link["addr_info"]
        if entry["scope"] != "link" or entry["family"] == "inet"
    ]


async def interfaces(settings: Settings) -> set[str]:
    """What is in an installation's namespace."""
    thread = NamespaceThread.named(namespace_path(settings))
    try:
        return {name for _, name in await thread.call(socket.if_nameindex)}
    finally:
        thread.close()


@pytest.mark.usefixtures("network")
async def test_a_machine_reaches_the_internet_by_name(shared: Machine) -> None:
    """What its own package manager is set up to use resolves and answers."""
    shown = await sh(shared, "apt-get update --print-uris")
    url = shown.split()[0].strip("'")
    host = urllib.parse.urlsplit(url).hostname
    assert await sh(shared, f"getent hosts {host}")
    assert await sh(shared, f"curl -sSL --max-time 30 -o /dev/null -w '%{{http_code}}' {url}") == "200"


async def test_every_machine_has_an_address_of_its_own(shared: Machine, machine: Machine) -> None:
    mine, others = (await machine.info()).address, (await shared.info()).address
    assert mine != others
    shown = await sh(machine, "ip -4 -o addr show dev eth0 scope global")
    assert str(mine) in shown
    assert str(others) not in shown


async def test_guest_programs_see_one_network_card(shared: Machine) -> None:
    """The link that Stead uses is nowhere a program would look, so none can cut it by accident."""
    links = json.loads(await sh(shared, "ip -j link"))
    assert {link["ifname"] for link in links} == {"lo", "eth0"}
    assert sorted((await sh(shared, "ls /sys/class/net")).split()) == ["eth0", "lo"]
    assert (
        await reached(shared, [f"http://[{addresses.AGENT_ADDRESS}%25eth0]:{addresses.AGENT_PORT}/"]) == set()
    )


async def test_a_machine_cannot_reach_the_host(settings: Settings, shared: Machine) -> None:
    """A server on all addresses of the host is out of reach by every one of them."""
    listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    async with serving(listening) as server:
        every = [*host_addresses(), str(addresses.GATEWAY)]
        assert len(every) > 3, "loopback, the way out and the link to the machines"
        assert any(address.startswith("169.254.") for address in every[:-1]), "the link's own address"
        for address in ("127.0.0.1", "::1"):
            _, writer = await asyncio.open_connection(address, server.port)
            writer.close()
            await writer.wait_closed()
        own = await _answered(server, 2)
        named = [f"[{address}]" if ":" in address else address for address in every]
        assert await reached(shared, [f"http://{name}:{server.port}/" for name in named]) == set()
        assert server.connections == own


async def _answered(server: Server, count: int) -> int:
    return await until(lambda: server.connections if server.connections >= count else 0, 60)


async def test_a_machine_cannot_reach_its_neighbour(shared: Machine, machine: Machine) -> None:
    neighbour = (await machine.info()).address
    url = f"http://{neighbour}:8000/"
    await sh(machine, "systemd-run -q python3 -m http.server 8000 --bind ::")

    async def serves_itself() -> set[str]:
        return await reached(machine, [url])

    await until(serves_itself, 60)
    management = f"http://[{addresses.AGENT_ADDRESS}%25eth0]:{addresses.AGENT_PORT}/v1/health"
    assert await reached(shared, [url, f"http://{neighbour}:22/", management]) == set()
    ping = await shared.exec(["ping", "-c", "1", "-W", "2", str(neighbour)])
    assert ping.exit_code == 1, ping
    assert b"0 received" in ping.stdout


async def test_private_networks_are_closed_unless_opened(
    shared: Machine, insider: Machine, private: Server
) -> None:
    url = f"http://{PRIVATE[2]}:{private.port}/"
    assert await reached(insider, [url]) == {url}
    seen = private.connections
    assert await reached(shared, [url]) == set()
    assert private.connections == seen


async def test_opening_one_network_opens_no_other(insider: Machine) -> None:
    """The host's own address inside of the opened network is still the host."""
    async with serving(socket.create_server(("0.0.0.0", 0))) as server:
        assert await reached(insider, [f"http://{PRIVATE[1]}:{server.port}/"]) == set()
        assert server.connections == 0


async def test_a_machine_cannot_send_in_anothers_name(insider: Machine, private: Server) -> None:
    """Datagrams with a false source get nowhere; the honest one that is sent after them arrives."""
    own = (await insider.info()).address
    false = [str(own + 1), str(PRIVATE[9]), "198.51.100.7", str(addresses.GATEWAY)]
    program = """
import socket, sys
to, port, *sources = sys.argv[1:]
for source in sources:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.setsockopt(socket.IPPROTO_IP, 19, 1)  # IP_TRANSPARENT: any source may be used
        link.bind((source, 0))
        link.sendto(source.encode(), (to, int(port)))
"""
    command = ["python3", "-c", program, str(PRIVATE[2]), str(private.port), *false, str(own)]
    result = await insider.exec(command, timeout=30)
    assert result.ok, result
    await private.datagram(str(own).encode(), 10)
    assert private.datagrams == [str(own).encode()]


@contextlib.asynccontextmanager
async def listening_on(settings: Settings, interface: str) -> AsyncIterator[socket.socket]:
    """Every frame on one interface of an installation's namespace."""

    def listen() -> socket.socket:
        link = socket.socket(
            socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.htons(_ALL_FRAMES)
        )
        link.bind((interface, _ALL_FRAMES))
        return link

    thread = NamespaceThread.named(namespace_path(settings))
    try:
        link = await thread.call(listen)
    finally:
        thread.close()
    with link:
        yield link


async def frames_until(link: socket.socket, marker: bytes, limit: float) -> list[bytes]:
    """All frames up to the first one that holds the marker."""
    frames: list[bytes] = []
    async with asyncio.timeout(limit):
        while not frames or marker not in frames[-1]:
            frames.append(await asyncio.get_running_loop().sock_recv(link, 65536))
    return frames


@contextlib.asynccontextmanager
async def ipv6_way_out(settings: Settings, network: str) -> AsyncIterator[str]:
    """Give an installation's namespace what it has not: a route for IPv6. Yields the uplink."""
    uplink = f"st{settings.instance}n"
    inside = ("ip", "-n", namespace_path(settings).name, "-6")
    await run(*inside, "route", "add", f"{network}/64", "dev", uplink)
    try:
        neighbour = (f"{network}1", "lladdr", addresses.TAP_MAC, "dev", uplink)
        await run(*inside, "neigh", "replace", *neighbour)
        yield uplink
        await run(*inside, "neigh", "delete", *neighbour)
    finally:
        await run(*inside, "route", "delete", f"{network}/64", "dev", uplink)


async def test_ipv6_does_not_leave_the_machine(settings: Settings, machine: Machine) -> None:
    """A guest that gives itself IPv6 addresses and routes reaches its own cable and nothing behind it.

    Not even when there is a way on: the rule holds, not the lack of a route.
    """
    slot = slot_of((await machine.info()).address)
    send = f"""
sysctl -qw net.ipv6.conf.eth0.disable_ipv6=0
ip -6 addr add fd53:7ead::5/64 dev eth0 nodad
ip -6 neigh replace fd53:7ead::1 lladdr {addresses.TAP_MAC} dev eth0
ip -6 route replace default via fd53:7ead::1 dev eth0
echo six-marker > /dev/udp/fd53:7ead:0:1::1/9
ping -6 -L -c 1 -W 1 ff02::1%eth0 | grep -c 'bytes from' || true
getent ahostsv4 four-marker.invalid || true
"""
    async with (
        ipv6_way_out(settings, "fd53:7ead:0:1::") as way,
        listening_on(settings, addresses.data_tap(slot)) as cable,
        listening_on(settings, way) as uplink,
    ):
        result = await machine.exec(["bash", "-ec", send], timeout=30)
        assert result.ok, result
        assert result.stdout.strip() == b"0", "somebody answered to all-nodes"
        await frames_until(cable, b"six-marker", 60)
        seen = await frames_until(uplink, b"four-marker", 60)
        assert not [frame for frame in seen if b"six-marker" in frame]


async def test_the_cable_goes_with_the_machine(machines: Machines, settings: Settings) -> None:
    machine = await machines.create()
    slot = slot_of((await machine.info()).address)
    taps = {addresses.data_tap(slot), addresses.management_tap(slot)}
    assert taps <= await interfaces(settings)
    await machine.delete()
    assert not taps & await interfaces(settings)


def foreign_rules() -> list[object]:
    """The host's firewall without the tables of any Stead."""
    shown = subprocess.run(["nft", "-j", "list", "ruleset"], check=True, capture_output=True).stdout
    found: list[object] = []
    for entry in json.loads(shown)["nftables"]:
        for kind, value in entry.items():
            table = value.get("name") if kind == "table" else value.get("table")
            if kind != "metainfo" and not str(table).startswith("stead_"):
                found.append({kind: value})
    return found


async def test_the_hosts_own_firewall_is_left_alone(settings: Settings) -> None:
    """Opening, using and closing an installation changes nothing that an administrator has set up."""
    table = f"administrator_{os.getpid()}"
    rules = f"""
table inet {table} {{
  chain c {{
    type filter hook forward priority 10;
    tcp dport 25 accept
  }}
}}
"""
    await run("nft", "-f", "-", stdin=rules.encode())
    try:
        before = foreign_rules()
        assert any(table in json.dumps(rule) for rule in before)
        with other_settings(settings) as other:
            async with open_machines(other) as machines:
                machine = await machines.create()
                assert foreign_rules() == before
                assert [found for found in leftovers(other) if found.startswith("table inet stead_")]
                await machine.delete()
            assert leftovers(other) == []
        assert foreign_rules() == before
    finally:
        await run("nft", "delete", "table", "inet", table)


UNASKED = """
import socket
nic = next(name for _, name in socket.if_nameindex() if name != "lo")
link = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
link.bind((nic, 0))
own = link.getsockname()[4]
arp = bytes.fromhex("0001080006040001") + own + bytes(4) + bytes(6) + socket.inet_aton("169.254.0.1")
solicitation = bytes.fromhex("6000000000083aff" + "fe80") + bytes(13) + bytes([1])
solicitation += bytes.fromhex("ff02") + bytes(13) + bytes([2]) + bytes.fromhex("8500000000000000")
for _ in range(50):
    link.send(bytes([255] * 6) + own + bytes.fromhex("0806") + arp)
    link.send(bytes.fromhex("333300000002") + own + bytes.fromhex("86dd") + solicitation)
print(nic)
"""


async def test_arp_and_ipv6_are_no_traffic(settings: Settings, machines: Machines, shared: Machine) -> None:
    """Guests send both unasked: as traffic, they would keep an idle VM awake."""
    row = await machines._row(shared.id)
    network = local_host(machines).network
    tap = addresses.data_tap(row.slot)

    async def received() -> int:
        command = ("nsenter", f"--net={namespace_path(settings)}", "ip", "-s", "-j", "link", "show", tap)
        return int(json.loads((await run(*command)).stdout)[0]["stats64"]["rx"]["packets"])

    packets, before = await received(), (await network.traffic()).get(row.slot, 0)
    await shared.files().write("/root/unasked.py", UNASKED.encode())
    nic = await sh(shared, "python3 /root/unasked.py")
    assert (
        await sh(shared, f"cat /proc/sys/net/ipv6/conf/{nic}/disable_ipv6; ip -6 address show {nic}") == "1"
    )

    async def arrived() -> bool:
        return await received() >= packets + 100

    await until(arrived, 60)
    assert (await network.traffic()).get(row.slot, 0) == before
    await sh(shared, "ping -c 1 -W 5 169.254.0.1")
    assert (await network.traffic())[row.slot] == before + 2 * 84, "an echo request and its reply"
