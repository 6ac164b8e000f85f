"""WireGuard into a VPC: a laptop in a namespace of its own, with the real `wg-quick`; namespaces are VMs."""

import asyncio
import contextlib
import json
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

from stead import addresses, landlock
from stead.errors import HostError
from stead.host import network as host_network
from stead.host.commands import run
from stead.host.interface import Nic, Peer, PrivateNetwork, VmSlot, WireGuardTunnel
from stead.host.namespaces import namespace_of
from stead.host.network import Network
from stead.host.taps import NO_PACKET_INFORMATION, TUN
from stead.host.wireguard import _is_bound, _program, _socket_of
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
class VpcWithLaptop:
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
async def vpc_laptop(root: None, tmp_path: Path) -> AsyncIterator[VpcWithLaptop]:
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
                yield VpcWithLaptop(network, vm, outside, computer, session, tunnel, config, settings, wanted)
    finally:
        await network.close()
        await host_network.remove(settings)


async def test_a_laptop_reaches_the_vpc_and_nothing_else(vpc_laptop: VpcWithLaptop) -> None:
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)
    assert await pings(vpc_laptop.laptop, str(CIDR[1]), wait=CERTAIN)
    # And back: a VM reaches the laptop at its tunnel address.
    async with echoing(await vpc_laptop.laptop.listener("0.0.0.0", PORT)):
        with await vpc_laptop.vm.side.connect(str(vpc_laptop.session.address), PORT) as link:
            assert await echoed(link, b"hello") == b"hello"
        assert not await vpc_laptop.outside.side.reaches(str(vpc_laptop.session.address), PORT)
    # Only what AllowedIPs names goes into the tunnel; make it all, as a hostile client would.
    name = vpc_laptop.config.stem
    for target in (
        addresses.GATEWAY,
        addresses.machine_address(11),
        addresses.machine_address(12),
        "1.1.1.1",
    ):
        vpc_laptop.laptop.ip("route", "add", f"{target}/32", "dev", name)
    wide = vpc_laptop.session.config.replace(f"AllowedIPs = {CIDR}", "AllowedIPs = 0.0.0.0/0")
    await vpc_laptop.configure(wide)
    assert await vpc_laptop.reaches(CIDR[1], wait=CERTAIN)
    targets = (
        (addresses.GATEWAY, 443),
        (addresses.GATEWAY, 53),
        (addresses.machine_address(11), PORT),
        (addresses.machine_address(12), PORT),
        (addresses.TUNNEL_SERVER, 22),
    )
    found = await asyncio.gather(*(vpc_laptop.reaches(*target) for target in targets))
    assert not [target for target, reached in zip(targets, found, strict=True) if reached]


async def test_a_large_transfer_does_not_stall(vpc_laptop: VpcWithLaptop) -> None:
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)
    reader, writer = await asyncio.open_connection(sock=await vpc_laptop.laptop.connect(str(CIDR[1]), PORT))
    async with asyncio.timeout(60):
        writer.write(b"x" * 1_000_000)
        writer.write_eof()
        assert len(await reader.read()) == 1_000_000
    writer.close()


async def test_a_closed_session_ends_at_once(vpc_laptop: VpcWithLaptop) -> None:
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)
    other = Peer(_new_keys()[1], IPv4Address("100.96.0.3"))
    await vpc_laptop.network.vpcs.set_tunnel(replace(vpc_laptop.tunnel, peers=(other,)))
    assert not await vpc_laptop.reaches(CIDR[1])
    await vpc_laptop.network.vpcs.set_tunnel(
        replace(vpc_laptop.tunnel, peers=(*vpc_laptop.tunnel.peers, other))
    )
    await vpc_laptop.connect_again()
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)
    await vpc_laptop.network.vpcs.set_tunnel(replace(vpc_laptop.tunnel, peers=()))
    assert not await vpc_laptop.reaches(CIDR[1])


async def test_hundreds_of_sessions_share_a_tunnel(vpc_laptop: VpcWithLaptop) -> None:
    others = tuple(Peer(_new_keys()[1], addresses.TUNNELS[number]) for number in range(3, 403))
    await vpc_laptop.network.vpcs.set_tunnel(
        replace(vpc_laptop.tunnel, peers=(*others, *vpc_laptop.tunnel.peers))
    )
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)


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


async def kill_during_transfer(vpc_laptop: VpcWithLaptop, after: Callable[[], Awaitable[None]]) -> float:
    """Kill wireguard-go, do something, and let the transfer end; returns the seconds that nothing arrived."""
    process = vpc_laptop.network.vpcs.wireguard._devices[1].process
    if process is None:
        pytest.skip("this host has WireGuard in its kernel")
    transfer = Transfer(await vpc_laptop.laptop.connect(str(CIDR[1]), PORT))
    running = asyncio.create_task(transfer.run())
    await until(lambda: transfer.returned > 20_000, 60)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    await until(lambda: process.serving and process.pid != pid and _is_bound(vpc_laptop.session.port), 60)
    await after()
    # The same connection: TCP sends again until the tunnel is back.
    sent = transfer.sent
    await until(lambda: transfer.returned > sent, 120)
    seconds = time.monotonic() - killed
    assert await vpc_laptop.reaches(CIDR[1], wait=CERTAIN)
    transfer.ending = True
    await asyncio.wait_for(running, 60)
    assert transfer.returned == transfer.sent
    sockets = list(Path("/var/run/wireguard").glob(f"{vpc_laptop.interface}*"))
    links = ip("-n", f"stead-{vpc_laptop.settings.instance}-1", "-brief", "link")
    assert len(sockets) == links.count(f"{vpc_laptop.interface} ") == 1
    assert vpc_laptop.interface not in ip("-brief", "link"), "the device is in the VPC only"
    return seconds


async def test_a_transfer_survives_a_kill_of_the_tunnel(vpc_laptop: VpcWithLaptop) -> None:
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)
    await kill_during_transfer(vpc_laptop, vpc_laptop.connect_again)


@pytest.mark.slow
async def test_a_client_connects_by_itself_after_a_kill_of_the_tunnel(vpc_laptop: VpcWithLaptop) -> None:
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)

    async def wait_only() -> None:
        pass

    seconds = await kill_during_transfer(vpc_laptop, wait_only)
    print(f"the transfer went on {seconds:.1f} s after the kill")


async def test_the_tunnel_is_the_work_of_a_user_without_rights(vpc_laptop: VpcWithLaptop) -> None:
    process = vpc_laptop.network.vpcs.wireguard._devices[1].process
    if process is None:
        pytest.skip("WireGuard is the kernel's on this host")
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    facts = {name: value.split() for name, value in (line.split(":", 1) for line in lines)}
    user = str(vpc_laptop.settings.tunnel_uid(1))
    assert facts["Uid"] == facts["Gid"] == [user] * 4
    assert set(facts["Groups"]) <= {user}
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(facts[name][0], 16) == 0, name
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == (["1"], ["2"])
    namespace = f"stead-{vpc_laptop.settings.instance}-1"
    (link,) = json.loads(ip("-n", namespace, "-json", "link", "show", vpc_laptop.interface))
    assert link["mtu"] == 1420


_SET_MTU = "socket(S, 2, 2, 0); my $link = pack(q(a16ix20), $ARGV[0], 576); ioctl(S, 0x8922, $link) or exit 1"


async def test_a_program_in_the_place_of_the_tunnel_can_change_nothing(
    root: None, tmp_path: Path, open_folder: Path
) -> None:
    """With its user, its capabilities, its descriptors and its filter, in the network of the host."""
    (open_folder / "public").write_text("secret")
    (open_folder / "public").chmod(0o644)
    settings = Settings(data=tmp_path)
    name = addresses.wireguard_link(settings.instance, 9)
    command = _program(name, settings.tunnel_uid(9), 51820, TUN | NO_PACKET_INFORMATION)
    program = list(command.arguments)
    assert program[-3:] == ["wireguard-go", "-f", name]
    try:
        attempts = f"""
attempt() {{ said=$("$@" 2>&1) && echo "$*"; }}
attempt ip link show {name}
attempt nft list ruleset
attempt nft add table inet stead_probe
attempt ip link set {name} up
attempt ip link set lo mtu 9000
attempt ip route add blackhole 198.51.100.7/32
attempt perl -e '{_SET_MTU}' {name}
true
"""
        done = await run(*program[:-3], "bash", "-c", attempts)
        possible = [f"ip link show {name}", f"perl -e {_SET_MTU} {name}"]
        assert done.stdout.decode().splitlines() == possible
        (link,) = json.loads(ip("-json", "link", "show", name))
        assert (link["mtu"], "UP" in link["flags"]) == (1420, False)
        if landlock.version():
            for command_line in (["cat", open_folder / "public"], ["ls", "/run"], ["cat", "/proc/1/status"]):
                with pytest.raises(HostError, match="Permission denied"):
                    await run(*program[:-3], *command_line)
    finally:
        for descriptor in command.handed_over:
            os.close(descriptor)
        _socket_of(name).unlink()


async def test_a_deleted_vpc_leaves_no_tunnel(vpc_laptop: VpcWithLaptop) -> None:
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)
    device = vpc_laptop.network.vpcs.wireguard._devices[1]
    await vpc_laptop.network.vpcs.remove(VPC)
    assert device.process is None or device.process.pid is None
    assert not _is_bound(vpc_laptop.session.port)
    assert not list(Path("/var/run/wireguard").glob(f"{vpc_laptop.interface}*"))
    with pytest.raises(HostError, match="does not exist"):
        await vpc_laptop.network.vpcs.set_tunnel(vpc_laptop.tunnel)
    assert not vpc_laptop.network.vpcs.wireguard._devices
    assert not namespace_of(f"stead-{vpc_laptop.settings.instance}-1").exists()


async def test_nothing_is_left_after_the_server_and_its_uninstallation(vpc_laptop: VpcWithLaptop) -> None:
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)
    await vpc_laptop.network.vpcs.wireguard.close()
    assert not _is_bound(vpc_laptop.session.port)
    assert vpc_laptop.interface not in ip("-n", f"stead-{vpc_laptop.settings.instance}-1", "link")
    # As a killed wireguard-go leaves it.
    (Path("/var/run/wireguard") / f"{vpc_laptop.interface}.sock").touch()
    await host_network.remove(vpc_laptop.settings)
    assert not list(Path("/var/run/wireguard").glob(f"{vpc_laptop.interface}*"))


async def test_a_port_in_use_is_named(vpc_laptop: VpcWithLaptop) -> None:
    await vpc_laptop.network.vpcs.set_tunnel(replace(vpc_laptop.tunnel, peers=()))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        other.bind(("0.0.0.0", vpc_laptop.tunnel.port))
        with pytest.raises(HostError, match=f"UDP port {vpc_laptop.tunnel.port}.* is in use"):
            await vpc_laptop.network.vpcs.set_tunnel(vpc_laptop.tunnel)
    await vpc_laptop.network.vpcs.set_tunnel(vpc_laptop.tunnel)
    assert _is_bound(vpc_laptop.tunnel.port)


async def test_a_packet_of_a_client_asks_for_a_vm_that_does_not_run(vpc_laptop: VpcWithLaptop) -> None:
    await until(lambda: vpc_laptop.reaches(CIDR[1]), 60)
    asleep = VmSlot("vm3", 13, Nic(VPC.id, CIDR[3]))
    async with guest(vpc_laptop.network, asleep):
        assert vpc_laptop.wanted == []
    assert not await vpc_laptop.reaches(CIDR[3])
    assert "vm3" in vpc_laptop.wanted
