"""Tap and tun devices. Call all functions in a thread of the namespace that gets the device."""

import fcntl
import os
import socket
import struct
from ipaddress import IPv4Address

from stead import addresses
from stead.errors import HostError
from stead.host.netlink import Netlink, link_up, neighbour, route

_TUNSETIFF = 0x400454CA
SET_MTU = 0x8922
"""The ioctl SIOCSIFMTU."""
_TAP_FLAGS = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
TUN, NO_PACKET_INFORMATION, VIRTIO_HEADER = 0x0001, 0x1000, 0x4000
"""Flags of a tun device: IFF_TUN, IFF_NO_PI, IFF_VNET_HDR."""


def open_tap(name: str) -> int:
    return _open(name, _TAP_FLAGS)


def open_tun(name: str, flags: int = TUN | NO_PACKET_INFORMATION) -> int:
    return _open(name, flags)


def _open(name: str, flags: int) -> int:
    """A device that the kernel removes, with its routes, when the descriptor is closed."""
    try:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise HostError(f"cannot open /dev/net/tun: {error.strerror}") from error
    try:
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22s", name.encode(), flags, b""))
    except OSError as error:
        os.close(descriptor)
        raise HostError(f"cannot create {name}: {error.strerror}") from error
    return descriptor


def set_mtu(name: str, mtu: int) -> None:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SET_MTU, struct.pack("16si20x", name.encode(), mtu))
    except OSError as error:
        raise HostError(f"cannot set the MTU of {name}: {error.strerror}") from error


def set_up_data_tap(netlink: Netlink, slot: int, address: IPv4Address, account: str | None) -> None:
    """Bring a VM's data tap up, with the route to its address and a permanent neighbour entry."""
    index = socket.if_nametoindex(addresses.data_tap(slot))
    netlink.change(
        link_up(index, addresses.TAP_MAC, addresses.account_group(account)),
        # Replaces: after a crash the route of the slot's last VM may still lead to its VPC.
        route(address, index),
        neighbour(address, index, addresses.DATA_MAC),
    )
