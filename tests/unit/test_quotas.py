"""Account limits, checked on real rows without VMs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from stead.limits import LimitExceeded, Limits
from stead.machines.quotas import Quotas
from stead.machines.records import Properties, Record
from stead.machines.states import Deleted, Lost, MachineState, Run, Running, State, Stopped, Suspended
from stead.machines.templates import Templates
from stead.processes import ProcessId
from stead.settings import Size
from stead.store.database import open_database
from stead.store.layers import LayerStore
from stead.store.machines import MachineStore
from support.databases import put_database

ALICE, BOB = "alice", "bob"
RUNNING, STOPPED = Running("top", Run(ProcessId(1, 1), None)), Stopped("top", "stopped")
SUSPENDED = Suspended("saved", "suspended")
SIZE = Size(vcpus=2, memory_mib=1024, disk_gib=20)


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[MachineStore]:
    database = await open_database(await put_database(tmp_path / "stead.db"))
    yield MachineStore(database)
    await database.dispose()


async def add(store: MachineStore, account: str | None = ALICE, state: MachineState = RUNNING) -> Record:
    slot = len(await store.slots())
    record = Record(f"m{slot}", slot, SIZE, "t", "h", "g", None, Properties(account=account), state)
    await store.insert(record.to_row())
    return record


def quotas_of(store: MachineStore, **limits: int) -> Quotas:
    quotas = Quotas(store)

    async def limits_of(account: str) -> Limits:
        return Limits(**limits) if account == ALICE else Limits()

    quotas.limits_of = limits_of
    return quotas


@pytest.mark.parametrize(
    ("what", "limit"),
    [("vms", 1), ("running", 1), ("total_disk_gib", 39), ("total_memory_gib", 1)],
)
async def test_a_limit_refuses_one_more_vm_of_its_account_only(
    store: MachineStore, what: str, limit: int
) -> None:
    quotas = quotas_of(store, **{what: limit})
    async with quotas.admitting(ALICE, SIZE):
        await add(store)
    with pytest.raises(LimitExceeded) as refused:
        async with quotas.admitting(ALICE, SIZE):
            pytest.fail("it was admitted")
    assert (refused.value.limit_name, refused.value.limit) == (what, limit)
    async with quotas.admitting(BOB, SIZE):
        await add(store, BOB)
    async with quotas.admitting(None, SIZE):
        await add(store, None)


@pytest.mark.parametrize(("what", "limit"), [("vcpus", 1), ("memory_gib", 0), ("disk_gib", 19)])
async def test_a_limit_refuses_a_too_large_vm(store: MachineStore, what: str, limit: int) -> None:
    quotas = quotas_of(store, **{what: limit})
    with pytest.raises(LimitExceeded) as refused:
        async with quotas.admitting(ALICE, SIZE):
            pytest.fail("it was admitted")
    assert refused.value.limit_name == what


async def test_concurrent_creates_do_not_exceed_a_limit(store: MachineStore) -> None:
    quotas = quotas_of(store, vms=3)

    async def come() -> bool:
        try:
            async with quotas.admitting(ALICE, SIZE):
                await asyncio.sleep(0)
                await add(store)
        except LimitExceeded:
            return False
        return True

    admitted = await asyncio.gather(*(come() for _ in range(10)))
    assert admitted.count(True) == 3


async def test_a_starting_vm_counts_as_running_at_once(store: MachineStore) -> None:
    quotas = quotas_of(store, running=1)
    one, other = await add(store, state=STOPPED), await add(store, state=SUSPENDED)
    async with quotas.starting(one, SIZE):
        with pytest.raises(LimitExceeded):
            async with quotas.starting(other, SIZE):
                pytest.fail("both are up")
    async with quotas.starting(other, SIZE):
        pass


async def test_vms_that_are_down_count_for_disk_only(store: MachineStore) -> None:
    for state in (STOPPED, SUSPENDED, Lost("lost")):
        await add(store, state=state)
    async with quotas_of(store, running=1, total_memory_gib=1).admitting(ALICE, SIZE):
        pass
    with pytest.raises(LimitExceeded):
        async with quotas_of(store, total_disk_gib=79).admitting(ALICE, SIZE):
            pytest.fail("there was no room")


async def test_deleted_vms_do_not_count(store: MachineStore) -> None:
    await add(store, state=Deleted("deleted"))
    async with quotas_of(store, vms=1, total_disk_gib=20).admitting(ALICE, SIZE):
        pass


async def test_resize_is_limited_like_create(store: MachineStore) -> None:
    row = await add(store)
    await add(store)
    quotas = quotas_of(store, total_disk_gib=60, memory_gib=2, total_memory_gib=3)
    async with quotas.resizing(row, Size(2, 2048, 40)):
        pass
    for size, what in ((Size(2, 1024, 41), "total_disk_gib"), (Size(2, 4096, 20), "memory_gib")):
        with pytest.raises(LimitExceeded) as refused:
            async with quotas.resizing(row, size):
                pytest.fail("it was admitted")
        assert refused.value.limit_name == what


@pytest.mark.parametrize(
    ("what", "limit", "larger"),
    [("total_disk_gib", 60, Size(2, 1024, 40)), ("total_memory_gib", 3, Size(2, 2048, 20))],
)
async def test_only_one_of_two_concurrent_resizes_gets_the_last_of_a_limit(
    store: MachineStore, what: str, limit: int, larger: Size
) -> None:
    quotas = quotas_of(store, **{what: limit})
    rows = [await add(store), await add(store)]
    admitted = asyncio.Barrier(2)

    async def resize(record: Record) -> str:
        try:
            async with quotas.resizing(record, larger):
                await admitted.wait()  # its row changes only after both were judged
                changes = {"disk_gib": larger.disk_gib, "memory_mib": larger.memory_mib}
                await store.update(record.id, **changes)
                return "resized"
        except LimitExceeded as refused:
            await admitted.wait()
            return refused.limit_name

    assert sorted(await asyncio.gather(*map(resize, rows))) == sorted(["resized", what])
    with pytest.raises(LimitExceeded):
        async with quotas.admitting(ALICE, SIZE):
            pytest.fail("the resized VM counts with its new size")


async def test_a_vm_that_is_resized_counts_as_up_although_it_is_stopped_for_it(store: MachineStore) -> None:
    quotas = quotas_of(store, running=1)
    row = await add(store)
    async with quotas.resizing(row, Size(4, 1024, 20)):
        await store.update(row.id, state=State.STOPPED)
        with pytest.raises(LimitExceeded):
            async with quotas.admitting(ALICE, SIZE):
                pytest.fail("its place was taken")
    async with quotas.admitting(ALICE, SIZE):
        pass


async def test_snapshots_are_limited(store: MachineStore) -> None:
    quotas = quotas_of(store, snapshots=2)

    async def count(_: str) -> int:
        return 2

    with pytest.raises(LimitExceeded):
        async with quotas.keeping(ALICE, count):
            pytest.fail("it was kept")
    async with quotas.keeping(BOB, count):
        pass


async def test_a_limit_is_checked_before_a_template_is_built(
    store: MachineStore,
) -> None:
    built: list[Size] = []

    async def ensure(size: Size, _: object) -> Any:
        built.append(size)
        return SimpleNamespace(size=size)

    async def find(_: Size) -> None:
        return None

    async def remove_unused(_: object) -> list[str]:
        return []

    nothing: Any = None
    host = SimpleNamespace(templates=SimpleNamespace(find=find, ensure=ensure, remove_unused=remove_unused))
    engine: Any = SimpleNamespace(host=host, quotas=quotas_of(store, vcpus=1))
    rows = LayerStore(store.database)
    templates = Templates(engine, pool=nothing, layer_rows=rows, default_size=Size())
    with pytest.raises(LimitExceeded):
        await templates.ensure(SIZE, account=ALICE)
    assert not built
    await templates.ensure(SIZE, account=BOB)
    await templates.ensure(SIZE)
    assert built == [SIZE, SIZE]
