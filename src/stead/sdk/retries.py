"""Retry policy: exponential backoff with jitter, and Retry-After.

A request that may have reached the server is repeated only if it is idempotent: reads, PUTs, deletes, and
creates with an idempotency key or with `if_missing`. Another create, or a command, is not, because a lost
request and a lost answer look the same to the client. A request that was never sent, because the connection
failed, is always repeated; so is one that the server refused because of its load, when the answer says so
(429, or `"retryable": true`) and says when (Retry-After).
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

_BUSY = frozenset({429, 502, 503, 504})
_AMBIGUOUS = frozenset({502, 504})
"""Sent by a proxy, which may have forwarded the request."""
_FINAL_CODES = frozenset({"CONNECTION_REFUSED", "SESSION_CAP_REACHED", "VM_START_TIMEOUT"})
"""Error codes with such a status that are final: they come after a long wait, or waiting does not help."""


@dataclass(frozen=True)
class RetryPolicy:
    """Delays of about `first` seconds, doubled each time up to `longest`; at most `attempts` requests."""

    attempts: int = 5
    first: float = 0.25
    longest: float = 8.0
    longest_asked: float = 60.0
    """The maximum Retry-After in seconds; an answer that asks for more is final."""

    def after_failure(self, attempt: int, *, sent: bool, idempotent: bool, timed_out: bool) -> float | None:
        """Seconds to wait after a failed connection, or None to give up. `attempt` counts from 1.

        A request that timed out is not repeated: that would add load to a slow server.
        """
        if attempt >= self.attempts or (sent and (timed_out or not idempotent)):
            return None
        return self._delay(attempt)

    def after_answer(
        self,
        attempt: int,
        status: int,
        code: str | None,
        headers: Mapping[str, str],
        *,
        idempotent: bool,
        refused: bool = False,
    ) -> float | None:
        """Seconds to wait after an answer, or None if it is final.

        `refused`: the server says that it refused the request before it began to execute it.
        """
        if attempt >= self.attempts or status not in _BUSY or code in _FINAL_CODES:
            return None
        asked = _retry_after(headers.get("retry-after"))
        # Nothing was executed, so any request may be repeated, if the server says when.
        refused = (refused or status == 429) and asked is not None
        if not idempotent and not refused:
            return None
        if asked is None:
            return self._delay(attempt)
        return asked if asked <= self.longest_asked else None

    def _delay(self, attempt: int) -> float:
        full = min(self.longest, self.first * (1 << (attempt - 1)))
        return full * random.uniform(0.5, 1.0)  # noqa: S311


def may_have_executed(status: int) -> bool:
    """Whether the server may have executed the request although the answer is an error."""
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
