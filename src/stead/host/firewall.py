"""The nftables rules of an installation, as text, in tables of their own.

No rule names a VM: what it may send follows from the route to its tap, which is removed with the tap.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network

from stead.addresses import AGENT_ADDRESS, AGENT_PORT, GATEWAY, HOST_LINK_ADDRESS, MAX_SLOTS

TRAFFIC_SET = "traffic"
"""Counts the IPv4 bytes of each data tap; interface counters would include ARP and IPv6, which are noise."""


def namespace_rules(
    uplink: str,
    resolver: IPv4Address | None,
    closed: Sequence[IPv4Network],
    opened: Sequence[IPv4Network],
) -> str:
    """Rules inside the namespace of the taps: spoofing guard, DNS, private networks, traffic counters.

    Management links (sm*) are kept out of connection tracking: every VM has the same link-local addresses on
    its link, and conntrack does not tell interfaces apart, so packets of one VM would count for another's
    connection. There the direction of a connection is read from the flags of its packets.
    """
    dns = (
        f'iifname "sd*" ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 dnat ip to {resolver}'
        if resolver
        else ""
    )
    return f"""
add table inet stead
delete table inet stead
table inet stead {{
  set closed {{ type ipv4_addr; flags interval; auto-merge; {_elements(closed)} }}
  set opened {{ type ipv4_addr; flags interval; auto-merge; {_elements(opened)} }}
  set {TRAFFIC_SET} {{ type ifname; size {MAX_SLOTS}; flags dynamic; }}
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
  chain delivered {{
    type filter hook postrouting priority srcnat + 1;
    oifname "sd*" meta nfproto ipv4 update @{TRAFFIC_SET} {{ oifname counter }}
  }}
  chain names {{
    type nat hook prerouting priority dstnat;
    {dns}
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    ct state established,related accept
    iifname "sm*" icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} accept
    iifname "sm*" ip6 saddr {AGENT_ADDRESS} ip6 daddr {HOST_LINK_ADDRESS} \
      tcp sport {AGENT_PORT} tcp flags & (syn | ack) != syn accept
    iifname "sd*" ip daddr {GATEWAY} icmp type echo-request accept
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
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


def host_rules(table: str, link: str, network: IPv4Network, resolver: IPv4Address | None) -> str:
    """Rules on the host's side of the link: NAT to the internet, no access to the host itself."""
    local_dns = (
        f'iifname "{link}" ip daddr {resolver} meta l4proto {{ tcp, udp }} th dport 53 accept'
        if resolver
        else ""
    )
    return f"""
add table inet {table}
delete table inet {table}
table inet {table} {{
  chain input {{
    type filter hook input priority filter;
    iifname "{link}" ct state established,related accept
    {local_dns}
    iifname "{link}" drop
  }}
  chain forward {{
    type filter hook forward priority filter;
    iifname "{link}" tcp flags syn tcp option maxseg size set rt mtu
    oifname "{link}" ct state established,related accept
    oifname "{link}" drop
  }}
  chain translate {{
    type nat hook postrouting priority srcnat;
    ip saddr {network} oifname != "{link}" masquerade
  }}
}}
"""


def _elements(networks: Sequence[IPv4Network]) -> str:
    return f"elements = {{ {', '.join(map(str, networks))} }}" if networks else ""
