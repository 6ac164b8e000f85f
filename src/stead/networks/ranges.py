"""Address ranges of VPCs and addresses in them. Pure functions."""

from collections.abc import Collection, Sequence
from ipaddress import AddressValueError, IPv4Address, IPv4Network, NetmaskValueError

from stead.networks.errors import InvalidAddress, InvalidCidr

PRIVATE = tuple(map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))
LONGEST_PREFIX = 29
_TAKEN = (
    (IPv4Network("100.64.0.0/10"), "Stead uses it for VMs and tunnels"),
    (IPv4Network("169.254.0.0/16"), "it is link-local, and has the gateway of VMs"),
    (IPv4Network("127.0.0.0/8"), "it is the loopback range"),
    (IPv4Network("224.0.0.0/3"), "it is for multicast, or reserved"),
    (IPv4Network("0.0.0.0/8"), "it is reserved"),
)


def parse_cidr(text: str, opened: Sequence[IPv4Network] = ()) -> IPv4Network:
    """The range of a new VPC; InvalidCidr if a VPC cannot have it.

    `opened` are networks that the operator lets VMs reach: a VPC with one of their addresses would hide it.
    """
    try:
        cidr = IPv4Network(text, strict=False)
    except (AddressValueError, NetmaskValueError, ValueError):
        raise InvalidCidr(text, "must be an IPv4 range such as 192.168.10.0/24") from None
    if text != str(cidr):
        # Also a bare address, a net mask, and host bits: what the caller means is not certain.
        raise InvalidCidr(text, f"write it as {cidr}")
    if not any(cidr.subnet_of(private) for private in PRIVATE):
        reason = next((reason for taken, reason in _TAKEN if cidr.overlaps(taken)), "it is not private")
        raise InvalidCidr(text, f"{reason}; choose one inside {', '.join(map(str, PRIVATE))}")
    if cidr.prefixlen > LONGEST_PREFIX:
        raise InvalidCidr(text, f"it is too small: the prefix must be /{LONGEST_PREFIX} or shorter")
    for network in opened:
        if cidr.overlaps(network):
            raise InvalidCidr(text, f"it overlaps {network}, a network of the host that VMs may reach")
    return cidr


def parse_address(text: str, cidr: IPv4Network) -> IPv4Address:
    """An address that a VM in the range can have; InvalidAddress for any other."""
    try:
        address = IPv4Address(text)
    except AddressValueError:
        raise InvalidAddress(text, "must be an IPv4 address such as 192.168.10.10, or true") from None
    if address not in cidr:
        raise InvalidAddress(text, f"it is not in the VPC's range {cidr}")
    if address in (cidr.network_address, cidr.broadcast_address):
        raise InvalidAddress(text, f"it is the network or broadcast address of {cidr}")
    return address


def lowest_free(cidr: IPv4Network, taken: Collection[IPv4Address]) -> IPv4Address | None:
    """The lowest address for a VM that is not taken; None when the range is full."""
    address = cidr.network_address + 1
    while address in taken:
        address += 1
    return address if address < cidr.broadcast_address else None
