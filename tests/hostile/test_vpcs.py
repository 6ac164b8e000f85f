"""VMs of one account, in several VPCs, leave the server time for the queries and packets of others."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv4Network

import pytest
import pytest_asyncio

from stead import addresses
from stead.edge.names import GuestResolver
from stead.host import network as host_network
from stead.host.firewall import PRIVATE_DNS_BURST, PRIVATE_DNS_RATE
from stead.host.interface import Nic, PrivateNetwork, VmSlot
from stead.host.network import Network
from stead.settings import Settings
from stead.shares import RateLimit
from support.guest_dns import datagram_socket, parsed_answer, query_for
from support.installations import other_settings
from support.links import CERTAIN
from support.vpc_guests import Guest, guest
from support.waiting import until

pytestmark = pytest.mark.root

CIDR = IPv4Network("10.79.0.0/24")
MALLORY = [PrivateNetwork(f"vpc-mallory{number}", number, CIDR, "mallory") for number in (1, 2)]
ALICE = PrivateNetwork("vpc-alice", 3, CIDR, "alice")
DB = IPv4Address("10.79.0.9")
PORT = 7000


class Table:
    """One name for all."""

    def addresses(self, slot: int, label: str) -> Sequence[IPv4Address]:
        return [DB]

    def name(self, slot: int, address: IPv4Address) -> str | None:
        return None


@dataclass
class ThreeVpcs:
    network: Network
    mallory: list[Guest]
    alice: Guest
    wanted: list[str]


def vm_slot(slot: int, vpc: PrivateNetwork, host: int) -> VmSlot:
    return VmSlot(f"vm{slot}", slot, Nic(vpc.id, CIDR[host]), vpc.account)


@pytest_asyncio.fixture
async def three_vpcs(settings: Settings) -> AsyncIterator[ThreeVpcs]:
    """Two VPCs of one account and one of another, with a VM that runs in each."""
    with other_settings(settings) as other:
        own = await Network.open(other)
        wanted: list[str] = []
        try:
            await own.vpcs.open([*MALLORY, ALICE], [], wanted.append)
            async with contextlib.AsyncExitStack() as stack:
                found = [
                    await stack.enter_async_context(guest(own, vm_slot(vpc.number, vpc, 1)))
                    for vpc in (*MALLORY, ALICE)
                ]
                await stack.enter_async_context(GuestResolver.running(other, own, ("style.dev",), Table()))
                yield ThreeVpcs(own, found[:2], found[2], wanted)
        finally:
            await own.close()
            await host_network.remove(other)


def _flood(sent: int) -> int:
    """Send queries for a private name as fast as possible; returns how many were answered."""
    with datagram_socket() as asking:
        asking.settimeout(1)
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        asking.connect((str(addresses.GATEWAY), 53))
        for _ in range(sent):
            asking.send(query_for("db.internal"))
        answered = 0
        with contextlib.suppress(TimeoutError):
            while asking.recv(4096):
                answered += 1
    return answered


async def test_queries_for_private_names_are_limited_by_account(three_vpcs: ThreeVpcs) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    flooding = [
        asyncio.create_task(each.side.thread.call(partial(_flood, 3000))) for each in three_vpcs.mallory
    ]
    query = query_for("db.internal")
    with await three_vpcs.alice.side.thread.call(datagram_socket) as asking:
        async with asyncio.timeout(CERTAIN):
            await loop.sock_sendto(asking, query, (str(addresses.GATEWAY), 53))
            assert parsed_answer(await loop.sock_recv(asking, 4096), query).addresses == [DB]
    answered = sum(await asyncio.gather(*flooding))
    assert 0 < answered <= PRIVATE_DNS_BURST + PRIVATE_DNS_RATE * (loop.time() - begun)


async def test_packets_to_vms_that_sleep_are_read_by_account(three_vpcs: ThreeVpcs) -> None:
    own, wanted = three_vpcs.network, three_vpcs.wanted
    own.vpcs._wakes = RateLimit(10, 0.5)
    for vpc in (*MALLORY, ALICE):
        async with guest(own, vm_slot(50 + vpc.number, vpc, 50)):
            pass

    async def send(source: Guest, packets: int) -> None:
        with await source.side.thread.call(datagram_socket) as sender:
            for _ in range(packets):
                sender.sendto(b"wake up", (str(CIDR[50]), PORT))
                await asyncio.sleep(0.025)

    flooding = [asyncio.create_task(send(each, 80)) for each in three_vpcs.mallory]
    await until(lambda: len(wanted) >= 10, CERTAIN)
    await send(three_vpcs.alice, 1)
    await until(lambda: "vm53" in wanted, CERTAIN)
    await asyncio.gather(*flooding)
    assert wanted.count("vm51") + wanted.count("vm52") < 40, "of 160"
    await asyncio.sleep(1.1)
    wanted.clear()
    await send(three_vpcs.mallory[0], 1)
    await until(lambda: "vm51" in wanted, CERTAIN)
