"""The database: opened, brought to the present shape, closed."""

import contextlib
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any, TypeVarTuple, overload

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.sql.selectable import TypedReturnsRows

from stead.errors import HostError
from stead.tasks import finished, in_thread

_MIGRATIONS = Path(__file__).parent / "migrations"
_TIMEOUT = 60

Columns = TypeVarTuple("Columns")
Values = Sequence[Mapping[str, Any]] | Mapping[str, Any]


class Database:
    """One file. A transaction in it is durable when it is over."""

    def __init__(self, path: Path) -> None:
        self._engine = create_async_engine(sa.URL.create("sqlite+aiosqlite", database=str(path)))
        sa.event.listen(self._engine.sync_engine, "connect", _configure)
        self._reader = sa.create_engine(
            sa.URL.create("sqlite", database=str(path)), isolation_level="AUTOCOMMIT"
        )
        sa.event.listen(self._reader, "connect", _forbid_writing)

    def begin(self) -> AbstractAsyncContextManager["Transaction"]:
        """To write: all of it, or nothing when the block is left by an error."""
        return _carried_through(self._engine.begin())

    def connect(self) -> AbstractAsyncContextManager["Transaction"]:
        """To read much, or what has to be searched for."""
        return _carried_through(self._engine.connect())

    def look_up(self) -> AbstractContextManager[sa.Connection]:
        """To read a row by what it is indexed by, on the caller's thread.

        Readers never wait for a writer, and another thread takes longer to ask than the row to find.
        """
        return self._reader.connect()

    async def dispose(self) -> None:
        self._reader.dispose()
        await self._engine.dispose()


class Transaction:
    """What can be done in the database between a beginning and an end."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    @overload
    async def execute(  # type: ignore[overload-overlap]  # as SQLAlchemy's own
        self, statement: TypedReturnsRows[*Columns], values: Values | None = None
    ) -> sa.CursorResult[*Columns]: ...

    @overload
    async def execute(
        self, statement: sa.Executable, values: Values | None = None
    ) -> sa.CursorResult[Any]: ...

    async def execute(self, statement: sa.Executable, values: Values | None = None) -> sa.CursorResult[Any]:
        return await finished(self._connection.execute(statement, values))


@contextlib.asynccontextmanager
async def _carried_through(block: AbstractAsyncContextManager[AsyncConnection]) -> AsyncIterator[Transaction]:
    """Let whoever waits be cancelled, but nothing that SQLite is asked to do.

    A connection that is given up in the middle of a statement keeps the whole database locked.
    """
    stack = contextlib.AsyncExitStack()
    try:
        yield Transaction(await finished(stack.enter_async_context(block)))
    except BaseException:
        await finished(stack.__aexit__(*sys.exc_info()))
        raise
    await finished(stack.aclose())


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
