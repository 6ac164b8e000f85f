"""Addresses and interface names of VMs and links. Pure functions, apart from `resolvers`."""

import functools
import hashlib
import ipaddress
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

MACHINES = IPv4Network("100.64.0.0/10")
GATEWAY = IPv4Address("169.254.0.1")
AGENT_ADDRESS = "fe80::2"
AGENT_PORT = 7070
HOST_LINK_ADDRESS = "fe80::1"
TUNNELS = IPv4Network("100.96.0.0/16")
"""Addresses of WireGuard clients, the same in each VPC; outside of those of VMs."""
TUNNEL_SERVER = TUNNELS[1]
VPC_ROUTER = IPv4Address("169.254.0.3")
"""Source of ICMP errors of a VPC's namespace."""
PRIVATE_ZONE = "internal"
"""VMs in a VPC have names right below it."""
DATA_MAC = "02:53:54:45:00:01"
MANAGEMENT_MAC = "02:53:54:45:00:02"
TAP_MAC = "02:53:54:45:00:fe"

IPV6_CLIENT_PREFIX = 64
"""Prefix length of the network that one IPv6 client usually has."""

MAX_SLOTS = 65536
"""Each VM has one slot, which determines its address, its tap names and its uid."""

NOT_THE_INTERNET = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT, and Stead's VMs
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # host of a VM on Azure: metadata, DHCP, DNS
        "169.254.0.0/16",  # link-local, and cloud metadata services
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # IETF protocol assignments
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarking
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)


@functools.lru_cache(4096)
def machine_address(slot: int) -> IPv4Address:
    """The address of the VM in a slot; the first four addresses are reserved."""
    if not 0 <= slot < MAX_SLOTS:
        raise ValueError(f"slot {slot} is out of range")
    return MACHINES.network_address + slot + 4


def slot_of_address(address: IPv4Address) -> int | None:
    """The slot of a VM's address; None for any other."""
    slot = int(address) - int(MACHINES.network_address) - 4
    return slot if 0 <= slot < MAX_SLOTS else None


def data_tap(slot: int) -> str:
    return f"sd{slot}"


def slot_of_data_tap(name: str) -> int | None:
    """The slot of a data tap; None for any other interface."""
    number = name.removeprefix("sd")
    return int(number) if number != name and number.isdecimal() else None


def management_tap(slot: int) -> str:
    return f"sm{slot}"


@functools.lru_cache(4096)
def account_group(account: str | None) -> int:
    """The interface group of an account's taps, by which the rules tell accounts apart; 0 without one.

    Two accounts with the same number, of two billion, would share what one may have.
    """
    if account is None:
        return 0
    return 1 + int.from_bytes(hashlib.sha256(account.encode()).digest()[:4]) % 0x7FFF_FFFF


def vpc_link(number: int) -> str:
    """The link to a VPC's namespace. It begins like a data tap: the rules for VMs apply to it."""
    return f"sdv{number}"


def wireguard_link(instance: str, number: int) -> str:
    """The WireGuard device of a VPC. It is made in the host's namespace, so its name is unique there."""
    return f"sw{instance}{number}"


def link_networks(instance: str) -> Iterable[IPv4Network]:
    """Candidate /30 networks between the host and an installation's namespace, best first."""
    start = int(instance, 16) % (128 * 64)
    for offset in range(128 * 64):
        index = (start + offset) % (128 * 64)
        yield IPv4Network((int(IPv4Address("169.254.64.0")) + index * 4, 30))


def resolvers(etc: Path = Path("/etc"), run: Path = Path("/run")) -> list[IPv4Address]:
    """The host's IPv4 name servers that a guest's packets can be sent to.

    A resolver on loopback (systemd-resolved) cannot be reached from another namespace, so its own upstream
    servers are used instead.
    """
    for path in (etc / "resolv.conf", run / "systemd/resolve/resolv.conf"):
        found = [server for server in _nameservers(path) if not server.is_loopback]
        if found:
            return found
    return []


def _nameservers(path: Path) -> list[IPv4Address]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return []
    servers = []
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                address = ipaddress.ip_address(words[1].split("%")[0])
            except ValueError:
                continue
            if isinstance(address, IPv4Address):
                servers.append(address)
    return servers


def network_of(address: str) -> str:
    """The key under which clients are counted: their address, or its /64 for IPv6, which one client has."""
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, IPV6_CLIENT_PREFIX), strict=False))
    return str(parsed)


def is_loopback(address: str) -> bool:
    """Whether a client is on this host: a person, a program, or a proxy with clients of its own."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback
