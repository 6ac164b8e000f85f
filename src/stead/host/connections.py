"""Tracked connections (conntrack) of the namespace of the taps, and of the host for it."""

import errno
import socket
from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import Any

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import (
    FILTER_FLAG_CTA_IP_DST,
    FILTER_FLAG_CTA_IP_SRC,
    NFCTAttrTuple,
    NFCTSocket,
)

_GONE = (errno.ENOENT, errno.ESRCH)


def delete_connections(address: IPv4Address) -> None:
    """Delete all connections from and to an address. Call it in a thread of the namespace."""
    with NFCTSocket() as conntrack:
        for ends, flag in (
            (NFCTAttrTuple(saddr=str(address)), FILTER_FLAG_CTA_IP_SRC),
            (NFCTAttrTuple(daddr=str(address)), FILTER_FLAG_CTA_IP_DST),
        ):
            try:
                selection = {"attrs": [["CTA_FILTER_ORIG_FLAGS", flag]]}
                conntrack.entry("del", tuple_orig=ends, cta_filter=selection)
            except NetlinkError:
                # Linux before 6.8 deletes single connections only.
                delete_each(conntrack, ends)


def delete_each(conntrack: NFCTSocket, ends: NFCTAttrTuple) -> None:
    """Delete the connections with these ends one by one."""
    _delete(conntrack, [_ends(found, "CTA_TUPLE_ORIG") for found in list(conntrack.dump(tuple_orig=ends))])


def translated_connections(address: IPv4Address) -> list[NFCTAttrTuple]:
    """The connections from an address to the internet, as the host tracks them on its side of the link.

    Call it in a thread of the namespace.
    """
    with NFCTSocket() as conntrack:
        replies = [
            _ends(found, "CTA_TUPLE_REPLY")
            for found in conntrack.dump(tuple_orig=NFCTAttrTuple(saddr=str(address)))
        ]
    # ICMP ends in seconds, and its types have no simple reverse.
    ports = (socket.IPPROTO_TCP, socket.IPPROTO_UDP)
    return [reply.reverse() for reply in replies if reply.daddr != str(address) and reply.proto in ports]


def _ends(found: Any, side: str) -> NFCTAttrTuple:
    return NFCTAttrTuple.from_netlink(found["nfgen_family"], found.get_attr(side))


def delete_tracked(connections: Sequence[NFCTAttrTuple]) -> None:
    with NFCTSocket() as conntrack:
        _delete(conntrack, connections)


def _delete(conntrack: NFCTSocket, connections: Sequence[NFCTAttrTuple]) -> None:
    for each in connections:
        try:
            conntrack.entry("del", tuple_orig=each)
        except NetlinkError as error:
            if error.code not in _GONE:
                raise
