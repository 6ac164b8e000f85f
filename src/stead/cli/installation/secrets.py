"""`stead secrets`: the keys that seal secrets in the database; for operators of the installation."""

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
import typer

from stead.cli.installation.terminal import run, settings
from stead.cli.output import Json, note, print_json
from stead.errors import HostError
from stead.store.database import Database, unseal_copy
from stead.store.github import github_apps
from stead.store.installation_id import DATABASE, open_beside_server
from stead.store.networks import sessions
from stead.store.sealing import Place, SealingKeys, put_value, reseal, unreadable
from stead.tasks import in_thread

app = typer.Typer(no_args_is_help=True, help="Rotate the key of secrets in the database.")


@contextlib.asynccontextmanager
async def _opened() -> AsyncIterator[Database]:
    chosen = settings()
    if not (chosen.data / DATABASE).exists():
        raise HostError(f"no installation in {chosen.data}: set STEAD_DATA, or start the server once")
    _require_root()
    database = await open_beside_server(chosen)
    try:
        yield database
    finally:
        await database.dispose()


def _require_root() -> None:
    if os.geteuid() != 0:
        raise HostError("sealing keys are of root: run this command as root")


@app.command("rotate")
def rotate_key(as_json: Json = False) -> None:
    """Create a new sealing key and seal all secrets with it. A running server notices.

    Older keys stay in the file, for backups of the database: delete their lines when no backup needs them.
    """

    async def work() -> None:
        async with _opened() as database:
            database.keys.rotate()
            count = await database.write(lambda connection: reseal(connection, database.keys))
            _report({"key": database.keys.ids[0], "resealed": count}, as_json)
            if not as_json:
                note("back up the file of the key, apart from the database")

    run(work())


@app.command("reseal")
def reseal_secrets(as_json: Json = False) -> None:
    """Seal all secrets with the first key of the file, after you have put a key there yourself."""

    async def work() -> None:
        async with _opened() as database:
            count = await database.write(lambda connection: reseal(connection, database.keys))
            _report({"key": database.keys.ids[0], "resealed": count}, as_json)

    run(work())


@app.command("forget")
def forget_secrets(as_json: Json = False) -> None:
    """Delete secrets that no key opens, when the file of the key is lost for good.

    GitHub Apps are disconnected: connect them again. WireGuard sessions of the VPCs end.
    """

    async def work() -> None:
        async with _opened() as database:
            lost = await database.write(lambda connection: _forget(connection, database))
        if as_json:
            print_json({"forgotten": [str(place) for place in lost]})
            return
        for place in lost:
            typer.echo(f"forgot {place}")
        if not lost:
            typer.echo("every secret can be read: nothing to forget")
        elif any(place.table == github_apps.name for place in lost):
            note("connect the GitHub Apps again with `stead github connect`")

    run(work())


@app.command("unseal")
def unseal_database(
    copy: Annotated[
        Path, typer.Argument(metavar="FILE", help="A copy from before a migration, stead.db.NNNN.")
    ],
    as_json: Json = False,
) -> None:
    """Put secrets in clear into a copy of the database, for the earlier release that it is of.

    That release cannot read sealed secrets. Install it and move the copy over `stead.db` at once: the next
    command of this release seals it again.
    """

    async def work() -> None:
        _require_root()
        count = await in_thread(unseal_copy, copy, SealingKeys(settings().sealing_key_files))
        if as_json:
            print_json({"unsealed": count})
        elif count:
            typer.echo(f"{count} secrets are in clear in {copy}")
        else:
            typer.echo(f"nothing to unseal in {copy}")

    run(work())


def _forget(connection: sa.Connection, database: Database) -> list[Place]:
    lost = unreadable(connection, database.keys)
    for place in lost:
        if place.table == github_apps.name:
            connection.execute(github_apps.delete().where(github_apps.c.id == place.row))
        else:
            put_value(connection, place, None)
            # Their clients know the public key of the lost one.
            connection.execute(sessions.delete().where(sessions.c.vpc == place.row))
    return lost


def _report(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(facts)
    else:
        typer.echo(f"sealed {facts['resealed']} secrets with key {facts['key']}")
