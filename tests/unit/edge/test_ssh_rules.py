"""Rules of the SSH gateway without IO: user names, and limits for failed logins."""

from functools import partial

import pytest

from stead.addresses import network_of
from stead.edge.ssh.login_places import LoginPlaces, client_network
from stead.edge.ssh.user_names import UserName, parse_user_name
from stead.shares import RateLimit

VM = "k3v9d0x1m8q2w7r5t6y4"
TOKEN = "stid_A-b_9"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (VM, UserName(VM)),
        (f"{VM}:{TOKEN}", UserName(VM, None, TOKEN)),
        (f"{VM},{TOKEN}", UserName(VM, None, TOKEN)),
        (f"{VM}+dev", UserName(VM, "dev")),
        (f"{VM}+dev:{TOKEN}", UserName(VM, "dev", TOKEN)),
        (f"{VM}+first.last-x_1,{TOKEN}", UserName(VM, "first.last-x_1", TOKEN)),
        (f"{VM}:", UserName(VM)),
        (f"{VM}+dev,", UserName(VM, "dev")),
    ],
)
def test_user_names_of_every_form(text: str, found: UserName) -> None:
    assert parse_user_name(text) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "root@x",
        VM.upper(),
        f"{VM}x",
        f"{VM}+",
        f"{VM}+:{TOKEN}",
        f"{VM}+a b",
        f"{VM}:a b",
        f"{VM}:{TOKEN}:x",
        f"+dev:{TOKEN}",
        f"{VM}\n",
        f"{VM}:{'a' * 600}",
    ],
)
def test_other_user_names_are_refused(text: str) -> None:
    assert parse_user_name(text) is None


def test_a_token_is_not_shown_with_a_user_name() -> None:
    assert TOKEN not in repr(parse_user_name(f"{VM}:{TOKEN}"))


def test_failures_are_limited_by_key_and_forgotten_in_time() -> None:
    now = 100.0
    limit = RateLimit(3, 10.0, clock=lambda: now)
    for _ in range(3):
        assert limit.wait("a") == 0
        limit.spend("a")
    assert limit.wait("a") == 10
    assert limit.wait("b") == 0
    now += 9.5
    assert limit.wait("a") == 1
    now += 1
    assert limit.wait("a") == 0
    limit.spend("a")
    assert limit.wait("a") == 10
    now += 1000
    for _ in range(3):
        assert limit.wait("a") == 0
        limit.spend("a")
    assert limit.wait("a") == 10


def test_failures_of_many_keys_take_bounded_memory() -> None:
    now = 0.0
    limit = RateLimit(1, 10.0, most_keys=3, clock=lambda: now)
    for key in "abcd":
        limit.spend(key)
    assert len(limit._full_at) == 3
    assert [limit.wait(key) for key in "abcd"] == [0, 10, 10, 10]
    now = 60.0
    limit.spend("e")
    assert list(limit._full_at) == ["e"]


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_clients_are_counted_by_address_and_ipv6_network(address: str, network: str) -> None:
    assert network_of(address) == network


def test_a_new_connection_takes_a_place_of_its_own_network_first() -> None:
    places, dropped = LoginPlaces(10, 2), list[int]()
    for number in range(5):
        places.take("a", partial(dropped.append, number))
    places.take("b", lambda: dropped.append(99))
    assert places.used == 3
    assert len(dropped) == 3 and 99 not in dropped


def test_a_full_gateway_takes_places_of_the_network_that_has_the_most() -> None:
    places, dropped = LoginPlaces(9, 5), list[str]()
    places.take("owner", lambda: dropped.append("owner"))
    for name in "abcd" * 10:
        places.take(name, partial(dropped.append, name))
    assert places.used == 9
    assert set(dropped) == set("abcd"), "not the one that has a single place"


def test_a_place_that_was_left_is_not_dropped() -> None:
    places, dropped = LoginPlaces(1, 1), list[str]()
    places.take("a", lambda: dropped.append("a"))()
    places.take("b", lambda: dropped.append("b"))
    assert dropped == []


def test_loopback_counts_as_several_networks() -> None:
    """Clients behind one proxy are told apart by their port."""
    assert len({client_network("127.0.0.1", port) for port in range(40000, 40100)}) == 8
    assert client_network("192.0.2.7", 1) == client_network("192.0.2.7", 2) == "192.0.2.7"
    assert client_network("2001:db8:1:2::3", 1) == "2001:db8:1:2::/64"
