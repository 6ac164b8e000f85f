"""The database: opened, brought to the present shape, closed."""

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


async def open_database(path: Path) -> AsyncEngine:
    """A database in one file, migrated to the present shape."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    await in_thread(_migrate, path)
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    sa.event.listen(engine.sync_engine, "connect", _configure)
    return engine


def _configure(connection: Any, _: object) -> None:
    cursor = connection.cursor()
    # A commit is on disk before anyone is told of it.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _migrate(path: Path) -> None:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    engine = sa.create_engine(f"sqlite:///{path}")
    try:
        with engine.begin() as connection:
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
