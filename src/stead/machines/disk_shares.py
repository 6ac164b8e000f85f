"""Shares of the disk: which accounts use more than theirs, and whose VMs are paused while it is nearly full.

Without IO; `disk_usage.py` measures, `disk_watch.py` acts.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from stead.disk_marks import DiskMarks

Account = str | None
_CUT = 4
"""Accounts are among the largest if a cut of these to one level, so that a quarter is freed, reaches them."""
_LASTS = 60.0
_SHORTEST = 0.05
"""Seconds between two observations, at least: a rate needs some time."""


def above_share(usage: Mapping[Account, int]) -> set[Account]:
    """Accounts that use more than an equal share, and are among the largest.

    An equal share alone protects no account: an attacker with a thousand small accounts makes it small.
    """
    if not usage:
        return set()
    share = max(sum(usage.values()) / len(usage), _level(usage, sum(usage.values()) / _CUT))
    return {account for account, used in usage.items() if used > share}


def _level(usage: Mapping[Account, int], excess: float) -> float:
    """The level to which the largest are cut if they give up `excess` bytes together."""
    total = 0
    sizes = sorted(usage.values(), reverse=True)
    for count, (size, below) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True), 1):
        total += size
        if total - count * below >= excess:
            return (total - excess) / count
    return 0.0


class PauseCause(Enum):
    SHARE = "share"
    """The account is above its share."""
    WRITES = "writes"
    """Its VMs write to a disk that has nothing left to give."""


@dataclass(frozen=True)
class DiskObservation:
    at: float
    """Seconds, by any clock."""
    free: int
    usage: Mapping[Account, int]


def accounts_to_pause(
    paused: Mapping[Account, PauseCause],
    now: DiskObservation,
    before: DiskObservation | None,
    running: Collection[Account],
    marks: DiskMarks,
) -> dict[Account, PauseCause]:
    """The accounts whose VMs are paused from now on; `paused` are those whose are.

    Below `low` one account above its share after the other, the largest first, while the disk continues to
    fill. Below `critical` all of them, and every account that writes so much that what is left above the
    floor would not last for `_LASTS` seconds: one that writes a few lines of a log continues for long.
    """
    above = above_share(now.usage)
    after = {
        account: cause
        for account, cause in paused.items()
        if now.free < marks.enough and not (account not in above and now.free >= _end(cause, marks))
    }
    if now.free >= marks.low:
        return after
    largest = sorted((above & {*running}) - after.keys(), key=lambda account: -now.usage[account])
    filling = before is not None and now.free < before.free
    if now.free >= marks.critical:
        chosen = largest[:1] if filling or not after else []
        return after | dict.fromkeys(chosen, PauseCause.SHARE)
    after |= dict.fromkeys(largest, PauseCause.SHARE)
    if before is not None:
        seconds = max(now.at - before.at, _SHORTEST)
        slow = max(0, now.free - marks.floor) / _LASTS * seconds
        for account in running:
            if account not in after and now.usage.get(account, 0) - before.usage.get(account, 0) > slow:
                after[account] = PauseCause.WRITES
    return after


def _end(cause: PauseCause, marks: DiskMarks) -> int:
    """Free bytes at which an account that is not above its share continues."""
    return marks.critical if cause is PauseCause.SHARE else marks.low
