"""Repository quotas: enforced while data arrives, and measured on disk afterwards."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from stead.disk_marks import writable
from stead.limits import Limits
from stead.repos.errors import DiskFull, RepoError, RepoNotFound
from stead.repos.repository import MAX_REFS
from stead.repos.sizes import RepoSize, lfs_size, measure_repo
from stead.shares import KeyedLimit
from stead.store.repos import RepoRow, RepoStore
from stead.tasks import TaskSet, Threads, working_for

DELAY = 1.0
"""Debounce in seconds: changes within this time are measured together."""
_MEASURED_AT_ONCE = 2
_MIB = 1 << 20

LimitsOf = Callable[[str], Awaitable[Limits]]
Message = Callable[[int, int], str]
"""Formats the error message from the limit and the current value."""
SupersededRef = tuple[str, str | None]
"""The old and new commit of a ref; the new one is None if the ref was deleted."""
Measured = Callable[[str, RepoSize, Sequence[SupersededRef]], Awaitable[None]]
"""Callback after a changed repository was measured."""


class QuotaExceeded(RepoError):
    """A quota is exceeded; `limit` and `current` are bytes, or a number of refs."""

    def __init__(self, text: str, limit: int, current: int) -> None:
        super().__init__(text)
        self.limit = limit
        self.current = current


class _Tally:
    """The measured size of a repository or account, and the bytes written since."""

    def __init__(self, measured: int) -> None:
        self.measured = measured
        self.since = 0


@dataclass(frozen=True)
class _Bound:
    tally: _Tally
    limit: int
    message: Message

    @property
    def left(self) -> int:
        return self.limit - self.tally.measured - self.tally.since

    def exceeded(self) -> QuotaExceeded:
        current = self.tally.measured
        return QuotaExceeded(self.message(self.limit, current), self.limit, current)


def _repo_message(limit: int, current: int) -> str:
    used = f"repository quota exceeded: {_mib(current)} of {_mib(limit)} MiB in use"
    return f"{used}; raise the quota, or delete branches (their space is freed after 14 days)"


def _new_repo_message(limit: int, _: int) -> str:
    return f"repository quota exceeded (max {_mib(limit)} MiB); raise the quota"


def _account_message(limit: int, current: int) -> str:
    used = f"account quota exceeded: repositories use {_mib(current)} of {_mib(limit)} MiB"
    return f"{used}; raise the quota, or delete a repository"


def _refs_message(limit: int, current: int) -> str:
    return f"ref limit exceeded: this repository has {current} branches and tags (max {limit}); delete some"


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}".removesuffix(".0")


class QuotaReservation:
    """The bytes that one client writes to a repository, counted until the next measurement."""

    def __init__(
        self,
        account: str,
        sizes: list[_Bound],
        refs: _Bound,
        catch_up: Callable[[str], Awaitable[None]],
        folder: Path,
    ) -> None:
        """`folder` is on the disk that the client writes to."""
        self.account = account
        self.over = asyncio.Event()
        self.lfs = 0
        """Bytes of stored LFS objects."""
        self.superseded: list[SupersededRef] = []
        self._sizes = sizes
        self._refs = refs
        self._catch_up = catch_up
        self._folder = folder
        self._reserved: Counter[_Tally] = Counter()

    @property
    def room(self) -> int | None:
        """Bytes left, shared by all concurrent writers; None without a limit."""
        left = [bound.left for bound in self._sizes]
        return max(0, min(left)) if left else None

    @property
    def disk_room(self) -> int:
        """Bytes that git may still write to the disk of the host, whatever the quota is."""
        return writable(self._folder)

    def exceeded(self) -> QuotaExceeded | DiskFull:
        """The error for too little space."""
        least = min(self._sizes, key=lambda bound: bound.left, default=None)
        if least is None or self.disk_room < least.left:
            return DiskFull()
        return least.exceeded()

    def check_disk(self) -> None:
        """DiskFull if the disk of the host has nothing left for git."""
        if not self.disk_room:
            self.release()
            raise DiskFull

    async def reserve(self, size: int) -> None:
        """Reserve more bytes, or raise QuotaExceeded or DiskFull."""
        await self._count(self._sizes, size)

    async def reserve_refs(self, count: int) -> None:
        await self._count([self._refs], count)

    async def _count(self, bounds: list[_Bound], amount: int) -> None:
        if not amount:
            return
        self.check_disk()
        for bound in bounds:
            bound.tally.since += amount
            self._reserved[bound.tally] += amount
        if any(bound.left < 0 for bound in bounds):
            # Measure again: recent writes may have been compressed since.
            await self._catch_up(self.account)
            for bound in bounds:
                if bound.left < 0:
                    # Release the reservation: the data is discarded.
                    self.release()
                    raise bound.exceeded()

    def release(self) -> None:
        """Release the reservation, after a measurement or a failed write."""
        for tally, amount in self._reserved.items():
            tally.since -= amount
        self._reserved.clear()


@dataclass(eq=False)
class _Measurement:
    """A repository to measure, and its writers."""

    repo: str
    reservations: list[QuotaReservation] = field(default_factory=list)
    now: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class RepoQuotas:
    """Enforces quotas across concurrent writers.

    Bytes are counted as they arrive, for all writers together. A repository is measured shortly after a
    change, and the result is stored in its row.
    """

    def __init__(
        self,
        store: RepoStore,
        path_of: Callable[[str], Path],
        limits_of: LimitsOf,
        on_measured: Measured,
        folder: Path,
    ) -> None:
        """`folder` has all repositories."""
        self._folder = folder
        self._store = store
        self._path_of = path_of
        self._limits_of = limits_of
        self._on_measured = on_measured
        self._tallies: WeakValueDictionary[tuple[str, str], _Tally] = WeakValueDictionary()
        self._writers: dict[str, set[QuotaReservation]] = {}
        self._next: dict[str, _Measurement] = {}
        self._measurements: set[_Measurement] = set()
        self._tasks = TaskSet()
        self._measuring = KeyedLimit(_MEASURED_AT_ONCE, 1)
        """By account: the changes of one repository are measured in their order."""

    # Writes

    @contextlib.asynccontextmanager
    async def reserving(self, repo_id: str) -> AsyncIterator[QuotaReservation]:
        """Context of a write to a repository."""
        quota = await self.peek(repo_id)
        self._writers.setdefault(repo_id, set()).add(quota)
        try:
            yield quota
        finally:
            self._writers[repo_id].discard(quota)
            if not self._writers[repo_id]:
                del self._writers[repo_id]
            quota.over.set()
            self.measure_soon(repo_id, quota)

    async def peek(self, repo_id: str) -> QuotaReservation:
        """The quota of a repository at this time, without a write."""
        row = await self._measured_row(repo_id)
        repo = self._tally("repo", row.id, row.whole_size or 0)
        refs = _Bound(self._tally("refs", row.id, row.refs or 0), MAX_REFS, _refs_message)
        sizes = await self._sizes(row.account, repo, _repo_message)
        if any(bound.tally.since > bound.left for bound in sizes):
            await self._catch_up(row.account)
        return QuotaReservation(row.account, sizes, refs, self._catch_up, self._folder)

    @contextlib.asynccontextmanager
    async def creating(self, account: str) -> AsyncIterator[QuotaReservation]:
        """Context of the creation of a repository, which is recorded with its size."""
        sizes = await self._sizes(account, _Tally(0), _new_repo_message)
        refs = _Bound(_Tally(0), MAX_REFS, _refs_message)
        quota = QuotaReservation(account, sizes, refs, self._catch_up, self._folder)
        try:
            yield quota
        finally:
            await self._refresh(account)
            quota.release()

    async def _sizes(self, account: str, repo: _Tally, message: Message) -> list[_Bound]:
        limits = await self._limits_of(account)
        bounds = []
        if limits.repo_mib is not None:
            bounds.append(_Bound(repo, limits.repo_mib * _MIB, message))
        if limits.total_repos_mib is not None:
            for unknown in await self._store.unmeasured(account):
                await self.measure(unknown)
            total = self._tally("account", account, await self._store.total_size(account))
            bounds.append(_Bound(total, limits.total_repos_mib * _MIB, _account_message))
        return bounds

    def _tally(self, kind: str, name: str, measured: int) -> _Tally:
        tally = self._tallies.get((kind, name))
        if tally is None:
            tally = self._tallies[kind, name] = _Tally(measured)
        tally.measured = measured
        return tally

    async def wait_for_writers(self, repo_id: str) -> None:
        """Wait until current writers of a repository finish."""
        for quota in list(self._writers.get(repo_id, ())):
            await quota.over.wait()

    # Measurements

    def measure_soon(self, repo_id: str, quota: QuotaReservation | None = None) -> None:
        """Schedule a measurement; the writes count until then."""
        measurement = self._next.get(repo_id)
        if measurement is None:
            measurement = self._next[repo_id] = _Measurement(repo_id)
            self._measurements.add(measurement)
            work = self._measure_later(measurement)
            measurement.task = self._tasks.start(work, f"measure repository {repo_id}")
            measurement.task.add_done_callback(lambda _: self._measurements.discard(measurement))
        if quota is not None:
            measurement.reservations.append(quota)

    async def _measure_later(self, measurement: _Measurement) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DELAY):
                await measurement.now.wait()
        # Writers that finish from here on may have written data that this measurement misses.
        del self._next[measurement.repo]
        try:
            more_lfs = sum(quota.lfs for quota in measurement.reservations)
            size = await self.measure(measurement.repo, more_lfs=more_lfs)
        finally:
            for quota in measurement.reservations:
                quota.release()
        if size is not None:
            superseded = [each for quota in measurement.reservations for each in quota.superseded]
            await self._on_measured(measurement.repo, size, superseded)

    async def measure(self, repo_id: str, *, more_lfs: int | None = 0) -> RepoSize | None:
        """Measure a repository and record its size; None if it does not exist.

        LFS objects can be many and are never removed: they are scanned only if `more_lfs` is None.
        """
        owner = await self._store.get(repo_id)
        if owner is None:
            return None
        async with self._measuring.hold(owner.account):
            row, path = await self._store.get(repo_id), self._path_of(repo_id)
            # A repository that is being created or deleted is not in its place.
            if row is None or not path.is_dir():
                return None
            with working_for(row.account):
                size = await Threads.TREES.run(measure_repo, path)
                if more_lfs is None or row.lfs_size is None:
                    lfs = await Threads.TREES.run(lfs_size, path)
                else:
                    lfs = row.lfs_size + more_lfs
            if (size.objects, lfs, size.refs) != (row.size, row.lfs_size, row.refs):
                await self._store.update(repo_id, size=size.objects, lfs_size=lfs, refs=size.refs)
        for kind, number in (("repo", size.objects + lfs), ("refs", size.refs)):
            if (tally := self._tallies.get((kind, repo_id))) is not None:
                tally.measured = number
        await self._refresh(row.account)
        return size

    async def measure_all(self) -> None:
        """Measure all repositories that a crash left with an unknown size."""
        last = ""
        while ids := await self._store.ids(last, 1000):
            for last in ids:
                await self.measure(last, more_lfs=None)

    async def _measured_row(self, repo_id: str) -> RepoRow:
        row = await self._store.get(repo_id)
        if row is not None and row.size is None:
            await self.measure(repo_id)
            row = await self._store.get(repo_id)
        if row is None:
            raise RepoNotFound(repo_id)
        return row

    async def _refresh(self, account: str) -> None:
        tally = self._tallies.get(("account", account))
        if tally is not None:
            tally.measured = await self._store.total_size(account)

    async def _catch_up(self, account: str) -> None:
        await self._finish(
            measurement
            for measurement in self._measurements
            if any(quota.account == account for quota in measurement.reservations)
        )

    async def flush(self) -> None:
        """Run pending measurements now."""
        await self._finish(self._measurements)

    async def _finish(self, measurements: Iterable[_Measurement]) -> None:
        tasks = []
        for measurement in measurements:
            measurement.now.set()
            if measurement.task is not None:
                tasks.append(measurement.task)
        if tasks:
            # A cancelled waiter does not cancel the measurement of the others.
            await asyncio.wait(tasks)
