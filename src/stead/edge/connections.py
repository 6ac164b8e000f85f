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
CONNECTION_RATE, CONNECTION_BURST = 50, 500
"""New connections of one address (as above): per second, and in a burst. Each handshake costs CPU."""
MAX_CLIENTS = 65_535
"""Addresses that are counted by themselves; any others share `_LISTS` counts by a hash of the address."""
_LISTS = 256
_RATE_MEMORY = "30s"
"""How long a rate is kept: longer than a used up burst takes to fill again."""


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


def limit_rules(
    table: str,
    ports: Sequence[int],
    most: int = MAX_CONNECTIONS,
    clients: int = MAX_CLIENTS,
    rate: int = CONNECTION_RATE,
    burst: int = CONNECTION_BURST,
) -> str:
    """nftables rules that refuse new connections of an address that has, or opens, too many.

    Loopback has no limit. A rule whose set is full matches nothing, so an address that is not in it then,
    such as while packets with forged addresses fill it, is counted in lists that others may share.
    """
    served = f"meta l4proto {{ tcp, udp }} th dport {{ {', '.join(map(str, ports))} }} ct state new"
    over_rate = f"limit rate over {rate}/second burst {burst} packets"
    families = [("4", "ipv4_addr", "ip saddr"), ("6", "ipv6_addr", "ip6 saddr & ffff:ffff:ffff:ffff::")]
    sets = "\n  ".join(
        f"""set rates{name} {{ type {kind}; size {clients}; flags dynamic, timeout; timeout {_RATE_MEMORY}; }}
  set clients{name} {{ type {kind}; size {clients}; flags dynamic; }}"""
        for name, kind, _ in families
    )
    chains = "\n  ".join(
        f"""chain limited{name} {{
    update @rates{name} {{ {source} {over_rate} }} drop
    {source} != @rates{name} update @rates {{ {_list(source)} {over_rate} }} drop
    add @clients{name} {{ {source} ct count over {most} }} drop
    {source} != @clients{name} add @lists {{ {_list(source)} ct count over {most} }} drop
  }}"""
        for name, _, source in families
    )
    return f"""
add table inet {table}
delete table inet {table}
table inet {table} {{
  {sets}
  set rates {{ type mark; size {_LISTS}; flags dynamic, timeout; timeout {_RATE_MEMORY}; }}
  set lists {{ type mark; size {_LISTS}; flags dynamic; }}
  {chains}
  chain input {{
    type filter hook input priority filter - 1;
    iif "lo" accept
    {served} meta nfproto ipv4 jump limited4
    {served} meta nfproto ipv6 jump limited6
  }}
}}
"""


def _list(source: str) -> str:
    return f"jhash {source} mod {_LISTS}"
