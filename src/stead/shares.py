"""Shares of a resource that all accounts use: places with bounds in all and by key, token buckets, memory."""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Entry = TypeVar("Entry", bound=Hashable)
Release = Callable[[], None]
Reserve = Callable[[int], Awaitable[bool]]
"""Reserves so many more bytes of memory. If there are none, it raises an error or answers False."""


@dataclass(eq=False)
class _Waiter:
    key: Hashable
    caller: Hashable
    amount: int
    granted: "asyncio.Future[None]"


class KeyedLimit:
    """A semaphore with `total` places, of which each key (an account) holds at most `per_key`.

    Within a key, each caller (an identity) holds at most `per_caller`; None, such as the owner of the
    account, has no bound but the key's. A free place goes to the waiting key that holds the fewest, then to
    the caller that has waited longest. A holder may take several places at once, such as the bytes of a body.
    """

    def __init__(
        self,
        total: int | None = None,
        per_key: int | None = None,
        *,
        per_caller: int | None = None,
        max_waiting: int | None = None,
        max_wait: float | None = None,
        busy: Callable[[], Exception] = TimeoutError,
        release_after: float | None = None,
    ) -> None:
        """`busy` makes the error that is raised after `max_wait` seconds without a place, or at once if
        `max_waiting` callers of the same key are waiting.

        A place that is held for `release_after` seconds is released; the work in it continues.
        """
        self._total = total
        self._per_key = per_key
        self._per_caller = per_caller
        self._max_waiting = max_waiting
        self._max_wait = max_wait
        self._busy = busy
        self._release_after = release_after
        self._used = 0
        self._held: Counter[Hashable] = Counter()
        self._held_by_caller: Counter[tuple[Hashable, Hashable]] = Counter()
        self._waiting: list[_Waiter] = []
        self._waiting_by_key: Counter[Hashable] = Counter()

    @property
    def used(self) -> int:
        """Places in use."""
        return self._used

    @property
    def waiting(self) -> int:
        """Callers that wait for a place."""
        return len(self._waiting)

    def held_by(self, key: Hashable) -> int:
        return self._held[key]

    def fullest(self) -> Hashable:
        """The key that holds the most places; some key must hold one."""
        return max(self._held, key=self._held.__getitem__)

    @contextlib.asynccontextmanager
    async def hold(
        self, key: Hashable = None, caller: Hashable = None, *, amount: int = 1, max_wait: float | None = None
    ) -> AsyncIterator[None]:
        """Hold a place, or `amount` of them, during a block."""
        release = await self.acquire(key, caller, amount=amount, max_wait=max_wait)
        try:
            yield
        finally:
            release()

    async def acquire(
        self, key: Hashable = None, caller: Hashable = None, *, amount: int = 1, max_wait: float | None = None
    ) -> Release:
        """Wait for a place. The caller releases it by the returned function, which may be called twice."""
        release = self.try_acquire(key, caller, amount=amount)
        if release is not None:
            return release
        await self._wait(key, caller, amount, self._max_wait if max_wait is None else max_wait)
        return self._release_once(key, caller, amount)

    def try_acquire(
        self, key: Hashable = None, caller: Hashable = None, *, amount: int = 1
    ) -> Release | None:
        """As `acquire`, without waiting: None if there is no place."""
        if not self._has_place(key, caller, amount):
            return None
        self._take(key, caller, amount)
        return self._release_once(key, caller, amount)

    def _release_once(self, key: Hashable, caller: Hashable, amount: int) -> Release:
        held = True
        timer: asyncio.TimerHandle | None = None

        def release() -> None:
            nonlocal held
            if held:
                held = False
                if timer is not None:
                    timer.cancel()
                self._release(key, caller, amount)

        if self._release_after is not None:
            timer = asyncio.get_running_loop().call_later(self._release_after, release)
        return release

    async def _wait(self, key: Hashable, caller: Hashable, amount: int, max_wait: float | None) -> None:
        if self._max_waiting is not None and self._waiting_by_key[key] >= self._max_waiting:
            raise self._busy()
        waiter = _Waiter(key, caller, amount, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._waiting_by_key[key] += 1
        try:
            async with asyncio.timeout(max_wait) as limit:
                await waiter.granted
        except BaseException as error:
            if waiter in self._waiting:
                self._leave_queue(waiter)
            else:
                self._release(key, caller, amount)
            if isinstance(error, TimeoutError) and limit.expired():
                raise self._busy() from None
            raise

    def _leave_queue(self, waiter: _Waiter) -> None:
        self._waiting.remove(waiter)
        self._waiting_by_key[waiter.key] -= 1
        if not self._waiting_by_key[waiter.key]:
            del self._waiting_by_key[waiter.key]

    def _has_place(self, key: Hashable, caller: Hashable, amount: int) -> bool:
        return (
            _fits(self._used, amount, self._total)
            and _fits(self._held[key], amount, self._per_key)
            and (caller is None or _fits(self._held_by_caller[key, caller], amount, self._per_caller))
        )

    def _can_take(self, waiter: _Waiter) -> bool:
        # A cancelled waiter is in the queue until its task runs.
        return not waiter.granted.done() and self._has_place(waiter.key, waiter.caller, waiter.amount)

    def _take(self, key: Hashable, caller: Hashable, amount: int) -> None:
        self._used += amount
        self._held[key] += amount
        if caller is not None:
            self._held_by_caller[key, caller] += amount

    def _release(self, key: Hashable, caller: Hashable, amount: int) -> None:
        self._used -= amount
        self._held[key] -= amount
        if not self._held[key]:
            del self._held[key]
        if caller is not None:
            self._held_by_caller[key, caller] -= amount
            if not self._held_by_caller[key, caller]:
                del self._held_by_caller[key, caller]
        while self._waiting:
            able = [each for each in self._waiting if self._can_take(each)]
            if not able:
                return
            # min() takes the first of equals.
            chosen = min(able, key=lambda each: self._held[each.key])
            self._leave_queue(chosen)
            self._take(chosen.key, chosen.caller, chosen.amount)
            chosen.granted.set_result(None)


def share_of(total: int) -> int:
    """How many of `total` places one account may hold: a quarter, and at least one."""
    return max(1, total // 4)


def _fits(used: int, amount: int, most: int | None) -> bool:
    """An amount above the bound fits when nothing else is held: it would wait for ever otherwise."""
    return most is None or used + amount <= most or (used == 0 and most > 0)


class KeyedLock(KeyedLimit):
    """One lock per key, removed when no task holds or awaits it; waiters get it in their order."""

    def __init__(self) -> None:
        super().__init__(per_key=1)


class SharedEntries(Generic[Entry]):
    """Entries of keys (accounts) that share a bound: above it, the key with the most entries gives one up."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[Entry, Hashable] = {}
        self._entries: dict[Hashable, dict[Entry, None]] = {}
        """By key, oldest first."""

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._keys

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._keys)

    def add(self, entry: Entry, key: Hashable) -> Entry | None:
        """Add a new entry; returns the one to remove for it, if they are too many now."""
        self._keys[entry] = key
        self._entries.setdefault(key, {})[entry] = None
        return self.first_to_go() if len(self._keys) > self._most else None

    def first_to_go(self) -> Entry:
        """The oldest entry of the key with the most; some entry must exist."""
        largest = max(self._entries.values(), key=len)
        return next(iter(largest))

    def remove(self, entry: Entry) -> None:
        key = self._keys.pop(entry)
        del self._entries[key][entry]
        if not self._entries[key]:
            del self._entries[key]


class RateLimit:
    """A token bucket by key: `burst` events at once, then one in `interval` seconds."""

    def __init__(
        self,
        burst: int,
        interval: float,
        *,
        most_keys: int = 10_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._interval = interval
        self._most_keys = most_keys
        self._clock = clock
        self._full_at: dict[Hashable, float] = {}
        """When the bucket of each key will have all its tokens again."""

    def wait(self, key: Hashable) -> int:
        """Seconds until the next event is allowed, rounded up; 0 if it is allowed now."""
        over = self._full_at.get(key, 0.0) - self._clock() - (self._burst - 1) * self._interval
        return max(0, math.ceil(over))

    def spend(self, key: Hashable) -> None:
        """Count an event. Of too many keys the one that was counted least recently is forgotten."""
        now = self._clock()
        self._full_at[key] = max(self._full_at.pop(key, 0.0), now) + self._interval
        if len(self._full_at) > self._most_keys:
            self._full_at = {each: at for each, at in self._full_at.items() if at > now}
        if len(self._full_at) > self._most_keys:
            del self._full_at[next(iter(self._full_at))]

    def allow(self, key: Hashable) -> int:
        """Count an event if it is allowed: 0. Otherwise the seconds to wait, and nothing is counted."""
        seconds = self.wait(key)
        if not seconds:
            self.spend(key)
        return seconds


async def unlimited(_: int) -> bool:
    """Reserves any amount of memory: for the server's own work."""
    return True


class MemoryReservation:
    """Reserves memory for data of unknown size, in steps of 1 MiB while it is collected; 64 KiB are free."""

    FREE = 64 << 10
    _STEP = 1 << 20

    def __init__(self, reserve: Reserve = unlimited, reserved: int = 0) -> None:
        """`reserved` bytes were reserved before."""
        self._reserve = reserve
        self._reserved = max(reserved, self.FREE)
        self._size = 0

    async def add(self, size: int) -> bool:
        """Count so many more bytes before they are collected; False if there is no memory for them."""
        self._size += size
        missing = self._size - self._reserved
        if missing > 0:
            missing = max(missing, self._STEP)
            if not await self._reserve(missing):
                return False
            self._reserved += missing
        return True
