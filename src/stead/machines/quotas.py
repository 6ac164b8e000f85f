"""What an account may still have, judged in one place at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from stead.errors import LimitExceeded
from stead.limits import UNLIMITED, Limits
from stead.machines.states import DOWN, State
from stead.settings import Size
from stead.store.machines import MachineRow, MachineStore, Usage

_NOT_UP = (*DOWN, State.LOST)

LimitsOf = Callable[[str], Awaitable[Limits]]


async def _unlimited(_: str) -> Limits:
    return UNLIMITED


class Quotas:
    """Admits machines one after another, so that two that come together do not both take the last place."""

    def __init__(self, store: MachineStore) -> None:
        self._store = store
        self._turn = asyncio.Lock()
        self._arriving: dict[str, str] = {}
        self.limits_of: LimitsOf = _unlimited

    @contextlib.asynccontextmanager
    async def admitting(self, account: str | None, size: Size) -> AsyncIterator[None]:
        """A new machine may be recorded in this block; LimitExceeded when it would be one too many."""
        async with self._turn:
            if account is not None:
                limits = await self.limits_of(account)
                check_size(size, limits)
                usage = await self._usage(account)
                _check("vms", limits.vms, usage.machines, 1)
                _check("total_disk_gib", limits.total_disk_gib, usage.disk_gib, size.disk_gib)
                _check_up(usage, size, limits)
            yield

    @contextlib.asynccontextmanager
    async def starting(self, row: MachineRow, size: Size) -> AsyncIterator[None]:
        """A machine that was down comes up in this block; it counts from the beginning."""
        if row.account is None:
            yield
            return
        async with self._turn:
            limits = await self.limits_of(row.account)
            _check_up(await self._usage(row.account, without=row.id), size, limits)
            self._arriving[row.id] = row.account
        try:
            yield
        finally:
            self._arriving.pop(row.id, None)

    async def check_resize(self, row: MachineRow, size: Size) -> None:
        """LimitExceeded when a machine may not become as large as this."""
        if row.account is None:
            return
        limits = await self.limits_of(row.account)
        check_size(size, limits)
        usage = await self._usage(row.account, without=row.id)
        _check("total_disk_gib", limits.total_disk_gib, usage.disk_gib, size.disk_gib)
        if row.state not in _NOT_UP:
            _check_up(usage, size, limits)

    @contextlib.asynccontextmanager
    async def keeping(
        self, account: str | None, count: Callable[[str], Awaitable[int]]
    ) -> AsyncIterator[None]:
        """A new snapshot may be recorded in this block."""
        async with self._turn:
            if account is not None:
                limits = await self.limits_of(account)
                if limits.snapshots is not None:
                    _check("snapshots", limits.snapshots, await count(account), 1)
            yield

    async def _usage(self, account: str, without: str | None = None) -> Usage:
        arriving = [machine for machine, owner in self._arriving.items() if owner == account]
        return await self._store.usage(account, not_up=_NOT_UP, arriving=arriving, without=without)


def check_size(size: Size, limits: Limits) -> None:
    _check("vcpus", limits.vcpus, 0, size.vcpus)
    _check("memory_gib", limits.memory_gib, 0, size.memory_mib / 1024)
    _check("disk_gib", limits.disk_gib, 0, size.disk_gib)


def _check_up(usage: Usage, size: Size, limits: Limits) -> None:
    _check("running", limits.running, usage.up, 1)
    _check("total_memory_gib", limits.total_memory_gib, usage.memory_mib / 1024, size.memory_mib / 1024)


def _check(what: str, limit: int | None, current: float, requested: float) -> None:
    if limit is not None and current + requested > limit:
        raise LimitExceeded(what, limit, current, requested)
