"""The database: migrations, concurrent opens, writes and reads."""

import asyncio
import contextlib
import importlib
import itertools
import pkgutil
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import get_args

import pytest
import pytest_asyncio
import sqlalchemy as sa

from stead import store
from stead.identity.accounts import Accounts
from stead.machines.machine import machine_info
from stead.machines.records import record_of
from stead.machines.states import Creating
from stead.store.accounts import AccountStore, accounts
from stead.store.database import Database, open_database
from stead.store.machines import MachineStore
from stead.store.rows import Rows
from support.databases import migrate


@pytest_asyncio.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_database(tmp_path / "stead.db")
    yield opened
    await opened.dispose()


async def test_rows_have_the_columns_that_migrations_create(database: Database) -> None:
    modules = [
        importlib.import_module(f"stead.store.{each.name}") for each in pkgutil.iter_modules(store.__path__)
    ]
    tables = {
        each for module in modules for each in vars(module).values() if isinstance(each, sa.TableClause)
    }
    with database.look_up() as connection:
        schema = sa.inspect(connection)
        assert {table.name for table in tables} == {*schema.get_table_names()} - {"alembic_version"}
        created = {table.name: schema.get_columns(table.name) for table in tables}
    for table in tables:
        assert {column.name for column in table.c} == {column["name"] for column in created[table.name]}
    for kind in Rows.__subclasses__():
        optional = {field.name for field in fields(kind.row) if NoneType in get_args(field.type)}
        for column in created[kind.table.name]:
            same = column["type"]._type_affinity is kind.table.c[column["name"]].type._type_affinity
            assert same or isinstance(column["type"], sa.Integer), (kind, column)
            if not column.get("primary_key"):
                assert column["nullable"] == (column["name"] in optional), (kind, column)


async def test_concurrent_opens_of_a_new_database(tmp_path: Path) -> None:
    databases = await asyncio.gather(*(open_database(tmp_path / "stead.db") for _ in range(5)))
    made = await asyncio.gather(*(Accounts(database).default() for database in databases))
    assert len({account.id for account in made}) == 1
    await asyncio.gather(*(database.dispose() for database in databases))


async def test_open_waits_for_a_reader_to_switch_to_wal(tmp_path: Path) -> None:
    """The switch to WAL mode needs exclusive access and ignores SQLite's busy timeout."""
    path = tmp_path / "stead.db"
    await (await open_database(path)).dispose()
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("PRAGMA journal_mode=DELETE")
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM accounts").fetchall()
    opening = asyncio.create_task(open_database(path))
    _, waiting = await asyncio.wait({opening}, timeout=0.5)
    assert waiting
    reader.close()
    database = await opening
    with database.look_up() as connection:
        assert connection.execute(sa.text("PRAGMA journal_mode")).scalar_one() == "wal"
    await database.dispose()


@pytest.mark.parametrize("name", ["a b", "a?mode=ro", "a#b", "a%20b"])
async def test_paths_with_special_characters(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "stead.db"
    database = await open_database(path)
    account = await Accounts(database).default()
    assert (await AccountStore(database).get(account.id)) is not None
    await database.dispose()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT id FROM accounts").fetchall() == [(account.id,)]
    connection.close()
    assert {each.name for each in tmp_path.iterdir()} == {name}


async def test_a_cancelled_write_does_not_lock_the_database(database: Database) -> None:
    store = AccountStore(database)
    account = await Accounts(database).create("changing")

    async def rename() -> None:
        for number in itertools.count():
            await store.update(account.id, name=str(number))

    for moment in range(60):
        renaming = asyncio.create_task(rename())
        await asyncio.sleep(moment * 0.0005)
        renaming.cancel()
        # Once more, as a server does that stops: not even then is it given up in the middle.
        await asyncio.sleep(0)
        renaming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await renaming
        async with asyncio.timeout(60):
            await store.update(account.id, name="next")
        found = await store.get(account.id)
        assert found is not None
        assert found.name == "next"


async def test_look_up_sees_committed_rows_and_does_not_wait_for_writers(
    database: Database, tmp_path: Path
) -> None:
    store = AccountStore(database)
    account = await Accounts(database).create("before")
    for name in ("one", "two"):
        with contextlib.closing(sqlite3.connect(tmp_path / "stead.db")) as other:
            other.execute("UPDATE accounts SET name = ?", (name,))
            before = await asyncio.wait_for(store.get(account.id), 60)
            assert before is not None and before.name != name
            other.commit()
        after = await store.get(account.id)
        assert after is not None and after.name == name


async def test_a_look_up_cannot_write(database: Database) -> None:
    with database.look_up() as connection, pytest.raises(sa.exc.OperationalError, match="readonly"):
        connection.execute(accounts.delete())


async def test_migration_of_vms_that_were_being_recreated(tmp_path: Path) -> None:
    """Before 0022, a new VM with any reason was one that is recreated."""
    path = tmp_path / "stead.db"
    migrate(path, "0021")
    old = [
        ("created", "creating", None),
        ("again", "creating", "being recreated"),
        ("ended", "stopped", "killed"),
    ]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executemany(
            "INSERT INTO machines (id, state, reason, step, vcpus, memory_mib, disk_gib, slot, template,"
            " hostname, guest_machine_id, created_at, updated_at, top)"
            " VALUES (?, ?, ?, NULL, 1, 512, 20, ?, 't', 'h', 'g', 1, 1, 'top')",
            [(*row, slot) for slot, row in enumerate(old)],
        )
        connection.commit()
    database = await open_database(path)
    rows = {row.id: row for row in await MachineStore(database).list()}
    assert {row.id: (row.recreated, row.reason) for row in rows.values()} == {
        "created": (False, None),
        "again": (True, None),
        "ended": (False, "killed"),
    }
    assert record_of(rows["created"]).state == Creating("allocate", "top")
    assert record_of(rows["again"]).state == Creating("allocate", "top", recreated=True)
    assert machine_info(rows["again"]).reason == "being recreated"
    await database.dispose()
