"""WireGuard into a VPC: a laptop in a namespace of its own, with the real `wg-quick`; namespaces are VMs."""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
import pytest_asyncio

from stead import addresses
from stead.errors import HostError
from stead.host import network as host_network
from stead.host.interface import Nic, Peer, PrivateNetwork, VmSlot, WireGuardTunnel
from stead.host.namespaces import namespace_of
from stead.host.network import Network
from stead.host.wireguard import _is_bound
from stead.networks.tunnels import TunnelSession, _new_keys
from stead.settings import Settings
from support.laptop import Laptop, laptop, session_into, written
from support.links import CERTAIN, PROBE, Side, echoed, echoing, ip
from support.vpc_guests import Guest, guest, pings
from support.waiting import until

CIDR = IPv4Network("10.78.0.0/24")
VPC = PrivateNetwork("vpc-tunnel", 1, CIDR)
PORT = 7000


@dataclass
class Scene:
    network: Network
    vm: Guest
    outside: Guest
    computer: Laptop
    session: TunnelSession
    tunnel: WireGuardTunnel
    config: Path
    settings: Settings
    wanted: list[str]

    @property
    def laptop(self) -> Side:
        return self.computer.side

    @property
    def interface(self) -> str:
        return addresses.wireguard_link(self.settings.instance, 1)

    async def reaches(self, address: object, port: int = PORT, wait: float = PROBE) -> bool:
        return await self.laptop.reaches(str(address), port, wait=wait)

    async def configure(self, text: str) -> None:
        """Give the laptop's device a configuration without taking it down."""
        stripped = "".join(line for line in text.splitlines(True) if not line.startswith(("Address", "MTU")))
        await self.computer.run("wg", "syncconf", self.config.stem, "/dev/stdin", stdin=stripped)

    async def connect_again(self) -> None:
        """At once: by itself a client notices after 15 s without an answer that its keys are void."""
        peer = self.session.server_key
        await self.computer.run("wg", "set", self.config.stem, "peer", peer, "remove")
        await self.configure(self.session.config)


@pytest_asyncio.fixture
async def scene(root: None, tmp_path: Path) -> AsyncIterator[Scene]:
    settings = Settings(data=tmp_path, cache=tmp_path)
    network = await Network.open(settings)
    try:
        wanted: list[str] = []
        await network.vpcs.open([VPC], [], wanted.append)
        async with contextlib.AsyncExitStack() as stack:
            computer = stack.enter_context(laptop())
            vm = await stack.enter_async_context(guest(network, VmSlot("vm1", 11, Nic(VPC.id, CIDR[1]))))
            outside = await stack.enter_async_context(guest(network, VmSlot("vm2", 12)))
            await stack.enter_async_context(echoing(await vm.side.listener("0.0.0.0", PORT)))
            await stack.enter_async_context(echoing(await outside.side.listener("0.0.0.0", PORT)))
            session, tunnel = session_into(VPC, computer)
            config = written(tmp_path, session)
            await network.vpcs.set_tunnel(tunnel)
            async with computer.joined(config):
                yield Scene(network, vm, outside, computer, session, tunnel, config, settings, wanted)
    finally:
        await network.close()
        await host_network.remove(settings)


async def test_a_laptop_reaches_the_vpc_and_nothing_else(scene: Scene) -> None:
    await until(lambda: scene.reaches(CIDR[1]), 60)
    assert await pings(scene.laptop, str(CIDR[1]), wait=CERTAIN)
    # And back: a VM reaches the laptop at its tunnel address.
    async with echoing(await scene.laptop.listener("0.0.0.0", PORT)):
        with await scene.vm.side.connect(str(scene.session.address), PORT) as link:
            assert await echoed(link, b"hello") == b"hello"
        assert not await scene.outside.side.reaches(str(scene.session.address), PORT)
    # Only what AllowedIPs names goes into the tunnel; make it all, as a hostile client would.
    name = scene.config.stem
    for target in (
        addresses.GATEWAY,
        addresses.machine_address(11),
        addresses.machine_address(12),
        "1.1.1.1",
    ):
        scene.laptop.ip("route", "add", f"{target}/32", "dev", name)
    wide = scene.session.config.replace(f"AllowedIPs = {CIDR}", "AllowedIPs = 0.0.0.0/0")
    await scene.configure(wide)
    assert await scene.reaches(CIDR[1], wait=CERTAIN)
    targets = (
        (addresses.GATEWAY, 443),
        (addresses.GATEWAY, 53),
        (addresses.machine_address(11), PORT),
        (addresses.machine_address(12), PORT),
        (addresses.TUNNEL_SERVER, 22),
    )
    found = await asyncio.gather(*(scene.reaches(*target) for target in targets))
    assert not [target for target, reached in zip(targets, found, strict=True) if reached]


async def test_a_large_transfer_does_not_stall(scene: Scene) -> None:
    await until(lambda: scene.reaches(CIDR[1]), 60)
    reader, writer = await asyncio.open_connection(sock=await scene.laptop.connect(str(CIDR[1]), PORT))
    async with asyncio.timeout(60):
        writer.write(b"x" * 1_000_000)
        writer.write_eof()
        assert len(await reader.read()) == 1_000_000
    writer.close()


async def test_a_closed_session_ends_at_once(scene: Scene) -> None:
    await until(lambda: scene.reaches(CIDR[1]), 60)
    other = Peer(_new_keys()[1], IPv4Address("100.96.0.3"))
    await scene.network.vpcs.set_tunnel(replace(scene.tunnel, peers=(other,)))
    assert not await scene.reaches(CIDR[1])
    await scene.network.vpcs.set_tunnel(replace(scene.tunnel, peers=(*scene.tunnel.peers, other)))
    await scene.connect_again()
    await until(lambda: scene.reaches(CIDR[1]), 60)
    await scene.network.vpcs.set_tunnel(replace(scene.tunnel, peers=()))
    assert not await scene.reaches(CIDR[1])


async def test_hundreds_of_sessions_share_a_tunnel(scene: Scene) -> None:
    others = tuple(Peer(_new_keys()[1], addresses.TUNNELS[number]) for number in range(3, 403))
    await scene.network.vpcs.set_tunnel(replace(scene.tunnel, peers=(*others, *scene.tunnel.peers)))
    await until(lambda: scene.reaches(CIDR[1]), 60)


@dataclass
class Transfer:
    """Data that goes to an echo server and back over one connection, until it is told to end."""

    link: socket.socket
    sent: int = 0
    returned: int = 0
    ending: bool = False

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self.link)

        async def send() -> None:
            while not self.ending:
                writer.write(b"x" * 1000)
                await writer.drain()
                self.sent += 1000
                await asyncio.sleep(0.01)
            writer.write_eof()

        async def receive() -> None:
            while data := await reader.read(10_000):
                self.returned += len(data)

        await asyncio.gather(send(), receive())
        writer.close()


async def kill_during_transfer(scene: Scene, after: Callable[[], Awaitable[None]]) -> float:
    """Kill wireguard-go, do something, and let the transfer end; returns the seconds that nothing arrived."""
    process = scene.network.vpcs.wireguard._devices[1].process
    if process is None:
        pytest.skip("this host has WireGuard in its kernel")
    transfer = Transfer(await scene.laptop.connect(str(CIDR[1]), PORT))
    running = asyncio.create_task(transfer.run())
    await until(lambda: transfer.returned > 20_000, 60)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    await until(lambda: process.serving and process.pid != pid and _is_bound(scene.session.port), 60)
    await after()
    # The same connection: TCP sends again until the tunnel is back.
    sent = transfer.sent
    await until(lambda: transfer.returned > sent, 120)
    seconds = time.monotonic() - killed
    assert await scene.reaches(CIDR[1], wait=CERTAIN)
    transfer.ending = True
    await asyncio.wait_for(running, 60)
    assert transfer.returned == transfer.sent
    sockets = list(Path("/var/run/wireguard").glob(f"{scene.interface}*"))
    links = ip("-n", f"stead-{scene.settings.instance}-1", "-brief", "link")
    assert len(sockets) == links.count(f"{scene.interface} ") == 1
    assert scene.interface not in ip("-brief", "link"), "the device is in the VPC only"
    return seconds


async def test_a_transfer_survives_a_kill_of_the_tunnel(scene: Scene) -> None:
    await until(lambda: scene.reaches(CIDR[1]), 60)
    await kill_during_transfer(scene, scene.connect_again)


@pytest.mark.slow
async def test_a_client_connects_by_itself_after_a_kill_of_the_tunnel(scene: Scene) -> None:
    await until(lambda: scene.reaches(CIDR[1]), 60)

    async def wait_only() -> None:
        pass

    seconds = await kill_during_transfer(scene, wait_only)
    print(f"the transfer went on {seconds:.1f} s after the kill")


async def test_a_deleted_vpc_leaves_no_tunnel(scene: Scene) -> None:
    await until(lambda: scene.reaches(CIDR[1]), 60)
    device = scene.network.vpcs.wireguard._devices[1]
    await scene.network.vpcs.remove(VPC)
    assert device.process is None or device.process.pid is None
    assert not _is_bound(scene.session.port)
    assert not list(Path("/var/run/wireguard").glob(f"{scene.interface}*"))
    with pytest.raises(HostError, match="does not exist"):
        await scene.network.vpcs.set_tunnel(scene.tunnel)
    assert not scene.network.vpcs.wireguard._devices
    assert not namespace_of(f"stead-{scene.settings.instance}-1").exists()


async def test_nothing_is_left_after_the_server_and_its_uninstallation(scene: Scene) -> None:
    await until(lambda: scene.reaches(CIDR[1]), 60)
    await scene.network.vpcs.wireguard.close()
    assert not _is_bound(scene.session.port)
    assert scene.interface not in ip("-n", f"stead-{scene.settings.instance}-1", "link")
    # As a killed wireguard-go leaves it.
    (Path("/var/run/wireguard") / f"{scene.interface}.sock").touch()
    await host_network.remove(scene.settings)
    assert not list(Path("/var/run/wireguard").glob(f"{scene.interface}*"))


async def test_a_port_in_use_is_named(scene: Scene) -> None:
    await scene.network.vpcs.set_tunnel(replace(scene.tunnel, peers=()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("0.0.0.0", scene.tunnel.port))
        with pytest.raises(HostError, match=f"UDP port {scene.tunnel.port}.* is in use"):
            await scene.network.vpcs.set_tunnel(scene.tunnel)
    await scene.network.vpcs.set_tunnel(scene.tunnel)
    assert _is_bound(scene.tunnel.port)


async def test_a_packet_of_a_client_asks_for_a_vm_that_does_not_run(scene: Scene) -> None:
    await until(lambda: scene.reaches(CIDR[1]), 60)
    asleep = VmSlot("vm3", 13, Nic(VPC.id, CIDR[3]))
    async with guest(scene.network, asleep):
        assert scene.wanted == []
    assert not await scene.reaches(CIDR[3])
    assert "vm3" in scene.wanted
