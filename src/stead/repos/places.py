"""Places for git: how many processes and transfers run at once, in all and for each caller.

Each counts for the account of its caller, so that no account takes the places of another. Those of callers
who visit repositories of another account also count for its owner, and those without credentials for their
address, in a small pool.
"""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass, field
from enum import Enum

from stead.repos.errors import RepoBusy
from stead.shares import KeyedLimit

MAX_WAIT = 30.0
"""Seconds that a caller waits for a place."""
_MAX_WAITING = 256
"""Waiting callers of one account: a list of repositories asks for one hundred places at once."""
_PROCESSES = 4 * (os.cpu_count() or 1) + 16
_OBJECTS = 72


@dataclass(frozen=True)
class GitCaller:
    """The caller that git runs for: an account, an identity of it, or an address without credentials."""

    account: str | None
    identity: str | None = None
    address: str = ""

    @property
    def key(self) -> Hashable:
        """Under which shares are counted."""
        return self.account if self.account is not None else ("anonymous", self.address)


class Work(Enum):
    """Kinds of work with separate places: a client that reads slowly cannot hold those of short calls."""

    CALL = "git processes"
    """Processes with a time limit."""
    TRANSFER = "git transfers"
    """Processes that last as long as a client or another server lets them: clones, archives, imports."""
    OBJECT = "LFS transfers"
    """Transfers of LFS objects, of which git-lfs starts eight at once: files without a process."""


class GitPlaces:
    """The places of one kind of work."""

    def __init__(self, work: Work, total: int, *, max_wait: float = MAX_WAIT) -> None:
        def limit(total: int | None, per_key: int, per_caller: int | None = None) -> KeyedLimit:
            return KeyedLimit(
                total,
                per_key,
                per_caller=per_caller,
                max_waiting=_MAX_WAITING,
                busy=lambda: RepoBusy(work.value),
            )

        self.per_account = max(1, total // 3)
        self._max_wait = max_wait
        self._places = limit(total, self.per_account, max(1, self.per_account * 3 // 4))
        self._visits = limit(None, self.per_account, max(1, self.per_account // 2))
        self._anonymous = limit(max(1, total // 4), max(1, total // 8))

    @contextlib.asynccontextmanager
    async def hold(self, owner: str, user: GitCaller) -> AsyncIterator[None]:
        """Hold a place for work on a repository of `owner`; RepoBusy without one after `max_wait` seconds."""
        until = time.monotonic() + self._max_wait

        async def enter(limit: KeyedLimit, key: Hashable, caller: Hashable = None) -> None:
            left = max(0.0, until - time.monotonic())
            await stack.enter_async_context(limit.hold(key, caller, max_wait=left))

        async with contextlib.AsyncExitStack() as stack:
            # The places that all accounts share come last: a caller that waits for its own share has none.
            if user.account != owner:
                await enter(self._visits, owner, user.key)
            if user.account is None:
                await enter(self._anonymous, user.address)
            await enter(self._places, user.account, user.identity or user.address)
            yield


def _places() -> dict[Work, GitPlaces]:
    totals = {Work.CALL: _PROCESSES, Work.TRANSFER: _PROCESSES, Work.OBJECT: _OBJECTS}
    return {work: GitPlaces(work, total) for work, total in totals.items()}


@dataclass(frozen=True)
class RepoPlaces:
    """The places of an installation."""

    by_work: dict[Work, GitPlaces] = field(default_factory=_places)

    def of(self, owner: str, user: GitCaller) -> "PlaceHolder":
        return PlaceHolder(self, owner, user)


@dataclass(frozen=True)
class PlaceHolder:
    """Takes places for one caller in repositories of one account."""

    places: RepoPlaces
    owner: str
    user: GitCaller

    def hold(self, work: Work) -> contextlib.AbstractAsyncContextManager[None]:
        return self.places.by_work[work].hold(self.owner, self.user)
