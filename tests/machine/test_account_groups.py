"""The interface group of an account: all that its VMs send comes through interfaces of this group."""

import json
from collections.abc import AsyncIterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest
import pytest_asyncio

from stead import addresses
from stead.errors import HostError
from stead.host import network as host_network
from stead.host.interface import Nic, PrivateNetwork, VmSlot
from stead.host.network import Network
from stead.settings import Settings
from support.links import ip

CIDR = IPv4Network("10.77.0.0/24")
VPC = PrivateNetwork("vpc-ours", 1, CIDR, "ours")


@pytest_asyncio.fixture
async def own_settings(root: None, tmp_path: Path) -> AsyncIterator[Settings]:
    made = Settings(data=tmp_path, cache=tmp_path)
    yield made
    await host_network.remove(made)


@pytest_asyncio.fixture
async def network(own_settings: Settings) -> AsyncIterator[Network]:
    opened = await Network.open(own_settings)
    try:
        await opened.vpcs.open([VPC], [], lambda machine: None)
        yield opened
    finally:
        await opened.close()


def group_of(settings: Settings, interface: str) -> int:
    listed = json.loads(ip("-n", f"stead-{settings.instance}", "-json", "-N", "link", "show", interface))
    return int(listed[0].get("group", "0"))


async def test_taps_and_vpcs_of_an_account_are_one_group(network: Network, own_settings: Settings) -> None:
    ours, theirs = addresses.account_group("ours"), addresses.account_group("theirs")
    assert len({ours, theirs, addresses.account_group(None)}) == 3
    first = await network.attach(VmSlot("vm1", 1, None, "ours"))
    other = await network.attach(VmSlot("vm2", 2, None, "theirs"))
    member = await network.attach(VmSlot("vm3", 3, Nic(VPC.id, CIDR[3]), "ours"))
    try:
        assert group_of(own_settings, addresses.data_tap(1)) == ours
        assert group_of(own_settings, addresses.data_tap(2)) == theirs
        assert group_of(own_settings, addresses.vpc_link(VPC.number)) == ours
    finally:
        for taps in (first, other, member):
            taps.close()


async def test_a_vm_of_the_pool_joins_the_group_of_its_account(
    network: Network, own_settings: Settings
) -> None:
    prepared = await network.attach(VmSlot("vm1", 1))
    try:
        assert group_of(own_settings, addresses.data_tap(1)) == 0
        await network.join(VmSlot("vm1", 1, None, "ours"))
        assert group_of(own_settings, addresses.data_tap(1)) == addresses.account_group("ours")
    finally:
        prepared.close()
    with pytest.raises(HostError, match="cannot set up the network of slot 1"):
        await network.join(VmSlot("vm1", 1, None, "ours"))
