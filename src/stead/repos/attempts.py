"""When a delivery is tried, tried again, and given up. Nothing here sends anything or knows the time."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

_SECOND = 10**9
DELAYS = (5, 15, 60, 5 * 60, 15 * 60, 3600, 3 * 3600, 6 * 3600)
"""Seconds after each attempt that failed; after the one that follows the last of them it is given up."""
MAX_ATTEMPTS = len(DELAYS) + 1
JITTER = 0.25
"""By this part of itself a delay may be longer, so that not all come back at the same moment."""
MAX_AGE = 14 * 3600
"""Seconds, a little more than all delays together.

What is older when it fails is given up at once: it waited behind another that was tried for as long, and one
endpoint that is gone for good does not pile up days of attempts.
"""


class State(StrEnum):
    PENDING = "pending"
    SENDING = "sending"
    DELIVERED = "delivered"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        return self in (State.DELIVERED, State.FAILED)


@dataclass(frozen=True)
class Progress:
    """How far a delivery has come. Times are in nanoseconds; `attempts` are those with a known end."""

    created_at: int
    next_at: int
    state: State = State.PENDING
    attempts: int = 0
    finished_at: int | None = None

    @classmethod
    def new(cls, now: int) -> Self:
        return cls(created_at=now, next_at=now)

    def wait(self, now: int) -> int:
        """Nanoseconds until it is tried. What is said to be sent already was interrupted: it is due."""
        return 0 if self.state is State.SENDING else max(self.next_at - now, 0)

    def begin(self) -> Self:
        """An attempt that was interrupted, by a crash or by the end of Stead, begins again."""
        if self.state.final:
            raise ValueError(f"delivery is {self.state}")
        return replace(self, state=State.SENDING)

    def end(self, delivered: bool, now: int, chance: float) -> Self:
        """An attempt is over; `chance`, from 0 to 1, says how much longer than needed the next one waits."""
        if self.state is not State.SENDING:
            raise ValueError(f"delivery is {self.state}")
        attempts = self.attempts + 1
        if delivered:
            return replace(self, state=State.DELIVERED, attempts=attempts, finished_at=now)
        if attempts >= MAX_ATTEMPTS or now - self.created_at >= MAX_AGE * _SECOND:
            return replace(self, state=State.FAILED, attempts=attempts, finished_at=now)
        delay = int(DELAYS[attempts - 1] * (1 + JITTER * chance) * _SECOND)
        return replace(self, state=State.PENDING, attempts=attempts, next_at=now + delay)
