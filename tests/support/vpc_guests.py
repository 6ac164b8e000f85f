"""Network namespaces that stand for VMs behind real taps: frames are carried between two taps."""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

from stead import addresses
from stead.host.interface import VmSlot
from stead.host.network import Network
from stead.host.taps import open_tap
from support.links import Side, namespace

_FRAME = 70_000


@dataclass(frozen=True)
class Guest:
    """A namespace with `eth0`, which has a VM's address as its agent would set it."""

    side: Side
    vm_slot: VmSlot

    @property
    def address(self) -> str:
        nic = self.vm_slot.nic
        return str(addresses.machine_address(self.vm_slot.number) if nic is None else nic.address)


def _carry(source: int, target: int) -> None:
    with contextlib.suppress(BlockingIOError, OSError):
        for _ in range(64):
            os.write(target, os.read(source, _FRAME))


@contextlib.asynccontextmanager
async def guest(network: Network, vm_slot: VmSlot) -> AsyncIterator[Guest]:
    """A running VM: its taps exist until the end of the block."""
    taps = await network.attach(vm_slot)
    try:
        async with plugged(taps.data, vm_slot) as made:
            yield made
    finally:
        taps.close()


@contextlib.asynccontextmanager
async def plugged(tap: int, vm_slot: VmSlot) -> AsyncIterator[Guest]:
    loop = asyncio.get_running_loop()
    with namespace(f"g{vm_slot.number}") as side:
        own = await side.thread.call(lambda: open_tap("eth0"))
        made = Guest(side, vm_slot)
        side.ip("link", "set", "eth0", "address", addresses.DATA_MAC, "addrgenmode", "none")
        side.ip("addr", "add", f"{made.address}/32", "dev", "eth0")
        side.ip("link", "set", "eth0", "up")
        gateway = str(addresses.GATEWAY)
        side.ip("neigh", "add", gateway, "lladdr", addresses.TAP_MAC, "dev", "eth0", "nud", "permanent")
        side.ip("route", "add", gateway, "dev", "eth0")
        side.ip("route", "add", "default", "via", gateway, "dev", "eth0")
        loop.add_reader(tap, _carry, tap, own)
        loop.add_reader(own, _carry, own, tap)
        try:
            yield made
        finally:
            loop.remove_reader(tap)
            loop.remove_reader(own)
            os.close(own)


async def pings(side: Side, address: str, wait: float = 1.0) -> bool:
    """Whether an echo request is answered. With `wait=CERTAIN` where it should be."""

    def make() -> socket.socket:
        made = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        made.setblocking(False)
        return made

    echo = struct.pack("!BBHHH", 8, 0, 0xF7FE, 0, 1)  # echo request 0, 1, with its checksum
    loop = asyncio.get_running_loop()
    with await side.thread.call(make) as link:
        try:
            async with asyncio.timeout(wait):
                await loop.sock_sendto(link, echo, (address, 0))
                while (await loop.sock_recv(link, 2000))[20] != 0:
                    pass
                return True
        except (OSError, TimeoutError):
            return False
