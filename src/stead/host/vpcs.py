"""Private networks on this host: a network namespace for each VPC, linked to the namespace of all taps.

A VM in a VPC has its data tap in the VPC's namespace, where it is routed as all taps are. Its slot's address
stays its address outside of the VPC, translated one to one on the link: the host, the edge and the internet
work as for a VM without a VPC. Packets to a VM that does not run go to a tun device that the
server reads: it wakes the VM, and sends them on when the VM's tap is there.
"""

import asyncio
import contextlib
import os
import re
import socket
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from stead import addresses
from stead.deadlines import scaled
from stead.errors import HostError
from stead.host import firewall, netlink
from stead.host.commands import run
from stead.host.connections import delete_connections
from stead.host.interface import Nic, PrivateNetwork, VmSlot, WireGuardTunnel
from stead.host.namespaces import NamespaceThread, is_namespace, namespace_of
from stead.host.netlink import Netlink
from stead.host.routing import sysctl
from stead.host.taps import open_tap, open_tun, set_up_data_tap
from stead.host.traffic import read_traffic
from stead.host.wireguard import WireGuard, remove_sockets
from stead.logs import get_logger
from stead.settings import Settings
from stead.shares import KeyedLock, RateLimit
from stead.tasks import finished

log = get_logger("stead.vpcs")

_WAKE_METRIC = 4096
"""Of the route to a VM that does not run: the route of its tap has a lower one."""
_MTU = 1500
_HELD_PACKETS = 8
"""Packets that wait for one VM to wake; programs send the others again."""
_HELD_VMS, _HELD_VMS_OF_ACCOUNT, _HELD_VMS_IN_ALL = 32, 128, 512
"""VMs for which packets wait: in one VPC, in those of an account, and in all."""
_WAKES, _WAKE_INTERVAL = 200, 0.01
"""Packets to VMs that do not run which are read for an account: at once, and seconds for one more."""
_WAKE_PAUSE = 1.0
"""Seconds for which no packet of a VPC is read whose account has read too many."""
_HELD_FOR = scaled(30.0)
"""Seconds after which a packet that waits for a VM is dropped."""
_AT_ONCE = 4
"""Namespaces that are set up at the same time."""

_FILLER = (
    bytes.fromhex(addresses.DATA_MAC.replace(":", ""))
    + bytes.fromhex(addresses.TAP_MAC.replace(":", ""))
    + b"\x88\xb5"
).ljust(60, b"\0")
"""A frame of the EtherType for local experiments, which a guest drops."""

_Pair = tuple[IPv4Address, IPv4Address]
"""An address of a VM in the VPC, and that outside."""
Wanted = Callable[[str], None]
"""Called with the id of a VM that does not run and is sent packets."""


def _namespace(settings: Settings, number: int) -> str:
    return f"stead-{settings.instance}-{number}"


@dataclass(eq=False)
class _OpenVpc:
    """The namespace of a VPC, with a thread in it."""

    network: PrivateNetwork
    thread: NamespaceThread
    netlink: Netlink
    wake: int
    """Descriptor of the tun device for packets to VMs that do not run."""
    frames: socket.socket
    """Sends Ethernet frames into taps."""
    loaded: dict[IPv4Address, IPv4Address] = field(default_factory=dict)
    """The address maps of its rules: from addresses in the VPC to those outside. Used in the thread only."""
    held: dict[IPv4Address, list[tuple[float, bytes]]] = field(default_factory=dict)
    """Packets to VMs that do not run, with the time at which they came."""
    closed: bool = False

    def replace_members(self, added: Collection[_Pair], removed: Collection[_Pair] = ()) -> None:
        """Change the address maps, all at once. Call it in the thread."""
        inners, outers = {inner for inner, _ in added}, {outer for _, outer in added}
        gone = [
            (inner, outer)
            for inner, outer in self.loaded.items()
            if inner in inners or outer in outers or (inner, outer) in removed
        ]
        changes = [netlink.no_map_elements(firewall.TABLE, *each) for each in firewall.vpc_maps(gone)]
        changes += [netlink.map_elements(firewall.TABLE, *each) for each in firewall.vpc_maps(added)]
        if changes:
            self.netlink.change_maps(*changes)
        for inner, _ in gone:
            del self.loaded[inner]
        self.loaded.update(added)

    async def close(self) -> None:
        self.closed = True
        asyncio.get_running_loop().remove_reader(self.wake)
        os.close(self.wake)
        self.frames.close()
        await self.thread.call(self.netlink.close)
        self.thread.close()


class Vpcs:
    """The VPCs of an installation on this host. `taps` is a thread in the namespace of all taps."""

    def __init__(self, settings: Settings, taps: NamespaceThread, link: Netlink, tracked: int) -> None:
        self._settings = settings
        self._taps = taps
        self._netlink = link
        self._tracked = tracked
        self._known: dict[str, PrivateNetwork] = {}
        self._members: dict[str, dict[IPv4Address, VmSlot]] = {}
        self._open: dict[str, _OpenVpc] = {}
        self._locks = KeyedLock()
        self._wakes = RateLimit(_WAKES, _WAKE_INTERVAL)
        self._wanted: Wanted = lambda machine: None
        self.wireguard = WireGuard(settings, lambda number: _namespace(settings, number))

    # VPCs

    async def open(
        self, networks: Collection[PrivateNetwork], members: Collection[VmSlot], wanted: Wanted
    ) -> None:
        """Make the namespaces those of `networks`. Those without VMs are made when they get one."""
        self._wanted = wanted
        numbers = {network.number for network in networks}
        for number in _numbers(self._settings):
            if number not in numbers:
                try:
                    await self._delete(number)
                except HostError as error:
                    log.error(
                        "cannot delete the namespace of a VPC that is gone", number=number, error=str(error)
                    )
        for network in networks:
            self._known[network.id] = network
            self._members[network.id] = {}
        for vm_slot in members:
            nic = _nic(vm_slot)
            if nic.vpc in self._members:
                self._members[nic.vpc][nic.address] = vm_slot
        limit = asyncio.Semaphore(_AT_ONCE)

        async def set_up(vpc: str) -> None:
            async with limit:
                try:
                    await self._opened(vpc)
                except (HostError, OSError, NetlinkError) as error:
                    # It is tried again when one of its VMs starts.
                    log.error("cannot set up a VPC", vpc=vpc, error=str(error))

        await asyncio.gather(*(set_up(vpc) for vpc, found in self._members.items() if found))

    async def add(self, network: PrivateNetwork) -> None:
        self._known[network.id] = network
        self._members.setdefault(network.id, {})
        await self._opened(network.id)

    async def remove(self, network: PrivateNetwork) -> None:
        """Remove a VPC without VMs; idempotent."""
        async with self._locks.hold(network.id):
            self._known.pop(network.id, None)
            self._members.pop(network.id, None)
            opened = self._open.pop(network.id, None)
            await self.wireguard.remove(network.number)
            if opened is not None:
                await finished(opened.close())
            await self._delete(network.number)

    async def set_tunnel(self, tunnel: WireGuardTunnel) -> None:
        """Let exactly these WireGuard clients into a VPC."""
        vpc = tunnel.network.id
        if tunnel.peers:
            await self._opened(vpc)
        async with self._locks.hold(vpc):
            if vpc not in self._known:
                raise HostError(f"VPC {vpc} does not exist")
            await self.wireguard.set(tunnel)

    async def close(self) -> None:
        await self.wireguard.close()
        for opened in self._open.values():
            await opened.close()
        self._open.clear()

    # VMs

    async def attach(self, vm_slot: VmSlot) -> int:
        """Create the data tap of a VM in its VPC; returns its descriptor."""
        nic = _nic(vm_slot)
        opened = await self._opened(nic.vpc)

        with _explained(vm_slot):
            tap = await opened.thread.call(lambda: _open_tap(opened, vm_slot))
            try:
                await self._admit(opened, vm_slot, nic)
            except BaseException:
                os.close(tap)
                raise
        return tap

    async def move(self, vm_slot: VmSlot) -> None:
        """Move the data tap of a VM from the namespace of all taps into its VPC."""
        nic = _nic(vm_slot)
        opened = await self._opened(nic.vpc)

        def move() -> None:
            namespace = os.open(namespace_of(_namespace(self._settings, opened.network.number)), os.O_RDONLY)
            try:
                index = socket.if_nametoindex(addresses.data_tap(vm_slot.number))
                self._netlink.change(netlink.link_to_namespace(index, namespace))
            finally:
                os.close(namespace)

        with _explained(vm_slot):
            await self._taps.call(move)
            await self._admit(opened, vm_slot, nic)

    async def forget(self, vm_slot: VmSlot) -> None:
        """Remove what the VPC has of a VM that is deleted, but for its tap, which ends with its process."""
        nic = _nic(vm_slot)
        if self._members.get(nic.vpc, {}).get(nic.address) == vm_slot:
            del self._members[nic.vpc][nic.address]
        opened = self._open.get(nic.vpc)
        if opened is None:
            return
        opened.held.pop(nic.address, None)
        outer = addresses.machine_address(vm_slot.number)

        def remove() -> None:
            opened.replace_members([], removed=[(nic.address, outer)])
            index = socket.if_nametoindex(firewall.VPC_WAKE)
            gone = netlink.no_route(nic.address, index, _WAKE_METRIC)
            opened.netlink.change(gone, missing_allowed=True)
            delete_connections(nic.address)

        with _explained(vm_slot):
            await opened.thread.call(remove)
            await self._taps.call(lambda: self._unroute(opened.network, outer))

    def slots(self) -> set[int]:
        """The slots of all VMs in VPCs."""
        return {vm_slot.number for found in self._members.values() for vm_slot in found.values()}

    async def traffic(self) -> dict[int, int]:
        """Bytes of each slot in a VPC, as `Network.traffic`."""
        counted: dict[int, int] = {}
        for vpc, opened in list(self._open.items()):
            # One that was removed meanwhile has no thread any more.
            if self._members.get(vpc) and self._open.get(vpc) is opened:
                for slot, count in (await opened.thread.call(read_traffic)).items():
                    counted[slot] = counted.get(slot, 0) + count
        return counted

    async def _admit(self, opened: _OpenVpc, vm_slot: VmSlot, nic: Nic) -> None:
        """Bring a VM's tap up, and translate between its address in the VPC and that outside."""
        outer = addresses.machine_address(vm_slot.number)

        def admit() -> bool:
            new = opened.loaded.get(nic.address) != outer
            if new:
                # Connections of a VM that had this address before are not this VM's.
                delete_connections(nic.address)
                opened.replace_members([(nic.address, outer)])
                _route_to_wake(opened.netlink, [nic.address])
            set_up_data_tap(opened.netlink, vm_slot.number, nic.address, vm_slot.account)
            return new

        if await opened.thread.call(admit):
            await self._taps.call(lambda: self._route(opened.network, outer))
        self._members[opened.network.id][nic.address] = vm_slot
        oldest = asyncio.get_running_loop().time() - _HELD_FOR
        for came, packet in opened.held.pop(nic.address, ()):
            if came >= oldest:
                with contextlib.suppress(OSError):
                    os.write(opened.wake, packet)

    # Namespaces

    async def _opened(self, vpc: str) -> _OpenVpc:
        found = self._open.get(vpc)
        if found is not None:
            return found
        async with self._locks.hold(vpc):
            if vpc not in self._open:
                network = self._known.get(vpc)
                if network is None:
                    raise HostError(f"VPC {vpc} does not exist")
                self._open[vpc] = await finished(self._set_up(network))
            return self._open[vpc]

    async def _set_up(self, network: PrivateNetwork) -> _OpenVpc:
        """Create or repair the namespace of a VPC, its link, routes and rules (idempotent)."""
        name = _namespace(self._settings, network.number)
        path = namespace_of(name)
        if not is_namespace(path):
            path.unlink(missing_ok=True)
            await run("ip", "netns", "add", name)
        thread = NamespaceThread.named(path)
        try:
            await thread.call(_set_sysctls)
            await self._ensure_link(network, thread)
            link = await thread.call(Netlink)
            pairs = {
                inner: addresses.machine_address(vm_slot.number)
                for inner, vm_slot in self._members[network.id].items()
            }
            wake = await thread.call(lambda: _set_up_routes(link, network, pairs))
            frames = await thread.call(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
            opened = _OpenVpc(network, thread, link, wake, frames)
            await self._load(network, firewall.vpc_rules(network.cidr, pairs.items(), self._tracked))
            opened.loaded.update(pairs)
            await self._taps.call(lambda: self._set_group(network))
            await self._taps.call(lambda: self._set_routes(network, pairs.values()))
        except BaseException:
            thread.close()
            raise
        asyncio.get_running_loop().add_reader(wake, self._wake, opened)
        return opened

    async def _ensure_link(self, network: PrivateNetwork, thread: NamespaceThread) -> None:
        outer, inner = addresses.vpc_link(network.number), firewall.VPC_UPLINK
        if inner in await thread.call(_interfaces) and outer in await self._taps.call(_interfaces):
            return
        taps = f"stead-{self._settings.instance}"
        with contextlib.suppress(HostError):
            await run("ip", "-n", taps, "link", "delete", outer)
        commands = f"""
link set lo up
addr replace {addresses.VPC_ROUTER}/32 dev lo
link add name {inner} address {addresses.DATA_MAC} mtu {_MTU} type veth \
peer name {outer} address {addresses.TAP_MAC} mtu {_MTU} netns {taps}
link set {inner} up
neigh replace {addresses.GATEWAY} lladdr {addresses.TAP_MAC} dev {inner} nud permanent
route replace default via {addresses.GATEWAY} dev {inner} onlink
"""
        name = _namespace(self._settings, network.number)
        await run("ip", "-n", name, "-batch", "-", stdin=commands.encode())
        await run("ip", "-n", taps, "link", "set", outer, "up")

    async def _load(self, network: PrivateNetwork, rules: str) -> None:
        path = namespace_of(_namespace(self._settings, network.number))
        await run("nsenter", f"--net={path}", "nft", "-f", "-", stdin=rules.encode())

    async def _delete(self, number: int) -> None:
        """Delete a namespace with all that is in it, and the link to it."""
        taps = f"stead-{self._settings.instance}"
        if addresses.vpc_link(number) in await self._taps.call(_interfaces):
            await run("ip", "-n", taps, "link", "delete", addresses.vpc_link(number))
        await delete_namespace(_namespace(self._settings, number))

    # The namespace of all taps: call these in its thread

    def _set_group(self, network: PrivateNetwork) -> None:
        """Connections of all VMs in a VPC count for its account."""
        index = socket.if_nametoindex(addresses.vpc_link(network.number))
        self._netlink.change(netlink.link_group(index, addresses.account_group(network.account)))

    def _route(self, network: PrivateNetwork, outer: IPv4Address) -> None:
        index = socket.if_nametoindex(addresses.vpc_link(network.number))
        self._netlink.change(netlink.route(outer, index), netlink.neighbour(outer, index, addresses.DATA_MAC))

    def _unroute(self, network: PrivateNetwork, outer: IPv4Address) -> None:
        index = socket.if_nametoindex(addresses.vpc_link(network.number))
        self._netlink.change(
            netlink.no_route(outer, index), netlink.no_neighbour(outer, index), missing_allowed=True
        )

    def _set_routes(self, network: PrivateNetwork, outers: Iterable[IPv4Address]) -> None:
        wanted = set(outers)
        index = socket.if_nametoindex(addresses.vpc_link(network.number))
        with IPRoute() as present:
            found = [
                IPv4Address(route.get_attr("RTA_DST"))
                for route in present.get_routes(family=socket.AF_INET, oif=index)
            ]
        for outer in found:
            if outer not in wanted:
                self._unroute(network, outer)
        for outer in wanted:
            self._route(network, outer)

    # VMs that do not run

    def _wake(self, opened: _OpenVpc) -> None:
        """Read a packet to a VM that does not run, keep it, and have the VM woken."""
        if self._wakes.allow(opened.network.account):
            # The kernel keeps some packets meanwhile and drops the others.
            loop = asyncio.get_running_loop()
            loop.remove_reader(opened.wake)
            loop.call_later(_WAKE_PAUSE, self._resume, opened)
            return
        try:
            packet = os.read(opened.wake, _MTU + 1)
        except OSError:
            return
        if len(packet) < 20 or packet[0] >> 4 != 4:
            return
        target = IPv4Address(packet[16:20])
        vm_slot = self._members.get(opened.network.id, {}).get(target)
        if vm_slot is None:
            return
        self._hold(opened, target, packet)
        self._wanted(vm_slot.machine)

    def _resume(self, opened: _OpenVpc) -> None:
        if not opened.closed:
            asyncio.get_running_loop().add_reader(opened.wake, self._wake, opened)

    def _hold(self, opened: _OpenVpc, target: IPv4Address, packet: bytes) -> None:
        now = asyncio.get_running_loop().time()
        held = [each for each in opened.held.pop(target, ()) if each[0] >= now - _HELD_FOR]
        if not held and len(opened.held) >= _HELD_VMS:
            del opened.held[next(iter(opened.held))]
        if not held:
            account = opened.network.account
            of_account = sum(
                len(each.held) for each in self._open.values() if each.network.account == account
            )
            in_all = sum(len(each.held) for each in self._open.values())
            if of_account >= _HELD_VMS_OF_ACCOUNT or in_all >= _HELD_VMS_IN_ALL:
                return
        if len(held) < _HELD_PACKETS:
            held.append((now, packet))
        opened.held[target] = held


def _open_tap(opened: _OpenVpc, vm_slot: VmSlot) -> int:
    """Create a VM's data tap. QEMU spoils the first frame that it finds there, so that is not a packet.

    QEMU reads one frame before the guest runs. It knows the length of the frame's virtio header only when the
    guest's device state is loaded, and until then passes the frame on without that header.
    """
    name = addresses.data_tap(vm_slot.number)
    tap = open_tap(name)
    try:
        index = socket.if_nametoindex(name)
        opened.netlink.change(
            netlink.link_up(index, addresses.TAP_MAC, addresses.account_group(vm_slot.account))
        )
        opened.frames.sendto(_FILLER, (name, 0))
    except BaseException:
        os.close(tap)
        raise
    return tap


def _nic(vm_slot: VmSlot) -> Nic:
    if vm_slot.nic is None:
        raise ValueError(f"VM {vm_slot.machine} is in no VPC")
    return vm_slot.nic


@contextlib.contextmanager
def _explained(vm_slot: VmSlot) -> Iterator[None]:
    try:
        yield
    except (OSError, NetlinkError) as error:
        raise HostError(f"cannot set up the VPC of VM {vm_slot.machine}: {error}") from error


def _interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def _set_sysctls() -> None:
    sysctl("net/ipv4/ip_forward", "1")
    # Not for all interfaces: packets that waited for a VM come from elsewhere than their source is routed to.
    sysctl("net/ipv4/conf/all/rp_filter", "0")
    sysctl("net/ipv4/conf/default/rp_filter", "1")
    sysctl("net/ipv4/conf/all/accept_redirects", "0")
    sysctl("net/ipv4/conf/all/send_redirects", "0")
    sysctl("net/ipv4/conf/default/send_redirects", "0")
    sysctl("net/ipv6/conf/default/accept_ra", "0")
    sysctl("net/ipv6/conf/default/addr_gen_mode", "1")


def _set_up_routes(link: Netlink, network: PrivateNetwork, inners: Iterable[IPv4Address]) -> int:
    """Routes of a VPC, and the tun device for packets to VMs that do not run; returns its descriptor."""
    wake = open_tun(firewall.VPC_WAKE)
    try:
        index = socket.if_nametoindex(firewall.VPC_WAKE)
        sysctl(f"net/ipv4/conf/{firewall.VPC_WAKE}/rp_filter", "0")
        # Connections to an address without a VM fail at once.
        link.change(netlink.tun_up(index), netlink.unreachable(network.cidr))
        _route_to_wake(link, inners)
    except BaseException:
        os.close(wake)
        raise
    return wake


def _route_to_wake(link: Netlink, inners: Iterable[IPv4Address]) -> None:
    index = socket.if_nametoindex(firewall.VPC_WAKE)
    link.change(*(netlink.route(inner, index, _WAKE_METRIC) for inner in inners))


def _numbers(settings: Settings) -> list[int]:
    """The numbers of all namespaces of VPCs that this installation has."""
    pattern = re.compile(rf"stead-{settings.instance}-(\d+)")
    found = (pattern.fullmatch(path.name) for path in Path("/run/netns").glob(f"stead-{settings.instance}-*"))
    return [int(match[1]) for match in found if match]


async def delete_namespace(name: str) -> None:
    if namespace_of(name).exists():
        await run("ip", "netns", "delete", name)


async def remove_all(settings: Settings) -> None:
    """Delete the namespaces of all VPCs (idempotent)."""
    for number in _numbers(settings):
        await delete_namespace(_namespace(settings, number))
    remove_sockets(settings)
