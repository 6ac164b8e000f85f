"""The resolver of VMs: real dnsmasq in an installation's namespace, asked from links that stand for VMs."""

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import pytest_asyncio

from stead import addresses
from stead.edge.names import GuestResolver
from stead.host import network, resolvers
from stead.host.network import Network, namespace_path
from stead.processes import ProcessId, of_user
from stead.settings import Settings
from stead.tasks import in_background
from support.installations import other_settings
from support.links import Side, ip, namespace, plug_in
from support.name_server import NameServer, dns_socket, name_server
from support.waiting import until

pytestmark = pytest.mark.root

_A, _AAAA, _TXT = 1, 28, 16
_NO_ERROR = 0
_UPSTREAM = IPv4Address(f"10.202.{os.getpid() % 256}.53")
_PUBLIC = IPv4Address("192.0.2.80")
"""What the host's resolver answers to every question about an address."""


def _question(name: str, kind: int) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return labels + b"\0" + struct.pack("!HH", kind, 1)


def _query(name: str, kind: int = _A) -> bytes:
    return struct.pack("!HHHHHH", secrets.randbits(16), 0x0100, 1, 0, 0, 0) + _question(name, kind)


@dataclass(frozen=True)
class Answer:
    code: int
    addresses: list[IPv4Address]


def _parsed(answer: bytes, query: bytes) -> Answer:
    assert answer[:2] == query[:2]
    count = struct.unpack("!H", answer[6:8])[0]
    records, found = answer[len(query) :], []
    for _ in range(count):
        kind, _, _, size = struct.unpack("!HHIH", records[2:12])
        if kind == _A:
            found.append(IPv4Address(records[12 : 12 + size]))
        records = records[12 + size :]
    return Answer(answer[3] & 15, found)


@contextlib.asynccontextmanager
async def _serving(address: IPv4Address, known: IPv4Address) -> AsyncIterator[NameServer]:
    ip("addr", "add", f"{address}/32", "dev", "lo")
    try:
        async with name_server(dns_socket(address), known) as resolver:
            yield resolver
    finally:
        ip("addr", "delete", f"{address}/32", "dev", "lo")


@pytest_asyncio.fixture(scope="module")
async def upstream() -> AsyncIterator[NameServer]:
    async with _serving(_UPSTREAM, _PUBLIC) as resolver:
        yield resolver


@dataclass(frozen=True)
class NetworkWithTwoVms:
    """An installation's network with two VMs."""

    settings: Settings
    network: Network
    guests: list[Side]
    upstream: NameServer

    async def ask(self, name: str, kind: int = _A, guest: int = 0) -> Answer:
        query = _query(name, kind)
        with await self.guests[guest].thread.call(_datagrams) as asking:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(60):
                while True:
                    await loop.sock_sendto(asking, query, (str(addresses.GATEWAY), 53))
                    # Again, as any resolver: a query is lost while dnsmasq is restarted.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1):
                            return _parsed(await loop.sock_recv(asking, 4096), query)

    async def address_of(self, name: str) -> IPv4Address | None:
        """The address of a name; None without an answer."""
        try:
            return (await self.ask(name)).addresses[0]
        except (TimeoutError, OSError, IndexError):
            return None

    def processes(self) -> list[ProcessId]:
        return list(of_user(self.settings.resolver_uid))


def _datagrams() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setblocking(False)
    return made


@pytest_asyncio.fixture(scope="module")
async def two_vms(settings: Settings, upstream: NameServer) -> AsyncIterator[NetworkWithTwoVms]:
    with (
        pytest.MonkeyPatch.context() as patch,
        other_settings(settings) as other,
        contextlib.ExitStack() as stack,
    ):
        patch.setattr(addresses, "resolvers", lambda: [_UPSTREAM])
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


@pytest_asyncio.fixture
async def resolver(two_vms: NetworkWithTwoVms) -> AsyncIterator[GuestResolver]:
    async with GuestResolver.running(
        two_vms.settings, two_vms.network, ("git.freestyle.sh", "style.dev")
    ) as made:
        yield made


@pytest.mark.usefixtures("resolver")
async def test_names_of_this_stead_lead_to_the_gateway(two_vms: NetworkWithTwoVms) -> None:
    for name in ("git.freestyle.sh", "style.dev", "app.style.dev", "a.b.STYLE.dev"):
        assert await two_vms.ask(name) == Answer(_NO_ERROR, [addresses.GATEWAY])
        for kind in (_AAAA, _TXT):
            assert (await two_vms.ask(name, kind)).addresses == []
    assert not [asked for asked in two_vms.upstream.asked if b"style" in asked.lower()]


@pytest.mark.usefixtures("resolver")
async def test_other_names_are_asked_of_the_host_s_resolver(two_vms: NetworkWithTwoVms) -> None:
    assert await two_vms.ask("freestyle.sh") == Answer(_NO_ERROR, [_PUBLIC])
    assert await two_vms.ask("notstyle.dev") == Answer(_NO_ERROR, [_PUBLIC])


@pytest.mark.usefixtures("resolver")
async def test_dns_over_tcp(two_vms: NetworkWithTwoVms) -> None:
    query = _query("app.style.dev")
    with await two_vms.guests[0].connect(str(addresses.GATEWAY), 53) as connection:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, struct.pack("!H", len(query)) + query)
        answer = await loop.sock_recv(connection, 4096)
    assert _parsed(answer[2:], query) == Answer(_NO_ERROR, [addresses.GATEWAY])


async def test_mapped_domains_lead_to_the_gateway(
    two_vms: NetworkWithTwoVms, resolver: GuestResolver
) -> None:
    async def leads(name: str, address: IPv4Address) -> bool:
        return await two_vms.address_of(name) == address

    await resolver.publish({"shop.example.com", "*.wild.example.com"})
    await until(lambda: leads("shop.example.com", addresses.GATEWAY), 60)
    await until(lambda: leads("any.wild.example.com", addresses.GATEWAY), 60)
    assert await two_vms.address_of("other.example.com") == _PUBLIC
    await resolver.publish({"blog.example.com"})
    await until(lambda: leads("blog.example.com", addresses.GATEWAY), 60)
    await until(lambda: leads("shop.example.com", _PUBLIC), 60)
    await until(lambda: leads("any.wild.example.com", _PUBLIC), 60)
    await resolver.publish(())
    await until(lambda: leads("blog.example.com", _PUBLIC), 60)


@pytest_asyncio.fixture
async def changing(two_vms: NetworkWithTwoVms) -> AsyncIterator[pytest.MonkeyPatch]:
    """For changes of the host's name servers; the rules let VMs reach the first ones again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolvers, "_POLL", 0.1)
        yield patch
    await network._ensure(two_vms.settings)


async def _answered(two_vms: NetworkWithTwoVms, known: IPv4Address) -> None:
    """Wait until a name server that has this address for all names is asked; no answer is cached."""
    numbers = itertools.count()

    async def followed() -> bool:
        return await two_vms.address_of(f"name{next(numbers)}.example.com") == known

    await until(followed, 60)


async def test_name_servers_that_the_host_gets_later_are_followed(
    two_vms: NetworkWithTwoVms, changing: pytest.MonkeyPatch
) -> None:
    """A host that has none when the server starts: VMs ask them as soon as it has some."""
    changing.setattr(addresses, "resolvers", list)
    now, known = IPv4Address(int(_UPSTREAM) + 2), IPv4Address("192.0.2.82")
    loading = network._follow_resolvers(two_vms.settings)
    async with (
        _serving(now, known),
        GuestResolver.running(two_vms.settings, two_vms.network, ("style.dev",)),
        in_background(loading, "follow the host's name servers"),
    ):
        assert await two_vms.address_of("app.style.dev") == addresses.GATEWAY
        assert await two_vms.address_of("one.example.com") is None
        changing.setattr(addresses, "resolvers", lambda: [now])
        await _answered(two_vms, known)


async def test_other_name_servers_of_the_host_are_followed(
    two_vms: NetworkWithTwoVms, changing: pytest.MonkeyPatch
) -> None:
    """The same dnsmasq asks them, and the host's rules let it."""
    now, known = IPv4Address(int(_UPSTREAM) + 1), IPv4Address("192.0.2.81")
    loading = network._follow_resolvers(two_vms.settings)
    async with (
        _serving(now, known),
        GuestResolver.running(two_vms.settings, two_vms.network, ("style.dev",)),
        in_background(loading, "follow the host's name servers"),
    ):
        assert await two_vms.address_of("one.example.com") == _PUBLIC
        (process,) = two_vms.processes()
        changing.setattr(addresses, "resolvers", list)
        await asyncio.sleep(0.3)
        assert await two_vms.address_of("two.example.com") == _PUBLIC, "no name servers are no change"
        changing.setattr(addresses, "resolvers", lambda: [now])
        await _answered(two_vms, known)
        assert two_vms.processes() == [process]


@pytest.mark.usefixtures("resolver")
async def test_dnsmasq_runs_as_its_own_user_and_is_restarted(two_vms: NetworkWithTwoVms) -> None:
    (process,) = two_vms.processes()
    assert Path(f"/proc/{process.pid}/comm").read_text().strip() == "dnsmasq"
    status = Path(f"/proc/{process.pid}/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    assert capabilities == 1 << 10, "CAP_NET_BIND_SERVICE alone"
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: process not in two_vms.processes(), 60)
    await until(two_vms.processes, 60)

    async def answers() -> bool:
        return await two_vms.address_of("app.style.dev") == addresses.GATEWAY

    await until(answers, 60)


@pytest.mark.usefixtures("resolver")
async def test_queries_of_one_vm_are_limited(two_vms: NetworkWithTwoVms) -> None:
    sent = 5000

    def flood() -> int:
        """Send queries as fast as possible; returns how many were answered."""
        with _datagrams() as asking:
            asking.setblocking(True)
            asking.settimeout(1)
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
            asking.connect((str(addresses.GATEWAY), 53))
            for _ in range(sent):
                asking.send(_query("app.style.dev"))
            answered = 0
            with contextlib.suppress(TimeoutError):
                while asking.recv(4096):
                    answered += 1
        return answered

    answered = await two_vms.guests[0].thread.call(flood)
    assert 0 < answered < sent / 2
    assert await two_vms.ask("app.style.dev", guest=1) == Answer(_NO_ERROR, [addresses.GATEWAY])


_DRIVER = """
import asyncio, sys
from pathlib import Path
from stead.edge.names import GuestResolver
from stead.host.network import Network
from stead.settings import Settings

async def main():
    settings = Settings(data=Path(sys.argv[1]))
    async with GuestResolver.running(settings, await Network.open(settings), ("style.dev",)):
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_dnsmasq_ends_with_a_killed_server(settings: Settings) -> None:
    with other_settings(settings) as other:
        try:
            for _ in range(2):
                server = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _DRIVER, str(other.data)), stdout=asyncio.subprocess.PIPE
                )
                try:
                    assert server.stdout is not None
                    assert await server.stdout.readline() == b"ready\n"
                    assert list(of_user(other.resolver_uid))
                finally:
                    server.kill()
                    await server.wait()
                await until(lambda: not list(of_user(other.resolver_uid)), 60)
        finally:
            await network.remove(other)


async def test_without_a_server_vms_ask_the_host_s_resolver(two_vms: NetworkWithTwoVms) -> None:
    """A VM keeps running while no server does, and its names keep resolving."""
    async with GuestResolver.running(two_vms.settings, two_vms.network, ("style.dev",)):
        assert await two_vms.address_of("app.style.dev") == addresses.GATEWAY
    assert await two_vms.address_of("app.style.dev") == _PUBLIC
