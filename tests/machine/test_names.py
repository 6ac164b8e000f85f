"""The resolver of VMs: real dnsmasq in an installation's namespace, asked from links that stand for VMs."""

import asyncio
import itertools
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import pytest_asyncio

from stead import addresses, landlock
from stead.edge.names import GuestResolver
from stead.errors import HostError
from stead.host import network, resolvers
from stead.host.commands import run
from stead.host.firewall import DNS_BURST, DNS_RATE
from stead.processes import of_user
from stead.settings import Settings
from stead.tasks import in_background
from support.guest_dns import (
    AAAA,
    NO_ERROR,
    PUBLIC,
    TXT,
    UPSTREAM,
    Answer,
    NetworkWithTwoVms,
    network_with_two_vms,
    parsed_answer,
    query_for,
    serving_dns,
)
from support.installations import other_settings
from support.waiting import until

pytestmark = pytest.mark.root


@pytest_asyncio.fixture(scope="module")
async def two_vms(settings: Settings) -> AsyncIterator[NetworkWithTwoVms]:
    async with network_with_two_vms(settings) as made:
        yield made


@pytest_asyncio.fixture
async def resolver(two_vms: NetworkWithTwoVms) -> AsyncIterator[GuestResolver]:
    async with GuestResolver.running(
        two_vms.settings, two_vms.network, ("git.freestyle.sh", "style.dev")
    ) as made:
        yield made


@pytest.mark.usefixtures("resolver")
async def test_names_of_this_stead_lead_to_the_gateway(two_vms: NetworkWithTwoVms) -> None:
    for name in ("git.freestyle.sh", "style.dev", "app.style.dev", "a.b.STYLE.dev"):
        assert await two_vms.ask(name) == Answer(NO_ERROR, [addresses.GATEWAY])
        for kind in (AAAA, TXT):
            assert (await two_vms.ask(name, kind)).addresses == []
    assert not [asked for asked in two_vms.upstream.asked if b"style" in asked.lower()]


@pytest.mark.usefixtures("resolver")
async def test_other_names_are_asked_of_the_host_s_resolver(two_vms: NetworkWithTwoVms) -> None:
    assert await two_vms.ask("freestyle.sh") == Answer(NO_ERROR, [PUBLIC])
    assert await two_vms.ask("notstyle.dev") == Answer(NO_ERROR, [PUBLIC])


@pytest.mark.usefixtures("resolver")
async def test_dns_over_tcp(two_vms: NetworkWithTwoVms) -> None:
    query = query_for("app.style.dev")
    with await two_vms.guests[0].connect(str(addresses.GATEWAY), 53) as connection:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(connection, struct.pack("!H", len(query)) + query)
        answer = await loop.sock_recv(connection, 4096)
    assert parsed_answer(answer[2:], query) == Answer(NO_ERROR, [addresses.GATEWAY])


async def test_mapped_domains_lead_to_the_gateway(
    two_vms: NetworkWithTwoVms, resolver: GuestResolver
) -> None:
    async def leads(name: str, address: IPv4Address) -> bool:
        return await two_vms.address_of(name) == address

    await resolver.publish({"shop.example.com", "*.wild.example.com"})
    await until(lambda: leads("shop.example.com", addresses.GATEWAY), 60)
    await until(lambda: leads("any.wild.example.com", addresses.GATEWAY), 60)
    assert await two_vms.address_of("other.example.com") == PUBLIC
    await resolver.publish({"blog.example.com"})
    await until(lambda: leads("blog.example.com", addresses.GATEWAY), 60)
    await until(lambda: leads("shop.example.com", PUBLIC), 60)
    await until(lambda: leads("any.wild.example.com", PUBLIC), 60)
    await resolver.publish(())
    await until(lambda: leads("blog.example.com", PUBLIC), 60)


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
    now, known = IPv4Address(int(UPSTREAM) + 2), IPv4Address("192.0.2.82")
    loading = network._follow_resolvers(two_vms.settings)
    async with (
        serving_dns(now, known),
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
    now, known = IPv4Address(int(UPSTREAM) + 1), IPv4Address("192.0.2.81")
    loading = network._follow_resolvers(two_vms.settings)
    async with (
        serving_dns(now, known),
        GuestResolver.running(two_vms.settings, two_vms.network, ("style.dev",)),
        in_background(loading, "follow the host's name servers"),
    ):
        assert await two_vms.address_of("one.example.com") == PUBLIC
        processes = two_vms.processes()
        changing.setattr(addresses, "resolvers", list)
        await asyncio.sleep(0.3)
        assert await two_vms.address_of("two.example.com") == PUBLIC, "no name servers are no change"
        changing.setattr(addresses, "resolvers", lambda: [now])
        await _answered(two_vms, known)
        assert two_vms.processes() == processes


async def test_name_servers_of_the_host_are_followed_after_an_error(
    two_vms: NetworkWithTwoVms, changing: pytest.MonkeyPatch
) -> None:
    now, known = IPv4Address(int(UPSTREAM) + 3), IPv4Address("192.0.2.83")
    failed = 0

    def fail() -> list[IPv4Address]:
        nonlocal failed
        failed += 1
        raise ValueError("made up")

    async with (
        serving_dns(now, known),
        GuestResolver.running(two_vms.settings, two_vms.network, ("style.dev",)),
        in_background(network._follow_resolvers(two_vms.settings), "follow the host's name servers"),
    ):
        assert await two_vms.address_of("one.example.com") == PUBLIC
        changing.setattr(addresses, "resolvers", fail)
        # dnsmasq's list, and the host's rules.
        await until(lambda: failed >= 2, 60)
        changing.setattr(addresses, "resolvers", lambda: [now])
        await _answered(two_vms, known)


async def test_connections_to_deleted_vms_are_looked_for_after_an_error(
    two_vms: NetworkWithTwoVms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "_ORPHANS", 0.05)
    errors = iter([OSError(2, "made up"), ValueError("made up")])
    looked = 0

    def destroy(slots: set[int]) -> None:
        nonlocal looked
        if error := next(errors, None):
            raise error
        looked += 1

    monkeypatch.setattr(network, "destroy_orphans", destroy)
    async with in_background(two_vms.network._destroy_orphans()):
        await until(lambda: looked >= 2, 60)


async def test_dnsmasq_runs_as_its_own_user_and_is_restarted(
    two_vms: NetworkWithTwoVms, resolver: GuestResolver
) -> None:
    processes = two_vms.processes()
    assert len(processes) == 2
    for process in processes:
        assert Path(f"/proc/{process.pid}/comm").read_text().strip() == "dnsmasq"
        status = Path(f"/proc/{process.pid}/status").read_text()
        capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
        assert capabilities == 1 << 10, "CAP_NET_BIND_SERVICE alone"
    await resolver.publish({"*.wild.example.com"})
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not {*processes} & {*two_vms.processes()}, 60)
    for name in ("app.style.dev", "any.wild.example.com"):

        async def answers(name: str = name) -> bool:
            return await two_vms.address_of(name) == addresses.GATEWAY

        await until(answers, 60)


async def test_a_program_in_the_place_of_dnsmasq_reads_the_files_of_dnsmasq_alone(
    two_vms: NetworkWithTwoVms, resolver: GuestResolver
) -> None:
    if not landlock.version():
        pytest.skip("this kernel has no Landlock")
    arguments = resolver._command().arguments
    prefix = arguments[: arguments.index("dnsmasq")]
    assert (await run(*prefix, "cat", resolver._folder / "servers")).stdout.startswith(b"nameserver")
    for command_line in (["ls", "/run"], ["cat", "/etc/hosts"], ["cat", "/proc/1/status"], ["ls", "/"]):
        with pytest.raises(HostError, match="Permission denied"):
            await run(*prefix, *command_line)


_FLOOD = """
import socket, sys, time
query, sent = bytes.fromhex(sys.argv[2]), int(sys.argv[3])
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
    asking.settimeout(1)
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    asking.connect((sys.argv[1], 53))
    begun = time.monotonic()
    for _ in range(sent):
        asking.send(query)
    seconds, answered = time.monotonic() - begun, 0
    try:
        while asking.recv(4096):
            answered += 1
    except TimeoutError:
        print(answered, seconds)
"""


@pytest.mark.usefixtures("resolver")
async def test_queries_of_one_vm_are_limited(two_vms: NetworkWithTwoVms) -> None:
    """They come from a process of its own, which sends as fast as it can whatever this one does."""
    sent, query = 5000, query_for("app.style.dev")
    inside = ("ip", "netns", "exec", two_vms.guests[0].name, sys.executable, "-c", _FLOOD)
    flood = await run(*inside, str(addresses.GATEWAY), query.hex(), str(sent))
    answered, seconds = map(float, flood.stdout.split())
    assert 0 < answered <= DNS_BURST + DNS_RATE * (seconds + 1)
    assert answered < sent / 2
    assert await two_vms.ask("app.style.dev", guest=1) == Answer(NO_ERROR, [addresses.GATEWAY])


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
    assert await two_vms.address_of("app.style.dev") == PUBLIC
