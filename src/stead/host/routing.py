"""Forwarding on the host's interfaces, which VMs need for replies, without making the host a router.

All installations of a host share this. The interfaces are kept in the nftables set of
`firewall.routing_rules`, which a reboot clears together with the sysctls.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from stead.errors import HostError
from stead.host import firewall
from stead.host.commands import CommandFailed, run


def sysctl(name: str, value: str) -> None:
    path = Path("/proc/sys") / name
    try:
        if path.read_text().strip() != value:
            path.write_text(value)
    except OSError as error:
        raise HostError(f"cannot set {name}: {error.strerror}") from error


async def enable_forwarding(interfaces: Iterable[str]) -> None:
    """Turn forwarding on where it is off; there only replies to connections of VMs are forwarded."""
    added = {name for name in interfaces if not _forwards(name)}
    if _forwards("all"):
        # The administrator, or a container engine, has made this host a router.
        await _guard(set())
    elif added:
        # The rules come first: there is no moment without them.
        await _guard(await _guarded() | added)
    for name in added:
        sysctl(_sysctl_of(name), "1")


async def restore_forwarding() -> None:
    """Turn off what `enable_forwarding` turned on, when the last installation of this host is removed."""
    if not _forwards("all"):
        for name in await _guarded():
            if Path("/proc/sys", _sysctl_of(name)).exists():
                sysctl(_sysctl_of(name), "0")
    await _guard(set())


async def _guarded() -> set[str]:
    try:
        name = firewall.ROUTING_TABLE, firewall.ROUTING_SET
        listing = await run("nft", "-j", "list", "set", "inet", *name)
    except CommandFailed:
        return set()
    return read_interfaces(listing.stdout)


def read_interfaces(listing: bytes) -> set[str]:
    """Interfaces in nft's JSON of the set."""
    return {
        str(name)
        for entry in json.loads(listing)["nftables"]
        for name in entry.get("set", {}).get("elem", ())
    }


async def _guard(interfaces: set[str]) -> None:
    table = firewall.ROUTING_TABLE
    rules = firewall.routing_rules(interfaces)
    if not interfaces:
        rules = f"add table inet {table}\ndelete table inet {table}\n"
    await run("nft", "-f", "-", stdin=rules.encode())


def _forwards(interface: str) -> bool:
    try:
        return Path("/proc/sys", _sysctl_of(interface)).read_text().strip() == "1"
    except OSError as error:
        raise HostError(f"cannot read {_sysctl_of(interface)}: {error.strerror}") from error


def _sysctl_of(interface: str) -> str:
    return f"net/ipv4/conf/{interface}/forwarding"
