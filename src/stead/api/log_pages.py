"""Paging through two log sources at once: a merge by time, and a token with the position in each.

Each source is read in its own order after its own position, so a line is on exactly one page, whatever the
clocks of host and guest do.
"""

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stead.guest.systemd_journal import is_cursor

MAX_TOKEN = 1000
_MAX_TIME = 2**63 - 1
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class PageToken:
    """A position in a query: its window in microseconds, and the last line taken from each source."""

    since: int
    until: int
    logbook: tuple[int, int] | None = None
    """Time and id of a row."""
    journal: str | None = None
    """A cursor of the guest's journal."""

    def encode(self) -> str:
        parts = [self.since, self.until, self.logbook, self.journal]
        text = json.dumps(parts, separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str) -> "PageToken":
        """Raises ValueError for everything that `encode` did not make."""
        try:
            if len(text) > MAX_TOKEN:
                raise ValueError(f"{len(text)} characters")
            since, until, row, cursor = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
            position = None
            if row is not None:
                at, number = row
                position = _time(at), _time(number)
            if cursor is not None and not is_cursor(cursor):
                raise ValueError(cursor)
            return cls(_time(since), _time(until), position, cursor)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"not a page token: {error}") from None


def _time(value: Any) -> int:
    if not isinstance(value, int) or not -_MAX_TIME <= value <= _MAX_TIME:
        raise ValueError(value)
    return value


@dataclass(frozen=True)
class Source(Generic[A]):
    """The next lines of one source, in its order. Unless `complete`, there are more after the last one."""

    items: Sequence[A]
    time: Callable[[A], int]
    complete: bool


@dataclass(frozen=True)
class Merged(Generic[A, B]):
    """One page: how many items of each source it takes, in which order, and whether there are more."""

    order: Sequence[A | B]
    first: int
    second: int
    more: bool


def merge(first: Source[A], second: Source[B], limit: int) -> Merged[A, B]:
    """Up to `limit` items, by time; at equal times those of the first source precede.

    Stops where a source has no more items at hand but is not complete: its next one may be the oldest.
    """
    order: list[A | B] = []
    i = j = 0
    while len(order) < limit:
        if (i == len(first.items) and not first.complete) or (j == len(second.items) and not second.complete):
            break
        if i == len(first.items) and j == len(second.items):
            break
        if j == len(second.items) or (
            i < len(first.items) and first.time(first.items[i]) <= second.time(second.items[j])
        ):
            order.append(first.items[i])
            i += 1
        else:
            order.append(second.items[j])
            j += 1
    left = i < len(first.items) or j < len(second.items)
    return Merged(order, i, j, left or not first.complete or not second.complete)
