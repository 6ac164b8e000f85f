"""The nftables rules of an installation, as text, in tables of their own.

No rule names a VM: what it may send follows from the route to its tap, which is removed with the tap.
"""

from collections.abc import Collection, Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network

from stead.addresses import AGENT_ADDRESS, AGENT_PORT, GATEWAY, HOST_LINK_ADDRESS, MAX_SLOTS, TUNNELS
from stead.host import dns_matches

TABLE = "stead"
"""In the namespaces: family inet."""
TRAFFIC_SET = "traffic"
"""Counts the IPv4 bytes of each data tap; interface counters would include ARP and IPv6, which are noise."""
MAX_CONNECTIONS = 4096
"""Connections that a VM may have in the connection tracking table, which all VMs and the host share."""
MAX_DNS_CONNECTIONS = 4
"""DNS connections over TCP that a VM may have: dnsmasq serves 20 at once in all."""
_LISTED = 128
"""Connections of one list: the kernel walks it at each new connection, so there are many short ones."""
DNS_RATE, DNS_BURST = 200, 500
"""DNS queries over UDP that a VM may send: per second, and in a burst."""
ACCOUNT_DNS_RATE, ACCOUNT_DNS_BURST = 1000, 1000
"""The same of all VMs of an account: they share dnsmasq with those of others."""
PRIVATE_DNS_RATE, PRIVATE_DNS_BURST = 200, 500
"""Those of an account's queries for names in VPCs: the server itself answers them."""
PRIVATE_NAMES_PORT, _PRIVATE_NAMES = 54, 0x53
"""The gateway's port where names in VPCs are served, and the mark of queries that are sent there.

Below 1024: dnsmasq asks others from random ports above.
"""
EDGE_PORTS = (80, 443)
"""Ports of the gateway address where Caddy listens for VMs."""
VPC_UPLINK, VPC_WAKE = "outer", "wake"
"""Interfaces in a VPC's namespace: the link to that of the taps; where packets to VMs that do not run go."""
VPN_SEGMENT = 1380
"""TCP payload of a packet that fits a WireGuard tunnel of 1420 bytes."""
WAKE_RATE = 50
"""Packets per second to VMs that do not run, in each VPC: each is read by the server, within the account's
share (`vpcs.py`)."""
ROUTING_TABLE = "stead_routing"
ROUTING_SET = "enabled"


def namespace_rules(
    uplink: str, closed: Sequence[IPv4Network], opened: Sequence[IPv4Network], tracked: int
) -> str:
    """Rules inside the namespace of the taps: spoofing guard, limits, private networks, traffic counters.

    All VMs together have at most about `tracked` connections, and those of an account half of them: its taps
    and its VPCs are one interface group. The edge has room for its own.

    Management links (sm*) are kept out of connection tracking: every VM has the same link-local addresses on
    its link, and conntrack does not tell interfaces apart, so packets of one VM would count for another's
    connection. There the direction of a connection is read from the flags of its packets.
    """
    return f"""
add table inet {TABLE}
delete table inet {TABLE}
table inet {TABLE} {{
  set closed {{ type ipv4_addr; flags interval; auto-merge; {_elements(closed)} }}
  set opened {{ type ipv4_addr; flags interval; auto-merge; {_elements(opened)} }}
  set {TRAFFIC_SET} {{ type ifname; size {MAX_SLOTS}; flags dynamic; }}
  set connections {{ type ipv4_addr; size {MAX_SLOTS}; flags dynamic; }}
  set dns_connections {{ type ipv4_addr; size {MAX_SLOTS}; flags dynamic; }}
  set accounts {{ type devgroup . mark; size {max(tracked, 1)}; flags dynamic; }}
  {_tracked_set(tracked)}
  chain spoofed {{
    type filter hook prerouting priority raw;
    iifname "sm*" notrack accept
    iifname "sd*" meta nfproto ipv6 drop
    iifname "sd*" fib saddr . iif oif missing drop
    iifname "sd*" update @{TRAFFIC_SET} {{ iifname counter }}
  }}
  chain untracked {{
    type filter hook output priority raw;
    oifname "sm*" notrack
  }}
  chain limited {{
    type filter hook prerouting priority mangle;
    iifname "sd*" ct state new add @connections {{ ip saddr ct count over {MAX_CONNECTIONS} }} drop
    iifname "sd*" ct state new \
      add @accounts {{ meta iifgroup . {_list(tracked // 2)} ct count over {_LISTED} }} drop
    iifname "sd*" ct state new {_over_tracked(tracked)} drop
  }}
  chain delivered {{
    type filter hook postrouting priority srcnat + 1;
    oifname "sd*" meta nfproto ipv4 update @{TRAFFIC_SET} {{ oifname counter }}
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    iifname "lo" accept
    ct state established,related accept
    iifname "sm*" ip6 saddr {AGENT_ADDRESS} icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
    iifname "sm*" ip6 saddr {AGENT_ADDRESS} ip6 daddr {HOST_LINK_ADDRESS} \
      tcp sport {AGENT_PORT} tcp flags & (syn | ack) != syn accept
    iifname "sd*" ip daddr {GATEWAY} icmp type echo-request accept
    iifname "sd*" ip daddr {GATEWAY} udp dport 53 accept
    iifname "sd*" ip daddr {GATEWAY} udp dport {PRIVATE_NAMES_PORT} meta mark {_PRIVATE_NAMES} accept
    iifname "sd*" ip daddr {GATEWAY} tcp dport 53 ct state new \
      add @dns_connections {{ ip saddr ct count over {MAX_DNS_CONNECTIONS} }} reject with tcp reset
    iifname "sd*" ip daddr {GATEWAY} tcp dport {{ 53, {", ".join(map(str, EDGE_PORTS))} }} accept
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    ct state invalid drop
    ct state established,related accept
    iifname "sd*" oifname "{uplink}" ct status dnat accept
    iifname "sd*" oifname "{uplink}" ip daddr @opened accept
    iifname "sd*" ip daddr @closed reject with icmp type admin-prohibited
    iifname "sd*" oifname "{uplink}" accept
  }}
  chain translate {{
    type nat hook postrouting priority srcnat;
    oifname "{uplink}" masquerade
  }}
}}
"""


def vpc_rules(cidr: IPv4Network, members: Iterable[tuple[IPv4Address, IPv4Address]], tracked: int) -> str:
    """Rules inside the namespace of a VPC. `members` are the addresses of VMs: in the VPC, and outside.

    VMs reach each other by their VPC addresses, without connection tracking. To all else (`outer` leads to
    the namespace of the taps, whose rules then apply) and from the host a VM has its other address.
    """
    segments = f"tcp flags syn tcp option maxseg size set {VPN_SEGMENT}"
    maps = "\n".join(
        f"add element inet {TABLE} {name} {{ {', '.join(f'{key} : {value}' for key, value in pairs)} }}"
        for name, pairs in vpc_maps(list(members))
    )
    return f"""
add table inet {TABLE}
delete table inet {TABLE}
table inet {TABLE} {{
  map inbound {{ type ipv4_addr : ipv4_addr; }}
  map outbound {{ type ipv4_addr : ipv4_addr; }}
  set {TRAFFIC_SET} {{ type ifname; size {MAX_SLOTS}; flags dynamic; }}
  set connections {{ type ipv4_addr; size {MAX_SLOTS}; flags dynamic; }}
  {_tracked_set(tracked)}
  chain spoofed {{
    type filter hook prerouting priority raw;
    iifname "sd*" meta nfproto ipv6 drop
    iifname "sd*" fib saddr . iif oif missing drop
    iifname "sd*" update @{TRAFFIC_SET} {{ iifname counter }}
    iifname "sw*" ip saddr != {TUNNELS} drop
    iifname "sw*" ip daddr != {cidr} drop
    ip daddr {{ {cidr}, {TUNNELS} }} iifname != "{VPC_UPLINK}" notrack
  }}
  chain limited {{
    type filter hook prerouting priority mangle;
    iifname "sd*" ct state new add @connections {{ ip saddr ct count over {MAX_CONNECTIONS} }} drop
    iifname "sd*" ct state new {_over_tracked(tracked)} drop
  }}
  chain inbound {{
    type nat hook prerouting priority dstnat;
    iifname "{VPC_UPLINK}" dnat ip to ip daddr map @inbound
  }}
  chain outbound {{
    type nat hook postrouting priority srcnat;
    oifname "{VPC_UPLINK}" snat ip to ip saddr map @outbound
  }}
  chain delivered {{
    type filter hook postrouting priority srcnat + 1;
    oifname "sd*" meta nfproto ipv4 update @{TRAFFIC_SET} {{ oifname counter }}
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    iifname "{VPC_UPLINK}" oifname "{VPC_WAKE}" reject with icmp type host-unreachable
    iifname "{VPC_UPLINK}" oifname "sd*" accept
    iifname "sd*" ip daddr {cidr} oifname "sd*" accept
    iifname "sw*" ip daddr {cidr} oifname "sd*" {segments}
    iifname "sw*" ip daddr {cidr} oifname "sd*" accept
    iifname != "{VPC_UPLINK}" ip daddr {cidr} oifname "{VPC_WAKE}" limit rate {WAKE_RATE}/second accept
    iifname "sd*" ip daddr {TUNNELS} oifname "sw*" {segments}
    iifname "sd*" ip daddr {TUNNELS} oifname "sw*" accept
    iifname "{VPC_WAKE}" ip daddr {cidr} oifname "sd*" accept
    iifname "sd*" oifname "{VPC_UPLINK}" ct state invalid drop
    iifname "sd*" oifname "{VPC_UPLINK}" accept
  }}
}}
{maps}
"""  # nftables, not SQL


def vpc_maps(
    members: Collection[tuple[IPv4Address, IPv4Address]],
) -> list[tuple[str, list[tuple[IPv4Address, IPv4Address]]]]:
    """What the maps of `vpc_rules` contain for members, pairs as there."""
    if not members:
        return []
    return [("inbound", [(outer, inner) for inner, outer in members]), ("outbound", list(members))]


def served_dns_rules(opened: Sequence[IPv4Network]) -> str:
    """DNS in the namespace while Stead's resolver runs: bounded, and without conntrack entries of queries.

    Queries of VMs in VPCs for private names go to a port of their own. No state is needed for that: the port
    of the answer is changed back. The taps and VPCs of an account are one interface group.
    """
    account = "meta iifgroup limit rate over"
    query = f'iifname "sd*" ip daddr {GATEWAY} udp dport 53'
    private = [*dns_matches.private_names(), *dns_matches.private_addresses(opened)]
    lines = "\n    ".join(f"{match} goto private_name" for match in private)
    return f"""
add table inet stead_dns
delete table inet stead_dns
table inet stead_dns {{
  set queries {{ type ipv4_addr; size {MAX_SLOTS}; flags dynamic, timeout; timeout 1m; }}
  set accounts {{ type devgroup; size {MAX_SLOTS}; flags dynamic, timeout; timeout 1m; }}
  set private {{ type devgroup; size {MAX_SLOTS}; flags dynamic, timeout; timeout 1m; }}
  chain private_name {{
    update @private {{ {account} {PRIVATE_DNS_RATE}/second burst {PRIVATE_DNS_BURST} packets }} drop
    meta mark set {_PRIVATE_NAMES}
    udp dport set {PRIVATE_NAMES_PORT}
  }}
  chain question {{
    {lines}
  }}
  chain answers {{
    type filter hook output priority raw;
    ip saddr {GATEWAY} udp sport 53 notrack
    ip saddr {GATEWAY} udp sport {PRIVATE_NAMES_PORT} notrack udp sport set 53
  }}
  chain queries {{
    type filter hook prerouting priority raw + 1;
    {query} update @queries {{ ip saddr limit rate over {DNS_RATE}/second burst {DNS_BURST} packets }} drop
    {query} update @accounts {{ {account} {ACCOUNT_DNS_RATE}/second burst {ACCOUNT_DNS_BURST} packets }} drop
    {query} notrack
    iifname "sdv*" ip daddr {GATEWAY} udp dport 53 jump question
  }}
}}
"""  # noqa: S608  # nftables, not SQL


def forwarded_dns_rules(resolver: IPv4Address | None) -> str:
    """DNS in the namespace while no server runs: VMs ask the host's resolver."""
    forward = (
        f'iifname "sd*" ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 dnat ip to {resolver}'
        if resolver
        else ""
    )
    return f"""
add table inet stead_dns
delete table inet stead_dns
table inet stead_dns {{
  chain forwarded {{
    type nat hook prerouting priority dstnat;
    {forward}
  }}
}}
"""


def host_rules(
    table: str,
    link: str,
    network: IPv4Network,
    resolvers: Sequence[IPv4Address],
    uplinks: Sequence[str],
    opened: Sequence[IPv4Network],
    tracked: int,
) -> str:
    """Rules on the host's side of the link: NAT to the internet, no access to the host itself.

    All VMs together have at most about `tracked` connections in the host's connection tracking table. Packets
    of VMs leave through the interfaces of the default route only, so networks that come up later are closed
    too. What the host's own rules redirect (DNAT) is a service that the host publishes.
    """
    dns = (
        f'iifname "{link}" ip saddr {network} ip daddr {{ {", ".join(map(str, resolvers))} }}'
        " meta l4proto { tcp, udp } th dport 53 accept"
        if resolvers
        else ""
    )
    elsewhere = f"oifname != {{ {_names(uplinks)} }}" if uplinks else ""
    return f"""
add table inet {table}
delete table inet {table}
table inet {table} {{
  set opened {{ type ipv4_addr; flags interval; auto-merge; {_elements(opened)} }}
  {_tracked_set(tracked)}
  chain limited {{
    type filter hook prerouting priority mangle;
    iifname "{link}" ct state new {_over_tracked(tracked)} drop
  }}
  chain input {{
    type filter hook input priority filter;
    iifname "{link}" ct state established,related accept
    {dns}
    iifname "{link}" drop
  }}
  chain forward {{
    type filter hook forward priority filter;
    oifname "{link}" ct state established,related accept
    oifname "{link}" drop
    iifname "{link}" ip saddr != {network} drop
    iifname "{link}" meta nfproto ipv6 drop
    iifname "{link}" ct status dnat drop
    iifname "{link}" {elsewhere} ip daddr != @opened drop
    iifname "{link}" tcp flags syn tcp option maxseg size set rt mtu
  }}
  chain translate {{
    type nat hook postrouting priority srcnat;
    ip saddr {network} oifname != "{link}" masquerade
  }}
}}
"""


def routing_rules(interfaces: Iterable[str]) -> str:
    """Rules for interfaces of the host on which Stead turned forwarding on, for the replies to its VMs.

    Other hosts there must not be able to use this host as a router. What is published by DNAT passes: a
    container engine may have come later than Stead.
    """
    return f"""
add table inet {ROUTING_TABLE}
delete table inet {ROUTING_TABLE}
table inet {ROUTING_TABLE} {{
  set {ROUTING_SET} {{ type ifname; elements = {{ {_names(interfaces)} }} }}
  chain forward {{
    type filter hook forward priority filter;
    iifname @{ROUTING_SET} ct status dnat accept
    iifname @{ROUTING_SET} ct direction original drop
  }}
}}
"""


def _tracked_set(tracked: int) -> str:
    return f"set tracked {{ type mark; size {_lists(tracked)}; flags dynamic; }}"


def _over_tracked(tracked: int) -> str:
    """Matches a connection whose list is full: connections are spread over lists by a hash of their ends."""
    return f"add @tracked {{ {_list(tracked)} ct count over {_LISTED} }}"


def _list(tracked: int) -> str:
    return f"jhash ip saddr . ip daddr . th sport . th dport mod {_lists(tracked)}"


def _lists(tracked: int) -> int:
    return max(1, tracked // _LISTED)


def _names(interfaces: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in sorted(interfaces))


def _elements(networks: Sequence[IPv4Network]) -> str:
    return f"elements = {{ {', '.join(map(str, networks))} }}" if networks else ""
