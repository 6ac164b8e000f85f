"""The SQLite database: migrations, one writer thread, readers in WAL mode."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from stead.errors import HostError
from stead.tasks import finished, in_thread

_MIGRATIONS = Path(__file__).parent / "migrations"
_TIMEOUT = 60

T = TypeVar("T")


class Database:
    """One SQLite file. A write is durable when `write` returns.

    SQLite has one writer at a time, so one thread does all writes: they queue instead of waiting for a lock,
    and finish even when their caller is cancelled.
    """

    def __init__(self, path: Path) -> None:
        url = sa.URL.create("sqlite", database=str(path))
        self._engine = sa.create_engine(url)
        sa.event.listen(self._engine, "connect", _configure)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="database")
        # No pool limit: a wait for a connection would block the event loop.
        self._reader = sa.create_engine(url, isolation_level="AUTOCOMMIT", max_overflow=-1)
        sa.event.listen(self._reader, "connect", _forbid_writing)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Run work in a transaction; an exception rolls it back."""

        def transaction() -> T:
            with self._engine.begin() as connection:
                return work(connection)

        return await finished(asyncio.get_running_loop().run_in_executor(self._writer, transaction))

    async def execute(self, *statements: sa.Executable) -> int:
        """Run statements in a transaction; returns the row count of the last."""
        return await self.write(
            lambda connection: [connection.execute(each) for each in statements][-1].rowcount
        )

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run a query that may be slow in a thread."""

        def reading() -> T:
            with self.look_up() as connection:
                return work(connection)

        return await in_thread(reading)

    def look_up(self) -> AbstractContextManager[sa.Connection]:
        """A connection for indexed queries on the caller's thread.

        WAL readers never wait for the writer, and a thread hand-off takes longer than such a query.
        """
        return self._reader.connect()

    async def dispose(self) -> None:
        await in_thread(self._writer.shutdown)
        self._reader.dispose()
        self._engine.dispose()


async def open_database(path: Path) -> Database:
    """Open a database and migrate it to the newest schema."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    await in_thread(_migrate, path)
    await in_thread(_write_ahead, path)
    return Database(path)


def _configure(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    # A commit is on disk before its caller continues.
    for pragma in ("synchronous=FULL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _forbid_writing(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA query_only=ON")
    cursor.close()


def _migrate(path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    url = sa.URL.create("sqlite", database=str(path))
    engine = sa.create_engine(url, connect_args={"timeout": _TIMEOUT})
    try:
        with engine.connect() as connection:
            if MigrationContext.configure(connection).get_current_revision() == script.get_current_head():
                return
        with engine.begin() as connection:
            # A concurrent migration waits here, then finds the newest revision.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            current = MigrationContext.configure(connection).get_current_revision()
            if current == script.get_current_head():
                return
            known = {revision.revision for revision in script.walk_revisions()}
            if current is not None and current not in known:
                raise HostError(
                    f"database {path} was written by a newer Stead (revision {current}): upgrade Stead"
                )
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except sa.exc.DatabaseError as error:
        raise HostError(f"cannot open the database {path}: {error.orig}") from error
    finally:
        engine.dispose()


def _write_ahead(path: Path) -> None:
    """Switch the file to WAL mode, in which readers do not block; the mode is stored in the file."""
    deadline = time.monotonic() + _TIMEOUT
    with contextlib.closing(sqlite3.connect(path)) as connection:
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                # This pragma ignores the busy timeout: retry while another connection is open.
                if time.monotonic() > deadline:
                    raise HostError(f"cannot open the database {path}: {error}") from error
                time.sleep(0.01)
            else:
                return
