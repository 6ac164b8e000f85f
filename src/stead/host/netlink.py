"""Changes of links, routes, neighbours and nftables maps by netlink, many in one message.

What a VM waits for at its start: pyroute2 takes a millisecond for each change, and `nft` ten.
"""

import errno
import itertools
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address

from stead.deadlines import scaled

_TIMEOUT = scaled(30.0)
_AT_ONCE = 64
"""Changes in one message: their answers fit the buffer of the socket."""
_ANSWERS = 65536
_NETFILTER = 12
_ERROR = 2  # NLMSG_ERROR, also a message of success
_REQUEST, _ACK, _REPLACE, _CREATE = 0x1, 0x4, 0x100, 0x400
_SET_LINK, _NEW_ADDRESS = 16, 20
_NEW_ROUTE, _DELETE_ROUTE = 24, 25
_NEW_NEIGHBOUR, _DELETE_NEIGHBOUR = 28, 29
_MAC_OF_LINK, _GROUP_OF_LINK, _NAMESPACE_OF_LINK = 1, 27, 28  # IFLA_ADDRESS, IFLA_GROUP, IFLA_NET_NS_FD
_IFF_UP = 1
_MAIN_TABLE, _STATIC, _UNICAST, _UNREACHABLE = 254, 4, 1, 7
_UNIVERSE, _LINK = 0, 253
_PERMANENT = 0x80
_NO_DAD = 0x02
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_NFTABLES = 10
_NEW_ELEMENT, _DELETE_ELEMENT = _NFTABLES << 8 | 12, _NFTABLES << 8 | 14
_INET = 1

_Pair = tuple[IPv4Address, IPv4Address]


@dataclass(frozen=True)
class NetlinkChange:
    """One request to the kernel: the type and flags of a netlink message, and its content."""

    kind: int
    flags: int
    content: bytes


def link_up(index: int, mac: str, group: int = 0) -> NetlinkChange:
    """Bring a link up, with a MAC address and in a group of interfaces."""
    return NetlinkChange(
        _SET_LINK,
        0,
        _link(index, _IFF_UP)
        + _attribute(_MAC_OF_LINK, _mac(mac))
        + _attribute(_GROUP_OF_LINK, _number(group)),
    )


def tun_up(index: int) -> NetlinkChange:
    return NetlinkChange(_SET_LINK, 0, _link(index, _IFF_UP))


def link_group(index: int, group: int) -> NetlinkChange:
    return NetlinkChange(_SET_LINK, 0, _link(index) + _attribute(_GROUP_OF_LINK, _number(group)))


def link_to_namespace(index: int, namespace: int) -> NetlinkChange:
    """Move a link into the namespace of a descriptor; it is down there."""
    return NetlinkChange(_SET_LINK, 0, _link(index) + _attribute(_NAMESPACE_OF_LINK, _number(namespace)))


def address(index: int, own: IPv6Address, prefix: int) -> NetlinkChange:
    """Give a link an IPv6 address, without a check for duplicates."""
    head = struct.pack("=BBBBi", socket.AF_INET6, prefix, _NO_DAD, 0, index)
    return NetlinkChange(_NEW_ADDRESS, _CREATE, head + _attribute(1, own.packed))


def route(target: IPv4Address, index: int, metric: int = 0) -> NetlinkChange:
    return NetlinkChange(
        _NEW_ROUTE, _CREATE | _REPLACE, _route(IPv4Network(target), _LINK, _UNICAST, index, metric)
    )


def no_route(target: IPv4Address, index: int, metric: int = 0) -> NetlinkChange:
    return NetlinkChange(_DELETE_ROUTE, 0, _route(IPv4Network(target), _LINK, _UNICAST, index, metric))


def unreachable(target: IPv4Network) -> NetlinkChange:
    return NetlinkChange(_NEW_ROUTE, _CREATE | _REPLACE, _route(target, _UNIVERSE, _UNREACHABLE, None, 0))


def neighbour(target: IPv4Address | IPv6Address, index: int, mac: str) -> NetlinkChange:
    """A permanent neighbour entry: who has an address is not asked."""
    return NetlinkChange(
        _NEW_NEIGHBOUR, _CREATE | _REPLACE, _neighbour(target, index) + _attribute(2, _mac(mac))
    )


def no_neighbour(target: IPv4Address, index: int) -> NetlinkChange:
    return NetlinkChange(_DELETE_NEIGHBOUR, 0, _neighbour(target, index))


def map_elements(table: str, name: str, pairs: Iterable[_Pair]) -> NetlinkChange:
    """Add addresses to an nftables map of a table of the family inet."""
    return NetlinkChange(_NEW_ELEMENT, _CREATE, _elements(table, name, pairs))


def no_map_elements(table: str, name: str, pairs: Iterable[_Pair]) -> NetlinkChange:
    return NetlinkChange(_DELETE_ELEMENT, 0, _elements(table, name, pairs))


class Netlink:
    """Netlink sockets of the namespace of the thread that opens them. One thread at a time uses them."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._links = _socket(socket.NETLINK_ROUTE)
        try:
            self._tables = _socket(_NETFILTER)
        except BaseException:
            self._links.close()
            raise

    def close(self) -> None:
        self._links.close()
        self._tables.close()

    def change(self, *changes: NetlinkChange, missing_allowed: bool = False) -> None:
        """Change links, routes and neighbours. Raises the first OSError, after all have been tried.

        With `missing_allowed`, what is to be deleted may be missing.
        """
        allowed = (errno.ENOENT, errno.ESRCH) if missing_allowed else ()
        failures = []
        for start in range(0, len(changes), _AT_ONCE):
            failures += self._exchange(self._links, changes[start : start + _AT_ONCE])
        for code in failures:
            if code not in allowed:
                raise OSError(code, os.strerror(code))

    def change_maps(self, *changes: NetlinkChange) -> None:
        """Change nftables maps, all or nothing."""
        edge = struct.pack(">BBH", 0, 0, _NFTABLES)
        batch = [NetlinkChange(_BATCH_BEGIN, 0, edge), *changes, NetlinkChange(_BATCH_END, 0, edge)]
        for code in self._exchange(self._tables, batch):
            raise OSError(code, os.strerror(code))

    def _exchange(self, link: socket.socket, changes: Sequence[NetlinkChange]) -> list[int]:
        """Send changes in one message; returns the error codes of those that failed."""
        message = b""
        edges: set[int] = set()
        awaited: set[int] = set()
        for change in changes:
            number = next(self._numbers)
            edge = change.kind in (_BATCH_BEGIN, _BATCH_END)
            (edges if edge else awaited).add(number)
            flags = _REQUEST | change.flags | (0 if edge else _ACK)
            message += struct.pack("=IHHII", 16 + len(change.content), change.kind, flags, number, 0)
            message += change.content
        link.send(message)
        failures = []
        while awaited:
            answers = link.recv(_ANSWERS)
            at = 0
            while at < len(answers):
                length, kind, _, number, _, code = struct.unpack_from("=IHHIIi", answers, at)
                at += length + 3 & ~3
                if kind == _ERROR and number in awaited | edges:
                    if code:
                        failures.append(-code)
                    # A batch that is refused as a whole has one answer.
                    awaited = set() if number in edges else awaited - {number}
        return failures


def _socket(protocol: int) -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    made.settimeout(_TIMEOUT)
    made.bind((0, 0))
    return made


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + bytes(-length % 4)


def _nest(kind: int, *inner: bytes) -> bytes:
    return _attribute(kind | 0x8000, b"".join(inner))


def _number(value: int) -> bytes:
    return struct.pack("=I", value)


def _link(index: int, flags: int = 0) -> bytes:
    """The head of a change of a link; sets these flags."""
    return struct.pack("=BxHiII", 0, 0, index, flags, flags)


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def _route(target: IPv4Network, scope: int, kind: int, index: int | None, metric: int) -> bytes:
    head = struct.pack(
        "=BBBBBBBBI", socket.AF_INET, target.prefixlen, 0, 0, _MAIN_TABLE, _STATIC, scope, kind, 0
    )
    attributes = _attribute(1, target.network_address.packed)
    if index is not None:
        attributes += _attribute(4, _number(index))
    if metric:
        attributes += _attribute(6, _number(metric))
    return head + attributes


def _neighbour(target: IPv4Address | IPv6Address, index: int) -> bytes:
    family = socket.AF_INET if target.version == 4 else socket.AF_INET6
    return struct.pack("=BxHiHBB", family, 0, index, _PERMANENT, 0, 0) + _attribute(1, target.packed)


def _elements(table: str, name: str, pairs: Iterable[_Pair]) -> bytes:
    elements = (
        _nest(1, _nest(1, _attribute(1, key.packed)), _nest(2, _attribute(1, value.packed)))
        for key, value in pairs
    )
    return (
        struct.pack(">BBH", _INET, 0, 0)
        + _attribute(1, table.encode() + b"\0")
        + _attribute(2, name.encode() + b"\0")
        + _nest(3, *elements)
    )
