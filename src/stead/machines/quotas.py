"""Account limits: every check is made under one lock, and what is admitted counts at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from stead.limits import UNLIMITED, LimitExceeded, LimitName, Limits
from stead.machines.records import Record
from stead.machines.states import DOWN, State
from stead.settings import Size
from stead.store.machines import MachineStore, Usage

_NOT_UP = (*DOWN, State.LOST)

LimitsOf = Callable[[str], Awaitable[Limits]]


async def _unlimited(_: str) -> Limits:
    return UNLIMITED


@dataclass(frozen=True)
class Reservation:
    """What a VM that is being started or resized counts as, whatever its row says meanwhile."""

    account: str
    disk_gib: int
    memory_mib: int
    up: bool


class Quotas:
    """Checks limits one request at a time, so that two concurrent ones cannot both take the last place."""

    def __init__(self, store: MachineStore) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._reserved: dict[str, Reservation] = {}
        self.limits_of: LimitsOf = _unlimited

    @contextlib.asynccontextmanager
    async def admitting(self, account: str | None, size: Size) -> AsyncIterator[None]:
        """Insert the row of a new VM in this block; LimitExceeded when the account may not have it."""
        async with self._lock:
            if account is not None:
                limits = await self.limits_of(account)
                check_size(size, limits)
                usage = await self._usage(account)
                _check_new(usage, size, limits)
                _check_up(usage, size, limits)
            yield

    def starting(self, record: Record, size: Size) -> AbstractAsyncContextManager[None]:
        """Bring a VM up in this block; it counts as up from the beginning."""

        def check(usage: Usage, limits: Limits) -> None:
            if record.state.name is State.DELETED:
                _check_new(usage, size, limits)
            _check_up(usage, size, limits)

        return self._changing(record, size, check, up=True)

    def resizing(self, record: Record, size: Size) -> AbstractAsyncContextManager[None]:
        """Change a VM's size in this block; it counts with the larger of both sizes from the beginning."""
        up = record.state.name not in _NOT_UP

        def check(usage: Usage, limits: Limits) -> None:
            check_size(size, limits)
            _check(LimitName.TOTAL_DISK_GIB, limits.total_disk_gib, usage.disk_gib, size.disk_gib)
            if up:
                _check_up(usage, size, limits)

        return self._changing(record, size, check, up=up)

    @contextlib.asynccontextmanager
    async def _changing(
        self, record: Record, size: Size, check: Callable[[Usage, Limits], None], *, up: bool
    ) -> AsyncIterator[None]:
        account = record.account
        if account is None:
            yield
            return
        async with self._lock:
            check(await self._usage(account, without=record.id), await self.limits_of(account))
            disk_gib = max(record.size.disk_gib, size.disk_gib)
            memory_mib = max(record.size.memory_mib, size.memory_mib)
            self._reserved[record.id] = Reservation(account, disk_gib, memory_mib, up)
        try:
            yield
        finally:
            del self._reserved[record.id]

    @contextlib.asynccontextmanager
    async def keeping(
        self, account: str | None, count: Callable[[str], Awaitable[int]]
    ) -> AsyncIterator[None]:
        """Insert the row of a new snapshot in this block."""
        async with self._lock:
            if account is not None:
                limits = await self.limits_of(account)
                if limits.snapshots is not None:
                    _check(LimitName.SNAPSHOTS, limits.snapshots, await count(account), 1)
            yield

    async def _usage(self, account: str, without: str | None = None) -> Usage:
        """What an account has, apart from one VM; reservations count in place of their VMs' rows."""
        reserved = {
            machine: each
            for machine, each in self._reserved.items()
            if each.account == account and machine != without
        }
        excluded = [*reserved] if without is None else [*reserved, without]
        usage = await self._store.usage(account, not_up=_NOT_UP, excluding=excluded)
        up = [each for each in reserved.values() if each.up]
        return Usage(
            machines=usage.machines + len(reserved),
            up=usage.up + len(up),
            disk_gib=usage.disk_gib + sum(each.disk_gib for each in reserved.values()),
            memory_mib=usage.memory_mib + sum(each.memory_mib for each in up),
        )


def check_size(size: Size, limits: Limits) -> None:
    _check(LimitName.VCPUS, limits.vcpus, 0, size.vcpus)
    _check(LimitName.MEMORY_GIB, limits.memory_gib, 0, size.memory_mib / 1024)
    _check(LimitName.DISK_GIB, limits.disk_gib, 0, size.disk_gib)


def _check_new(usage: Usage, size: Size, limits: Limits) -> None:
    _check(LimitName.VMS, limits.vms, usage.machines, 1)
    _check(LimitName.TOTAL_DISK_GIB, limits.total_disk_gib, usage.disk_gib, size.disk_gib)


def _check_up(usage: Usage, size: Size, limits: Limits) -> None:
    _check(LimitName.RUNNING, limits.running, usage.up, 1)
    _check(
        LimitName.TOTAL_MEMORY_GIB, limits.total_memory_gib, usage.memory_mib / 1024, size.memory_mib / 1024
    )


def _check(name: LimitName, limit: int | None, current: float, requested: float) -> None:
    if limit is not None and current + requested > limit:
        raise LimitExceeded(name, limit, current, requested)
