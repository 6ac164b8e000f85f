"""Idempotency keys: which calls create, and which get the answer of an earlier one."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import sqlalchemy as sa

from stead.creation import idempotency
from stead.creation.idempotency import IdempotencyKeyReused, IdempotencyKeys, InterruptedCreate, KeyedCall
from stead.errors import InvalidRequest, SteadError
from stead.store.database import Database, open_database
from stead.store.idempotency import IdempotencyStore
from support.waiting import until


@pytest_asyncio.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await open_database(tmp_path / "stead.db")
    yield opened
    await opened.dispose()


@pytest.fixture
def keys(database: Database) -> IdempotencyKeys:
    return IdempotencyKeys(IdempotencyStore(database))


@dataclass(frozen=True)
class Thing:
    id: int | str


class Maker:
    """Makes a new thing each time."""

    def __init__(self) -> None:
        self.made = 0
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self) -> Thing:
        self.made += 1
        number = self.made
        await self.go_on.wait()
        return Thing(number)


def call(key: str = "k", body: bytes = b"{}", *, account: str = "me", path: str = "/v1/vms") -> KeyedCall:
    return KeyedCall.parse(account, key, f"POST {path}", body, f"ri-{key}")


async def test_repeated_call_gets_the_first_answer(keys: IdempotencyKeys, database: Database) -> None:
    make = Maker()
    assert await keys.run(call(), Thing, make) == await keys.run(call(), Thing, make) == Thing(1)
    assert await keys.run(call('"k"'), Thing, make) == Thing(1), "the quotes of a structured header"
    assert await IdempotencyKeys(IdempotencyStore(database)).run(call(), Thing, make) == Thing(1), (
        "a new server"
    )
    assert await keys.run(call("other"), Thing, make) == Thing(2)
    assert await keys.run(call(account="them"), Thing, make) == Thing(3)


async def test_key_of_another_request_is_refused(keys: IdempotencyKeys) -> None:
    make = Maker()
    make.go_on.clear()
    first = asyncio.create_task(keys.run(call(), Thing, make))
    await until(lambda: make.made, 60)
    for _ in range(2):
        for other in (call(body=b'{"name": "x"}'), call(path="/v1/vpcs")):
            with pytest.raises(IdempotencyKeyReused, match="'k' was used for another request"):
                await keys.run(other, Thing, make)
        make.go_on.set()
        assert await first == Thing(1)
    assert make.made == 1


async def test_concurrent_calls_create_once(keys: IdempotencyKeys) -> None:
    make = Maker()
    answers = await asyncio.gather(*(keys.run(call(), Thing, make) for _ in range(20)))
    assert answers == [Thing(1)] * 20
    assert make.made == 1


async def test_create_continues_without_its_client(keys: IdempotencyKeys) -> None:
    make = Maker()
    make.go_on.clear()
    gone = asyncio.create_task(keys.run(call(), Thing, make))
    await until(lambda: make.made, 60)
    gone.cancel()
    await asyncio.wait({gone})
    make.go_on.set()
    assert await keys.run(call(), Thing, make) == Thing(1)


async def test_failed_create_is_forgotten(keys: IdempotencyKeys) -> None:
    async def fail() -> Thing:
        raise SteadError("no room")

    make = Maker()
    for _ in range(2):
        with pytest.raises(SteadError, match="no room"):
            await keys.run(call(), Thing, fail)
    assert await keys.run(call(body=b"another"), Thing, make) == Thing(1)


async def test_answers_are_bounded_in_time_and_number(
    keys: IdempotencyKeys, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker()
    monkeypatch.setattr(idempotency, "MAX_KEYS", 3)
    for number in range(5):
        await keys.run(call(str(number)), Thing, make)
        await keys.run(call(str(number), account="them"), Thing, make)
    assert [await keys.run(call(number), Thing, make) for number in "432"] == [Thing(9), Thing(7), Thing(5)]
    assert await keys.run(call("0"), Thing, make) == Thing(11), "the oldest was forgotten"
    monkeypatch.setattr(idempotency, "LIFETIME", 0)
    assert await keys.run(call("4", b"another"), Thing, make) == Thing(12)
    with database.look_up() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM idempotency_keys")).scalar_one() == 1


async def test_keys_and_bodies_are_not_stored(keys: IdempotencyKeys, database: Database) -> None:
    secret = KeyedCall.parse("me", "my-key", "POST /v1/vms", b'{"env": "my-secret"}', "ri-1")
    await keys.run(secret, Thing, Maker())
    with database.look_up() as connection:
        (row,) = connection.execute(sa.text("SELECT * FROM idempotency_keys")).all()
    assert "my-key" not in str(row) and "my-secret" not in str(row)


@pytest.mark.parametrize("key", ["", '""', "  ", "é", "a\tb", "x" * 256])
def test_invalid_keys_are_refused(key: str) -> None:
    with pytest.raises(InvalidRequest, match="must be 1 to 255 printable ASCII characters"):
        call(key)


async def test_creates_that_a_crash_interrupted(database: Database) -> None:
    """One had made its thing, one had not; both keys work after it."""
    store, make = IdempotencyStore(database), Maker()
    for key in ("made", "lost"):
        await store.insert(call(key).row())

    async def find(create: InterruptedCreate) -> Thing | None:
        assert (create.account, create.path) == ("me", "/v1/vms")
        return Thing("found") if create.request == "ri-made" else None

    keys = IdempotencyKeys(store)
    await keys.recover(find)
    assert await keys.run(call("made"), Thing, make) == Thing("found")
    assert await keys.run(call("lost"), Thing, make) == Thing(1)
