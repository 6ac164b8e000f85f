"""Build records: phases with times and states, the list of builds, recovery and migration."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stead.builds import records as records_module
from stead.builds.records import Phase, PhaseInfo, Records
from stead.logbook import Logbook
from stead.store.builds import BuildStore
from stead.store.database import Database, open_database
from support.databases import migrate, put_database


class Lines(Logbook):
    """A logbook that keeps messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    async def write(self, account: str, message: str, **about: Any) -> None:
        self.messages.append(message)


@pytest_asyncio.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_database(await put_database(tmp_path / "stead.db"))
    yield opened
    await opened.dispose()


def outline(phases: Sequence[PhaseInfo]) -> list[tuple[str, str, bool]]:
    return [(each.name, each.state, each.finished_at is not None) for each in phases]


async def test_one_phase_runs_at_a_time_and_ends_when_the_next_one_starts(database: Database) -> None:
    lines = Lines()
    records = Records(BuildStore(database), lines)
    planned = [Phase(1, "cached"), Phase(2, "vm"), Phase(2, "files"), Phase(None, "vm")]
    record = await records.open("me", planned, request="ri-1")
    assert (await records.get("me", record.id)).planned_phases == (
        *("layer 1: cached", "layer 2: vm", "layer 2: files"),
        "vm",
    )
    await record.layer(1).skip("cached")
    await record.layer(2).start("vm")
    build = await records.get("me", record.id)
    assert (build.state, build.current_phase, build.request) == ("running", "layer 2: vm", "ri-1")
    assert outline(await records.phases("me", record.id)) == [
        ("layer 1: cached", "succeeded", True),
        ("layer 2: vm", "running", False),
    ]
    await record.layer(2).start("files")
    await record.vm.start("vm")
    await record.succeed()
    build = await records.get("me", record.id)
    assert (build.state, build.current_phase, build.failure) == ("succeeded", None, None)
    phases = await records.phases("me", record.id)
    assert [phase.name for phase in phases] == list(build.planned_phases)
    assert all(phase.state == "succeeded" for phase in phases)
    assert phases[-1].finished_at == build.finished_at
    assert lines.messages == [
        *("phase started: layer 2: vm", "phase started: layer 2: files", "phase started: vm"),
        "build succeeded",
    ]


async def test_a_layer_that_another_request_builds_is_one_phase(database: Database) -> None:
    """It replaces what was planned for that layer and the layers below it."""
    records = Records(BuildStore(database), Lines())
    planned = [Phase(1, "vm"), Phase(1, "snapshot"), Phase(2, "vm"), Phase(3, "vm"), Phase(None, "vm")]
    record = await records.open("me", planned)
    await record.layer(1).start("vm")
    await record.skip(2, "waiting", wait=True)
    build = await records.get("me", record.id)
    assert build.planned_phases == ("layer 1: vm", "layer 2: waiting", "layer 3: vm", "vm")
    assert build.current_phase == "layer 2: waiting"
    await record.fail("files: no space", "sc-1")
    build = await records.get("me", record.id)
    assert (build.state, build.failure) == ("failed", "files: no space")
    assert [(phase.state, phase.snapshot) for phase in await records.phases("me", record.id)] == [
        ("succeeded", None),
        ("failed", "sc-1"),
    ]


async def test_builds_are_listed_newest_first_by_state_and_page(database: Database) -> None:
    records = Records(BuildStore(database), Lines())
    opened = [await records.open("me", [Phase(1, "vm", labelled=False)], labelled=False) for _ in range(5)]
    await records.open("another", [])
    await opened[1].layer(1).start("vm")
    await opened[0].succeed()
    await opened[4].fail("broken")
    newest = [record.id for record in reversed(opened)]
    builds, total = await records.list("me")
    assert ([build.id for build in builds], total) == (newest, 5)
    assert builds[3].current_phase == "vm"
    builds, total = await records.list("me", limit=2, offset=1)
    assert ([build.id for build in builds], total) == (newest[1:3], 5)
    builds, total = await records.list("me", "running")
    assert ([build.id for build in builds], total) == (newest[1:4], 3)


async def test_a_restart_fails_running_builds_and_their_phases(database: Database) -> None:
    records = Records(BuildStore(database), Lines())
    record = await records.open("me", [Phase(None, "vm"), Phase(None, "files")])
    await record.vm.start("vm")
    await records.recover()
    build = await records.get("me", record.id)
    assert (build.state, build.failure) == ("failed", "the Stead server stopped during the build")
    assert outline(await records.phases("me", record.id)) == [("vm", "failed", True)]


async def test_migration_gives_old_phases_their_end_and_state(tmp_path: Path) -> None:
    path = tmp_path / "stead.db"
    migrate(path, "0007")
    with closing(sqlite3.connect(path)) as old:
        old.execute(
            "INSERT INTO builds (id, account, state, planned_phases, started_at, finished_at, updated_at)"
            " VALUES ('bld-1', 'me', 'failed', '[\"machine\", \"files\"]', 1000000000, 5000000000, 0)"
        )
        rows = [("bph-1", 0, "machine", 1), ("bph-2", 1, "files", 2)]
        old.executemany(
            "INSERT INTO build_phases (id, build, position, name, started_at) VALUES (?, 'bld-1', ?, ?, ?)",
            [(row, position, name, at * 10**9) for row, position, name, at in rows],
        )
        old.commit()
    database = await open_database(path)
    phases = await Records(BuildStore(database), Lines()).phases("me", "bld-1")
    assert [(phase.name, phase.state, phase.finished_at) for phase in phases] == [
        ("machine", "succeeded", 2.0),
        ("files", "failed", 5.0),
    ]
    await database.dispose()


async def test_finished_builds_are_deleted_after_their_retention(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = Records(BuildStore(database), Lines())
    old, running = [await records.open("me", [Phase(None, "vm")]) for _ in range(2)]
    await old.vm.start("vm")
    await old.succeed()
    monkeypatch.setattr(records_module, "_PRUNE_EVERY", -1)
    monkeypatch.setattr(records_module, "_RETENTION", 0)
    new = await records.open("me", [])
    assert {build.id for build in (await records.list("me"))[0]} == {new.id, running.id}


@pytest.mark.parametrize("first", ["succeed", "fail"])
async def test_the_first_end_of_a_build_stays(database: Database, first: str) -> None:
    """A client disconnects while the success is written, or the other way round."""
    lines = Lines()
    records = Records(BuildStore(database), lines)
    record = await records.open("me", [Phase(None, "vm")])
    await record.vm.start("vm")
    ends = [record.succeed(), record.fail("cancelled", "sc-1")]
    for end in ends if first == "succeed" else reversed(ends):
        await end
    ended, phases = await records.get("me", record.id), await records.phases("me", record.id)
    if first == "succeed":
        assert (ended.state, ended.failure) == ("succeeded", None)
        assert (phases[0].state, phases[0].snapshot) == ("succeeded", None)
    else:
        assert (ended.state, ended.failure) == ("failed", "cancelled")
        assert (phases[0].state, phases[0].snapshot) == ("failed", "sc-1")
    assert len(lines.messages) == 2, "of two ends, one is in the log"


async def test_concurrent_ends_of_a_build_are_one(database: Database) -> None:
    lines = Lines()
    records = Records(BuildStore(database), lines)
    record = await records.open("me", [])
    await asyncio.gather(record.fail("one"), record.succeed(), record.fail("two"))
    assert len(lines.messages) == 1
    ended = await records.get("me", record.id)
    expected = "build succeeded" if ended.state == "succeeded" else f"build failed: {ended.failure}"
    assert lines.messages == [expected]


async def test_a_build_that_has_ended_gets_no_more_phases(database: Database) -> None:
    """The server was restarted, or the client has left, while a layer is built for others."""
    lines = Lines()
    records = Records(BuildStore(database), lines)
    record = await records.open("me", [Phase(None, "vm"), Phase(None, "files")])
    await record.vm.start("vm")
    await records.recover()
    ended = await records.get("me", record.id)
    await record.vm.start("files")
    await record.succeed()
    assert await records.get("me", record.id) == ended and ended.state == "failed"
    assert [each.name for each in await records.phases("me", record.id)] == ["vm"]
    assert lines.messages == ["phase started: vm"]
