"""Restore slots: how many VMs are brought up at once, shared fairly by the accounts."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from stead.deadlines import scaled

_LONGEST = scaled(10.0)
"""Seconds. A restore takes about one; a guest whose agent does not answer would hold its slot for minutes."""


class RestoreSlots:
    """A semaphore whose places go to the waiting account that holds the fewest, and back after a deadline.

    The work of a slot whose time is over continues: the slot only limits how many compete for the CPU.
    """

    def __init__(self, count: int, longest: float = _LONGEST) -> None:
        self._free = count
        self._longest = longest
        self._held: Counter[str | None] = Counter()
        self._waiting: list[tuple[str | None, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def held(self, account: str | None) -> AsyncIterator[None]:
        """Bring a VM of an account up in this block."""
        await self._acquire(account)
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._release(account)

        timer = asyncio.get_running_loop().call_later(self._longest, release)
        try:
            yield
        finally:
            timer.cancel()
            release()

    async def _acquire(self, account: str | None) -> None:
        if self._free > 0:
            self._free -= 1
            self._held[account] += 1
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((account, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._release(account)
            else:
                self._waiting.remove((account, granted))
            raise

    def _release(self, account: str | None) -> None:
        self._held[account] -= 1
        if self._held[account] == 0:
            del self._held[account]
        waiting = [each for each in self._waiting if not each[1].done()]
        if not waiting:
            self._free += 1
            return
        # min() takes the first of equals, which has waited longest.
        chosen = min(waiting, key=lambda each: self._held[each[0]])
        self._waiting.remove(chosen)
        self._held[chosen[0]] += 1
        chosen[1].set_result(None)
