"""Tracked connections (conntrack) of the namespace of the taps."""

import errno
from ipaddress import IPv4Address

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
    for found in list(conntrack.dump(tuple_orig=ends)):
        original = NFCTAttrTuple.from_netlink(found["nfgen_family"], found.get_attr("CTA_TUPLE_ORIG"))
        try:
            conntrack.entry("del", tuple_orig=original)
        except NetlinkError as error:
            if error.code not in _GONE:
                raise
