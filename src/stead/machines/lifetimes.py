"""Lifetimes: when something is deleted by itself."""

from dataclasses import dataclass
from datetime import UTC, datetime

from stead.errors import InvalidRequest

MAX_TTL = 3650 * 24 * 3600
"""Seconds of the longest lifetime; without one, there is no end."""
_SECOND = 10**9


@dataclass(frozen=True)
class Lifetime:
    """For `ttl` seconds, or until `expires_at` (seconds since the epoch); with neither, for ever."""

    ttl: int | None = None
    expires_at: float | None = None

    def __post_init__(self) -> None:
        if self.ttl is not None and self.expires_at is not None:
            raise InvalidRequest("both a lifetime and a date of expiry are given: give one of them")
        if self.ttl is not None and not 1 <= self.ttl <= MAX_TTL:
            raise InvalidRequest(f"lifetime must be from 1 to {MAX_TTL} seconds, not {self.ttl}")

    def check(self, now: int) -> None:
        """InvalidRequest if the date has passed or is too far away. `now` is in nanoseconds."""
        if self.expires_at is None:
            return
        away = self.expires_at - now / _SECOND
        if away <= 0:
            raise InvalidRequest(f"date of expiry {utc(self.expires_at)} has passed: give a later one")
        if away > MAX_TTL:
            raise InvalidRequest(
                f"date of expiry {utc(self.expires_at)} is more than {MAX_TTL} seconds away:"
                " leave it out for a lifetime without an end"
            )

    def end(self, now: int) -> int | None:
        """When it ends if it begins now, both in nanoseconds; None is never."""
        if self.ttl is not None:
            return now + self.ttl * _SECOND
        return None if self.expires_at is None else int(self.expires_at * _SECOND)

    def outlasts(self, expires_at: float | None, now: int) -> bool:
        """Whether it ends later than a time in seconds, if it begins now."""
        end = self.end(now)
        return expires_at is not None and (end is None or end > expires_at * _SECOND)


FOREVER = Lifetime()


def utc(seconds: float) -> str:
    """A moment for messages, in UTC."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f} (seconds since 1970)"
