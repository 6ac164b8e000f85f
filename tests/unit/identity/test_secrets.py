"""Keys and tokens: how they are stored, checked and revoked."""

import asyncio
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import pytest

from stead.identity.accounts import Account
from stead.identity.callers import Caller, Callers
from stead.store.accounts import KeyStore
from support.accounts import Installation


async def test_database_contains_no_secrets(here: Installation, ours: Account) -> None:
    info, key = await here.accounts.create_key(ours.id)
    identity = await here.identities.create(ours.id)
    _, token = await here.identities.create_token(ours.id, identity.id)
    for secret in (key, token):
        assert await here.callers.authenticate(secret) is not None
    await here.callers.close()

    kept = b"".join(file.read_bytes() for file in here.path.parent.glob("stead.db*"))
    assert info.hint.encode() in kept, "this is where it would be found"
    for secret in (key, token):
        prefix, body = secret.split("_", 1)
        assert (prefix, len(body)) in {("stead", 43), ("stid", 43)}
        assert body.encode() not in kept
        assert body[10:].encode() not in kept


async def test_authenticate_keys_and_tokens(here: Installation, ours: Account) -> None:
    _, key = await here.accounts.create_key(ours.id)
    identity = await here.identities.create(ours.id)
    _, token = await here.identities.create_token(ours.id, identity.id)
    assert await here.callers.authenticate(key) == Caller(ours.id)
    assert await here.callers.authenticate(token) == Caller(ours.id, identity.id)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda key: "",
        lambda key: "stead_",
        lambda key: key[:-1],
        lambda key: key + "\n",
        lambda key: key.lower(),
        lambda key: key.removeprefix("stead_"),
        lambda key: "stid_" + key.removeprefix("stead_"),
        lambda key: "stead_" + "A" * 43,
        lambda key: key[:10],
        lambda key: key + "A" * 1_000_000,
        lambda key: "stead_" + "ü" * 43,
        lambda key: "\ud800" * 49,
        lambda key: "stead_' OR 1=1 --".ljust(49, "x"),
    ],
)
async def test_malformed_secrets_are_refused(
    here: Installation, ours: Account, spoil: Callable[[str], str]
) -> None:
    _, key = await here.accounts.create_key(ours.id)
    assert await here.callers.authenticate(spoil(key)) is None


async def test_stored_hash_is_not_a_valid_secret(here: Installation, ours: Account) -> None:
    """A leak of the database does not leak valid credentials."""
    info, _ = await here.accounts.create_key(ours.id)
    row = await KeyStore(here.database).get(info.id)
    assert row is not None
    for guess in (row.hash, f"stead_{row.hash[:43]}", row.hint):
        assert await here.callers.authenticate(guess) is None


async def test_revocation_takes_effect_at_once_in_all_processes(
    here: Installation, there: Installation, ours: Account
) -> None:
    """The command line revokes keys in another process than the server's."""
    info, key = await here.accounts.create_key(ours.id)
    _, other = await here.accounts.create_key(ours.id)
    identity = await here.identities.create(ours.id)
    token_info, token = await here.identities.create_token(ours.id, identity.id)
    _, last = await here.identities.create_token(ours.id, identity.id)
    for secret in (key, other, token, last):
        assert await here.callers.authenticate(secret) is not None

    await there.accounts.revoke_key(info.id)
    assert await here.callers.authenticate(key) is None
    await there.identities.revoke_token(ours.id, identity.id, token_info.id)
    assert await here.callers.authenticate(token) is None
    assert await here.callers.authenticate(last) == Caller(ours.id, identity.id)
    await there.identities.delete(ours.id, identity.id)
    assert await here.callers.authenticate(last) is None
    assert await here.callers.authenticate(other) == Caller(ours.id)


async def test_use_of_a_key_is_recorded_once_a_minute(
    here: Installation, ours: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    update = KeyStore.update

    async def counting(self: KeyStore, row_id: str, **changes: object) -> Any:
        written.append(row_id)
        return await update(self, row_id, **changes)

    monkeypatch.setattr(KeyStore, "update", counting)
    info, key = await here.accounts.create_key(ours.id)
    await asyncio.gather(*(here.callers.authenticate(key) for _ in range(20)))
    await here.callers.close()
    assert written == [info.id]
    (used,) = await here.accounts.keys(ours.id)
    assert used.used_at is not None and abs(used.used_at - time.time()) < 60

    again = Callers(here.database)
    await again.authenticate(key)
    await again.close()
    assert written == [info.id], "after a restart it still is the same minute"

    await update(KeyStore(here.database), info.id, used_at=time.time_ns() - 61 * 10**9)
    again = Callers(here.database)
    await again.authenticate(key)
    await again.close()
    assert written == [info.id] * 2


async def test_use_of_a_token_is_recorded(here: Installation, ours: Account) -> None:
    identity = await here.identities.create(ours.id)
    info, token = await here.identities.create_token(ours.id, identity.id)
    assert info.used_at is None
    await here.callers.authenticate(token)
    await here.callers.close()
    (used,) = await here.identities.tokens(ours.id, identity.id)
    assert used.used_at is not None


async def test_authenticate_does_not_wait_for_the_write(here: Installation, ours: Account) -> None:
    _, key = await here.accounts.create_key(ours.id)
    other = sqlite3.connect(here.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    async with asyncio.timeout(5):  # less than SQLite waits for a lock
        assert await here.callers.authenticate(key) == Caller(ours.id)
    other.execute("COMMIT")
    other.close()
    await here.callers.close()
    (used,) = await here.accounts.keys(ours.id)
    assert used.used_at is not None


async def test_authenticate_succeeds_if_the_write_fails(
    here: Installation, ours: Account, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is full")

    info, key = await here.accounts.create_key(ours.id)
    monkeypatch.setattr(KeyStore, "update", fail)
    callers = Callers(here.database)
    assert await callers.authenticate(key) == Caller(ours.id)
    await callers.close()
    assert info.id in caplog.text and "the disk is full" in caplog.text and key not in caplog.text
