"""Limits of accounts and of the host: checked under one lock, and what is admitted counts at once."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from stead.errors import CapacityExceeded, DiskSpaceExceeded
from stead.limits import UNLIMITED, LimitExceeded, LimitName, Limits
from stead.machines.records import Record
from stead.machines.states import DOWN, UNOWNED, State
from stead.settings import Size
from stead.store.machines import MachineStore, Usage

_NOT_UP = (*DOWN, State.LOST)
_NOT_UP_FOR_USERS = (*_NOT_UP, *UNOWNED)
"""A VM of the pool gives its memory to the one that is created from it."""

LimitsOf = Callable[[str], Awaitable[Limits]]


async def _unlimited(_: str) -> Limits:
    return UNLIMITED


@dataclass(frozen=True)
class Reservation:
    """What a VM that is being started or resized counts as, whatever its row says meanwhile."""

    account: str | None
    disk_gib: int
    memory_mib: int
    up: bool


@dataclass(frozen=True)
class HostBounds:
    """What this host can hold, whatever the limits of accounts are."""

    memory_mib: int
    """Of one VM: more could never be used."""
    disk_gib: int
    """Of all VMs, by the sizes of their disks, and of all snapshots, by what they take.

    Disks are thin, so it is a multiple of the host's. A snapshot never grows: it counts as captured, which is
    too much where snapshots share layers, and never too little.
    """
    total_memory_mib: int
    """Of all VMs that are up, by size. Most of it is shared or unused, so it is a multiple of the host's."""
    explained: str = ""
    """Where `disk_gib` comes from."""
    memory_explained: str = ""

    def check_size(self, size: Size) -> None:
        if size.memory_mib > self.memory_mib:
            raise CapacityExceeded(
                f"a VM with {size.memory_mib / 1024:g} GiB of memory does not fit this host:"
                f" at most {self.memory_mib / 1024:g} GiB"
            )

    def check_disk(self, reserved_gib: int, more_gib: int) -> None:
        if reserved_gib + more_gib > self.disk_gib:
            raise DiskSpaceExceeded(
                f"cannot reserve {more_gib} GiB of disk: VMs and snapshots have {reserved_gib} of the"
                f" {self.disk_gib} GiB that this host may promise{self.explained};"
                " delete some, or ask for less"
            )

    def check_total_memory(self, reserved_mib: int, more_mib: int) -> None:
        if reserved_mib + more_mib > self.total_memory_mib:
            raise CapacityExceeded(
                f"cannot reserve {more_mib / 1024:g} GiB of memory:"
                f" VMs that run have {reserved_mib / 1024:g} of the {self.total_memory_mib / 1024:g} GiB"
                f" that this host may promise{self.memory_explained};"
                " suspend or stop VMs, or ask for less"
            )


@dataclass(frozen=True)
class _Change:
    """What is about to happen to a VM that has a row."""

    record: Record
    size: Size
    check: Callable[[Usage, Limits], None]
    up: bool
    larger: bool
    """Whether it needs more disk than its row counts for."""


def _resize(record: Record, size: Size) -> _Change:
    up = record.state.name not in _NOT_UP

    def check(usage: Usage, limits: Limits) -> None:
        check_size(size, limits)
        _check(LimitName.TOTAL_DISK_GIB, limits.total_disk_gib, usage.disk_gib, size.disk_gib)
        if up:
            _check_up(usage, size, limits)

    return _Change(record, size, check, up=up, larger=size.disk_gib > record.size.disk_gib)


class Quotas:
    """Checks limits one request at a time, so that two concurrent ones cannot both take the last place."""

    def __init__(self, store: MachineStore) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._reserved: dict[str, Reservation] = {}
        self._templates: dict[str, Counter[Size]] = {}
        """The sizes of templates that are being built for an account, or whose VM has no row yet."""
        self.limits_of: LimitsOf = _unlimited
        self.host: HostBounds | None = None

    @contextlib.asynccontextmanager
    async def admitting(self, account: str | None, size: Size) -> AsyncIterator[None]:
        """Insert the row of a new VM in this block.

        LimitExceeded when the account may not have it, CapacityExceeded when the host cannot.
        """
        async with self._lock:
            await self._check_all(account, size, 1)
            yield

    async def check(self, account: str | None, size: Size, count: int = 1) -> None:
        """Raise as `admitting` would for so many VMs now: before work is done for them, or anything evicted.

        Nothing is reserved, so it does not wait for others: `admitting` decides.
        """
        await self._check_all(account, size, count)

    async def _check_all(self, account: str | None, size: Size, count: int) -> None:
        if account is not None:
            limits = await self.limits_of(account)
            check_size(size, limits)
            usage = await self._usage(account)
            _check_new(usage, size, limits, count)
            _check_up(usage, size, limits, count)
        if self.host is not None:
            self.host.check_size(size)
            self.host.check_disk(self._reserved_disk(), size.disk_gib * count)
            self.host.check_total_memory(self._reserved_memory(), size.memory_mib * count)

    def _reserved_disk(self, without: str | None = None) -> int:
        """The disks of all VMs apart from one; reservations count in place of their VMs' rows."""
        reserved = {machine: each.disk_gib for machine, each in self._reserved.items() if machine != without}
        excluded = [*reserved] if without is None else [*reserved, without]
        return self._store.reserved_disk(excluding=excluded) + sum(reserved.values())

    def _reserved_memory(self, without: str | None = None) -> int:
        """The memory of all VMs that are up, apart from one; as in `_reserved_disk`."""
        reserved = {machine: each for machine, each in self._reserved.items() if machine != without}
        excluded = [*reserved] if without is None else [*reserved, without]
        up = sum(each.memory_mib for each in reserved.values() if each.up)
        return self._store.reserved_memory(not_up=_NOT_UP_FOR_USERS, excluding=excluded) + up

    def starting(self, record: Record, size: Size) -> AbstractAsyncContextManager[None]:
        """Bring a VM up in this block; it counts as up from the beginning."""
        new = record.state.name is State.DELETED

        def check(usage: Usage, limits: Limits) -> None:
            if new:
                _check_new(usage, size, limits)
            _check_up(usage, size, limits)

        return self._changing(_Change(record, size, check, up=True, larger=new))

    def resizing(self, record: Record, size: Size) -> AbstractAsyncContextManager[None]:
        """Change a VM's size in this block; it counts with the larger of both sizes from the beginning."""
        return self._changing(_resize(record, size))

    async def check_resize(self, record: Record, size: Size) -> None:
        """Raise as `resizing` would now: before a VM is woken for it."""
        await self._check_change(_resize(record, size))

    @contextlib.asynccontextmanager
    async def _changing(self, change: "_Change") -> AsyncIterator[None]:
        record, size = change.record, change.size
        async with self._lock:
            await self._check_change(change)
            disk_gib = max(record.size.disk_gib, size.disk_gib)
            memory_mib = max(record.size.memory_mib, size.memory_mib)
            self._reserved[record.id] = Reservation(record.account, disk_gib, memory_mib, change.up)
        try:
            yield
        finally:
            del self._reserved[record.id]

    async def _check_change(self, change: "_Change") -> None:
        record, size = change.record, change.size
        if record.account is not None:
            usage = await self._usage(record.account, without=record.id)
            change.check(usage, await self.limits_of(record.account))
        if self.host is not None and size != record.size:
            self.host.check_size(size)
        if self.host is not None and change.larger:
            self.host.check_disk(self._reserved_disk(without=record.id), size.disk_gib)
        if self.host is not None and change.up:
            self.host.check_total_memory(self._reserved_memory(without=record.id), size.memory_mib)

    @contextlib.asynccontextmanager
    async def adding_template(
        self, account: str | None, size: Size, sizes_of: Callable[[str], Awaitable[Collection[Size]]]
    ) -> AsyncIterator[None]:
        """Build a template of this size in this block, and insert the row of a VM that needs it.

        LimitExceeded when the account may not have one more. `sizes_of` has the sizes of the templates below
        its VMs and snapshots; what is in other such blocks counts as well.
        """
        if account is None:
            yield
            return
        async with self._lock:
            most = (await self.limits_of(account)).templates
            if most is not None:
                sizes = {*await sizes_of(account), *self._templates.get(account, ())}
                if size not in sizes:
                    _check(LimitName.TEMPLATES, most, len(sizes), 1)
            reserved = self._templates.setdefault(account, Counter())
            reserved[size] += 1
        try:
            yield
        finally:
            reserved[size] -= 1
            if not reserved[size]:
                del reserved[size]
            if not reserved:
                self._templates.pop(account, None)

    async def check_snapshot(self, account: str | None, count: Callable[[str], Awaitable[int]]) -> None:
        """Raise as `keeping` would: before anything is evicted for a snapshot."""
        async with self.keeping(account, count):
            pass

    @contextlib.asynccontextmanager
    async def keeping(
        self, account: str | None, count: Callable[[str], Awaitable[int]]
    ) -> AsyncIterator[None]:
        """Insert the row of a new snapshot in this block.

        How much disk it takes is known when it is captured. So the one that goes beyond a limit is made, and
        no other one after it.
        """
        async with self._lock:
            if account is not None:
                limits = await self.limits_of(account)
                if limits.snapshots is not None:
                    _check(LimitName.SNAPSHOTS, limits.snapshots, await count(account), 1)
                usage = await self._usage(account)
                _check(LimitName.TOTAL_DISK_GIB, limits.total_disk_gib, usage.disk_gib, 0)
            if self.host is not None:
                self.host.check_disk(self._reserved_disk(), 0)
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


def _check_new(usage: Usage, size: Size, limits: Limits, count: int = 1) -> None:
    _check(LimitName.VMS, limits.vms, usage.machines, count)
    _check(LimitName.TOTAL_DISK_GIB, limits.total_disk_gib, usage.disk_gib, size.disk_gib * count)


def _check_up(usage: Usage, size: Size, limits: Limits, count: int = 1) -> None:
    _check(LimitName.RUNNING, limits.running, usage.up, count)
    memory = size.memory_mib / 1024 * count
    _check(LimitName.TOTAL_MEMORY_GIB, limits.total_memory_gib, usage.memory_mib / 1024, memory)


def _check(name: LimitName, limit: int | None, current: float, requested: float) -> None:
    if limit is not None and current + requested > limit:
        raise LimitExceeded(name, limit, current, requested)
