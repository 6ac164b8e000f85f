"""Rate limits for failed logins, and places for connections that are not authenticated yet. No IO."""

import ipaddress
import math
import time
from collections import Counter
from collections.abc import Callable

_IPV6_NETWORK = 64


def network_of(address: str) -> str:
    """The key under which clients are counted: their address, or its /64 for IPv6, which one client has."""
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, _IPV6_NETWORK), strict=False))
    return str(parsed)


class FailureLimit:
    """A leaky bucket by key: `burst` failures at once, then one in `interval` seconds."""

    def __init__(
        self,
        burst: int,
        interval: float,
        *,
        most_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._interval = interval
        self._most_keys = most_keys
        self._clock = clock
        self._empty_at: dict[str, float] = {}
        """When the bucket of each key will be empty."""

    def wait(self, key: str) -> int:
        """Seconds until the next attempt is allowed, rounded up; 0 if it is allowed now."""
        over = self._empty_at.get(key, 0.0) - self._clock() - (self._burst - 1) * self._interval
        return max(0, math.ceil(over))

    def failed(self, key: str) -> None:
        now = self._clock()
        self._empty_at[key] = max(self._empty_at.pop(key, 0.0), now) + self._interval
        if len(self._empty_at) > self._most_keys:
            self._empty_at = {each: at for each, at in self._empty_at.items() if at > now}
        if len(self._empty_at) > self._most_keys:
            del self._empty_at[next(iter(self._empty_at))]


class ConnectionPlaces:
    """Places for connections, `total` in all and `per_key` for each key."""

    def __init__(self, total: int, per_key: int) -> None:
        self._total = total
        self._per_key = per_key
        self._held: Counter[str] = Counter()

    def take(self, key: str | None) -> bool:
        """Take a place; False if there is none. The key None has no limit of its own."""
        if self._held.total() >= self._total or (key is not None and self._held[key] >= self._per_key):
            return False
        self._held[key or ""] += 1
        return True

    def release(self, key: str | None) -> None:
        self._held[key or ""] -= 1
        if not self._held[key or ""]:
            del self._held[key or ""]
