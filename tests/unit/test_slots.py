"""Slots, which are addresses: a freed one is not given to another VM right away."""

from pathlib import Path

import pytest

from stead.errors import CapacityExceeded
from stead.machines import journal as journals
from stead.machines.journal import Journal
from stead.machines.records import Properties, Record
from stead.machines.states import Creating, Deleting
from stead.settings import Size
from stead.store.database import open_database
from stead.store.machines import MachineStore
from support.databases import put_database


async def test_a_freed_slot_is_kept_for_some_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = await open_database(await put_database(tmp_path / "stead.db"))
    journal = Journal(MachineStore(database), range(2))

    async def allocated() -> Record:
        return await journal.allocate(Creating, Size(), "template", Properties())

    try:
        first, second = await allocated(), await allocated()
        assert (first.slot, second.slot) == (0, 1)
        await journal.forget(await journal.transition(first, Deleting("clean")))
        with pytest.raises(CapacityExceeded):
            await allocated()
        monkeypatch.setattr(journals, "_QUARANTINE", 0.0)
        assert (await allocated()).slot == 0
    finally:
        await database.dispose()
