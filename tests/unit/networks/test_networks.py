"""Rules of VPCs: who sees them, limits, and deletion."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path

import pytest
import pytest_asyncio

from stead.errors import InvalidRequest, SteadError
from stead.identity.accounts import Accounts
from stead.limits import LimitExceeded
from stead.networks.errors import InvalidCidr, VpcInUse, VpcNotFound
from stead.networks.networks import MAX_VPCS, Member, Networks
from stead.store.database import Database, open_database
from stead.store.machines import MachineRow, MachineStore
from stead.store.networks import VpcStore


@dataclass
class TwoAccounts:
    database: Database
    networks: Networks
    ours: str
    theirs: str

    async def machine(self, machine: str, vpc: str, address: str) -> None:
        row = MachineRow(
            id=machine,
            name=None,
            state="stopped",
            step=None,
            vcpus=1,
            memory_mib=512,
            disk_gib=20,
            slot=int(machine[-1]),
            template="t",
            hostname=machine,
            guest_machine_id="0" * 32,
            account=self.ours,
            vpc=vpc,
            vpc_address=address,
        )
        await MachineStore(self.database).insert(row)


@pytest_asyncio.fixture
async def two_accounts(tmp_path: Path) -> AsyncIterator[TwoAccounts]:
    database = await open_database(tmp_path / "stead.db")
    accounts = Accounts(database)
    ours, theirs = [(await accounts.create(name)).id for name in ("ours", "theirs")]
    networks = Networks(VpcStore(database), MachineStore(database), [IPv4Network("10.9.0.0/16")])
    yield TwoAccounts(database, networks, ours, theirs)
    await database.dispose()


async def test_vpcs_are_created_listed_and_deleted(two_accounts: TwoAccounts) -> None:
    networks = two_accounts.networks
    first = await networks.create(two_accounts.ours, "10.0.0.0/16", "first")
    second = await networks.create(two_accounts.ours, "10.0.0.0/16")
    assert (first.name, second.name) == ("first", None)
    assert first.id != second.id and first.cidr == second.cidr == IPv4Network("10.0.0.0/16")
    assert await networks.list(two_accounts.ours) == [first, second]
    assert await networks.get(two_accounts.ours, first.id) == first
    assert await networks.members(two_accounts.ours, first.id) == []
    await networks.delete(two_accounts.ours, first.id)
    with pytest.raises(VpcNotFound):
        await networks.get(two_accounts.ours, first.id)
    with pytest.raises(VpcNotFound):
        await networks.delete(two_accounts.ours, first.id)
    assert await networks.list(two_accounts.ours) == [second]


async def test_each_vpc_has_a_number_of_its_own(two_accounts: TwoAccounts) -> None:
    made = await asyncio.gather(
        *(two_accounts.networks.create(two_accounts.ours, "10.0.0.0/24") for _ in range(8))
    )
    await two_accounts.networks.delete(two_accounts.ours, made[3].id)
    await two_accounts.networks.create(two_accounts.theirs, "10.0.0.0/24")
    rows = await VpcStore(two_accounts.database).all()
    assert [row.number for row in rows] == list(range(1, 9))


async def test_another_accounts_vpc_does_not_exist(two_accounts: TwoAccounts) -> None:
    made = await two_accounts.networks.create(two_accounts.ours, "10.0.0.0/16")
    assert await two_accounts.networks.list(two_accounts.theirs) == []
    for call in (two_accounts.networks.get, two_accounts.networks.members, two_accounts.networks.delete):
        with pytest.raises(VpcNotFound):
            await call(two_accounts.theirs, made.id)
    assert await two_accounts.networks.get(two_accounts.ours, made.id) == made


async def test_a_vpc_in_use_is_not_deleted(two_accounts: TwoAccounts) -> None:
    made = await two_accounts.networks.create(two_accounts.ours, "10.0.0.0/24")
    for number in range(7):
        await two_accounts.machine(f"{'a' * 19}{number}", made.id, f"10.0.0.{number + 1}")
    assert (await two_accounts.networks.members(two_accounts.ours, made.id))[0].machine == f"{'a' * 19}0"
    with pytest.raises(VpcInUse, match=f"in use by VM {'a' * 19}0, .* and 2 more") as refused:
        await two_accounts.networks.delete(two_accounts.ours, made.id)
    assert len(refused.value.machines) == 7
    for number in range(7):
        await MachineStore(two_accounts.database).delete(f"{'a' * 19}{number}")
    await two_accounts.networks.delete(two_accounts.ours, made.id)


async def test_members_have_addresses(two_accounts: TwoAccounts) -> None:
    made = await two_accounts.networks.create(two_accounts.ours, "10.0.0.0/24")
    await two_accounts.machine("b" * 19 + "1", made.id, "10.0.0.7")
    (member,) = await two_accounts.networks.members(two_accounts.ours, made.id)
    assert member == Member("b" * 19 + "1", made.cidr[7], (f"{'b' * 19}1.internal",))


@pytest.mark.parametrize(
    ("cidr", "name", "error"),
    [
        ("10.9.1.0/24", None, InvalidCidr),
        ("1.2.3.0/24", None, InvalidCidr),
        ("10.0.0.0/16", "", InvalidRequest),
        ("10.0.0.0/16", "a\nb", InvalidRequest),
        ("10.0.0.0/16", "x" * 201, InvalidRequest),
    ],
)
async def test_refusals_leave_nothing(
    two_accounts: TwoAccounts, cidr: str, name: str | None, error: type[SteadError]
) -> None:
    with pytest.raises(error):
        await two_accounts.networks.create(two_accounts.ours, cidr, name)
    assert await two_accounts.networks.list(two_accounts.ours) == []


async def test_an_account_has_a_limit(two_accounts: TwoAccounts) -> None:
    for _ in range(MAX_VPCS):
        await two_accounts.networks.create(two_accounts.ours, "10.0.0.0/24")
    with pytest.raises(LimitExceeded, match="vpcs is limited to 100"):
        await two_accounts.networks.create(two_accounts.ours, "10.0.0.0/24")
    await two_accounts.networks.create(two_accounts.theirs, "10.0.0.0/24")
