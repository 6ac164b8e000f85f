"""Which names may have certificates: only mapped ones, and of each account a limited number.

ACME servers limit certificates by registered domain, which all names of the public preview zone share, and
orders by ACME account, which all accounts share. Clients can make up any number of names of a wildcard.
"""

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from stead.edge.routes import MappedPort, RouteSource, host_of
from stead.files import write_atomically
from stead.logs import get_logger
from stead.settings import Settings
from stead.shares import RateLimit

log = get_logger("stead.edge")

MAX_NEW_NAMES = 100
"""Names that get a certificate for the first time in a day: of an account's wildcards, and as many others."""
_DAY, _WEEK = 86_400.0, 604_800.0
_ACCOUNTS = 4
"""An account has this part of what all accounts have."""
_ORDERS, _ORDER_INTERVAL = 200, 54.0
"""Orders of all accounts: at once, and seconds for one more. Let's Encrypt takes 300 in 3 hours."""
_ORDERS_OF_NAME, _NAME_INTERVAL = 5, 1200.0
"""Orders for one name: those that fail are repeated at the next connection."""
_SAME_ORDER = 5.0
"""Seconds in which several connections for a new name are one order."""
_LOG_INTERVAL = 60.0


def issued_in(storage: Path) -> Callable[[str], bool]:
    """Whether Caddy's storage has a certificate of a name that has not ended."""

    def issued(name: str) -> bool:
        return any(map(_is_valid, storage.glob(f"certificates/*/{name}/{name}.crt")))

    return issued


def _is_valid(path: Path) -> bool:
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return False
    return found.not_valid_after_utc > datetime.datetime.now(datetime.UTC)


@dataclass(frozen=True)
class CertificateLimits:
    """Which zones have which limits."""

    public_zone: str | None = None
    local_zones: tuple[str, ...] = ()
    """Their certificates are signed by the installation's own CA."""
    names_per_day: int = 5
    """Of the public zone: new names of an account."""
    names_per_week: int = 40
    """The same of all accounts; an account has a quarter."""
    other_names_per_day: int = MAX_NEW_NAMES

    @classmethod
    def of(cls, settings: Settings) -> "CertificateLimits":
        return cls(
            settings.public_zone,
            settings.local_zones,
            settings.acme_names_per_day,
            settings.acme_names_per_week,
        )


@dataclass(frozen=True)
class _NewName:
    account: str
    wildcard: bool
    """Clients may have made it up."""
    at: float


class CertificatePermission:
    """Caddy asks it before it orders, renews or loads a certificate."""

    def __init__(
        self,
        source: RouteSource,
        issued: Callable[[str], bool],
        limits: CertificateLimits,
        record: Path,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`record` is a file with the public zone's new names of the last week: a restart forgets none."""
        self._source = source
        self._issued = issued
        self._limits = limits
        self._record = record
        self._clock = clock
        self._in_zone: dict[str, _NewName] = dict(_recorded(record))
        """New names of the public zone in the last week, oldest first."""
        self._others: dict[str, _NewName] = {}
        """New names of other domains in the last day, oldest first."""
        self._orders = RateLimit(_ORDERS, _ORDER_INTERVAL, clock=clock)
        self._orders_of_account = RateLimit(_ORDERS // _ACCOUNTS, _ORDER_INTERVAL * _ACCOUNTS, clock=clock)
        self._orders_of_name = RateLimit(_ORDERS_OF_NAME, _NAME_INTERVAL, clock=clock)
        self._ordered: dict[str, float] = {}
        self._lines = RateLimit(1, _LOG_INTERVAL, clock=clock)
        self._forget_old()
        self._write_record()

    def allows(self, name: str) -> bool:
        host = host_of(name)
        route = None if host is None else self._source.route(host)
        if host is None or route is None:
            return False
        if self._issued(host):
            return True
        self._forget_old()
        refused = self._refusal(host, route)
        if refused is None:
            return True
        # Anybody can cause it.
        if not self._lines.allow(route.account):
            log.warning("no certificate", name=host, account=route.account, reason=refused)
        return False

    def _refusal(self, host: str, route: MappedPort) -> str | None:
        """Why a name gets no certificate now; None if it gets one, which is counted then."""
        wildcard = route.domain != host
        new = _NewName(route.account, wildcard, self._clock())
        if _is_below(host, self._limits.local_zones):
            return self._add(self._others, host, new) if wildcard else None
        in_zone = self._limits.public_zone is not None and _is_below(host, [self._limits.public_zone])
        names = self._in_zone if in_zone else self._others
        if self._ordered.get(host, 0.0) > new.at - _SAME_ORDER:
            return None
        limits = (
            (self._orders, None),
            (self._orders_of_account, route.account),
            (self._orders_of_name, host),
        )
        if any(limit.wait(key) for limit, key in limits):
            return "too many orders of certificates, or too many failed ones of this name: try again later"
        refused = self._add(names, host, new)
        if refused is None:
            for limit, key in limits:
                limit.spend(key)
            self._ordered[host] = new.at
        return refused

    def _add(self, names: dict[str, _NewName], host: str, new: _NewName) -> str | None:
        """Count a new name; why it cannot be, else None."""
        if host in names:
            return None
        same = [
            each for each in names.values() if (each.account, each.wildcard) == (new.account, new.wildcard)
        ]
        today = sum(each.at > new.at - _DAY for each in same)
        limits = self._limits
        if names is self._others:
            most = limits.other_names_per_day
            if today >= most:
                return f"{most} new names of the account in a day"
        elif today >= limits.names_per_day:
            return f"{limits.names_per_day} new names of the account in a day (STEAD_ACME_NAMES_PER_DAY)"
        elif len(same) >= max(1, limits.names_per_week // _ACCOUNTS):
            return f"{len(same)} new names of the account in a week (a quarter of STEAD_ACME_NAMES_PER_WEEK)"
        elif len(names) >= limits.names_per_week:
            return f"{limits.names_per_week} new names of all accounts in a week (STEAD_ACME_NAMES_PER_WEEK)"
        names[host] = new
        if names is self._in_zone:
            with contextlib.suppress(OSError), self._record.open("a") as file:
                file.write(_line(host, new))
        return None

    def _forget_old(self) -> None:
        now = self._clock()
        for names, seconds in ((self._in_zone, _WEEK), (self._others, _DAY)):
            for name in [name for name, each in names.items() if each.at <= now - seconds]:
                del names[name]
        for name in [name for name, at in self._ordered.items() if at <= now - _SAME_ORDER]:
            del self._ordered[name]

    def _write_record(self) -> None:
        lines = "".join(_line(name, each) for name, each in self._in_zone.items())
        write_atomically(self._record, lines.encode(), 0o600)


def _is_below(host: str, zones: "list[str] | tuple[str, ...]") -> bool:
    return any(host.endswith(f".{zone}") for zone in zones)


def _line(name: str, new: _NewName) -> str:
    return json.dumps([name, new.account, new.wildcard, new.at]) + "\n"


def _recorded(path: Path) -> Iterator[tuple[str, _NewName]]:
    """What was written; an incomplete line, as after a power cut, is left out."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        with contextlib.suppress(ValueError, TypeError):
            name, account, wildcard, at = json.loads(line)
            yield str(name), _NewName(str(account), bool(wildcard), float(at))
