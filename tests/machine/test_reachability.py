"""Who reaches whom: every pair of VMs, VPN clients and the host, by every protocol, with labelled packets.

Namespaces stand for VMs and laptops. Each packet says where it comes from and what it is for, all parties
watch their links, and the whole table is compared: what is not expected somewhere must not arrive there.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path

import pytest_asyncio

from stead import addresses
from stead.host import network as host_network
from stead.host.interface import Nic, PrivateNetwork, VmSlot, WireGuardTunnel
from stead.host.namespaces import NamespaceThread
from stead.host.network import Network
from stead.networks.tunnels import TunnelSession
from stead.settings import Settings
from support import packet_probes as probes
from support.laptop import Laptop, laptop, session_into, written
from support.links import link, namespace
from support.packet_probes import PROTOCOLS, Seen, Wire, label_of, marked
from support.vpc_guests import guest
from support.waiting import until

RANGE, OTHER_RANGE = IPv4Network("10.77.0.0/24"), IPv4Network("10.79.0.0/24")
OURS = PrivateNetwork("vpc-ours", 1, RANGE)
STRANGERS = PrivateNetwork("vpc-strangers", 2, RANGE)
OTHER = PrivateNetwork("vpc-other", 3, OTHER_RANGE)

VMS = {
    "vm": VmSlot("vm", 11, Nic(OURS.id, RANGE[1])),
    "neighbour": VmSlot("neighbour", 12, Nic(OURS.id, RANGE[2])),
    # In another VPC of the account, in one of another account with our range and address, and in none.
    "other": VmSlot("other", 13, Nic(OTHER.id, OTHER_RANGE[1])),
    "stranger": VmSlot("stranger", 21, Nic(STRANGERS.id, RANGE[1])),
    "plain": VmSlot("plain", 30),
}
LAPTOPS = {"laptop": OURS, "strangers-laptop": STRANGERS, "colleagues-laptop": OURS}

# From whom, to which address: who gets it, by every protocol over IPv4. `stranger` has the address of `vm`.
REACHES = {
    ("vm", "neighbour"): "neighbour",
    ("neighbour", "vm"): "vm",
    ("vm", "laptop"): "laptop",
    ("neighbour", "laptop"): "laptop",
    ("laptop", "vm"): "vm",
    ("laptop", "neighbour"): "neighbour",
    # Clients of one VPC reach its VMs, and not each other.
    ("vm", "colleagues-laptop"): "colleagues-laptop",
    ("neighbour", "colleagues-laptop"): "colleagues-laptop",
    ("colleagues-laptop", "vm"): "vm",
    ("colleagues-laptop", "neighbour"): "neighbour",
    ("stranger", "laptop"): "strangers-laptop",
    ("strangers-laptop", "vm"): "stranger",
    # The server: mapped domains, SSH and forwarded ports.
    **{("server", f"outer-{name}"): name for name in VMS},
}
# To all, or to nobody in particular: nothing of it arrives anywhere.
IPV4_GROUPS = {
    "broadcast": ("255.255.255.255", "ff:ff:ff:ff:ff:ff"),
    "vpc-broadcast": (str(RANGE.broadcast_address), "ff:ff:ff:ff:ff:ff"),
    "all-hosts": ("224.0.0.1", "01:00:5e:00:00:01"),
    "group": ("239.1.2.3", "01:00:5e:01:02:03"),
}
IPV6_TARGETS = {
    "link-local": ("fe80::2", addresses.TAP_MAC),
    "unique-local": ("fd00::2", addresses.TAP_MAC),
    "all-nodes": ("ff02::1", "33:33:00:00:00:01"),
}


@dataclass
class WiredNetwork:
    seen: Seen
    network: Network
    wires: dict[str, Wire]
    sources: dict[str, IPv4Address]
    targets: Mapping[str, IPv4Address]
    flushes: int = 0

    async def send(self, source: str, kind: int, packet: bytes, mac: str | None = None) -> None:
        if source == "server":
            await self.network._thread.call(lambda: _send_routed(packet))
        else:
            self.wires[source].send(kind, packet, mac)

    async def send_ipv4(
        self, source: str, protocol: str, target: IPv4Address, label: str, mac: str | None = None
    ) -> None:
        for packet in probes.ipv4(protocol, self.sources[source], target, marked(label)):
            await self.send(source, probes.IPV4, packet, mac)

    async def flush(self, source: str, target: str, protocol: str = "udp") -> None:
        """Wait for a packet that arrives after all that were sent before it."""
        self.flushes += 1
        label = f"{source} flush {self.flushes}"

        async def arrived() -> bool:
            # A tunnel may not be up yet.
            await self.send_ipv4(source, protocol, self.targets[target], label)
            await asyncio.sleep(0.002)
            return label in self.seen.arrived

        await until(arrived, 60)


def _send_routed(packet: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as link:
        link.sendto(packet, (str(IPv4Address(packet[16:20])), 0))


FLUSHES = {
    **dict.fromkeys(VMS, ("gateway", "icmp")),
    **dict.fromkeys(LAPTOPS, ("vm", "udp")),
    "server": ("outer-plain", "udp"),
    "host": ("gateway", "icmp"),
}
"""Of each source: a packet that certainly arrives."""


@pytest_asyncio.fixture
async def wired(root: None, tmp_path: Path) -> AsyncIterator[WiredNetwork]:
    settings = Settings(data=tmp_path, cache=tmp_path)
    network = await Network.open(settings)
    try:
        await network.vpcs.open([OURS, STRANGERS, OTHER], [], lambda machine: None)
        async with contextlib.AsyncExitStack() as stack:
            yield await _set_up(network, settings, stack, tmp_path)
    finally:
        await network.close()
        await host_network.remove(settings)


async def _set_up(
    network: Network, settings: Settings, stack: contextlib.AsyncExitStack, folder: Path
) -> WiredNetwork:
    seen = Seen()
    wires: dict[str, Wire] = {}
    sources: dict[str, IPv4Address] = {"server": addresses.GATEWAY}
    targets: dict[str, IPv4Address] = {}
    for name, vm_slot in VMS.items():
        made = await stack.enter_async_context(guest(network, vm_slot))
        watch = probes.watched(seen, name, made.side.thread, "eth0")
        own = await stack.enter_async_context(watch)
        wires[name] = Wire(own, "eth0", addresses.DATA_MAC, addresses.TAP_MAC)
        sources[name] = targets[name] = IPv4Address(made.address)
        targets[f"outer-{name}"] = addresses.machine_address(vm_slot.number)
    # The same addresses as those of `vm` and of `outer-plain`.
    del targets["stranger"], targets["plain"]
    computers = [stack.enter_context(laptop(number)) for number in range(len(LAPTOPS))]
    tunnels: dict[str, WireGuardTunnel] = {}
    for computer, (name, vpc) in zip(computers, LAPTOPS.items(), strict=True):
        session, tunnels[vpc.id] = session_into(vpc, computer, tunnels.get(vpc.id))
        await network.vpcs.set_tunnel(tunnels[vpc.id])
        device = await _join(computer, session, folder, stack)
        watch = probes.watched(seen, name, computer.side.thread, device, frames=False)
        wires[name] = Wire(await stack.enter_async_context(watch), device)
        sources[name] = session.address
    _, outer, inner, _ = host_network._names(settings)
    own_thread = NamespaceThread.named(Path("/proc/self/ns/net"))
    stack.callback(own_thread.close)
    ends = {
        "host": await stack.enter_async_context(probes.watched(seen, "host", own_thread, outer)),
        "link": await stack.enter_async_context(probes.watched(seen, "link", network._thread, inner)),
    }
    macs = [end.getsockname()[4].hex(":") for end in ends.values()]
    wires["host"] = Wire(ends["host"], outer, *macs)
    await stack.enter_async_context(probes.delivered(seen, "server", network._thread))
    for vpc in (OURS, STRANGERS, OTHER):
        await stack.enter_async_context(probes.delivered(seen, "router", network.vpcs._open[vpc.id].thread))
    found = await asyncio.to_thread(host_network._survey, outer, ())
    assert found.link is not None
    sources["host"] = found.link[1]
    targets |= {
        "laptop": sources["laptop"],
        "colleagues-laptop": sources["colleagues-laptop"],
        "tunnel-server": addresses.TUNNEL_SERVER,
        "gateway": addresses.GATEWAY,
        "router": addresses.VPC_ROUTER,
        "host": found.link[1],
        "link": found.link[2],
        "network-of-the-host": computers[0].host,
    }
    return WiredNetwork(seen, network, wires, sources, targets)


async def _join(
    computer: Laptop, session: TunnelSession, folder: Path, stack: contextlib.AsyncExitStack
) -> str:
    """A client that sends everything into its tunnel, not only what its configuration names."""
    config = session.config.replace(f"AllowedIPs = {session.cidr}", "AllowedIPs = 0.0.0.0/0, ::/0")
    config = config.replace("[Interface]\n", "[Interface]\nTable = off\n")
    path = written(folder, session, config)
    await stack.enter_async_context(computer.joined(path))
    return path.stem


def expected_of(source: str, target: str, protocol: str) -> set[str]:
    if source == "host":
        # It sends into the link; nobody behind it gets anything.
        return {"link"}
    if source in VMS and target == "gateway" and protocol == "icmp":
        return {"server"}
    found = REACHES.get((source, target))
    return {found} if found is not None and protocol in PROTOCOLS else set()


async def test_who_reaches_whom_by_which_protocol(wired: WiredNetwork) -> None:
    seen = wired.seen
    table: dict[str, set[str]] = {}

    def cell(source: str, target: str, protocol: str) -> str:
        label = label_of(source, target, protocol)
        table[label] = expected_of(source, target, protocol)
        return label

    async def probe(source: str) -> None:
        await wired.flush(source, *FLUSHES[source])
        for name, target in wired.targets.items():
            # Packets of the server to other addresses would leave this host.
            if wired.sources[source] == target or (source == "server" and not name.startswith("outer-")):
                continue
            for protocol in PROTOCOLS:
                await wired.send_ipv4(source, protocol, target, cell(source, name, protocol))
            if source in VMS:
                label = cell(source, name, "arp")
                packet = probes.arp(wired.sources[source], target, addresses.DATA_MAC, marked(label))
                await wired.send(source, probes.ARP, packet, "ff:ff:ff:ff:ff:ff")
            await wired.flush(source, *FLUSHES[source])
        if source == "server":
            return
        for name, (text, mac) in IPV4_GROUPS.items():
            for protocol in ("udp", "icmp"):
                for link_target in (mac, None):
                    label = cell(source, name, protocol)
                    await wired.send_ipv4(source, protocol, IPv4Address(text), label, link_target)
        for name, (text, mac) in IPV6_TARGETS.items():
            packet = probes.ipv6(IPv6Address(text), marked(cell(source, name, "udp6")))
            await wired.send(source, probes.IPV6, packet, None if source == "host" else mac)
        await wired.flush(source, *FLUSHES[source])

    # The server last: GRE has no ports, so that what is sent to it later would count as an answer.
    for source in sorted(wired.sources, key="server".__eq__):
        await probe(source)
    # Frames that arrive are behind those that should not have.
    for source, target in REACHES:
        await wired.flush(source, target)
    assert not {label for label in table if not label.startswith("server ")} - seen.left, "all were sent"
    found = {label: seen.arrived.get(label, set()) for label in table}
    wrong = [
        f"{label}: {found[label] or '{}'}, not {table[label] or '{}'}"
        for label in table
        if found[label] != table[label]
    ]
    assert not wrong, "\n".join(wrong)
    assert len(table) > 800


async def test_every_probe_arrives_over_a_plain_link(root: None) -> None:
    """The control of the test above: these packets are valid, and their arrival is noticed."""
    seen = Seen()
    labels = []
    with namespace("p") as here, namespace("q") as there:
        link(here, "eth0", there, "eth0")
        async with (
            probes.watched(seen, "here", here.thread, "eth0") as own,
            probes.watched(seen, "there", there.thread, "eth0"),
        ):
            wire = Wire(own, "eth0", addresses.DATA_MAC, addresses.TAP_MAC)

            def cell(name: str) -> bytes:
                labels.append(label_of("here", "there", name))
                return marked(labels[-1])

            for protocol in PROTOCOLS:
                for packet in probes.ipv4(protocol, RANGE[1], RANGE[2], cell(protocol)):
                    wire.send(probes.IPV4, packet)
            for name, (text, mac) in IPV4_GROUPS.items():
                (packet,) = probes.ipv4("udp", RANGE[1], IPv4Address(text), cell(name))
                wire.send(probes.IPV4, packet, mac)
            for name, (text, mac) in IPV6_TARGETS.items():
                wire.send(probes.IPV6, probes.ipv6(IPv6Address(text), cell(name)), mac)
            packet = probes.arp(RANGE[1], RANGE[2], addresses.DATA_MAC, cell("arp"))
            wire.send(probes.ARP, packet, "ff:ff:ff:ff:ff:ff")
            await until(lambda: set(labels) <= seen.arrived.keys(), 60)
    assert {label: {"there"} for label in labels} == seen.arrived
