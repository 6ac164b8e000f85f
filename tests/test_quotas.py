"""What an account may have, judged over real rows and without machines."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stead.errors import LimitExceeded
from stead.limits import Limits
from stead.machines.quotas import Quotas
from stead.machines.states import State
from stead.settings import Size
from stead.store.database import open_database
from stead.store.machines import MachineRow, MachineStore

ALICE, BOB = "alice", "bob"
SIZE = Size(vcpus=2, memory_mib=1024, disk_gib=20)


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[MachineStore]:
    database = await open_database(tmp_path / "stead.db")
    yield MachineStore(database)
    await database.dispose()


async def add(store: MachineStore, account: str | None = ALICE, state: State = State.RUNNING) -> MachineRow:
    slot = len(await store.slots())
    return await store.insert(
        MachineRow(
            id=f"m{slot}",
            name=None,
            state=state,
            step=None,
            vcpus=SIZE.vcpus,
            memory_mib=SIZE.memory_mib,
            disk_gib=SIZE.disk_gib,
            slot=slot,
            template="t",
            hostname="h",
            guest_machine_id="g",
            account=account,
        )
    )


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
async def test_the_one_too_many_is_refused_and_the_others_are_not(
    store: MachineStore, what: str, limit: int
) -> None:
    quotas = quotas_of(store, **{what: limit})
    async with quotas.admitting(ALICE, SIZE):
        await add(store)
    with pytest.raises(LimitExceeded) as refused:
        async with quotas.admitting(ALICE, SIZE):
            pytest.fail("it was admitted")
    assert (refused.value.what, refused.value.limit) == (what, limit)
    async with quotas.admitting(BOB, SIZE):
        await add(store, BOB)
    async with quotas.admitting(None, SIZE):
        await add(store, None)


@pytest.mark.parametrize(("what", "limit"), [("vcpus", 1), ("memory_gib", 0), ("disk_gib", 19)])
async def test_one_machine_may_be_too_large(store: MachineStore, what: str, limit: int) -> None:
    quotas = quotas_of(store, **{what: limit})
    with pytest.raises(LimitExceeded) as refused:
        async with quotas.admitting(ALICE, SIZE):
            pytest.fail("it was admitted")
    assert refused.value.what == what


async def test_of_many_that_come_together_as_many_are_admitted_as_may_be(store: MachineStore) -> None:
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


async def test_a_machine_that_is_starting_counts_before_its_row_says_so(store: MachineStore) -> None:
    quotas = quotas_of(store, running=1)
    one, other = await add(store, state=State.STOPPED), await add(store, state=State.SUSPENDED)
    async with quotas.starting(one, SIZE):
        with pytest.raises(LimitExceeded):
            async with quotas.starting(other, SIZE):
                pytest.fail("both are up")
    async with quotas.starting(other, SIZE):
        pass


async def test_machines_that_are_down_take_disk_and_nothing_else(store: MachineStore) -> None:
    for state in (State.STOPPED, State.SUSPENDED, State.LOST):
        await add(store, state=state)
    async with quotas_of(store, running=1, total_memory_gib=1).admitting(ALICE, SIZE):
        pass
    with pytest.raises(LimitExceeded):
        async with quotas_of(store, total_disk_gib=79).admitting(ALICE, SIZE):
            pytest.fail("there was no room")


async def test_a_name_that_is_kept_for_later_takes_nothing(store: MachineStore) -> None:
    await add(store, state=State.DELETED)
    async with quotas_of(store, vms=1, total_disk_gib=20).admitting(ALICE, SIZE):
        pass


async def test_growing_is_limited_like_making(store: MachineStore) -> None:
    row = await add(store)
    await add(store)
    quotas = quotas_of(store, total_disk_gib=60, memory_gib=2, total_memory_gib=3)
    await quotas.check_resize(row, Size(2, 2048, 40))
    for size, what in ((Size(2, 1024, 41), "total_disk_gib"), (Size(2, 4096, 20), "memory_gib")):
        with pytest.raises(LimitExceeded) as refused:
            await quotas.check_resize(row, size)
        assert refused.value.what == what


async def test_snapshots_are_counted(store: MachineStore) -> None:
    quotas = quotas_of(store, snapshots=2)

    async def count(_: str) -> int:
        return 2

    with pytest.raises(LimitExceeded):
        async with quotas.keeping(ALICE, count):
            pytest.fail("it was kept")
    async with quotas.keeping(BOB, count):
        pass
