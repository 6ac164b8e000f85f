"""Minimum rate of a transfer: a client that is slower loses its place."""

import time
from collections.abc import Callable

RATE = 1024
"""Bytes in a second that a client moves at least, on average."""
GRACE = 10.0
"""Seconds that a client may wait at first."""
MAX_CREDIT = 60.0
"""Seconds that a client may stall at most, however much it has moved before."""


class ClientPace:
    """Seconds of credit of one client: waiting for it spends them, bytes that it moves earn them.

    Only the time that the server waits for the client counts, not the time that git needs.
    """

    def __init__(
        self,
        rate: int,
        grace: float,
        max_credit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate = rate
        self._max_credit = max_credit
        self._clock = clock
        self._credit = grace
        self._waiting_since: float | None = None

    @property
    def left(self) -> float:
        """Seconds that the client has left for its next step."""
        return max(0.0, self._credit)

    def wait(self) -> float:
        """The server waits for the client from now on, for at most these seconds."""
        self._waiting_since = self._clock()
        return self.left

    def moved(self, size: int) -> None:
        """The client sent or received bytes: the wait is over."""
        if self._waiting_since is not None:
            self._credit -= self._clock() - self._waiting_since
            self._waiting_since = None
        self._credit = min(self._max_credit, self._credit + size / self._rate)
