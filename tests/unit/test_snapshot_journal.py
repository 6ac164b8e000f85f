"""Changes of state of snapshots: which are legal, and that the first of two concurrent ones wins."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from stead.errors import SnapshotNotFound
from stead.machines.snapshot_journal import (
    CapturingSnapshot,
    DeletedSnapshot,
    SnapshotContents,
    SnapshotJournal,
    SnapshotState,
    UsableSnapshot,
    check_snapshot_transition,
    contents_of,
)
from stead.machines.states import IllegalTransition
from stead.store.database import open_database
from stead.store.layers import LayerStore
from stead.store.machines import LayerRow
from stead.store.snapshots import SnapshotRow, SnapshotStore
from support.databases import put_database

NEW = SnapshotRow("sc-1", None, SnapshotState.BUILDING, "vm", 1, 512, 20, "template", expires_at=5)
STATES: dict[str, SnapshotContents] = {
    "capturing": CapturingSnapshot(),
    "captured": CapturingSnapshot("layer"),
    "usable": UsableSnapshot("layer", "memory", 1),
    "measured": UsableSnapshot("layer", "memory", None),
    "another": UsableSnapshot("other", "memory", 1),
    "deleted": DeletedSnapshot(1),
}
LEGAL = {
    "capturing": "capturing captured usable measured another",
    "captured": "captured usable measured",
    "usable": "usable measured deleted",
    "measured": "usable measured deleted",
    "another": "another deleted",
    "deleted": "",
}


@pytest_asyncio.fixture
async def store(tmp_path: Path) -> AsyncIterator[SnapshotStore]:
    database = await open_database(await put_database(tmp_path / "stead.db"))
    for each in ("layer", "other"):
        await LayerStore(database).insert(LayerRow(each, None, "template", f"{each}.qcow2"))
    yield SnapshotStore(database)
    await database.dispose()


@pytest.mark.parametrize("before", STATES)
@pytest.mark.parametrize("after", STATES)
def test_transition_table(before: str, after: str) -> None:
    try:
        check_snapshot_transition(STATES[before], STATES[after])
    except IllegalTransition:
        legal = False
    else:
        legal = True
    assert legal == (after in LEGAL[before].split())


@pytest.mark.parametrize("failure", [None, "a step failed"])
async def test_contents_are_read_back_as_they_were_written(store: SnapshotStore, failure: str | None) -> None:
    journal = SnapshotJournal(store)
    row = await journal.begin(replace(NEW, failure=failure))
    for name in ("capturing", "captured", "measured", "usable", "deleted"):
        row = await journal.transition(row, STATES[name])
        assert contents_of(row) == STATES[name] and await store.get(row.id) == row
        if name == "usable":
            assert row.state == (SnapshotState.READY if failure is None else SnapshotState.FAILED)
    assert (row.layer, row.checkpoint, row.size_bytes) == (None, None, None)


async def usable(journal: SnapshotJournal) -> SnapshotRow:
    return await journal.transition(await journal.begin(NEW), STATES["usable"])


async def test_of_two_deletions_that_found_a_snapshot_one_is_told_that_it_is_gone(
    store: SnapshotStore,
) -> None:
    journal = SnapshotJournal(store)
    row = await usable(journal)
    both = (journal.transition(row, DeletedSnapshot(1)), journal.transition(row, DeletedSnapshot(2)))
    done, late = await asyncio.gather(*both, return_exceptions=True)
    assert isinstance(done, SnapshotRow) and isinstance(late, SnapshotNotFound)
    assert await store.get(row.id) == done


async def test_a_snapshot_that_was_deleted_does_not_get_its_contents_back(store: SnapshotStore) -> None:
    """Recovery measures a snapshot that its owner deletes meanwhile."""
    journal = SnapshotJournal(store)
    row = await usable(journal)
    gone = await journal.transition(row, DeletedSnapshot(1))
    with pytest.raises(SnapshotNotFound):
        await journal.transition(row, UsableSnapshot("layer", "memory", 2))
    with pytest.raises(SnapshotNotFound):
        await journal.change(row.id, name="new")
    await journal.touch(row.id)
    assert await store.get(row.id) == gone


async def test_a_capture_whose_row_is_gone_is_not_completed(store: SnapshotStore) -> None:
    journal = SnapshotJournal(store)
    row = await journal.begin(NEW)
    await journal.forget(row)
    with pytest.raises(SnapshotNotFound):
        await journal.transition(row, STATES["usable"])
    assert await store.get(row.id) is None


async def test_a_change_that_another_one_has_overtaken_is_refused(store: SnapshotStore) -> None:
    journal = SnapshotJournal(store)
    row = await journal.begin(NEW)
    captured = await journal.transition(row, STATES["captured"])
    with pytest.raises(IllegalTransition, match="any more"):
        await journal.transition(row, STATES["another"])
    assert await store.get(row.id) == captured


async def test_a_snapshot_that_was_extended_does_not_expire(store: SnapshotStore) -> None:
    journal = SnapshotJournal(store)
    row = await usable(journal)
    extended = await journal.change(row.id, expires_at=9)
    assert not await journal.expire(row, 6)
    assert await store.get(row.id) == extended
    assert await journal.expire(extended, 10)
    assert not await journal.expire(extended, 11), "it is deleted"
    found = await store.get(row.id)
    assert found is not None and contents_of(found) == DeletedSnapshot(10)


async def test_a_usable_snapshot_keeps_its_row(store: SnapshotStore) -> None:
    journal = SnapshotJournal(store)
    with pytest.raises(IllegalTransition):
        await journal.begin(replace(NEW, state=SnapshotState.READY))
    row = await usable(journal)
    with pytest.raises(IllegalTransition):
        await journal.forget(row)
    assert await store.get(row.id) == row
