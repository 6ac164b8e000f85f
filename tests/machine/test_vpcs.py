"""VPCs on the host, with namespaces in the place of VMs: addresses, sleepers, and what is left of them."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
import pytest_asyncio

from stead import addresses
from stead.errors import HostError
from stead.host import network as host_network
from stead.host import vpcs
from stead.host.interface import Nic, PrivateNetwork, VmSlot
from stead.host.network import Network
from stead.settings import Settings
from support.links import CERTAIN, Side, echoed, echoing
from support.vpc_guests import Guest, guest, pings, plugged
from support.waiting import until

CIDR = IPv4Network("10.77.0.0/24")
OURS, THEIRS = PrivateNetwork("vpc-ours", 1, CIDR), PrivateNetwork("vpc-theirs", 2, CIDR)
PORT = 7000
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


def vm_slot(slot: int, vpc: PrivateNetwork | None = None, host: int = 0) -> VmSlot:
    nic = None if vpc is None else Nic(vpc.id, CIDR[host])
    return VmSlot(f"vm{slot}", slot, nic)


A1, A2, B1, OUTSIDE = vm_slot(11, OURS, 1), vm_slot(12, OURS, 2), vm_slot(21, THEIRS, 1), vm_slot(30)


@dataclass
class VpcPair:
    network: Network
    guests: dict[str, Guest] = field(default_factory=dict)
    wanted: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Guest:
        return self.guests[name]


@pytest_asyncio.fixture
async def own_settings(root: None, tmp_path: Path) -> AsyncIterator[Settings]:
    made = Settings(data=tmp_path, cache=tmp_path)
    yield made
    await host_network.remove(made)
    assert not list(Path("/run/netns").glob(f"stead-{made.instance}*"))


@pytest_asyncio.fixture
async def vpc_pair(own_settings: Settings) -> AsyncIterator[VpcPair]:
    """Two VMs in our VPC, one in another VPC with the same range and address, and one in none."""
    network = await Network.open(own_settings)
    vpc_pair = VpcPair(network)
    try:
        await network.vpcs.open([OURS, THEIRS], [], vpc_pair.wanted.append)
        async with contextlib.AsyncExitStack() as stack:
            for name, each in {"a1": A1, "a2": A2, "b1": B1, "outside": OUTSIDE}.items():
                vpc_pair.guests[name] = await stack.enter_async_context(guest(network, each))
            yield vpc_pair
    finally:
        await network.close()


@contextlib.asynccontextmanager
async def listening(side: Side) -> AsyncIterator[None]:
    """An echo server on all addresses."""
    async with echoing(await side.listener("0.0.0.0", PORT)):
        yield


async def dialed(network: Network, slot: int) -> socket.socket:
    """A connection of the host to the VM of a slot."""
    return await network.dial(addresses.machine_address(slot), PORT)


async def datagram_socket(side: Side, port: int = 0) -> socket.socket:
    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        made.bind(("0.0.0.0", port))
        return made

    return await side.thread.call(make)


async def test_the_same_address_in_two_vpcs_leads_to_two_vms(vpc_pair: VpcPair) -> None:
    assert vpc_pair["a1"].address == vpc_pair["b1"].address
    for name in ("a1", "b1"):
        async with listening(vpc_pair[name].side):
            link = await dialed(vpc_pair.network, vpc_pair[name].vm_slot.number)
            with link:
                assert await echoed(link, name.encode()) == name.encode()
        with pytest.raises(OSError):
            (await dialed(vpc_pair.network, vpc_pair[name].vm_slot.number)).close()


async def test_an_address_without_a_vm_is_unreachable_at_once(vpc_pair: VpcPair) -> None:
    with pytest.raises(OSError) as refused:
        await vpc_pair["a1"].side.connect(str(CIDR[77]), PORT)
    assert refused.value.errno in UNREACHABLE


async def test_the_gateway_and_nothing_else_of_the_host(vpc_pair: VpcPair) -> None:
    sides = [vpc_pair[name].side for name in ("a1", "outside")]
    assert all(await asyncio.gather(*(pings(side, str(addresses.GATEWAY), wait=CERTAIN) for side in sides)))
    found = await asyncio.gather(
        *(side.reaches(str(addresses.GATEWAY), 22) for side in sides),
        *(pings(side, str(addresses.VPC_ROUTER)) for side in sides),
    )
    assert not any(found)
    links = await vpc_pair.network._thread.call(lambda: socket.if_nameindex())
    assert {"sdv1", "sdv2", "sd30"} <= {name for _, name in links} and "sd11" not in dict(links).values()


async def test_a_vm_cannot_send_with_another_address(vpc_pair: VpcPair) -> None:
    a1, a2 = vpc_pair["a1"].side, vpc_pair["a2"].side
    async with listening(a2):
        assert await a1.reaches(vpc_pair["a2"].address, PORT, wait=CERTAIN)
        for stolen in (str(CIDR[9]), "1.2.3.4", str(addresses.machine_address(12))):
            a1.ip("addr", "add", f"{stolen}/32", "dev", "lo")
            receiver = await datagram_socket(a2, PORT)
            sender = await a1.thread.call(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            with receiver, sender:
                sender.bind((stolen, 0))
                sender.sendto(b"spoofed", (vpc_pair["a2"].address, PORT))
                sender.close()
                assert await datagram_arrives_at(receiver, a1, vpc_pair["a2"].address) == [b"honest"]


async def datagram_arrives_at(receiver: socket.socket, source: Side, address: str) -> list[bytes]:
    """What a socket gets until a datagram that is certain to arrive."""
    found: list[bytes] = []
    with await datagram_socket(source) as sender:
        async with asyncio.timeout(CERTAIN):
            await asyncio.get_running_loop().sock_sendto(sender, b"honest", (address, PORT))
            while b"honest" not in found:
                found.append(await asyncio.get_running_loop().sock_recv(receiver, 100))
    return found


async def test_a_large_transfer_passes_in_both_directions(vpc_pair: VpcPair) -> None:
    """1 MB each way, over the VPC and from the host: nothing stalls on the packet size."""

    async def send_and_count(link: socket.socket) -> int:
        reader, writer = await asyncio.open_connection(sock=link)
        writer.write(b"x" * 1_000_000)
        writer.write_eof()
        data = await reader.read()
        writer.close()
        return len(data)

    async with listening(vpc_pair["a2"].side), asyncio.timeout(CERTAIN):
        assert (
            await send_and_count(await vpc_pair["a1"].side.connect(vpc_pair["a2"].address, PORT)) == 1_000_000
        )
        assert await send_and_count(await dialed(vpc_pair.network, 12)) == 1_000_000


async def test_traffic_in_a_vpc_is_counted(vpc_pair: VpcPair) -> None:
    before = await vpc_pair.network.traffic()
    assert await pings(vpc_pair["a1"].side, vpc_pair["a2"].address, wait=CERTAIN)
    after = await vpc_pair.network.traffic()
    for slot in (11, 12):
        assert after[slot] - before.get(slot, 0) >= 2 * 28
    assert after.get(21, 0) == before.get(21, 0)


async def test_counters_of_many_vpcs_are_read_without_processes(
    vpc_pair: VpcPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*command: str, **options: object) -> None:
        raise AssertionError(command)

    many = [PrivateNetwork(f"vpc-{number}", number, CIDR) for number in (5, 6, 8)]
    for number, network in enumerate(many):
        await vpc_pair.network.vpcs.add(network)
        async with guest(vpc_pair.network, vm_slot(70 + number, network, 1)) as made:
            assert await pings(made.side, str(addresses.GATEWAY), wait=CERTAIN)
    monkeypatch.setattr("asyncio.create_subprocess_exec", refuse)
    assert {70, 71, 72} <= (await vpc_pair.network.traffic()).keys()
    # A VPC that is removed while the others are read is left out.
    reading = asyncio.create_task(vpc_pair.network.traffic())
    await asyncio.sleep(0)
    monkeypatch.undo()
    for number, network in enumerate(many):
        await vpc_pair.network.vpcs.forget(vm_slot(70 + number, network, 1))
        await vpc_pair.network.vpcs.remove(network)
    await reading
    assert not {70, 71, 72} & (await vpc_pair.network.traffic()).keys()


async def test_a_vm_of_the_pool_moves_into_a_vpc(vpc_pair: VpcPair) -> None:
    plain = vm_slot(40)
    taps = await vpc_pair.network.attach(plain)
    try:
        joined = vm_slot(40, OURS, 40)
        await vpc_pair.network.vpcs.move(joined)
        async with plugged(taps.data, joined) as moved, listening(moved.side):
            assert await vpc_pair["a1"].side.reaches(moved.address, PORT, wait=CERTAIN)
            (await dialed(vpc_pair.network, 40)).close()
            assert await pings(moved.side, str(addresses.GATEWAY), wait=CERTAIN)
    finally:
        taps.close()


async def test_a_packet_to_a_vm_that_does_not_run_wakes_it_and_is_delivered(vpc_pair: VpcPair) -> None:
    sleeper = vm_slot(50, OURS, 50)
    async with guest(vpc_pair.network, sleeper) as running:
        assert await pings(vpc_pair["a1"].side, running.address, wait=CERTAIN)
    assert vpc_pair.wanted == []
    with await datagram_socket(vpc_pair["a1"].side) as sender:
        sender.sendto(b"good morning", (str(CIDR[50]), PORT))
        await until(lambda: vpc_pair.wanted, CERTAIN)
        assert set(vpc_pair.wanted) == {"vm50"}
        taps = await vpc_pair.network.attach(sleeper)
        try:
            # The packet is in the queue of the tap, where QEMU finds it, but behind the frame that it spoils.
            assert b"good morning" not in os.read(taps.data, 2000)
            assert await until(lambda: _holds(taps.data, b"good morning"), CERTAIN)
        finally:
            taps.close()
    # Connections of the host do not wake it: they are made when it runs.
    vpc_pair.wanted.clear()
    with pytest.raises(OSError) as refused:
        async with asyncio.timeout(CERTAIN):
            (await dialed(vpc_pair.network, 50)).close()
    assert refused.value.errno in UNREACHABLE
    assert vpc_pair.wanted == []


def _holds(tap: int, text: bytes) -> bool:
    return any(text in frame for frame in _read(tap, []))


def _read(tap: int, found: list[bytes]) -> list[bytes]:
    """The frames found before, and those in the queue of a tap."""
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(os.read(tap, 2000))
    return found


async def test_packets_to_vms_that_do_not_run_are_limited(vpc_pair: VpcPair) -> None:
    async with guest(vpc_pair.network, vm_slot(51, OURS, 51)):
        pass
    with await datagram_socket(vpc_pair["a1"].side) as sender:
        for _ in range(5000):
            with contextlib.suppress(BlockingIOError):
                sender.sendto(b"flood", (str(CIDR[51]), PORT))
        await until(lambda: vpc_pair.wanted, CERTAIN)
        await asyncio.sleep(0.2)
    assert len(vpc_pair.wanted) < 500


async def test_packets_that_wait_for_vms_are_bounded_and_expire(
    vpc_pair: VpcPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vpcs, "_HELD_VMS_IN_ALL", 2)
    sleepers = [vm_slot(51, OURS, 51), vm_slot(52, OURS, 52), vm_slot(53, THEIRS, 53)]
    for each in sleepers:
        async with guest(vpc_pair.network, each):
            pass
    with (
        await datagram_socket(vpc_pair["a1"].side) as ours,
        await datagram_socket(vpc_pair["b1"].side) as theirs,
    ):
        for _ in range(12):
            for each, sender in zip(sleepers, (ours, ours, theirs), strict=True):
                vpc_pair.wanted.clear()
                sender.sendto(b"packet", (str(CIDR[each.number]), PORT))
                await until(lambda: vpc_pair.wanted, CERTAIN)
                assert vpc_pair.wanted == [each.machine], "it is woken also when the packet is dropped"
        opened = vpc_pair.network.vpcs._open
        assert [len(each) for each in opened[OURS.id].held.values()] == [8, 8]
        assert not opened[THEIRS.id].held
        monkeypatch.setattr(vpcs, "_HELD_FOR", 0.0)
        taps = await vpc_pair.network.attach(sleepers[0])
        try:
            ours.sendto(b"fresh", (str(CIDR[51]), PORT))
            found: list[bytes] = []
            await until(lambda: any(b"fresh" in frame for frame in _read(taps.data, found)), CERTAIN)
            assert not [frame for frame in found if b"packet" in frame]
        finally:
            taps.close()


async def test_a_deleted_vm_is_forgotten(vpc_pair: VpcPair) -> None:
    gone = vm_slot(60, OURS, 60)
    async with guest(vpc_pair.network, gone) as running, listening(running.side):
        (await dialed(vpc_pair.network, 60)).close()
    await vpc_pair.network.vpcs.forget(gone)
    with pytest.raises(OSError) as refused:
        await vpc_pair["a1"].side.connect(str(CIDR[60]), PORT)
    assert refused.value.errno in UNREACHABLE
    assert vpc_pair.wanted == []
    with pytest.raises(OSError) as refused:
        async with asyncio.timeout(CERTAIN):
            await dialed(vpc_pair.network, 60)
    assert refused.value.errno in UNREACHABLE
    # Its slot and its address go to other VMs.
    async with guest(vpc_pair.network, vm_slot(60)) as plain, listening(plain.side):
        (await dialed(vpc_pair.network, 60)).close()
    async with guest(vpc_pair.network, vm_slot(61, OURS, 60)) as heir, listening(heir.side):
        assert await vpc_pair["a1"].side.reaches(heir.address, PORT, wait=CERTAIN)
        (await dialed(vpc_pair.network, 61)).close()


async def test_vms_stay_connected_while_the_server_restarts(own_settings: Settings) -> None:
    network = await Network.open(own_settings)
    stale = PrivateNetwork("vpc-stale", 3, CIDR)
    async with contextlib.AsyncExitStack() as stack:
        await network.vpcs.open([OURS, stale], [], lambda machine: None)
        await network.vpcs.add(stale)
        a1, a2 = [await stack.enter_async_context(guest(network, each)) for each in (A1, A2)]
        await stack.enter_async_context(listening(a2.side))
        link = await a1.side.connect(a2.address, PORT)
        stack.callback(link.close)
        outside = await dialed(network, 12)
        stack.callback(outside.close)
        await network.close()
        assert await echoed(link, b"without a server") == b"without a server"
        wanted: list[str] = []
        network = await Network.open(own_settings)
        try:
            await network.vpcs.open([OURS], [A1, A2], wanted.append)
            assert await echoed(link, b"after it") == b"after it"
            assert await echoed(outside, b"after it") == b"after it"
            (await dialed(network, 12)).close()
            assert [path.name for path in Path("/run/netns").glob(f"stead-{own_settings.instance}-*")] == [
                f"stead-{own_settings.instance}-1"
            ]
        finally:
            await network.close()


async def test_a_removed_vpc_leaves_nothing(vpc_pair: VpcPair, own_settings: Settings) -> None:
    other = PrivateNetwork("vpc-other", 7, CIDR)
    await vpc_pair.network.vpcs.add(other)
    path = Path("/run/netns") / f"stead-{own_settings.instance}-7"
    assert path.exists()
    await vpc_pair.network.vpcs.remove(other)
    await vpc_pair.network.vpcs.remove(other)
    assert not path.exists()
    assert "sdv7" not in dict(await vpc_pair.network._thread.call(socket.if_nameindex)).values()
    with pytest.raises(HostError, match="does not exist"):
        await vpc_pair.network.attach(VmSlot("vm70", 70, Nic(other.id, IPv4Address("10.77.0.70"))))
