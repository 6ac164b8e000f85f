"""Admission of calls: places and rates by account, and a small pool by address for calls without a caller."""

from stead.addresses import is_loopback, network_of
from stead.api.errors import ApiError
from stead.identity.callers import Caller
from stead.settings import Settings
from stead.shares import KeyedLimit, RateLimit, Release

_MAX_WAIT = 1.0
"""Seconds that a call waits for a place: a short burst is not refused."""
_MAX_WAITING = 64
_BURST = 10
"""Seconds of the rate that may be used at once."""
_HEALTH_BURST, _HEALTH_INTERVAL = 200, 0.05
"""Requests of an address that is not loopback for `/healthz`: at once, and seconds for one more."""
_SMALLEST_POOL = 16
_SMALLEST_SHARE = 4


class Admission:
    """Who may make a call now. On this host `/healthz` and `/metrics` are always answered.

    An account has at most a quarter of the places, one of its identities half of that. Calls without a
    caller (public pages, anonymous git) have places of their own, by address; so have webhooks of GitHub.
    """

    def __init__(self, most: int, rate: int, anonymous_rate: int) -> None:
        """`most` calls in progress; `rate` calls a second of an account, `anonymous_rate` of an address."""
        share = max(1, most // 4)
        own = max(1, share // 2)
        text = f"too many requests at once: max {share} for an account, {own} for an identity,"
        text += f" {most} in all (STEAD_MAX_CALLS); retry later"
        self._places = KeyedLimit(
            most,
            share,
            per_caller=own,
            max_waiting=_MAX_WAITING,
            max_wait=_MAX_WAIT,
            busy=lambda: _busy(text),
        )
        self._anonymous_places = _pool("requests without a credential", most, 8)
        self._webhook_places = _pool("webhooks", most, 32)
        self._rate, self._anonymous_rate = rate, anonymous_rate
        self._rates = RateLimit(rate * _BURST, 1 / rate)
        self._identity_rates = RateLimit(max(1, rate * _BURST // 2), 2 / rate)
        self._anonymous_rates = RateLimit(anonymous_rate * _BURST, 1 / anonymous_rate)
        self._health_rates = RateLimit(_HEALTH_BURST, _HEALTH_INTERVAL)

    @classmethod
    def of(cls, settings: Settings) -> "Admission":
        return cls(settings.max_calls, settings.call_rate, settings.anonymous_rate)

    def count(self, caller: Caller) -> None:
        """Count a call of an account. ApiError if it makes too many a second."""
        seconds = 0
        if caller.identity is not None:
            seconds = self._identity_rates.allow(caller.identity)
        seconds = seconds or self._rates.allow(caller.account)
        if seconds:
            text = f"too many requests a second: max {self._rate} for an account, half of it for an identity"
            raise _too_often(f"{text} (STEAD_CALL_RATE)", seconds)

    def count_anonymous(self, address: str) -> None:
        """Count a call without a valid credential. ApiError if its address makes too many a second."""
        self._check_rate(self._anonymous_rates.allow(network_of(address)))

    def check_anonymous(self, address: str) -> None:
        """ApiError if `count_anonymous` would raise one; counts nothing. For unproven credentials.

        All clients on loopback may be those of one proxy, so that one of them would lock out the others.
        """
        if not is_loopback(address):
            self._check_rate(self._anonymous_rates.wait(network_of(address)))

    def count_health(self, address: str) -> None:
        """Count a call that is answered whatever else the server does; for other hosts up to a rate."""
        seconds = 0 if is_loopback(address) else self._health_rates.allow(network_of(address))
        if seconds:
            raise _too_often("too many health checks from one address", seconds)

    def _check_rate(self, seconds: int) -> None:
        if seconds:
            text = "too many requests a second without a valid credential: max"
            text += f" {self._anonymous_rate} for an address (STEAD_ANONYMOUS_RATE)"
            raise _too_often(text, seconds)

    async def place(self, caller: Caller) -> Release:
        """A place among the calls of the caller's account, held until it is released."""
        return await self._places.acquire(caller.account, caller.identity)

    async def anonymous_place(self, address: str) -> Release:
        return await self._anonymous_places.acquire(network_of(address))

    async def webhook_place(self, address: str) -> Release:
        return await self._webhook_places.acquire(network_of(address))


def _pool(what: str, most: int, part: int) -> KeyedLimit:
    """Places for calls without a caller: a part of those of accounts, an address has an eighth of it."""
    pool = max(_SMALLEST_POOL, most // part)
    each = max(_SMALLEST_SHARE, pool // 8)
    text = f"too many {what} at once: max {each} for an address, {pool} in all"
    text += " (a part of STEAD_MAX_CALLS); retry later"
    return KeyedLimit(pool, each, max_waiting=_MAX_WAITING, max_wait=_MAX_WAIT, busy=lambda: _busy(text))


def _busy(text: str) -> ApiError:
    # Refused before any work: also a command or a create may be sent again.
    return ApiError("SERVICE_UNAVAILABLE", text, headers={"Retry-After": "1"}, retryable=True)


def _too_often(text: str, seconds: int) -> ApiError:
    """Caddy closes the connection of the client after it."""
    headers = {"Retry-After": str(seconds)}
    return ApiError(
        "SERVICE_UNAVAILABLE", f"{text}; retry in {seconds} s", 429, headers=headers, retryable=True
    )
