"""Retention of VMs and snapshots, and the order of eviction when the disk is full."""

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal

from stead.errors import InvalidRequest
from stead.machines.disk_shares import above_share

DEFAULT_PRIORITY = 5
MAX_PRIORITY = 10

DeleteEvent = Literal["OnStop", "OnSuspend"]


@dataclass(frozen=True)
class Persistent:
    """Kept until a caller deletes it."""

    type: Literal["persistent"] = "persistent"


PERSISTENT = Persistent()


@dataclass(frozen=True)
class Sticky:
    """Evicted when the disk is full and it is not running; the lowest priority first."""

    priority: int = DEFAULT_PRIORITY
    type: Literal["sticky"] = "sticky"

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest(f"priority must be from 0 to {MAX_PRIORITY}, not {self.priority}")


@dataclass(frozen=True)
class Ephemeral:
    """Deleted when it is suspended or stops (`OnSuspend`, the default), or only when it stops (`OnStop`).

    A VM that falls asleep for being idle is suspended: with `OnSuspend` that deletes it.
    """

    delete_event: DeleteEvent = "OnSuspend"
    type: Literal["ephemeral"] = "ephemeral"

    def __post_init__(self) -> None:
        if self.delete_event not in ("OnStop", "OnSuspend"):
            raise InvalidRequest(f"delete event must be OnStop or OnSuspend, not {self.delete_event!r}")


Persistence = Persistent | Sticky | Ephemeral
SnapshotPersistence = Persistent | Sticky


def sticky(priority: int | None) -> Sticky:
    return Sticky(DEFAULT_PRIORITY if priority is None else priority)


def snapshot_columns(persistence: Persistence) -> dict[str, Any]:
    priority = persistence.priority if isinstance(persistence, Sticky) else None
    return {"persistence": persistence.type, "priority": priority}


def columns(persistence: Persistence) -> dict[str, Any]:
    delete_event = persistence.delete_event if isinstance(persistence, Ephemeral) else None
    return {**snapshot_columns(persistence), "delete_event": delete_event}


@functools.lru_cache
def from_columns(persistence: str, priority: int | None, delete_event: str | None) -> Persistence:
    match persistence:
        case "sticky":
            return sticky(priority)
        case "ephemeral":
            return Ephemeral("OnStop" if delete_event == "OnStop" else "OnSuspend")
        case _:
            return Persistent()


def snapshot_persistence(persistence: str, priority: int | None) -> SnapshotPersistence:
    kept = from_columns(persistence, priority, None)
    return Persistent() if isinstance(kept, Ephemeral) else kept


def ends_with(persistence: Persistence, *, suspended: bool) -> bool:
    """Whether a VM is deleted when it is suspended (`suspended=True`), or when it stops."""
    match persistence:
        case Ephemeral(delete_event="OnStop"):
            return not suspended
        case Ephemeral():
            return True
        case _:
            return False


class EvictionScope(Enum):
    """Whose sticky VMs and snapshots may be deleted to free disk space for a request."""

    NOTHING = "nothing"
    """It is not the request of a caller of the account."""
    OWN = "own"
    ABOVE_SHARE = "above share"
    """Those of the same account first, then those of accounts that have more than their share of the disk."""


@dataclass(frozen=True)
class Evictable:
    """A sticky snapshot, or a sticky VM that does not run."""

    id: str
    priority: int
    used_at: int
    delete: Callable[[str], Awaitable[None]] = field(compare=False)
    account: str | None = None


def eviction_order(
    candidates: Iterable[Evictable],
    account: str | None = None,
    scope: EvictionScope = EvictionScope.ABOVE_SHARE,
    usage: Mapping[str | None, int] = MappingProxyType({}),
) -> list[Evictable]:
    """What may be deleted for a request of `account`, in this order.

    Its own things: lowest priority first, among equals what was used longest ago. Then those of accounts
    whose `usage` of disk is above their share, from the account that uses most: owners choose priorities,
    so these cannot decide between accounts. For an account that is above its share itself, or that uses more
    than the others, they stay.
    """
    if scope is EvictionScope.NOTHING:
        return []
    others: set[str | None] = set()
    if scope is EvictionScope.ABOVE_SHARE:
        own = usage.get(account, 0)
        above = above_share({account: 0, **usage})
        others = set() if account in above else {each for each in above if usage[each] > own}
    allowed = [each for each in candidates if each.account == account or each.account in others]

    def order(each: Evictable) -> tuple[bool, int, int, int, str]:
        other = each.account != account
        used = usage.get(each.account, 0) if other else 0
        return other, -used, each.priority, each.used_at, each.id

    return sorted(allowed, key=order)
