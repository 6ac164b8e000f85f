"""Lifetimes of snapshots, on a host in memory and with a clock of the test."""

import asyncio
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from stead.errors import CapacityExceeded, InvalidRequest, SnapshotExpired, SnapshotNotFound
from stead.machines import expiry
from stead.machines.lifetimes import FOREVER, MAX_TTL, Lifetime
from stead.machines.records import Properties
from stead.machines.snapshot_journal import SnapshotState
from stead.store.database import open_database
from stead.store.snapshots import SnapshotStore
from support.databases import migrate
from support.engine import ALL, audit, contents, restart, used
from support.fake_server import FakeServer
from support.internals import inside
from support.waiting import until


@dataclass
class Clock:
    """The wall clock of the server."""

    ahead: float = 0.0

    def time(self) -> float:
        return time.time() + self.ahead

    def time_ns(self) -> int:
        return time.time_ns() + int(self.ahead * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("stead.machines.snapshots.time", clock)
    monkeypatch.setattr("stead.machines.machines.time", clock)
    return clock


async def listed(server: FakeServer) -> list[str]:
    return [info.id for info in await server.machines.snapshots.list()]


async def test_expired_snapshot_is_deleted_and_its_vms_stay(server: FakeServer, clock: Clock) -> None:
    source = await used(server)
    kept = await source.snapshot()
    short = await source.snapshot(lifetime=Lifetime(ttl=60))
    assert kept.expires_at is None
    assert short.expires_at == pytest.approx(time.time() + 60, abs=30)
    made = await server.machines.create(Properties(snapshot=short.id))
    await made.suspend()
    clock.ahead = 29
    await server.machines.snapshots.delete_expired()
    assert await listed(server) == [kept.id, short.id]
    clock.ahead = 61
    await server.machines.snapshots.delete_expired()
    assert await listed(server) == [kept.id]
    assert await contents(made) == ALL
    await audit(server)


async def test_expired_snapshot_is_refused_before_and_after_it_is_deleted(
    server: FakeServer, clock: Clock
) -> None:
    snapshot = await (await used(server)).snapshot(lifetime=Lifetime(ttl=60))
    machine = await server.machines.create(Properties(snapshot=snapshot.id, recreate=True))
    await machine.delete()
    clock.ahead = 61
    for deleted in (False, True):
        assert (await listed(server) == []) == deleted
        with pytest.raises(SnapshotExpired, match=rf"snapshot {snapshot.id} expired at 20\d\d-.*Z: .*Extend"):
            await server.machines.create(Properties(snapshot=snapshot.id))
        with pytest.raises(SnapshotExpired):
            await machine.start()
        await server.machines.snapshots.delete_expired()
    with pytest.raises(SnapshotNotFound):
        await server.machines.snapshots.update(snapshot.id, lifetime=FOREVER)
    await audit(server)


async def test_snapshot_that_was_deleted_before_its_expiry_has_not_expired(
    server: FakeServer, clock: Clock
) -> None:
    snapshot = await (await used(server)).snapshot(lifetime=Lifetime(ttl=60))
    await server.machines.snapshots.delete(snapshot.id)
    clock.ahead = 61
    with pytest.raises(SnapshotNotFound) as refused:
        await server.machines.create(Properties(snapshot=snapshot.id))
    assert not isinstance(refused.value, SnapshotExpired)


async def test_expiry_waits_for_the_vms_that_are_being_created(server: FakeServer, clock: Clock) -> None:
    snapshot = await (await used(server)).snapshot(lifetime=Lifetime(ttl=60))
    inside(server.machines).slots._total = 1
    async with inside(server.machines).slots.hold("another"):
        creating = asyncio.create_task(server.machines.create(Properties(snapshot=snapshot.id)))

        async def allocated() -> bool:
            return len(await inside(server.machines).journal.list()) == 2

        await until(allocated, 60)
        clock.ahead = 61
        await server.machines.snapshots.delete_expired()
        await server.quiet()
        assert await listed(server) == [snapshot.id]
    # Its memory was still there.
    assert await contents(await creating) == ALL
    await server.machines.snapshots.delete_expired()
    assert await listed(server) == []
    await audit(server)


async def test_failed_create_does_not_keep_an_expired_snapshot(server: FakeServer, clock: Clock) -> None:
    snapshot = await (await used(server)).snapshot(lifetime=Lifetime(ttl=60))
    server.host.fail("check_capacity", CapacityExceeded("full"), skip=1)
    with pytest.raises(CapacityExceeded):
        await server.machines.create(Properties(snapshot=snapshot.id))
    clock.ahead = 61
    await server.machines.snapshots.delete_expired()
    assert await listed(server) == []


async def test_extension_shortening_and_no_end(server: FakeServer, clock: Clock) -> None:
    snapshots = server.machines.snapshots
    snapshot = await (await used(server)).snapshot("mine", lifetime=Lifetime(ttl=60))
    extended = await snapshots.update(snapshot.id, lifetime=Lifetime(ttl=600))
    assert extended.name == "mine"
    clock.ahead = 300
    await snapshots.delete_expired()
    # A new lifetime begins at the time of the request.
    extended = await snapshots.update(snapshot.id, lifetime=Lifetime(ttl=60))
    assert extended.expires_at == pytest.approx(clock.time() + 60, abs=30)
    await snapshots.update(snapshot.id, lifetime=FOREVER)
    clock.ahead = 10**9
    await snapshots.delete_expired()
    assert await listed(server) == [snapshot.id]
    renamed = await snapshots.update(snapshot.id, name=None)
    assert (renamed.name, renamed.expires_at) == (None, None)
    await snapshots.update(snapshot.id, lifetime=Lifetime(expires_at=clock.time() + 5))
    clock.ahead += 6
    await snapshots.delete_expired()
    assert await listed(server) == []


async def test_extension_just_before_the_deletion_wins(
    server: FakeServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check has found the snapshot expired when its owner extends it."""
    snapshots = server.machines.snapshots
    snapshot = await (await used(server)).snapshot(lifetime=Lifetime(ttl=60))
    clock.ahead = 61
    store = inside(server.machines).snapshot_store
    expired = store.expired

    async def find_then_extend(now: int, *, excluding: str) -> object:
        found = await expired(now, excluding=excluding)
        await snapshots.update(snapshot.id, lifetime=Lifetime(ttl=60))
        return found

    monkeypatch.setattr(store, "expired", find_then_extend)
    await snapshots.delete_expired()
    assert await listed(server) == [snapshot.id]
    await server.machines.create(Properties(snapshot=snapshot.id))
    await audit(server)


async def test_clock_that_is_set_back_postpones_the_end(server: FakeServer, clock: Clock) -> None:
    snapshot = await (await used(server)).snapshot(lifetime=Lifetime(ttl=60))
    clock.ahead = 50
    await server.machines.snapshots.delete_expired()
    clock.ahead = -86400
    await server.machines.snapshots.delete_expired()
    made = await server.machines.create(Properties(snapshot=snapshot.id))
    assert await contents(made) == ALL
    clock.ahead = 61
    await server.machines.snapshots.delete_expired()
    assert await listed(server) == []


async def test_server_deletes_what_expired_while_it_was_down_and_goes_on(
    server: FakeServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "INTERVAL", 0.01)
    machine = await used(server)
    first = await machine.snapshot(lifetime=Lifetime(ttl=60))
    second = await machine.snapshot(lifetime=Lifetime(ttl=600))
    clock.ahead = 61
    await restart(server)

    async def left(*wanted: str) -> bool:
        return await listed(server) == list(wanted)

    await until(lambda: left(second.id), 60)
    with pytest.raises(SnapshotExpired):
        await server.machines.create(Properties(snapshot=first.id))
    # One failure does not end the checks.
    broken = inside(server.machines).snapshot_store.expired

    async def fail_once(now: int, *, excluding: str) -> object:
        monkeypatch.setattr(inside(server.machines).snapshot_store, "expired", broken)
        raise RuntimeError("the database is locked")

    monkeypatch.setattr(inside(server.machines).snapshot_store, "expired", fail_once)
    clock.ahead = 601
    await until(lambda: left(), 60)
    await audit(server)


async def test_snapshot_that_expires_during_its_capture_is_deleted_after_it(
    server: FakeServer, clock: Clock
) -> None:
    snapshots, machine = server.machines.snapshots, await used(server)
    states: list[SnapshotState] = []

    async def meanwhile() -> None:
        states.extend(info.state for info in await snapshots.list())
        await snapshots.delete_expired()
        states.extend(info.state for info in await snapshots.list())

    tasks: list[asyncio.Task[None]] = []

    def expire() -> None:
        clock.ahead = 61
        tasks.append(asyncio.create_task(meanwhile()))

    server.host.fail("checkpoints.save", expire)
    snapshot = await machine.snapshot(lifetime=Lifetime(ttl=60))
    await asyncio.gather(*tasks)
    assert states[:1] == [SnapshotState.BUILDING]
    await snapshots.delete_expired()
    assert await listed(server) == []
    with pytest.raises(SnapshotNotFound):
        await snapshots.get(snapshot.id)
    await audit(server)


async def test_expired_snapshot_is_not_in_the_build_cache(server: FakeServer, clock: Clock) -> None:
    machine = await used(server, account="a")
    old = await server.machines.snapshot(machine.id, template_hash="h")
    new = await server.machines.snapshot(machine.id, template_hash="h", lifetime=Lifetime(ttl=60))
    found = await server.machines.snapshots.find("a", "h")
    assert found is not None and found.id == new.id
    clock.ahead = 61
    found = await server.machines.snapshots.find("a", "h")
    assert found is not None and found.id == old.id


async def test_lifetimes_are_bounded(server: FakeServer, clock: Clock) -> None:
    machine = await used(server)
    for ttl in (0, -1, MAX_TTL + 1):
        with pytest.raises(InvalidRequest, match=rf"from 1 to {MAX_TTL} seconds, not {ttl}$"):
            Lifetime(ttl=ttl)
    with pytest.raises(InvalidRequest, match="give one of them"):
        Lifetime(ttl=1, expires_at=clock.time() + 1)
    for moment, why in ((clock.time() - 1, "has passed"), (clock.time() + MAX_TTL + 60, "seconds away")):
        with pytest.raises(InvalidRequest, match=why):
            await machine.snapshot(lifetime=Lifetime(expires_at=moment))
    assert await listed(server) == []
    kept = await machine.snapshot()
    with pytest.raises(InvalidRequest, match="has passed"):
        await server.machines.snapshots.update(kept.id, lifetime=Lifetime(expires_at=0.0))
    assert (await server.machines.snapshots.get(kept.id)).expires_at is None


async def test_migration_gives_no_expiry_and_groups_snapshots_of_agents(tmp_path: Path) -> None:
    path = tmp_path / "stead.db"
    migrate(path, "0019")
    names = ("agent-26c1d165ab5f4ad5", "agent-of-mine", "agent-26c1d165ab5f4ad5-2", None)
    with closing(sqlite3.connect(path)) as old:
        old.executemany(
            "INSERT INTO snapshots (id, name, state, source_machine, vcpus, memory_mib, disk_gib, template,"
            " persistence, created_at, used_at)"
            " VALUES (?, ?, 'ready', 'm', 1, 512, 20, 't', 'persistent', 1, 1)",
            [(f"sc-{number}", name) for number, name in enumerate(names)],
        )
        old.commit()
    database = await open_database(path)
    rows = await SnapshotStore(database).list()
    assert [(row.id, row.purpose, row.expires_at) for row in rows] == [
        ("sc-0", "agent", None),
        ("sc-1", "use", None),
        ("sc-2", "use", None),
        ("sc-3", "use", None),
    ]
    await database.dispose()
