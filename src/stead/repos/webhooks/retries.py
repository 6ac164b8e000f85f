"""Retry schedule of webhook deliveries: exponential backoff with jitter. Pure state, without IO or clock."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

_SECOND = 10**9
DELAYS = (5, 15, 60, 5 * 60, 15 * 60, 3600, 3 * 3600, 6 * 3600)
"""Backoff in seconds after each failed attempt; one more attempt follows the last delay."""
MAX_ATTEMPTS = len(DELAYS) + 1
JITTER = 0.25
"""Maximum random extension of a delay, as a fraction: spreads retries."""
MAX_AGE = 14 * 3600
"""Seconds, slightly more than the sum of all delays.

An older delivery that fails is not retried: it waited behind another one for that long. So an endpoint that
is gone does not accumulate days of attempts.
"""


class DeliveryState(StrEnum):
    PENDING = "pending"
    SENDING = "sending"
    DELIVERED = "delivered"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (DeliveryState.DELIVERED, DeliveryState.FAILED)


@dataclass(frozen=True)
class DeliveryProgress:
    """The state of a delivery. Times are in nanoseconds; `attempts` counts those with a known result."""

    created_at: int
    next_at: int
    state: DeliveryState = DeliveryState.PENDING
    attempts: int = 0
    finished_at: int | None = None

    @classmethod
    def new(cls, now: int) -> Self:
        return cls(created_at=now, next_at=now)

    def wait(self, now: int) -> int:
        """Nanoseconds until the next attempt. A delivery in SENDING was interrupted and is due now."""
        return 0 if self.state is DeliveryState.SENDING else max(self.next_at - now, 0)

    def begin(self) -> Self:
        """Start an attempt, also again after one that a crash or shutdown interrupted."""
        if self.state.final:
            raise ValueError(f"delivery is {self.state}")
        return replace(self, state=DeliveryState.SENDING)

    def end(self, delivered: bool, now: int, chance: float) -> Self:
        """Record the result of an attempt. `chance` from 0 to 1 is the share of the maximum jitter."""
        if self.state is not DeliveryState.SENDING:
            raise ValueError(f"delivery is {self.state}")
        attempts = self.attempts + 1
        if delivered:
            return replace(self, state=DeliveryState.DELIVERED, attempts=attempts, finished_at=now)
        if attempts >= MAX_ATTEMPTS or now - self.created_at >= MAX_AGE * _SECOND:
            return replace(self, state=DeliveryState.FAILED, attempts=attempts, finished_at=now)
        delay = int(DELAYS[attempts - 1] * (1 + JITTER * chance) * _SECOND)
        return replace(self, state=DeliveryState.PENDING, attempts=attempts, next_at=now + delay)
