"""Ranges of VPCs and addresses in them."""

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.networks.errors import InvalidAddress, InvalidCidr
from stead.networks.ranges import LONGEST_PREFIX, PRIVATE, lowest_free, parse_address, parse_cidr


@st.composite
def private_ranges(draw: st.DrawFn) -> IPv4Network:
    outer = draw(st.sampled_from(PRIVATE))
    prefix = draw(st.integers(outer.prefixlen, LONGEST_PREFIX))
    start = draw(st.integers(0, 2 ** (prefix - outer.prefixlen) - 1))
    return IPv4Network((int(outer.network_address) + (start << (32 - prefix)), prefix))


@given(private_ranges())
def test_every_private_range_is_accepted(cidr: IPv4Network) -> None:
    assert parse_cidr(str(cidr)) == cidr


@given(st.integers(0, 2**32 - 1), st.integers(0, 32))
def test_every_accepted_range_is_private_and_large_enough(start: int, prefix: int) -> None:
    cidr = IPv4Network((start, prefix), strict=False)
    inside = any(cidr.subnet_of(private) for private in PRIVATE)
    if inside and prefix <= LONGEST_PREFIX:
        assert parse_cidr(str(cidr)) == cidr
    else:
        with pytest.raises(InvalidCidr):
            parse_cidr(str(cidr))


@given(st.text(max_size=40))
def test_any_text_is_a_range_or_refused(text: str) -> None:
    try:
        assert str(parse_cidr(text)) == text
    except InvalidCidr as error:
        assert str(error).startswith("invalid cidr ")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must be an IPv4 range"),
        ("fd00::/64", "must be an IPv4 range"),
        ("10.0.0.0/33", "must be an IPv4 range"),
        ("192.168.10.1/24", "write it as 192.168.10.0/24"),
        ("192.168.10.0/255.255.255.0", "write it as 192.168.10.0/24"),
        ("10.0.0.0", "write it as 10.0.0.0/32"),
        ("0.0.0.0/0", "choose one inside"),
        ("8.8.8.0/24", "it is not private"),
        ("172.0.0.0/8", "it is not private"),
        ("100.64.0.0/16", "Stead uses it for VMs"),
        ("169.254.0.0/24", "link-local"),
        ("127.0.0.0/24", "loopback"),
        ("224.0.0.0/24", "multicast"),
        ("10.0.0.0/30", "too small"),
    ],
)
def test_refused_ranges_say_why(text: str, reason: str) -> None:
    with pytest.raises(InvalidCidr, match=reason):
        parse_cidr(text)


def test_networks_that_the_operator_opened_are_refused() -> None:
    opened = [IPv4Network("10.1.0.0/16")]
    assert parse_cidr("10.2.0.0/16", opened)
    for text in ("10.1.2.0/24", "10.0.0.0/8", "10.1.0.0/16"):
        with pytest.raises(InvalidCidr, match=r"overlaps 10\.1\.0\.0/16"):
            parse_cidr(text, opened)


@given(private_ranges(), st.data())
def test_an_address_of_the_range_is_accepted_and_others_are_refused(
    cidr: IPv4Network, data: st.DataObject
) -> None:
    inside = cidr.network_address + data.draw(st.integers(1, cidr.num_addresses - 2))
    assert parse_address(str(inside), cidr) == inside
    beside = [
        cidr.network_address,
        cidr.broadcast_address,
        cidr.network_address - 1,
        cidr.broadcast_address + 1,
    ]
    for address in beside:
        with pytest.raises(InvalidAddress):
            parse_address(str(address), cidr)


@pytest.mark.parametrize("text", ["", "x", "10.0.0.5/24", "010.0.0.5", "10.0.0.256", "::1", " 10.0.0.5"])
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidAddress, match="must be an IPv4 address"):
        parse_address(text, IPv4Network("10.0.0.0/24"))


@given(private_ranges(), st.data())
def test_lowest_free_address(cidr: IPv4Network, data: st.DataObject) -> None:
    usable = min(cidr.num_addresses - 2, 64)
    offsets = data.draw(st.sets(st.integers(1, usable)))
    taken = {cidr.network_address + offset for offset in offsets}
    free = lowest_free(cidr, taken)
    wanted = next(offset for offset in range(1, usable + 2) if offset not in offsets)
    if wanted > cidr.num_addresses - 2:
        assert free is None
    else:
        assert free == cidr.network_address + wanted
        assert parse_address(str(free), cidr) == free


def test_a_full_range_has_no_free_address() -> None:
    cidr = IPv4Network("10.0.0.0/29")
    taken: set[IPv4Address] = set()
    while (address := lowest_free(cidr, taken)) is not None:
        assert address not in taken
        taken.add(address)
    assert len(taken) == 6
