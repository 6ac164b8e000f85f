"""Account limits, checked on real rows without VMs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from stead.errors import LimitExceeded
from stead.limits import Limits
from stead.machines.machines import Machines
from stead.machines.quotas import Quotas
from stead.machines.states import State
from stead.settings import Settings, Size
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
async def test_a_limit_refuses_one_more_vm_of_its_account_only(
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
async def test_a_limit_refuses_a_too_large_vm(store: MachineStore, what: str, limit: int) -> None:
    quotas = quotas_of(store, **{what: limit})
    with pytest.raises(LimitExceeded) as refused:
        async with quotas.admitting(ALICE, SIZE):
            pytest.fail("it was admitted")
    assert refused.value.what == what


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
    one, other = await add(store, state=State.STOPPED), await add(store, state=State.SUSPENDED)
    async with quotas.starting(one, SIZE):
        with pytest.raises(LimitExceeded):
            async with quotas.starting(other, SIZE):
                pytest.fail("both are up")
    async with quotas.starting(other, SIZE):
        pass


async def test_vms_that_are_down_count_for_disk_only(store: MachineStore) -> None:
    for state in (State.STOPPED, State.SUSPENDED, State.LOST):
        await add(store, state=state)
    async with quotas_of(store, running=1, total_memory_gib=1).admitting(ALICE, SIZE):
        pass
    with pytest.raises(LimitExceeded):
        async with quotas_of(store, total_disk_gib=79).admitting(ALICE, SIZE):
            pytest.fail("there was no room")


async def test_deleted_vms_do_not_count(store: MachineStore) -> None:
    await add(store, state=State.DELETED)
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
        assert refused.value.what == what


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

    async def resize(row: MachineRow) -> str:
        try:
            async with quotas.resizing(row, larger):
                await admitted.wait()  # its row changes only after both were judged
                changes = {"disk_gib": larger.disk_gib, "memory_mib": larger.memory_mib}
                await store.update(row.id, **changes)
                return "resized"
        except LimitExceeded as refused:
            await admitted.wait()
            return refused.what

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
    store: MachineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Size] = []

    async def ensure_template(_: object, size: Size, __: object) -> Any:
        built.append(size)
        return SimpleNamespace(size=size)

    async def find_template(_: Size) -> None:
        return None

    monkeypatch.setattr("stead.machines.machines.ensure_template", ensure_template)
    host = SimpleNamespace(find_template=find_template, network=None)
    parts: Any = SimpleNamespace(host=host, quotas=quotas_of(store, vcpus=1))
    machines = Machines(Settings(), parts, parts, parts, parts)
    with pytest.raises(LimitExceeded):
        await machines.template(SIZE, account=ALICE)
    assert not built
    await machines.template(SIZE, account=BOB)
    await machines.template(SIZE)
    assert built == [SIZE, SIZE]
