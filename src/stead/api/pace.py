"""Minimum rates of request bodies and answers: a client that stands still holds no place."""

MIN_RATE = 1 << 10
"""Bytes a second."""
STRANGER_RATE = 16 << 10
"""Bytes a second of an answer for a client without a credential: few clients could hold all their places."""


class Pace:
    """The rate of one direction of a call. Only the time counts in which the server waits for the client."""

    def __init__(self, window: float) -> None:
        """`window`: seconds in which the client has to send, or take, a number of bytes a second."""
        self._window = window
        self._since: float | None = None
        self._moved = 0

    def too_slow(self, now: float, moved: int, *, waiting: bool, rate: int = MIN_RATE) -> bool:
        """Look at it: `moved` bytes in all until now, and whether the server waits for more."""
        if not waiting:
            self._since = None
            return False
        if self._since is None or moved - self._moved >= rate * self._window:
            self._since, self._moved = now, moved
            return False
        return now - self._since >= self._window
