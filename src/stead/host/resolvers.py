"""Follows changes of the host's name servers, as by a DHCP client or a VPN."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from ipaddress import IPv4Address

from stead import addresses
from stead.tasks import in_thread

_POLL = 5.0


async def changes_of_resolvers() -> AsyncIterator[list[IPv4Address]]:
    """The host's name servers at first, and after each change.

    An empty list is not a change: the file is being written, or the host is offline.
    """
    known = await in_thread(addresses.resolvers)
    yield known
    while True:
        await asyncio.sleep(_POLL)
        found = await in_thread(addresses.resolvers)
        if found and found != known:
            known = found
            yield known


def resolv_conf(servers: Iterable[IPv4Address]) -> str:
    """The content of a file like /etc/resolv.conf."""
    return "".join(f"nameserver {server}\n" for server in servers)
