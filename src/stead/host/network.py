"""The network of one installation: a namespace with the taps of all VMs, linked to the host by NAT.

Taps are not persistent: the kernel removes them and their routes with the QEMU that holds them. So only the
namespace, the link and the host's tables can be left over; `remove` deletes them.
"""

import contextlib
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Self

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple

from stead import addresses
from stead.deadlines import scaled
from stead.errors import HostError
from stead.files import locked
from stead.host import firewall, netlink
from stead.host.commands import run
from stead.host.connections import delete_connections, delete_tracked, translated_connections
from stead.host.interface import VmSlot
from stead.host.namespaces import NamespaceThread, is_namespace, namespace_of
from stead.host.netlink import Netlink
from stead.host.resolvers import changes_of_resolvers
from stead.host.routing import enable_forwarding, restore_forwarding, sysctl
from stead.host.sockets import destroy_connections, destroy_orphans
from stead.host.taps import open_tap, set_up_data_tap
from stead.host.traffic import read_traffic
from stead.host.vpcs import Vpcs, remove_all
from stead.logs import get_logger
from stead.settings import Settings
from stead.supervision import Backoff, keep_running, repeat
from stead.tasks import TaskSet, in_thread

log = get_logger("stead.network")

_UNICAST = 1
_LOCK_TIMEOUT = scaled(60.0)
_RESURVEY = 30.0
"""Seconds between two looks for changed interfaces and default routes of the host."""
_ORPHANS = 10.0
"""Seconds between two searches for closed connections to taps that are gone."""
_FOLLOW_AGAIN = Backoff(shortest=1.0, longest=60.0, healthy=60.0)
_TRACKING = Path("/proc/sys/net/netfilter/nf_conntrack_max")


@dataclass(frozen=True)
class Taps:
    """The file descriptors of a VM's two taps, passed to QEMU and then closed here."""

    data: int
    management: int

    def close(self) -> None:
        os.close(self.data)
        os.close(self.management)


def namespace_path(settings: Settings) -> Path:
    return namespace_of(f"stead-{settings.instance}")


class Network:
    """The namespace of this installation, created if needed."""

    def __init__(self, settings: Settings, thread: NamespaceThread, link: Netlink) -> None:
        self._settings = settings
        self._thread = thread
        self._netlink = link
        self.vpcs = Vpcs(settings, thread, link, _tracked_of_vms())
        self._tasks = TaskSet()

    @classmethod
    async def open(cls, settings: Settings) -> Self:
        survey = await _ensure(settings)
        thread = NamespaceThread.named(namespace_path(settings))
        network = cls(settings, thread, await thread.call(Netlink))
        network._tasks.start(_follow_changes(settings, survey), "follow changes of the host's network")
        network._tasks.start(_follow_resolvers(settings), "follow the host's name servers")
        network._tasks.start(network._destroy_orphans(), "destroy connections to taps that are gone")
        return network

    async def close(self) -> None:
        await self._tasks.close()
        await self.vpcs.close()
        await self._thread.call(self._netlink.close)
        self._thread.close()

    async def attach(self, vm_slot: VmSlot) -> Taps:
        """Create the two taps of a VM, with its route and neighbour entries."""
        if vm_slot.nic is None:
            return await self._thread.call(lambda: self._attach(vm_slot, None))
        data = await self.vpcs.attach(vm_slot)
        return await self._thread.call(lambda: self._attach(vm_slot, data))

    def _attach(self, vm_slot: VmSlot, elsewhere: int | None) -> Taps:
        """Create the taps of a VM, but for a data tap that is in a VPC."""
        slot = vm_slot.number
        data = open_tap(addresses.data_tap(slot)) if elsewhere is None else elsewhere
        try:
            management = open_tap(addresses.management_tap(slot))
        except BaseException:
            os.close(data)
            raise
        taps = Taps(data, management)
        try:
            if elsewhere is None:
                set_up_data_tap(self._netlink, slot, addresses.machine_address(slot), vm_slot.account)
            index = socket.if_nametoindex(addresses.management_tap(slot))
            self._netlink.change(
                netlink.link_up(index, addresses.TAP_MAC),
                netlink.address(index, IPv6Address(addresses.HOST_LINK_ADDRESS), 64),
                netlink.neighbour(IPv6Address(addresses.AGENT_ADDRESS), index, addresses.MANAGEMENT_MAC),
            )
        except Exception as error:
            taps.close()
            raise HostError(f"cannot set up the network of slot {slot}: {error}") from error
        return taps

    async def join(self, vm_slot: VmSlot) -> None:
        """Make the data tap of a VM from the pool its account's, and move it into its VPC if it is in one."""
        if vm_slot.nic is not None:
            await self.vpcs.move(vm_slot)
            return

        def set_group() -> None:
            index = socket.if_nametoindex(addresses.data_tap(vm_slot.number))
            self._netlink.change(netlink.link_group(index, addresses.account_group(vm_slot.account)))

        try:
            await self._thread.call(set_group)
        except (OSError, NetlinkError) as error:
            raise HostError(f"cannot set up the network of slot {vm_slot.number}: {error}") from error

    async def forget_connections(self, slot: int) -> None:
        """Delete the tracked connections of a slot's address, before another VM gets it."""
        address = addresses.machine_address(slot)
        with _explained(slot):
            await self._thread.call(lambda: delete_connections(address))

    async def end_connections(self, vm_slot: VmSlot) -> None:
        """End all connections of a VM that is being deleted, also those that the host tracks."""
        try:
            await self._end_connections(vm_slot.number)
            if vm_slot.nic is not None:
                await self.vpcs.forget(vm_slot)
        except HostError as error:
            # They time out; the next VM with this address does not start before they are deleted.
            log.warning("cannot delete connections", vm=vm_slot.machine, error=str(error))

    async def _end_connections(self, slot: int) -> None:
        address = addresses.machine_address(slot)

        def end() -> list[NFCTAttrTuple]:
            destroy_connections(address)
            found = translated_connections(address)
            delete_connections(address)
            return found

        with _explained(slot):
            found = await self._thread.call(end)
            if found:
                await in_thread(delete_tracked, found)

    async def _destroy_orphans(self) -> None:
        async def destroy() -> None:
            try:
                await self._thread.call(partial(destroy_orphans, self.vpcs.slots()))
            except OSError as error:
                raise HostError(
                    "sock_diag is unavailable: sockets to deleted VMs stay until they time out:"
                    f" {error.strerror or error}"
                ) from error

        await repeat("search for connections to taps that are gone", destroy, _ORPHANS)

    async def serve_dns(self, served: bool) -> None:
        """Whether VMs ask a resolver in the namespace, at the gateway address, or the host's."""
        if served:
            rules = firewall.served_dns_rules(self._settings.allow_private)
        else:
            rules = firewall.forwarded_dns_rules(next(iter(addresses.resolvers()), None))
        await _load(self._settings, rules)

    async def agent_socket(self, slot: int) -> tuple[socket.socket, tuple[str, int, int, int]]:
        """A fresh socket in the namespace and the address of the agent in `slot`, not yet connected."""

        def make() -> tuple[socket.socket, tuple[str, int, int, int]]:
            index = socket.if_nametoindex(addresses.management_tap(slot))
            link = socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link, (addresses.AGENT_ADDRESS, addresses.AGENT_PORT, 0, index)

        return await self._thread.call(make)

    async def datagram_socket(self, address: IPv4Address, port: int) -> socket.socket:
        """A socket for UDP in the namespace, bound and not blocking."""

        def make() -> socket.socket:
            made = socket.socket(
                socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            )
            try:
                made.bind((str(address), port))
            except OSError as error:
                made.close()
                raise HostError(f"cannot bind UDP port {port} of {address}: {error.strerror}") from error
            return made

        return await self._thread.call(make)

    async def dial(self, address: IPv4Address, port: int) -> socket.socket:
        """A TCP connection from the namespace; OSError if refused."""
        return await self._thread.dial(address, port)

    async def traffic(self) -> dict[int, int]:
        """IPv4 bytes of each slot's data NIC in both directions, since this installation was opened.

        A slot that has had no traffic is missing. Counters outlive the tap: a slot's next VM continues them.
        """
        counted = await self._thread.call(read_traffic)
        for slot, count in (await self.vpcs.traffic()).items():
            counted[slot] = counted.get(slot, 0) + count
        return counted


@contextlib.contextmanager
def _explained(slot: int) -> Iterator[None]:
    try:
        yield
    except (OSError, NetlinkError) as error:
        raise HostError(f"cannot delete the connections of slot {slot}: {error}") from error


def _names(settings: Settings) -> tuple[str, str, str, str]:
    """Namespace, host end, inner end, host table."""
    instance = settings.instance
    return f"stead-{instance}", f"st{instance}h", f"st{instance}n", f"stead_{instance}"


@dataclass(frozen=True)
class _Survey:
    """Links, addresses and routes of the host's own namespace."""

    link: IPv4Network | None
    taken: tuple[IPv4Network, ...]
    uplinks: tuple[str, ...]
    side_networks: tuple[IPv4Network, ...]
    """Networks of the host without a default route: bridges, VPNs, VLANs."""
    ways_to_opened: tuple[str, ...]
    """Interfaces of the allowed private networks; they need forwarding for the replies."""

    @property
    def interfaces(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The interfaces that packets of VMs leave through."""
        return self.uplinks, self.ways_to_opened


def _survey(outer: str, opened: Sequence[IPv4Network]) -> _Survey:
    with IPRoute() as host:
        names = {link["index"]: link.get_attr("IFLA_IFNAME") for link in host.get_links()}
        routes = [
            (route.get_attr("RTA_OIF"), IPv4Network((route.get_attr("RTA_DST", "0.0.0.0"), route["dst_len"])))
            for route in host.get_routes(family=socket.AF_INET, type=_UNICAST)
            if route.get_attr("RTA_OIF") is not None
        ]
        main = {index for index, network in routes if network.prefixlen == 0}
        networks = [
            (
                message["index"],
                IPv4Network((message.get_attr("IFA_ADDRESS"), message["prefixlen"]), strict=False),
            )
            for message in host.get_addr(family=socket.AF_INET)
        ]
    return _Survey(
        link=next((network for index, network in networks if names.get(index) == outer), None),
        taken=tuple(network for _, network in networks),
        uplinks=tuple(sorted(names[index] for index in main if index in names)),
        side_networks=tuple(
            network for index, network in networks if index not in main and not network.is_loopback
        ),
        ways_to_opened=tuple(
            sorted(
                {
                    names[index]
                    for index, network in routes
                    if index in names and network.prefixlen > 0 and any(map(network.overlaps, opened))
                }
            )
        ),
    )


async def _ensure(settings: Settings) -> _Survey:
    """Create or repair the namespace, the link and the rules (idempotent)."""
    namespace, outer, inner, _ = _names(settings)
    path = namespace_path(settings)
    if not is_namespace(path):
        path.unlink(missing_ok=True)
        await run("ip", "netns", "add", namespace)
    async with _locked(settings):
        survey = await in_thread(_survey, outer, settings.allow_private)
        if survey.link is None:
            survey = replace(survey, link=await _make_link(settings, survey))
        await _load_host_rules(settings, survey)
    # Connections to an address without a tap fail at once.
    await run(
        *("nsenter", f"--net={path}", "ip", "route", "replace", "unreachable", str(addresses.MACHINES)),
    )
    closed = [*addresses.NOT_THE_INTERNET, *survey.side_networks]
    rules = firewall.namespace_rules(inner, closed, settings.allow_private, _tracked_of_vms())
    await _load(settings, rules)
    await _load(settings, firewall.forwarded_dns_rules(next(iter(addresses.resolvers()), None)))
    return survey


async def _load(settings: Settings, rules: str) -> None:
    """Load rules in the namespace."""
    await run("nsenter", f"--net={namespace_path(settings)}", "nft", "-f", "-", stdin=rules.encode())


async def _load_host_rules(settings: Settings, survey: _Survey) -> None:
    """Load the host's own rules and turn forwarding on. Call it with the lock held."""
    _, outer, _, table = _names(settings)
    if survey.link is None:
        raise HostError(f"the link {outer} has no address")
    rules = firewall.host_rules(
        table,
        outer,
        survey.link,
        addresses.resolvers(),
        survey.uplinks,
        settings.allow_private,
        _tracked_of_vms(),
    )
    await run("nft", "-f", "-", stdin=rules.encode())
    await enable_forwarding((*survey.uplinks, *survey.ways_to_opened))
    # Only this installation's VMs are behind its own link, and the rules above are for them.
    sysctl(f"net/ipv4/conf/{outer}/forwarding", "1")


def _tracked_of_vms() -> int:
    """Connections that all VMs together may have in a connection tracking table: half of it."""
    try:
        return int(_TRACKING.read_text()) // 2
    except OSError:
        # conntrack is loaded with the first rules; this is its default on a host with 1 GiB of memory.
        return 65_536 // 2


async def _follow_resolvers(settings: Settings) -> None:
    """Let VMs reach the name servers that the host has now."""
    _, outer, _, _ = _names(settings)
    # The rules were loaded for the first ones; after a failure they may be others.
    known = True

    async def follow(serving: Callable[[], None]) -> None:
        nonlocal known
        skip, known = known, False
        async for _ in changes_of_resolvers():
            if not skip:
                async with _locked(settings):
                    await _load_host_rules(settings, await in_thread(_survey, outer, settings.allow_private))
            skip = False
            serving()

    await keep_running("rules for the host's name servers", follow, _FOLLOW_AGAIN)


async def _follow_changes(settings: Settings, survey: _Survey) -> None:
    """Load the host's rules again when its interfaces or its default route have changed."""
    _, outer, _, _ = _names(settings)

    async def survey_again() -> None:
        nonlocal survey
        found = await in_thread(_survey, outer, settings.allow_private)
        if found.link is not None and found.interfaces != survey.interfaces:
            async with _locked(settings):
                await _load_host_rules(settings, found)
            survey = found

    await repeat("survey of the host's network", survey_again, _RESURVEY)


@contextlib.asynccontextmanager
async def _locked(settings: Settings) -> AsyncIterator[None]:
    """One installation of this host at a time changes what all share."""
    settings.runtime.mkdir(parents=True, exist_ok=True, mode=0o711)
    async with locked(settings.runtime / "network.lock", _LOCK_TIMEOUT):
        yield


async def _make_link(settings: Settings, survey: _Survey) -> IPv4Network:
    _, outer, inner, _ = _names(settings)
    within = ("nsenter", f"--net={namespace_path(settings)}")
    for network in addresses.link_networks(settings.instance):
        if not any(network.overlaps(other) for other in survey.taken):
            break
    else:
        raise HostError("no free link network in 169.254.64.0/19")
    ours, theirs = network[1], network[2]
    if Path("/sys/class/net", outer).exists():
        await run("ip", "link", "delete", outer)
    inside = f"""
link set lo up
addr replace {addresses.GATEWAY}/32 dev lo
link add {inner} type veth peer name {outer} netns {os.getpid()}
addr add {theirs}/30 dev {inner}
link set {inner} up
route replace default via {ours}
"""
    await run(*within, "ip", "-batch", "-", stdin=inside.encode())
    thread = NamespaceThread.named(namespace_path(settings))
    try:
        await thread.call(_namespace_sysctls)
    finally:
        thread.close()
    # The host's end gets its address last: a link without an address is incomplete.
    await run("ip", "-batch", "-", stdin=f"link set {outer} up\naddr add {ours}/30 dev {outer}\n".encode())
    return network


def _namespace_sysctls() -> None:
    sysctl("net/ipv4/ip_forward", "1")
    sysctl("net/ipv4/conf/all/rp_filter", "1")
    sysctl("net/ipv4/conf/default/rp_filter", "1")
    sysctl("net/ipv4/conf/all/accept_redirects", "0")
    sysctl("net/ipv4/conf/all/send_redirects", "0")
    sysctl("net/ipv6/conf/default/accept_ra", "0")
    sysctl("net/ipv6/conf/default/accept_dad", "0")
    # No automatic addresses: guests reach a tap only at the address that is added to it.
    sysctl("net/ipv6/conf/default/addr_gen_mode", "1")


async def remove(settings: Settings) -> None:
    """Remove everything that `open` created (idempotent)."""
    namespace, outer, _, table = _names(settings)
    await remove_all(settings)
    if Path("/sys/class/net", outer).exists():
        await run("ip", "link", "delete", outer)
    async with _locked(settings):
        await run("nft", "-f", "-", stdin=f"add table inet {table}\ndelete table inet {table}\n".encode())
        if not await _installations():
            await restore_forwarding()
    if namespace_path(settings).exists():
        await run("ip", "netns", "delete", namespace)


async def _installations() -> bool:
    """Whether this host has tables of any installation."""
    tables = await run("nft", "list", "tables")
    return re.search(rb"^table inet stead_[0-9a-f]{6}$", tables.stdout, re.MULTILINE) is not None
