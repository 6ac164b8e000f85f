"""Connections of the edge: cut those to a VM that is gone, and limit how many an address may open."""

from collections.abc import Sequence
from functools import partial
from ipaddress import IPv4Address

from stead.host.commands import run
from stead.host.namespaces import NamespaceThread
from stead.host.sockets import destroy_connections
from stead.logs import get_logger
from stead.settings import Settings

log = get_logger("stead.edge")

MAX_CONNECTIONS = 512
"""Open connections of one address (IPv6: one /64 network) to the public ports."""


async def cut_connections(thread: NamespaceThread, address: IPv4Address) -> None:
    """Close every TCP connection from the namespace to a VM, so that its clients notice its end."""
    try:
        await thread.call(partial(destroy_connections, address))
    except OSError as error:
        log.warning("cannot close connections to a VM", address=str(address), error=str(error))


async def limit_connections(settings: Settings, ports: Sequence[int]) -> None:
    await run("nft", "-f", "-", stdin=limit_rules(_table(settings), ports).encode())


async def remove_limits(settings: Settings) -> None:
    table = _table(settings)
    await run("nft", "-f", "-", stdin=f"add table inet {table}\ndelete table inet {table}\n".encode())


def _table(settings: Settings) -> str:
    return f"stead_{settings.instance}_edge"


def limit_rules(table: str, ports: Sequence[int], most: int = MAX_CONNECTIONS) -> str:
    """nftables rules that refuse new connections of an address that has too many. Loopback has no limit."""
    served = f"meta l4proto {{ tcp, udp }} th dport {{ {', '.join(map(str, ports))} }} ct state new"
    return f"""
add table inet {table}
delete table inet {table}
table inet {table} {{
  set clients4 {{ type ipv4_addr; size 65535; flags dynamic; }}
  set clients6 {{ type ipv6_addr; size 65535; flags dynamic; }}
  chain input {{
    type filter hook input priority filter - 1;
    iif "lo" accept
    {served} add @clients4 {{ ip saddr ct count over {most} }} drop
    {served} add @clients6 {{ ip6 saddr & ffff:ffff:ffff:ffff:: ct count over {most} }} drop
  }}
}}
"""
