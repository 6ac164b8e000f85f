"""Memory of large answers: what calls hold until their clients have taken it, bounded in all and by account.

It is separate from that of request bodies: a call that holds its body must not wait for itself.
"""

import contextlib

from stead.api.errors import ApiError
from stead.shares import KeyedLimit, MemoryReservation, Release

SMALL_ANSWER = MemoryReservation.FREE
"""Bytes of an answer that are not counted."""
_TOTAL = 512 << 20
_SHARE = 128 << 20
_MAX_WAIT = 10.0
_OUTPUT_ATTEMPTS = 60
_ATTEMPT = 0.5
"""Seconds. After all attempts, the rest of a command's output is dropped."""
_BEYOND_SHARES = 4
"""Commands that may collect beyond the share of their account, one of each account."""


class AnswerMemory:
    """The bytes of answers that the server may hold."""

    def __init__(self, total: int = _TOTAL, share: int = _SHARE) -> None:
        self._text = f"too many bytes of answers at once: max {share >> 20} MiB for an account,"
        self._text += f" {total >> 20} MiB in all; read the answers to other calls, and retry"
        self.bytes = KeyedLimit(total, share, max_wait=_MAX_WAIT, busy=self._busy)
        self.beyond_shares = KeyedLimit(_BEYOND_SHARES, 1)

    def _busy(self) -> ApiError:
        headers = {"Retry-After": "1"}
        return ApiError("SERVICE_UNAVAILABLE", self._text, headers=headers, retryable=True)


class AnswerReservation:
    """The memory of the answer to one call."""

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self._held: list[Release] = []
        self._unbounded = False

    async def reserve(self, share: str, amount: int) -> bool:
        """Reserve more bytes until the end of the call. ApiError if there are none within 10 s."""
        self._held.append(await self._memory.bytes.acquire(share, amount=amount))
        return True

    async def reserve_output(self, share: str, amount: int) -> bool:
        """Reserve bytes for the output of a command; False if there are none within 30 s.

        An error would lose the result of a command that has run. When the commands of an account fill its
        share before one of them is complete, one goes beyond the share: they would wait for each other.
        """
        for _ in range(_OUTPUT_ATTEMPTS):
            if self._unbounded or self._reserve_now(share, amount):
                return True
            with contextlib.suppress(ApiError):
                waiting = self._memory.bytes.acquire(share, amount=amount, max_wait=_ATTEMPT)
                self._held.append(await waiting)
                return True
        return False

    def _reserve_now(self, share: str, amount: int) -> bool:
        release = self._memory.bytes.try_acquire(share, amount=amount)
        if release is None:
            release = self._memory.beyond_shares.try_acquire(share)
            self._unbounded = release is not None
        if release is not None:
            self._held.append(release)
        return release is not None

    def release(self) -> None:
        for release in self._held:
            release()
        self._held.clear()
