"""Addresses follow from slots; resolvers are the ones that a guest's packets can reach."""

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead import addresses


@given(st.integers(0, addresses.MAX_SLOTS - 1), st.integers(0, addresses.MAX_SLOTS - 1))
def test_each_slot_has_an_address_of_its_own(one: int, other: int) -> None:
    assert (addresses.machine_address(one) == addresses.machine_address(other)) == (one == other)
    assert addresses.machine_address(one) in addresses.MACHINES
    assert len(addresses.data_tap(one)) <= 15


def test_a_slot_out_of_range_is_an_error() -> None:
    with pytest.raises(ValueError, match="out of range"):
        addresses.machine_address(addresses.MAX_SLOTS)


@given(st.text("0123456789abcdef", min_size=6, max_size=6))
def test_link_networks_are_small_and_link_local(instance: str) -> None:
    first = next(iter(addresses.link_networks(instance)))
    assert first.prefixlen == 30
    assert first.subnet_of(IPv4Network("169.254.0.0/16"))
    assert addresses.GATEWAY not in first


def test_a_resolver_on_loopback_is_replaced_by_its_own_upstream(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\noptions edns0\n")
    upstream = tmp_path / "systemd/resolve"
    upstream.mkdir(parents=True)
    (upstream / "resolv.conf").write_text("# managed\nnameserver fe80::1%eth0\nnameserver 10.0.0.53\n")
    assert addresses.resolvers(tmp_path, tmp_path) == [IPv4Address("10.0.0.53")]


def test_without_a_usable_resolver_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\nnameserver bogus\nnameserver\n")
    assert addresses.resolvers(tmp_path, tmp_path) == []
