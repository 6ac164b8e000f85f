"""The network of one installation: a namespace with the taps of all VMs, linked to the host by NAT.

Taps are not persistent: the kernel removes them and their routes with the QEMU that holds them. So only the
namespace, the link and the two tables can be left over; `remove` deletes them.
"""

import fcntl
import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Self

from pyroute2 import IPRoute

from stead import addresses
from stead.errors import HostError
from stead.host import firewall
from stead.host.commands import run
from stead.host.namespaces import NamespaceThread
from stead.settings import Settings
from stead.tasks import in_thread

_TUNSETIFF = 0x400454CA
_TAP_FLAGS = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_PERMANENT = 0x80
_NO_DAD = 0x02
_LINK_SCOPE = 253
_UNICAST = 1


@dataclass(frozen=True)
class Taps:
    """The file descriptors of a VM's two taps, passed to QEMU and then closed here."""

    data: int
    management: int

    def close(self) -> None:
        os.close(self.data)
        os.close(self.management)


def namespace_path(settings: Settings) -> Path:
    return Path("/run/netns") / f"stead-{settings.instance}"


class Network:
    """The namespace of this installation, created if needed."""

    def __init__(self, settings: Settings, thread: NamespaceThread, netlink: Any) -> None:
        self._settings = settings
        self._thread = thread
        self._netlink = netlink

    @classmethod
    async def open(cls, settings: Settings) -> Self:
        await _ensure(settings)
        thread = NamespaceThread.named(namespace_path(settings))
        return cls(settings, thread, await thread.call(IPRoute))

    async def close(self) -> None:
        await self._thread.call(self._netlink.close)
        self._thread.close()

    async def attach(self, slot: int) -> Taps:
        """Create the two taps of a VM's slot, with its route and neighbour entries."""
        return await self._thread.call(lambda: self._attach(slot))

    def _attach(self, slot: int) -> Taps:
        data = _open_tap(addresses.data_tap(slot))
        try:
            management = _open_tap(addresses.management_tap(slot))
        except BaseException:
            os.close(data)
            raise
        taps = Taps(data, management)
        try:
            index = socket.if_nametoindex(addresses.data_tap(slot))
            address = str(addresses.machine_address(slot))
            self._netlink.link("set", index=index, address=addresses.TAP_MAC, state="up")
            self._netlink.route("add", dst=f"{address}/32", oif=index, scope=_LINK_SCOPE)
            self._netlink.neigh(
                "add", dst=address, lladdr=addresses.DATA_MAC, ifindex=index, state=_PERMANENT
            )
            index = socket.if_nametoindex(addresses.management_tap(slot))
            self._netlink.link("set", index=index, address=addresses.TAP_MAC, state="up")
            self._netlink.addr(
                "add", index=index, address=addresses.HOST_LINK_ADDRESS, prefixlen=64, flags=_NO_DAD
            )
            self._netlink.neigh(
                "add",
                dst=addresses.AGENT_ADDRESS,
                lladdr=addresses.MANAGEMENT_MAC,
                ifindex=index,
                state=_PERMANENT,
            )
        except Exception as error:
            taps.close()
            raise HostError(f"cannot set up the network of slot {slot}: {error}") from error
        return taps

    async def agent_socket(self, slot: int) -> tuple[socket.socket, tuple[str, int, int, int]]:
        """A fresh socket in the namespace and the address of the agent in `slot`, not yet connected."""

        def make() -> tuple[socket.socket, tuple[str, int, int, int]]:
            index = socket.if_nametoindex(addresses.management_tap(slot))
            link = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link, (addresses.AGENT_ADDRESS, addresses.AGENT_PORT, 0, index)

        return await self._thread.call(make)

    async def traffic(self) -> dict[int, int]:
        """IPv4 bytes of each slot's data NIC in both directions, since this installation was opened.

        A slot that has had no traffic is missing. Counters outlive the tap: a slot's next VM continues them.
        """
        completed = await run(
            *("nsenter", f"--net={namespace_path(self._settings)}"),
            *("nft", "-j", "list", "set", "inet", "stead", firewall.TRAFFIC_SET),
        )
        return read_traffic(completed.stdout)


def read_traffic(listing: bytes) -> dict[int, int]:
    """Bytes by slot, from nft's JSON of the counter set."""
    counted = {}
    for entry in json.loads(listing)["nftables"]:
        for element in entry.get("set", {}).get("elem", ()):
            slot = addresses.slot_of_data_tap(element["elem"]["val"])
            if slot is not None:
                counted[slot] = int(element["elem"]["counter"]["bytes"])
    return counted


def _open_tap(name: str) -> int:
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(f"cannot open /dev/net/tun: {error.strerror}") from error
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22s", name.encode(), _TAP_FLAGS, b""))
    except OSError as error:
        os.close(descriptor)
        raise HostError(f"cannot create tap {name}: {error.strerror}") from error
    return descriptor


def _names(settings: Settings) -> tuple[str, str, str, str]:
    """Namespace, host end, inner end, host table."""
    instance = settings.instance
    return f"stead-{instance}", f"st{instance}h", f"st{instance}n", f"stead_{instance}"


@dataclass(frozen=True)
class _Survey:
    """Links, addresses and routes of the host's own namespace."""

    link: IPv4Network | None
    taken: tuple[IPv4Network, ...]
    uplinks: tuple[str, ...]
    side_networks: tuple[IPv4Network, ...]
    """Networks of the host without a default route: bridges, VPNs, VLANs."""
    ways_to_opened: tuple[str, ...]
    """Interfaces of the allowed private networks; they need forwarding for the replies."""


def _survey(outer: str, opened: Sequence[IPv4Network]) -> _Survey:
    with IPRoute() as host:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in host.get_links()}
        routes = [
            (route.get_attr("RTA_OIF"), IPv4Network((route.get_attr("RTA_DST", "0.0.0.0"), route["dst_len"])))
            for route in host.get_routes(family=socket.AF_INET, type=_UNICAST)
            if route.get_attr("RTA_OIF") is not None
        ]
        main = {index for index, network in routes if network.prefixlen == 0}
        networks = [
            (
                message["index"],
                IPv4Network((message.get_attr("IFA_ADDRESS"), message["prefixlen"]), strict=False),
            )
            for message in host.get_addr(family=socket.AF_INET)
        ]
    return _Survey(
        link=next((network for index, network in networks if names.get(index) == outer), None),
        taken=tuple(network for _, network in networks),
        uplinks=tuple(sorted(names[index] for index in main if index in names)),
        side_networks=tuple(
            network for index, network in networks if index not in main and not network.is_loopback
        ),
        ways_to_opened=tuple(
            sorted(
                {
                    names[index]
                    for index, network in routes
                    if index in names and network.prefixlen > 0 and any(map(network.overlaps, opened))
                }
            )
        ),
    )


async def _ensure(settings: Settings) -> None:
    """Create or repair the namespace, the link and the rules (idempotent)."""
    namespace, outer, inner, table = _names(settings)
    path = namespace_path(settings)
    if not _is_namespace(path):
        path.unlink(missing_ok=True)
        await run("ip", "netns", "add", namespace)
    survey = await in_thread(_survey, outer, settings.allow_private)
    network = survey.link or await _make_link(settings, survey)
    for interface in (outer, *survey.uplinks, *survey.ways_to_opened):
        _sysctl(f"net/ipv4/conf/{interface}/forwarding", "1")
    resolver = next(iter(addresses.resolvers()), None)
    closed = [*addresses.NOT_THE_INTERNET, *survey.side_networks]
    rules = firewall.namespace_rules(inner, resolver, closed, settings.allow_private)
    await run("nsenter", f"--net={path}", "nft", "-f", "-", stdin=rules.encode())
    await run("nft", "-f", "-", stdin=firewall.host_rules(table, outer, network, resolver).encode())


async def _make_link(settings: Settings, survey: _Survey) -> IPv4Network:
    _, outer, inner, _ = _names(settings)
    within = ("nsenter", f"--net={namespace_path(settings)}")
    for network in addresses.link_networks(settings.instance):
        if not any(network.overlaps(other) for other in survey.taken):
            break
    else:
        raise HostError("no free link network in 169.254.64.0/19")
    ours, theirs = network[1], network[2]
    if Path("/sys/class/net", outer).exists():
        await run("ip", "link", "delete", outer)
    inside = f"""
link set lo up
addr replace {addresses.GATEWAY}/32 dev lo
link add {inner} type veth peer name {outer} netns {os.getpid()}
addr add {theirs}/30 dev {inner}
link set {inner} up
route replace default via {ours}
"""
    await run(*within, "ip", "-batch", "-", stdin=inside.encode())
    thread = NamespaceThread.named(namespace_path(settings))
    try:
        await thread.call(_namespace_sysctls)
    finally:
        thread.close()
    # The host's end gets its address last: a link without an address is incomplete.
    await run("ip", "-batch", "-", stdin=f"link set {outer} up\naddr add {ours}/30 dev {outer}\n".encode())
    return network


def _namespace_sysctls() -> None:
    _sysctl("net/ipv4/ip_forward", "1")
    _sysctl("net/ipv4/conf/all/rp_filter", "1")
    _sysctl("net/ipv4/conf/default/rp_filter", "1")
    _sysctl("net/ipv4/conf/all/accept_redirects", "0")
    _sysctl("net/ipv4/conf/all/send_redirects", "0")
    _sysctl("net/ipv6/conf/default/accept_ra", "0")
    _sysctl("net/ipv6/conf/default/accept_dad", "0")
    # No automatic addresses: guests reach a tap only at the address that is added to it.
    _sysctl("net/ipv6/conf/default/addr_gen_mode", "1")


async def remove(settings: Settings) -> None:
    """Remove everything that `open` created (idempotent)."""
    namespace, outer, _, table = _names(settings)
    if Path("/sys/class/net", outer).exists():
        await run("ip", "link", "delete", outer)
    await run("nft", "-f", "-", stdin=f"add table inet {table}\ndelete table inet {table}\n".encode())
    if namespace_path(settings).exists():
        await run("ip", "netns", "delete", namespace)


def _is_namespace(path: Path) -> bool:
    """Whether a namespace is mounted there; a crash inside `ip netns add` leaves a bare file."""
    try:
        return path.stat().st_dev == Path("/proc/self/ns/net").stat().st_dev
    except FileNotFoundError:
        return False


def _sysctl(name: str, value: str) -> None:
    path = Path("/proc/sys") / name
    try:
        if path.read_text().strip() != value:
            path.write_text(value)
    except OSError as error:
        raise HostError(f"cannot set {name}: {error.strerror}") from error
