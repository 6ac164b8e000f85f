"""The SQLite database: migrations, one writer thread, readers in WAL mode."""

import asyncio
import contextlib
import functools
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from stead.errors import HostError
from stead.files import sync_folder
from stead.store.sealing import (
    RESTORE,
    SealingError,
    SealingKeys,
    put_value,
    seal_plain_values,
    sealed_values,
    sealing_key_of,
)
from stead.tasks import Threads, finished, in_thread

_MIGRATIONS = Path(__file__).parent / "migrations"
_TIMEOUT = 60
COPIES_DAYS = 7
"""Days for which the copy of a database from before a migration is kept."""
SEALED_SINCE = "0024"
"""The first schema whose releases seal secrets."""

T = TypeVar("T")


class Database:
    """One SQLite file. A write is durable when `write` returns.

    SQLite has one writer at a time, so one thread does all writes: they queue instead of waiting for a lock,
    and finish even when their caller is cancelled.
    """

    def __init__(self, path: Path, keys: SealingKeys | None = None) -> None:
        self.keys = keys or SealingKeys()
        """They seal and open the secrets in rows. Without keys, none can be stored or read."""
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

        return await Threads.QUERIES.run(reading)

    def look_up(self) -> AbstractContextManager[sa.Connection]:
        """A connection for indexed queries on the caller's thread.

        WAL readers never wait for the writer, and a thread hand-off takes longer than such a query.
        """
        return self._reader.connect()

    async def dispose(self) -> None:
        await in_thread(self._writer.shutdown)
        self._reader.dispose()
        self._engine.dispose()


@dataclass(frozen=True)
class Migration:
    """What a database needs before this release can use it."""

    current: str | None
    """The revision of its schema; None for a new database."""
    head: str


async def open_database(path: Path, keys: SealingKeys | None = None) -> Database:
    """Open a database and migrate it to the newest schema. Without keys, no secret can be stored or read.

    A server that runs with the older schema would fail: the caller holds the lock of the installation, or
    knows from `pending_migration` that there is nothing to do.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.touch(mode=0o600)
    await in_thread(_migrate, path)
    await in_thread(_write_ahead, path)
    return Database(path, keys)


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


def pending_migration(path: Path) -> Migration | None:
    """The migration that a database needs; None when it has the newest schema. HostError if it is newer."""
    if not path.exists():
        return Migration(None, _scripts().get_current_head() or "")
    with _engine(path) as engine, engine.connect() as connection:
        return _pending(path, connection)


def _migrate(path: Path) -> None:
    with _engine(path) as engine:
        with engine.connect() as connection:
            if _pending(path, connection) is None:
                return
        with engine.begin() as connection:
            # A concurrent migration waits here, then finds the newest revision.
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            pending = _pending(path, connection)
            if pending is None:
                return
            if pending.current is not None:
                _copy_aside(path, pending.current)
            config = _alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def _pending(path: Path, connection: sa.Connection) -> Migration | None:
    script = _scripts()
    head = script.get_current_head() or ""
    current = MigrationContext.configure(connection).get_current_revision()
    if current == head:
        return None
    if current is not None and current not in {revision.revision for revision in script.walk_revisions()}:
        raise HostError(f"database {path} was written by a newer Stead (revision {current}): upgrade Stead")
    return Migration(current, head)


def _alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.set_main_option("path_separator", "os")
    return config


@functools.cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_alembic_config())


@contextlib.contextmanager
def _engine(path: Path) -> Iterator[sa.Engine]:
    url = sa.URL.create("sqlite", database=str(path))
    engine = sa.create_engine(url, connect_args={"timeout": _TIMEOUT})
    try:
        yield engine
    except sa.exc.DatabaseError as error:
        raise HostError(f"cannot open the database {path}: {error.orig}") from error
    finally:
        engine.dispose()


def seal_secrets(path: Path, keys: SealingKeys) -> int:
    """Create the first sealing key, and seal secrets that an earlier release stored in clear.

    Copies from before a migration are sealed too: `unseal_copy` is their way back. Returns how many values
    were sealed. No key is created beside values of another one, which is lost and may be restored. The caller
    holds the lock of the installation.
    """
    count = _seal(path, keys)
    for copy in _copies(path):
        try:
            count += _seal(copy, keys)
        except HostError as error:
            raise SealingError(f"{copy} may hold secrets in clear: remove it, or restart: {error}") from error
    return count


def _seal(path: Path, keys: SealingKeys) -> int:
    with _engine(path) as engine, engine.begin() as connection:
        # Text that is replaced is overwritten with zeros.
        connection.exec_driver_sql("PRAGMA secure_delete=ON")
        if not keys.ids and any(sealing_key_of(value) for _, value in sealed_values(connection)):
            raise SealingError(f"no sealing key in {' or '.join(map(str, keys.files))}. {RESTORE}")
        keys.ensure()
        count = seal_plain_values(connection, keys)
    if count:
        _vacuum(path)
    return count


def unseal_copy(copy: Path, keys: SealingKeys) -> int:
    """Put secrets in clear into a copy from before a migration, as the release that it is of stored them.

    Returns how many; none if that release seals them itself.
    """
    if not copy.is_file():
        raise HostError(f"there is no database {copy}")
    with _engine(copy) as engine, engine.begin() as connection:
        revision = MigrationContext.configure(connection).get_current_revision()
        if revision is None:
            raise HostError(f"{copy} is no database of Stead")
        if revision >= SEALED_SINCE:
            return 0
        found = [(place, value) for place, value in sealed_values(connection) if sealing_key_of(value)]
        for place, value in found:
            put_value(connection, place, keys.open(value, place))
        return len(found)


def _vacuum(path: Path) -> None:
    """Rewrite the file: text that was deleted before is in free pages, and in the log of the database."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_TIMEOUT, isolation_level=None)) as connection:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise SealingError(
            f"secrets are sealed, but free pages of {path} may still hold them in clear: {error}."
            f" Free disk space, stop the server, and run `sqlite3 {path} VACUUM`"
        ) from error


def _copies(path: Path) -> list[Path]:
    """The copies of a database from before migrations."""
    return sorted(path.parent.glob(f"{path.name}.[0-9][0-9][0-9][0-9]"))


def _copy_aside(path: Path, revision: str) -> None:
    """Copy a database before its migration, for the way back to the release that it is of."""
    target = path.with_name(f"{path.name}.{revision}")
    unfinished = target.with_name(f".{target.name}.new")
    unfinished.unlink(missing_ok=True)
    try:
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with (
                contextlib.closing(sqlite3.connect(path, timeout=_TIMEOUT)) as source,
                contextlib.closing(sqlite3.connect(unfinished)) as copy,
            ):
                source.backup(copy)
                # A file alone, without a log beside it.
                copy.execute("PRAGMA journal_mode=DELETE")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        unfinished.rename(target)
        sync_folder(target.parent)
    except (OSError, sqlite3.Error) as error:
        unfinished.unlink(missing_ok=True)
        raise HostError(
            f"cannot copy the database to {target} before its migration: {error}."
            f" The database is unchanged: free {path.stat().st_size >> 20} MiB, and start again"
        ) from error


def remove_old_copies(path: Path) -> None:
    """Remove copies from before a migration when the release before it is not likely to be needed again."""
    oldest = time.time() - COPIES_DAYS * 86_400
    for copy in _copies(path):
        if copy.stat().st_mtime < oldest:
            copy.unlink(missing_ok=True)
    # Of a start that was killed. Its secrets are in clear.
    for unfinished in path.parent.glob(f".{path.name}.[0-9][0-9][0-9][0-9].new*"):
        unfinished.unlink(missing_ok=True)


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
