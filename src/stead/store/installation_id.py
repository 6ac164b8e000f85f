"""Installation id: ties the database to its data folder.

At start-up, files that no row refers to are set aside. With an empty or foreign database these would be all
of them, so such a database is refused.
"""

import asyncio
import contextlib
import os
import secrets
from pathlib import Path

import sqlalchemy as sa

from stead.errors import HostError
from stead.files import try_lock, write_atomically
from stead.settings import Settings
from stead.store.database import Database, open_database, pending_migration, remove_old_copies, seal_secrets
from stead.store.sealing import SealingError, SealingKeys
from stead.tasks import in_thread

installation = sa.table("installation", sa.column("id"))
DATABASE = "stead.db"
MARK = "installation"
_DATA = ("machines", "layers", "checkpoints", "repos")
_NOT_DATA = {"new", "gone", "gitconfig"}
_LOCK_WAIT = 10.0
"""Seconds that a command waits for a server or a command that is migrating the database."""


async def open_beside_server(settings: Settings) -> Database:
    """Open the database for a command that may run beside a server.

    Only a process with the lock of the installation migrates it: a running server of an older release would
    fail with the new schema.
    """
    path, keys = settings.data / DATABASE, SealingKeys(settings.sealing_key_files)
    deadline = asyncio.get_running_loop().time() + _LOCK_WAIT
    while True:
        lock = try_lock(settings.lock)
        if lock is not None:
            try:
                database = await open_database_of(settings.data, keys)
                try:
                    await in_thread(seal_secrets, path, keys)
                except SealingError:
                    # Without a key, only commands that need one fail, and say why.
                    return database
                except BaseException:
                    await database.dispose()
                    raise
                return database
            finally:
                os.close(lock)
        pending = await in_thread(pending_migration, path)
        if pending is None:
            return await open_database_of(settings.data, keys)
        if asyncio.get_running_loop().time() > deadline:
            raise HostError(
                f"the database of {settings.data} has schema {pending.current}, this Stead needs"
                f" {pending.head}, and a server of another release is running. Restart it with this release"
                " (`systemctl restart stead`), which migrates the database, then run this command again"
            )
        await asyncio.sleep(0.1)


async def open_database_of(data: Path, keys: SealingKeys | None = None) -> Database:
    """Open the database of a data folder; HostError when the two do not belong together.

    The caller holds the lock of the installation, unless the database has the newest schema.
    """
    path = data / DATABASE
    mark = _read_mark(data)
    is_new = not path.exists() or path.stat().st_size == 0
    if is_new and (mark is not None or _holds_data(data)):
        raise HostError(
            f"{data} has VMs or repositories, but its database {path} is missing: restore the database from"
            " the same backup, or move the folder away to start with an empty installation"
        )
    database = await open_database(path, keys)
    try:
        recorded = await _recorded(database)
        if mark is not None and recorded != mark:
            whose = f"of another installation ({recorded})" if recorded else "older than the folder"
            raise HostError(
                f"the database {path} does not belong to {data} ({mark}), it is {whose}: restore the database"
                f" and the folder from one backup. To use them together all the same, remove {data / MARK}"
            )
        if recorded is None:
            recorded = await _give_id(database)
        if mark is None:
            write_atomically(data / MARK, f"{recorded}\n".encode())
        remove_old_copies(path)
    except BaseException:
        await database.dispose()
        raise
    return database


async def _give_id(database: Database) -> str:
    """A new id, or the one that another process gave at the same time: one statement inserts and compares."""
    given = sa.select(sa.literal(secrets.token_hex(16))).where(~sa.exists(sa.select(installation.c.id)))
    await database.execute(installation.insert().from_select(["id"], given))
    found = await _recorded(database)
    if found is None:
        raise HostError("the database lost the id of the installation")
    return found


async def _recorded(database: Database) -> str | None:
    return await database.read(lambda connection: connection.scalar(sa.select(installation.c.id)))


def _read_mark(data: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return (data / MARK).read_text(errors="replace")[:64].strip()
    return None


def _holds_data(data: Path) -> bool:
    for name in _DATA:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if any(path.name not in _NOT_DATA for path in (data / name).iterdir()):
                return True
    return False
