"""nftables expressions that match DNS queries over UDP by the name that they ask for. Pure functions.

nftables has no search in a packet. But the name of a query begins at a fixed place, and each of its labels
begins with its length, so that there are few places where the end of the name can be.
"""

from collections.abc import Sequence
from ipaddress import IPv4Network

from stead.addresses import PRIVATE_ZONE

_NAME = 8 + 12
"""Where the name begins, from the UDP header on: after it and the header of the query."""
_LABEL = 63
"""Bytes of the longest label of a name."""
_AT_ONCE = 16
"""Bytes that one expression compares."""
_ZONE = bytes([len(PRIVATE_ZONE)]) + PRIVATE_ZONE.encode() + b"\0"
_REVERSE = b"\x07in-addr\x04arpa\0"
_OCTETS = {
    IPv4Network("10.0.0.0/8"): (3, [b"\x0210"]),
    IPv4Network("172.16.0.0/12"): (2, [b"\x02%d\x03172" % second for second in range(16, 32)]),
    IPv4Network("192.168.0.0/16"): (2, [b"\x03168\x03192"]),
}
"""Private ranges: how many numbers come first in the reversed name of an address, and what follows."""


def private_names() -> list[str]:
    """Match queries for names right below `internal`."""
    return [f"@th,{8 * _NAME},8 {size} {_matching(_NAME + 1 + size, _ZONE)}" for size in range(1, _LABEL + 1)]


def private_addresses(opened: Sequence[IPv4Network]) -> list[str]:
    """Match queries for the names of private addresses.

    Ranges with networks that the operator opened to VMs are left out: the host's resolver may know names.
    """
    return [
        _matching(_NAME + size, last + _REVERSE)
        for network, (numbers, endings) in _OCTETS.items()
        if not any(map(network.overlaps, opened))
        for last in endings
        for size in range(2 * numbers, 4 * numbers + 1)
    ]


def _matching(start: int, wanted: bytes) -> str:
    """Match these bytes from `start` of the UDP header on; letters in either case."""
    parts = []
    for at in range(0, len(wanted), _AT_ONCE):
        piece = wanted[at : at + _AT_ONCE]
        mask = bytes(0xDF if bytes([each]).isalpha() else 0xFF for each in piece)
        value = bytes(each & bits for each, bits in zip(piece, mask, strict=True))
        parts.append(f"@th,{8 * (start + at)},{8 * len(piece)} & 0x{mask.hex()} == 0x{value.hex()}")
    return " ".join(parts)
