"""TCP sockets of the namespace of the taps: destroys those that lead to a VM that is gone (sock_diag).

Call all functions in a thread of the namespace.
"""

import errno
import socket
import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from stead.addresses import AGENT_ADDRESS, data_tap, slot_of_address

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _SOCK_DESTROY = 20, 21
_ERROR, _DONE = 2, 3
_REQUEST, _ACKNOWLEDGE, _DUMP = 0x1, 0x4, 0x300
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBBI")
_SOCKET = struct.Struct("=BBBB4x16s16sI8x4xIIII")
_IDENTITY = slice(4, 52)
_TIME_WAIT, _LISTEN = 1 << 6, 1 << 10
_CLOSING = 1 << 4 | 1 << 5 | 1 << 9 | 1 << 11  # FIN-WAIT-1, FIN-WAIT-2, LAST-ACK, CLOSING
_OPEN = 0xFFF & ~(_TIME_WAIT | _LISTEN)
_GONE = (errno.ENOENT, errno.ESTALE)
_BUFFER = 1 << 16


@dataclass(frozen=True)
class _Found:
    family: int
    identity: bytes
    peer: IPv4Address | IPv6Address
    interface: int
    has_owner: bool
    """A process has it open."""


def destroy_connections(address: IPv4Address) -> int:
    """Destroy all connections to a VM; returns how many. Their owners get ECONNABORTED.

    One that stayed would send its unacknowledged bytes to the next VM with this address.
    """
    return _destroy(_OPEN, (socket.AF_INET,), lambda found: found.peer == address)


def destroy_orphans(elsewhere: Collection[int] = ()) -> int:
    """Destroy closed connections that wait for a VM whose tap is gone: minutes of retransmissions.

    A VM that wakes within that time answers by itself, so those of other VMs are left. The taps of the slots
    `elsewhere` are in other namespaces: nothing is known of them here.
    """
    links = dict(socket.if_nameindex())
    names = set(links.values())

    def is_orphan(found: _Found) -> bool:
        if found.has_owner:
            return False
        if isinstance(found.peer, IPv6Address):
            return found.peer == _AGENT and found.interface not in links
        slot = slot_of_address(found.peer)
        return slot is not None and slot not in elsewhere and data_tap(slot) not in names

    return _destroy(_CLOSING, (socket.AF_INET, socket.AF_INET6), is_orphan)


_AGENT = IPv6Address(AGENT_ADDRESS)


def _destroy(states: int, families: tuple[int, ...], wanted: Callable[[_Found], bool]) -> int:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as link:
        found = [each for family in families for each in _sockets(link, family, states) if wanted(each)]
        for each in found:
            query = _QUERY.pack(each.family, socket.IPPROTO_TCP, 0, 0, states) + each.identity
            _send(link, _SOCK_DESTROY, _REQUEST | _ACKNOWLEDGE, query)
            for _ in _answers(link):
                pass
    return len(found)


def _sockets(link: socket.socket, family: int, states: int) -> Iterator[_Found]:
    query = _QUERY.pack(family, socket.IPPROTO_TCP, 0, 0, states) + bytes(48)
    _send(link, _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, query)
    for body in _answers(link):
        family, _, _, _, _, peer, interface, _, _, _, inode = _SOCKET.unpack_from(body)
        address = IPv4Address(peer[:4]) if family == socket.AF_INET else IPv6Address(peer)
        yield _Found(family, body[_IDENTITY], address, interface, inode != 0)


def _send(link: socket.socket, kind: int, flags: int, body: bytes) -> None:
    link.send(_HEADER.pack(_HEADER.size + len(body), kind, flags, 0, 0) + body)


def _answers(link: socket.socket) -> Iterator[bytes]:
    """The messages of an answer, up to its end. Raises OSError."""
    while True:
        data = link.recv(_BUFFER)
        while data:
            length, kind, _, _, _ = _HEADER.unpack_from(data)
            body, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
            if kind == _DONE:
                return
            if kind == _ERROR:
                code = -struct.unpack_from("=i", body)[0]
                if code and code not in _GONE:
                    raise OSError(code, "sock_diag failed")
                return
            yield body
