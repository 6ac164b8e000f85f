"""Names in VPCs, on a host in memory: what each VM resolves after every change."""

from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from typing import Any

import pytest
import pytest_asyncio

from stead import addresses
from stead.installation import OpenedVms, open_parts
from stead.machines import Machine
from stead.machines.nics import NicRequest
from stead.machines.records import Properties
from stead.networks.names import MAX_ADDRESSES
from stead.store.database import Database
from stead.store.machines import MachineStore
from support.account_vpc import AccountVpc
from support.engine import restart
from support.fake_server import FakeServer


class VpcWithNames(AccountVpc):
    async def create(self, name: str | None, vpc: str | None = "", **options: Any) -> Machine:
        """A VM in the VPC; with `vpc` in another one, or in none."""
        nic = None if vpc is None else NicRequest(vpc or self.vpc)
        return await self.server.machines.create(
            Properties(account=self.account, name=name, **options), nic=nic
        )

    async def slot(self, machine: Machine) -> int:
        slot = addresses.slot_of_address((await machine.info()).address)
        assert slot is not None
        return slot

    async def resolved(self, asker: Machine, label: str) -> list[str]:
        found = self.server.private_names.addresses(await self.slot(asker), label)
        return [str(each) for each in found]


@pytest_asyncio.fixture
async def account_vpc(server: FakeServer) -> VpcWithNames:
    return await VpcWithNames.of(server, "10.0.0.0/24")


@pytest_asyncio.fixture
async def web(account_vpc: VpcWithNames) -> AsyncIterator[Machine]:
    """A VM that asks; its address is 10.0.0.1."""
    yield await account_vpc.create("web")


async def test_a_vm_is_found_by_its_name_and_its_id(account_vpc: VpcWithNames, web: Machine) -> None:
    db = await account_vpc.create("My DB")
    for label in ("my-db", "MY-DB", "my_db", db.id, db.id.upper()):
        assert await account_vpc.resolved(web, label) == ["10.0.0.2"]
    for label in ("db", "mydb", "", "-", db.id[:-1], "é" * 60):
        assert await account_vpc.resolved(web, label) == []
    assert await account_vpc.resolved(web, "web") == ["10.0.0.1"], "its own"
    names, slot = account_vpc.server.private_names, await account_vpc.slot(web)
    assert names.name(slot, IPv4Address("10.0.0.2")) == "my-db.internal"
    assert names.name(slot, IPv4Address("10.0.0.9")) is None
    unnamed = await account_vpc.create(None)
    assert names.name(slot, IPv4Address("10.0.0.3")) == f"{unnamed.id}.internal"


async def test_names_end_at_the_vpc(account_vpc: VpcWithNames, web: Machine) -> None:
    other = (await account_vpc.networks.create(account_vpc.account, "10.0.0.0/24")).id
    elsewhere, outside = await account_vpc.create("db", other), await account_vpc.create("db", None)
    assert await account_vpc.resolved(elsewhere, "db") == ["10.0.0.1"]
    for asker, label in (
        (web, "db"),
        (web, elsewhere.id),
        (web, outside.id),
        (elsewhere, "web"),
        (elsewhere, web.id),
        (outside, "web"),
        (outside, "db"),
        (outside, outside.id),
    ):
        assert await account_vpc.resolved(asker, label) == []
    names = account_vpc.server.private_names
    for asker in (elsewhere, outside):
        assert names.name(await account_vpc.slot(asker), IPv4Address("10.0.0.1")) != "web.internal"
    unused = 60_000
    assert not names.addresses(unused, "web")


async def test_an_ambiguous_name_has_all_addresses_and_the_oldest_first(
    account_vpc: VpcWithNames, web: Machine
) -> None:
    first, second = await account_vpc.create("db"), await account_vpc.create("DB ")
    assert await account_vpc.resolved(web, "db") == ["10.0.0.2", "10.0.0.3"]
    decoy = await account_vpc.create(first.id)
    assert await account_vpc.resolved(web, first.id) == ["10.0.0.2"], "an id has one address"
    assert await account_vpc.resolved(web, decoy.id) == ["10.0.0.4"]
    await first.delete()
    assert await account_vpc.resolved(web, "db") == ["10.0.0.3"]
    await second.delete()
    for _ in range(MAX_ADDRESSES + 2):
        await account_vpc.create("many")
    assert len(await account_vpc.resolved(web, "many")) == MAX_ADDRESSES


async def test_changes_are_seen_by_the_next_query(account_vpc: VpcWithNames, web: Machine) -> None:
    machines = account_vpc.server.machines
    assert await account_vpc.resolved(web, "db") == []
    db = await account_vpc.create("db", recreate=True)
    assert await account_vpc.resolved(web, "db") == ["10.0.0.2"]
    (copy,) = await db.fork(name="copy")
    assert await account_vpc.resolved(web, "copy") == await account_vpc.resolved(db, "copy") == ["10.0.0.3"]
    assert await account_vpc.resolved(copy, "db") == ["10.0.0.2"]
    snapshot = await db.snapshot()
    await account_vpc.create("clone", snapshot=snapshot.id)
    assert await account_vpc.resolved(web, "clone") == ["10.0.0.4"]
    for change in (db.suspend, db.stop):
        await change()
        assert await account_vpc.resolved(web, "db") == ["10.0.0.2"], "also of a VM that does not run"
    await machines.rename(db.id, "store")
    assert await account_vpc.resolved(web, "db") == []
    assert await account_vpc.resolved(web, "store") == ["10.0.0.2"]
    await machines.rename(db.id, None)
    assert await account_vpc.resolved(web, "store") == []
    assert await account_vpc.resolved(web, db.id) == ["10.0.0.2"]
    await machines.rename(db.id, "db")
    await restart(account_vpc.server)
    machines = account_vpc.server.machines
    db, web = await machines.get(db.id), await machines.get(web.id)
    assert await account_vpc.resolved(web, "db") == ["10.0.0.2"]
    await db.delete()
    for label in ("db", db.id):
        assert await account_vpc.resolved(web, label) == []
    assert [
        each.names for each in await account_vpc.networks.members(account_vpc.account, account_vpc.vpc)
    ].count(()) == 1
    await db.start()
    assert await account_vpc.resolved(web, "db") == ["10.0.0.2"], "recreated"


async def test_all_parts_of_an_installation_use_one_store_of_vms(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are read again after a change: a second store would not count the changes of the first."""
    made: list[MachineStore] = []
    original = MachineStore.__init__

    def counted(store: MachineStore, database: Database) -> None:
        made.append(store)
        original(store, database)

    monkeypatch.setattr(MachineStore, "__init__", counted)
    vms = OpenedVms(server.machines, server.host, server.store)
    async with open_parts(server.settings, server.database, vms, None) as here:
        before = server.store.version
        await here.machines.create()
        assert server.store.version > before
    assert made == []
