"""Changes by netlink, in a namespace of their own, as `ip` and `nft` then show them."""

import errno
import socket
import subprocess
from collections.abc import AsyncIterator
from ipaddress import IPv4Address, IPv4Network

import pytest
import pytest_asyncio

from stead.host import netlink
from stead.host.netlink import Netlink, NetlinkChange
from support.links import Side, namespace

FIRST = IPv4Address("10.9.0.1")
MANY = [FIRST + number for number in range(200)]


@pytest_asyncio.fixture
async def side(root: None) -> AsyncIterator[Side]:
    with namespace("k") as made:
        made.ip("link", "set", "lo", "up")
        yield made


@pytest_asyncio.fixture
async def link(side: Side) -> AsyncIterator[Netlink]:
    opened = await side.thread.call(Netlink)
    yield opened
    opened.close()


async def change(side: Side, link: Netlink, *changes: NetlinkChange, missing_allowed: bool = False) -> None:
    await side.thread.call(lambda: link.change(*changes, missing_allowed=missing_allowed))


async def loopback(side: Side) -> int:
    return await side.thread.call(lambda: socket.if_nametoindex("lo"))


async def test_more_changes_than_fit_one_message(side: Side, link: Netlink) -> None:
    index = await loopback(side)
    await change(side, link, *(netlink.route(each, index, 7) for each in MANY))
    assert side.ip("route").count("dev lo proto static scope link metric 7") == len(MANY)
    await change(side, link, *(netlink.no_route(each, index, 7) for each in MANY))
    assert side.ip("route") == ""


async def test_an_unreachable_network(side: Side, link: Netlink) -> None:
    await change(side, link, netlink.unreachable(IPv4Network("10.9.0.0/16")))
    assert side.ip("route").split() == ["unreachable", "10.9.0.0/16", "proto", "static"]


async def test_a_failure_is_raised_after_all_have_been_tried(side: Side, link: Netlink) -> None:
    index = await loopback(side)
    with pytest.raises(OSError) as failure:
        await change(side, link, netlink.no_route(FIRST, index), netlink.route(FIRST + 1, index))
    assert failure.value.errno == errno.ESRCH
    assert str(FIRST + 1) in side.ip("route")
    await change(side, link, netlink.no_route(FIRST, index), missing_allowed=True)
    with pytest.raises(OSError) as failure:
        await change(side, link, netlink.route(FIRST, 999), missing_allowed=True)
    assert failure.value.errno == errno.ENODEV


async def test_maps_change_all_or_nothing(side: Side, link: Netlink) -> None:
    side.load("table inet own {\n map pairs { type ipv4_addr : ipv4_addr; }\n}\n")

    async def change_maps(*changes: NetlinkChange) -> None:
        await side.thread.call(lambda: link.change_maps(*changes))

    def listed() -> str:
        command = ["ip", "netns", "exec", side.name, "nft", "list", "map", "inet", "own", "pairs"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def pairs(*numbers: int) -> list[tuple[IPv4Address, IPv4Address]]:
        return [(FIRST + number, FIRST + 100 + number) for number in numbers]

    await change_maps(netlink.map_elements("own", "pairs", pairs(0, 1)))
    assert "10.9.0.1 : 10.9.0.101" in listed()
    assert "10.9.0.2 : 10.9.0.102" in listed()
    with pytest.raises(OSError) as failure:
        await change_maps(
            netlink.map_elements("own", "pairs", pairs(2)), netlink.no_map_elements("own", "pairs", pairs(9))
        )
    assert failure.value.errno == errno.ENOENT
    assert "10.9.0.3" not in listed()
    await change_maps(
        netlink.no_map_elements("own", "pairs", pairs(0, 1)), netlink.map_elements("own", "pairs", pairs(3))
    )
    assert "10.9.0.4 : 10.9.0.104" in listed()
    assert "10.9.0.2" not in listed()
    with pytest.raises(OSError):
        await change_maps(netlink.map_elements("none", "pairs", pairs(4)))
