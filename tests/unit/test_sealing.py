"""Sealed values: keys, places, rotation, and a key that is lost."""

import contextlib
import os
import sqlite3
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stead.cli.installation.sealing_check import sealing_key
from stead.identity.accounts import Accounts
from stead.settings import Settings
from stead.store.database import Database, open_database, seal_secrets
from stead.store.github import AppRow, AppStore
from stead.store.networks import VpcRow, VpcStore
from stead.store.sealing import Place, SealingError, SealingKeys, reseal, sealing_key_of, unreadable
from support.databases import migrate, put_database

PLACE = Place("vpcs", "wireguard_key", "one")


@pytest.fixture
def keys(tmp_path: Path) -> SealingKeys:
    found = SealingKeys([tmp_path / "etc" / "sealing-key"])
    found.ensure()
    return found


@pytest_asyncio.fixture
async def database(tmp_path: Path, keys: SealingKeys) -> AsyncIterator[Database]:
    opened = await open_database(await put_database(tmp_path / "stead.db"), keys)
    yield opened
    await opened.dispose()


async def with_secrets(database: Database) -> tuple[AppStore, AppRow, VpcStore, VpcRow]:
    """An App and a VPC, each with secrets."""
    account = (await Accounts(database).default()).id
    apps, vpcs = AppStore(database), VpcStore(database)
    await apps.put(AppRow(account, "1", "PEM of the App", "hook secret", "u", "a"))
    made = await vpcs.create(VpcRow("vpc", 0, account, None, "10.0.0.0/24"), range(1, 5))
    assert made is not None
    vpc = await vpcs.ensure_key(made.id, "private WireGuard key")
    app = await apps.get(account)
    assert app is not None and vpc is not None
    return apps, app, vpcs, vpc


def test_value_opens_in_its_place_alone(keys: SealingKeys) -> None:
    sealed = keys.seal("secret", PLACE)
    assert "secret" not in sealed
    assert keys.open(sealed, PLACE) == "secret"
    assert keys.seal("secret", PLACE) != sealed, "equal secrets must not be seen to be equal"
    for other in (
        Place("vpcs", "wireguard_key", "two"),
        Place("github_apps", "wireguard_key", "one"),
        Place("vpcs", "webhook_secret", "one"),
    ):
        with pytest.raises(SealingError, match="changed or moved"):
            keys.open(sealed, other)


@pytest.mark.parametrize("change", [lambda text: text[:-2], lambda text: text[:-5] + "AAAA" + text[-1]])
def test_changed_value_is_refused(keys: SealingKeys, change: object) -> None:
    sealed = keys.seal("secret", PLACE)
    with pytest.raises(SealingError, match="changed"):
        keys.open(change(sealed), PLACE)  # type: ignore[operator]


def test_value_in_clear_is_refused(keys: SealingKeys) -> None:
    with pytest.raises(SealingError, match="not sealed"):
        keys.open("secret", PLACE)


def test_first_key_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "stead" / "sealing-key"
    first, second = SealingKeys([path]), SealingKeys([path])
    first.ensure()
    second.ensure()
    assert first.ids == second.ids and len(first.ids) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["sealing-key"]


def test_credential_of_systemd_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))

    def files(**changes: Any) -> list[Path]:
        return list(Settings(data=tmp_path, **changes).sealing_key_files)

    assert files() == [tmp_path / "stead-sealing-key", Path("/etc/stead/sealing-key")]
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    assert files() == [Path("/etc/stead/sealing-key")]
    assert files(sealing_key=tmp_path / "own") == [tmp_path / "own"]


def test_keys_of_all_files_open_and_the_first_seals(tmp_path: Path) -> None:
    files = [tmp_path / "one", tmp_path / "two"]
    for path in files:
        SealingKeys([path]).ensure()
    both, second = SealingKeys(files), SealingKeys(files[1:])
    assert both.open(second.seal("secret", PLACE), PLACE) == "secret"
    assert sealing_key_of(both.seal("secret", PLACE)) == SealingKeys(files[:1]).ids[0]


def test_key_file_that_others_can_read_is_refused(keys: SealingKeys) -> None:
    keys.files[0].chmod(0o644)
    with pytest.raises(SealingError, match="chmod 600"):
        keys.seal("secret", PLACE)


@pytest.mark.parametrize("content", ["short\n", "no base64!\n", "A" * 100_000])
def test_file_that_has_no_keys_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(content)
    with pytest.raises(SealingError, match="no file of sealing keys"):
        SealingKeys([path]).seal("secret", PLACE)


async def test_no_secret_is_in_the_files_of_the_database(database: Database, tmp_path: Path) -> None:
    apps, app, vpcs, vpc = await with_secrets(database)
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("stead.db*"))
    assert b"sealed1." in stored
    for secret in (b"PEM of the App", b"hook secret", b"private WireGuard key"):
        assert secret not in stored
    assert apps.opened(app).private_key == "PEM of the App"
    assert apps.opened(app).webhook_secret == "hook secret"
    assert vpcs.wireguard_key(vpc) == "private WireGuard key"


async def test_upgrade_seals_what_was_stored_in_clear(tmp_path: Path, keys: SealingKeys) -> None:
    path = tmp_path / "stead.db"
    migrate(path, "0023")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("INSERT INTO accounts (id, name, created_at) VALUES ('a', 'default', 1)")
        connection.execute("INSERT INTO github_apps VALUES ('a', '1', 'old PEM', 'old hook', 'u', 'a', 1)")
        connection.execute("INSERT INTO vpcs VALUES ('v', 1, 'a', NULL, '10.0.0.0/24', 1, 'old key')")
        connection.execute("INSERT INTO vpcs VALUES ('w', 2, 'a', NULL, '10.0.1.0/24', 1, NULL)")
        connection.commit()
    database = await open_database(path, keys)
    # Three, and as many in the copy from before the migration.
    assert seal_secrets(path, keys) == 6
    assert seal_secrets(path, keys) == 0
    apps, vpcs = AppStore(database), VpcStore(database)
    app, with_key, without = await apps.get("a"), await vpcs.get("v"), await vpcs.get("w")
    assert app is not None and with_key is not None and without is not None
    assert apps.opened(app).private_key == "old PEM"
    assert vpcs.wireguard_key(with_key) == "old key"
    assert vpcs.wireguard_key(without) is None
    await database.dispose()
    stored = b"".join(each.read_bytes() for each in (path, *tmp_path.glob("stead.db-*")))
    for secret in (b"old PEM", b"old hook", b"old key"):
        assert secret not in stored, "also not in free pages"


async def test_rotation(database: Database, keys: SealingKeys) -> None:
    apps, app, _, _ = await with_secrets(database)
    old = keys.ids[0]
    SealingKeys(keys.files).rotate()
    assert apps.opened(app).private_key == "PEM of the App", "the older key is kept"
    assert await database.write(lambda connection: reseal(connection, keys)) == 3
    assert await database.write(lambda connection: reseal(connection, keys)) == 0
    new, kept = keys.ids
    assert kept == old != new
    after = await apps.get(app.id)
    assert after is not None and sealing_key_of(after.private_key) == new
    assert apps.opened(after).webhook_secret == "hook secret"


async def test_running_server_notices_a_new_key(keys: SealingKeys) -> None:
    server = SealingKeys(keys.files)
    assert server.open(keys.seal("before", PLACE), PLACE) == "before"
    keys.rotate()
    assert server.open(keys.seal("after", PLACE), PLACE) == "after"
    assert server.seal("new", PLACE).split(".")[1] == keys.ids[0]


async def test_lost_key_stops_only_what_needs_it(
    database: Database, keys: SealingKeys, tmp_path: Path
) -> None:
    apps, app, vpcs, vpc = await with_secrets(database)
    settings = Settings(data=tmp_path, sealing_key=keys.files[0])
    assert (await sealing_key(settings)).status == "ok"
    key = keys.files[0].read_bytes()
    keys.files[0].unlink()
    database.keys = SealingKeys(keys.files)
    with pytest.raises(
        SealingError, match=r"sealing key \w{8} is not in .*sealing-key.*stead secrets forget"
    ):
        apps.opened(app)
    with pytest.raises(SealingError, match="no sealing key"):
        await apps.put(AppRow(app.id, "2", "k", "w", "u", "a"))
    with pytest.raises(SealingError, match="no sealing key in"):
        seal_secrets(tmp_path / "stead.db", database.keys)
    assert not keys.files[0].exists(), "a new key must not stand where the lost one may be restored"
    assert [each.id for each in await vpcs.all()] == [vpc.id]
    with database.look_up() as connection:
        assert len(unreadable(connection, database.keys)) == 3
    finding = await sealing_key(settings)
    assert finding.status == "degraded" and "3 of 3 secrets" in finding.what
    assert "stead secrets forget" in finding.remedy
    descriptor = os.open(keys.files[0], os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(descriptor, key)
    os.close(descriptor)
    assert apps.opened(app).private_key == "PEM of the App"
    assert (await sealing_key(settings)).status == "ok"
