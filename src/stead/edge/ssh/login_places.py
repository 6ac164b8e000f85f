"""Places for connections that have not logged in. No IO."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from stead.addresses import network_of
from stead.shares import KeyedLimit, Release

_LOOPBACK_NETWORKS = 8
"""Loopback counts as so many networks: all clients may be behind one proxy."""


def client_network(address: str, port: int) -> str:
    """The key under which a client is counted: its address, or its /64 for IPv6."""
    network = network_of(address)
    if network in ("127.0.0.1", "::/64"):
        return f"{network} {port % _LOOPBACK_NETWORKS}"
    return network


@dataclass(eq=False)
class _Place:
    release: Release
    drop: Callable[[], None]


class LoginPlaces:
    """A new connection always gets a place: strangers that hold all of them cannot keep others out.

    If its network has `per_network` already, one of these is closed for it. If all `total` are taken, it is
    one of the network that has the most. Which one is random: among connections that flood the gateway,
    neither the first nor the last would ever finish its login.
    """

    def __init__(self, total: int, per_network: int) -> None:
        self._per_network = per_network
        self._limit = KeyedLimit(total, per_network)
        self._places: dict[str, list[_Place]] = {}

    @property
    def used(self) -> int:
        return self._limit.used

    def take(self, network: str, drop: Callable[[], None]) -> Release:
        """Take a place. `drop` closes the connection when another one gets its place."""
        while (counted := self._limit.try_acquire(network)) is None:
            crowded = self._limit.held_by(network) >= self._per_network
            place = random.choice(self._places[network if crowded else str(self._limit.fullest())])  # noqa: S311
            place.release()
            place.drop()

        def release() -> None:
            places = self._places.get(network, [])
            if place in places:
                places.remove(place)
                if not places:
                    del self._places[network]
                counted()

        place = _Place(release, drop)
        self._places.setdefault(network, []).append(place)
        return release
