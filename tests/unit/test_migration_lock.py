"""Migrations: only with the lock of the installation, and after a copy of the database."""

import asyncio
import contextlib
import os
import sqlite3
import stat
import time
from pathlib import Path

import pytest

from stead.errors import HostError
from stead.files import try_lock
from stead.settings import Settings
from stead.store import installation_id
from stead.store.database import COPIES_DAYS, open_database, pending_migration
from stead.store.installation_id import open_beside_server, open_database_of
from support.databases import migrate, put_database


def revision(path: Path) -> str:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        (found,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    return str(found)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data=tmp_path)


async def test_command_does_not_migrate_beside_a_running_server(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settings.data / "stead.db"
    migrate(path, "0022")
    monkeypatch.setattr(installation_id, "_LOCK_WAIT", 0.3)
    lock = try_lock(settings.lock)
    assert lock is not None
    try:
        with pytest.raises(HostError, match=r"schema 0022.*systemctl restart stead"):
            await open_beside_server(settings)
        assert revision(path) == "0022"
    finally:
        os.close(lock)
    await (await open_beside_server(settings)).dispose()
    assert pending_migration(path) is None


async def test_command_uses_the_newest_schema_beside_a_running_server(settings: Settings) -> None:
    await (await open_database_of(settings.data)).dispose()
    lock = try_lock(settings.lock)
    assert lock is not None
    try:
        await (await open_beside_server(settings)).dispose()
    finally:
        os.close(lock)


async def test_commands_wait_for_the_one_that_migrates(settings: Settings) -> None:
    databases = await asyncio.gather(*(open_beside_server(settings) for _ in range(4)))
    for database in databases:
        await database.dispose()
    lock = try_lock(settings.lock)
    assert lock is not None, "the lock is held only while the database is opened"
    os.close(lock)


async def test_database_is_copied_before_a_migration(tmp_path: Path) -> None:
    path = tmp_path / "stead.db"
    migrate(path, "0022")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("INSERT INTO accounts (id, name, created_at) VALUES ('a', 'kept', 1)")
        connection.commit()
    await (await open_database(path)).dispose()
    copy = tmp_path / "stead.db.0022"
    assert revision(copy) == "0022" and revision(path) != "0022"
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        assert connection.execute("SELECT name FROM accounts").fetchall() == [("kept",)]
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600


async def test_no_migration_without_its_copy(tmp_path: Path) -> None:
    path = tmp_path / "stead.db"
    migrate(path, "0022")
    (tmp_path / "stead.db.0022").mkdir()
    with pytest.raises(HostError, match=r"cannot copy the database to .*stead\.db\.0022.*unchanged"):
        await open_database(path)
    assert revision(path) == "0022"
    assert {each.name for each in tmp_path.iterdir()} == {"stead.db", "stead.db.0022"}


async def test_old_copies_are_removed(tmp_path: Path) -> None:
    await put_database(tmp_path / "stead.db")
    for name, days in (("stead.db.0007", COPIES_DAYS + 1), ("stead.db.0022", 1), ("stead.db.backup", 400)):
        copy = tmp_path / name
        copy.touch()
        os.utime(copy, (0, time.time() - days * 86_400))
    await (await open_database_of(tmp_path)).dispose()
    assert not (tmp_path / "stead.db.0007").exists()
    assert (tmp_path / "stead.db.0022").exists() and (tmp_path / "stead.db.backup").exists()
