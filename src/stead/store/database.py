"""The database: opened, brought to the present shape, closed."""

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
    """One file. What is written in it is durable when `write` returns.

    SQLite has one writer at a time, so there is one thread for it: writes wait for their turn, never for a
    lock, and go on to their end whether or not somebody still waits for them.
    """

    def __init__(self, path: Path) -> None:
        url = sa.URL.create("sqlite", database=str(path))
        self._engine = sa.create_engine(url)
        sa.event.listen(self._engine, "connect", _configure)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="database")
        # On the loop's thread nobody may have to wait for a connection.
        self._reader = sa.create_engine(url, isolation_level="AUTOCOMMIT", max_overflow=-1)
        sa.event.listen(self._reader, "connect", _forbid_writing)

    async def write(self, work: Callable[[sa.Connection], T]) -> T:
        """Do something in a transaction: all of it, or nothing when it ends with an error."""

        def transaction() -> T:
            with self._engine.begin() as connection:
                return work(connection)

        return await finished(asyncio.get_running_loop().run_in_executor(self._writer, transaction))

    async def execute(self, *statements: sa.Executable) -> int:
        """Do these in a transaction; says how many rows the last of them concerned."""
        return await self.write(
            lambda connection: [connection.execute(each) for each in statements][-1].rowcount
        )

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """To read much, or what has to be searched for."""

        def reading() -> T:
            with self.look_up() as connection:
                return work(connection)

        return await in_thread(reading)

    def look_up(self) -> AbstractContextManager[sa.Connection]:
        """To read a row by what it is indexed by, on the caller's thread.

        Readers never wait for a writer, and another thread takes longer to ask than the row to find.
        """
        return self._reader.connect()

    async def dispose(self) -> None:
        await in_thread(self._writer.shutdown)
        self._reader.dispose()
        self._engine.dispose()


async def open_database(path: Path) -> Database:
    """A database, migrated to the present shape."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    await in_thread(_migrate, path)
    await in_thread(_write_ahead, path)
    return Database(path)


def _configure(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    # A commit is on disk before anyone is told of it.
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
            # Whoever comes at the same time waits here, and then finds it done.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            current = MigrationContext.configure(connection).get_current_revision()
            if current == script.get_current_head():
                return
            known = {revision.revision for revision in script.walk_revisions()}
            if current is not None and current not in known:
                raise HostError(f"{path} was written by a newer Stead (revision {current})")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except sa.exc.DatabaseError as error:
        raise HostError(f"cannot open the database {path}: {error.orig}") from error
    finally:
        engine.dispose()


def _write_ahead(path: Path) -> None:
    """Let readers go on while somebody writes; the file itself remembers it, for all connections."""
    deadline = time.monotonic() + _TIMEOUT
    with contextlib.closing(sqlite3.connect(path)) as connection:
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as error:
                # Unlike all else it does not wait when somebody is in its way.
                if time.monotonic() > deadline:
                    raise HostError(f"cannot open the database {path}: {error}") from error
                time.sleep(0.01)
            else:
                return
