"""The database: opened, brought to the present shape, closed."""

import contextlib
import sqlite3
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from stead.errors import HostError
from stead.tasks import in_thread

_MIGRATIONS = Path(__file__).parent / "migrations"
_TIMEOUT = 60


async def open_database(path: Path) -> AsyncEngine:
    """A database in one file, migrated to the present shape."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    await in_thread(_migrate, path)
    await in_thread(_write_ahead, path)
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    sa.event.listen(engine.sync_engine, "connect", _configure)
    return engine


def _configure(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    # A commit is on disk before anyone is told of it.
    for pragma in ("synchronous=FULL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _migrate(path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": _TIMEOUT})
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
