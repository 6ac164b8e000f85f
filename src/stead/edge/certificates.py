"""Which names may have certificates: only mapped ones, and a limited number of new ones of wildcards.

A client can make up any number of names of a wildcard. Each would be an order, which ACME servers limit, and
files that Caddy keeps.
"""

import time
from collections.abc import Callable
from pathlib import Path

from stead.edge.routes import RouteSource, host_of
from stead.logs import get_logger

log = get_logger("stead.edge")

MAX_NEW_NAMES = 100
"""Names of an account's wildcards that get a certificate for the first time, in a day."""
_DAY = 86_400.0


def issued_in(storage: Path) -> Callable[[str], bool]:
    """Whether a name has, or had, a certificate in Caddy's storage."""

    def issued(name: str) -> bool:
        return any(storage.glob(f"certificates/*/{name}/{name}.crt"))

    return issued


class CertificatePermission:
    """Caddy asks it before it orders, renews or loads a certificate."""

    def __init__(
        self,
        source: RouteSource,
        issued: Callable[[str], bool],
        most: int = MAX_NEW_NAMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._issued = issued
        self._most = most
        self._clock = clock
        self._new: dict[str, dict[str, float]] = {}
        """By account: new names, and when they were allowed; oldest first."""

    def allows(self, name: str) -> bool:
        host = host_of(name)
        route = None if host is None else self._source.route(host)
        if host is None or route is None:
            return False
        return route.domain == host or self._issued(host) or self._allows_new(route.account, host)

    def _allows_new(self, account: str, host: str) -> bool:
        now = self._clock()
        found = self._new.setdefault(account, {})
        for name in [name for name, at in found.items() if at <= now - _DAY]:
            del found[name]
        if host in found:
            return True
        if len(found) >= self._most:
            log.warning("no certificate for a name of a wildcard", name=host, account=account, max=self._most)
            return False
        found[host] = now
        return True
