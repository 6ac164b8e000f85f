"""A data folder and its database belong together; what no row explains is set aside, not deleted."""

import asyncio
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from stead.errors import HostError
from stead.host.image import BaseImage
from stead.host.quarantine import Quarantine
from stead.installation import open_machines
from stead.machines import Machine
from stead.settings import Settings
from stead.store.database import open_database
from stead.store.installation_id import installation, open_database_of
from support.installations import delete_all, other_settings


async def opened(data: Path) -> str:
    await (await open_database_of(data)).dispose()
    return (data / "installation").read_text()


async def test_an_installation_keeps_its_id(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    assert len(first.strip()) == 32
    assert await opened(tmp_path) == first


async def test_processes_that_open_a_new_installation_together_agree_on_its_id(tmp_path: Path) -> None:
    databases = await asyncio.gather(*(open_database_of(tmp_path) for _ in range(8)))
    with databases[0].look_up() as connection:
        (recorded,) = connection.execute(sa.select(installation.c.id)).scalars()
    assert (tmp_path / "installation").read_text().strip() == recorded
    for database in databases:
        await database.dispose()
    await opened(tmp_path)


@pytest.mark.parametrize("marked", [True, False])
async def test_a_missing_database_is_refused_while_there_is_data(tmp_path: Path, marked: bool) -> None:
    await opened(tmp_path)
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers/one.qcow2").touch()
    (tmp_path / "stead.db").rename(tmp_path / "aside")
    if not marked:
        (tmp_path / "installation").unlink()  # as before there were ids
    for _ in range(2):
        with pytest.raises(HostError, match=r"its database .* is missing"):
            await opened(tmp_path)
    assert not (tmp_path / "stead.db").exists(), "the refusal must not make the next start succeed"
    (tmp_path / "aside").rename(tmp_path / "stead.db")
    await opened(tmp_path)


async def test_a_database_of_another_installation_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        await opened(tmp_path / name)
    shutil.copy(tmp_path / "one/stead.db", tmp_path / "two/stead.db")
    with pytest.raises(HostError, match="of another installation"):
        await opened(tmp_path / "two")


async def test_a_database_from_before_the_folder_had_an_id_is_refused(tmp_path: Path) -> None:
    await (await open_database(tmp_path / "stead.db")).dispose()
    shutil.copy(tmp_path / "stead.db", tmp_path / "backup")
    await opened(tmp_path)  # an upgrade: the old database and its folder get an id
    shutil.copy(tmp_path / "backup", tmp_path / "stead.db")
    with pytest.raises(HostError, match="older than the folder"):
        await opened(tmp_path)
    (tmp_path / "installation").unlink()
    await opened(tmp_path)


def test_the_quarantine_keeps_files_for_days(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path)
    for _ in range(2):
        (tmp_path / "machines/a").mkdir(parents=True)
        (tmp_path / "machines/a/disk").write_text("data")
        quarantine.keep([tmp_path / "machines/a"])
    today = quarantine.folder / f"{datetime.now(UTC):%Y-%m-%d}"
    assert {path.name for path in (today / "machines").iterdir()} == {"a", "a.1"}
    quarantine.prune()
    assert (today / "machines/a.1/disk").read_text() == "data"
    for age, kept in ((7, True), (8, False)):
        old = quarantine.folder / f"{datetime.now(UTC) - timedelta(days=age):%Y-%m-%d}"
        today.rename(old)
        quarantine.prune()
        assert old.exists() is kept
        today = old
    assert not quarantine.folder.exists()


async def test_an_older_database_costs_no_vm(settings: Settings, image: BaseImage) -> None:
    """The VM that it does not know is set aside, and is back with its memory once the database is."""
    with other_settings(settings) as other:
        async with open_machines(other):
            pass
        shutil.copy(other.data / "stead.db", other.data / "older")
        async with open_machines(other) as machines:
            machine = await machines.create()
            await machine.exec("echo precious > /dev/shm/file")
            await machine.suspend()
        for name in ("stead.db", "older"):
            assert not (other.data / f"{name}-wal").exists(), "closed databases have no log"
        (other.data / "stead.db").rename(other.data / "newer")
        (other.data / "older").rename(other.data / "stead.db")
        async with open_machines(other) as machines:
            assert await machines.list() == []
        (day,) = (other.data / "quarantine").iterdir()
        aside = {path.name for path in day.iterdir()}
        assert aside == {"machines", "layers", "checkpoints"}
        for folder in day.iterdir():
            for path in folder.iterdir():
                path.rename(other.data / folder.name / path.name)
        shutil.rmtree(other.data / "quarantine")
        (other.data / "newer").rename(other.data / "stead.db")
        async with open_machines(other) as machines:
            found = Machine(machines, machine.id)
            assert (await found.exec("cat /dev/shm/file")).stdout == b"precious\n"
            await delete_all(machines)
