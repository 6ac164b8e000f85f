"""When a call is made again, and after how long.

A request that may have reached the server is sent again only if doing it twice does no harm: reading,
putting and deleting. A create or a command is not, because nobody can tell a lost request from a lost
answer. What never left this machine, because no connection could be made, is always tried again.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_BUSY = frozenset({429, 502, 503, 504})
_AMBIGUOUS = frozenset({502, 504})
"""Told by something in between, which may have passed the request on."""
_FINAL_CODES = frozenset({"VM_START_TIMEOUT", "SESSION_CAP_REACHED"})
"""Answers with such a status that come after a long wait, or do not change by waiting."""


@dataclass(frozen=True)
class RetryPolicy:
    """Waits of about `first` seconds, doubled each time up to `longest`, at most `attempts` calls in all."""

    attempts: int = 5
    first: float = 0.25
    longest: float = 8.0
    longest_asked: float = 60.0
    """Seconds that a server may ask for with Retry-After; if it asks for more, its answer is final."""

    def after_failure(self, attempt: int, *, sent: bool, idempotent: bool, timed_out: bool) -> float | None:
        """Seconds to wait after a broken connection, or None to give up. `attempt` counts from 1.

        A server that was reached and is silent is not asked again: it would only have more to do.
        """
        if attempt >= self.attempts or (sent and (timed_out or not idempotent)):
            return None
        return self._delay(attempt)

    def after_answer(
        self, attempt: int, status: int, code: str | None, headers: Mapping[str, str], *, idempotent: bool
    ) -> float | None:
        """Seconds to wait after an answer, or None if it is final."""
        if attempt >= self.attempts or status not in _BUSY or code in _FINAL_CODES:
            return None
        asked = _retry_after(headers.get("retry-after"))
        # 429 says that nothing was done, so everything may be sent again; but only when it says when.
        if not idempotent and not (status == 429 and asked is not None):
            return None
        if asked is None:
            return self._delay(attempt)
        return asked if asked <= self.longest_asked else None

    def _delay(self, attempt: int) -> float:
        full = min(self.longest, self.first * (1 << (attempt - 1)))
        return full * random.uniform(0.5, 1.0)  # noqa: S311


def leaves_doubt(status: int) -> bool:
    """Whether the request may have been done although the answer is an error."""
    return status in _AMBIGUOUS


def _retry_after(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
