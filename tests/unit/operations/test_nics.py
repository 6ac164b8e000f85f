"""NICs of VMs in VPCs, on a host in memory: who has which address, and for how long."""

import asyncio
from collections.abc import AsyncIterator
from ipaddress import IPv4Address
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from stead.errors import AddressTaken, HostError, InvalidRequest, StartFailed, SteadError
from stead.machines import Machine, State
from stead.machines.nics import NicRequest
from stead.machines.records import Properties
from stead.networks.errors import ForkUnsupported, InvalidAddress, VpcFull, VpcInUse
from support.account_vpc import AccountVpc
from support.engine import audit, installation, restart
from support.fake_server import FakeServer
from support.internals import inside
from support.waiting import until


class VpcWithVms(AccountVpc):
    async def create(self, address: str | None = None, **options: Any) -> Machine:
        nic = NicRequest(self.vpc, address)
        return await self.server.machines.create(Properties(account=self.account, **options), nic=nic)

    async def addresses(self) -> list[str]:
        members = await self.networks.members(self.account, self.vpc)
        return sorted(str(each.address) for each in members)

    def identity(self, machine: Machine) -> str:
        """The address that the guest was told."""
        return str(self.server.world.of(machine.id).identity["address"])


@pytest_asyncio.fixture
async def account_vpc(server: FakeServer) -> AsyncIterator[VpcWithVms]:
    yield await VpcWithVms.of(server, "10.0.0.0/29")
    await audit(server)


async def test_guest_has_the_fixed_address(account_vpc: VpcWithVms) -> None:
    machine = await account_vpc.create("10.0.0.5")
    info = await machine.info()
    assert info.nic is not None
    assert (info.nic.vpc, info.nic.address) == (account_vpc.vpc, IPv4Address("10.0.0.5"))
    assert account_vpc.identity(machine) == "10.0.0.5"
    assert account_vpc.server.world.of(machine.id).vm_slot.nic == info.nic


async def test_free_addresses_are_given_lowest_first(account_vpc: VpcWithVms) -> None:
    await account_vpc.create("10.0.0.2")
    machines = [await account_vpc.create() for _ in range(3)]
    assert [account_vpc.identity(machine) for machine in machines] == ["10.0.0.1", "10.0.0.3", "10.0.0.4"]
    await machines[1].delete()
    assert account_vpc.identity(await account_vpc.create()) == "10.0.0.3"


async def test_a_taken_address_is_refused(account_vpc: VpcWithVms) -> None:
    first = await account_vpc.create("10.0.0.5")
    await first.suspend()
    with pytest.raises(AddressTaken, match=r"address 10\.0\.0\.5 of VPC vpc-"):
        await account_vpc.create("10.0.0.5")
    assert len(await account_vpc.server.machines.list(account_vpc.account)) == 1
    await first.delete()
    await account_vpc.create("10.0.0.5")


async def test_one_address_in_two_vpcs(account_vpc: VpcWithVms) -> None:
    other = await account_vpc.networks.create(account_vpc.account, "10.0.0.0/29")
    await account_vpc.create("10.0.0.5")
    nic = NicRequest(other.id, "10.0.0.5")
    assert await account_vpc.server.machines.create(Properties(account=account_vpc.account), nic=nic)


@pytest.mark.parametrize(
    ("address", "error"), [("10.0.0.8", InvalidAddress), ("10.0.0.0", InvalidAddress), ("x", InvalidAddress)]
)
async def test_invalid_addresses_leave_nothing(
    account_vpc: VpcWithVms, address: str, error: type[SteadError]
) -> None:
    with pytest.raises(error):
        await account_vpc.create(address)
    assert await account_vpc.server.machines.list() == []


async def test_a_vpc_of_another_account_is_not_found(account_vpc: VpcWithVms) -> None:
    with pytest.raises(InvalidRequest, match="not found"):
        await account_vpc.server.machines.create(
            Properties(account="stranger"), nic=NicRequest(account_vpc.vpc)
        )


async def test_a_full_vpc_is_refused(account_vpc: VpcWithVms) -> None:
    for _ in range(6):
        await account_vpc.create()
    with pytest.raises(VpcFull, match=r"no free address in 10\.0\.0\.0/29"):
        await account_vpc.create()


async def test_the_address_survives_every_state(account_vpc: VpcWithVms) -> None:
    machine = await account_vpc.create("10.0.0.5", recreate=True)
    await machine.suspend()
    await machine.start()
    assert account_vpc.identity(machine) == "10.0.0.5"
    await machine.stop()
    await machine.start()
    assert account_vpc.identity(machine) == "10.0.0.5"
    await machine.resize(memory_mib=1024)
    assert account_vpc.identity(machine) == "10.0.0.5"
    await restart(account_vpc.server)
    machine = await account_vpc.server.machines.get(machine.id)
    await machine.delete()
    assert await account_vpc.addresses() == ["10.0.0.5"]
    with pytest.raises(AddressTaken):
        await account_vpc.create("10.0.0.5")
    await machine.start()
    assert account_vpc.identity(machine) == "10.0.0.5"


async def test_forks_of_a_vm_with_a_free_address_have_their_own(account_vpc: VpcWithVms) -> None:
    machine = await account_vpc.create()
    children = await machine.fork(3)
    assert [account_vpc.identity(child) for child in children] == ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
    assert account_vpc.identity(machine) == "10.0.0.1"
    with pytest.raises(VpcFull):
        await machine.fork(3)
    assert len(await account_vpc.addresses()) == 4


async def test_a_vm_with_a_fixed_address_is_not_forked(account_vpc: VpcWithVms) -> None:
    machine = await account_vpc.create("10.0.0.5")
    with pytest.raises(ForkUnsupported, match="fixed address"):
        await machine.fork()
    assert await account_vpc.addresses() == ["10.0.0.5"]
    # It is refused before anything is done for it.
    await machine.suspend()
    with pytest.raises(ForkUnsupported, match="fixed address"):
        await machine.fork()
    assert (await machine.info()).state is State.SUSPENDED
    assert "load" not in account_vpc.server.host.calls


async def test_a_snapshot_has_no_nic(account_vpc: VpcWithVms) -> None:
    machine = await account_vpc.create("10.0.0.5")
    snapshot = await machine.snapshot()
    outside = await account_vpc.server.machines.create(
        Properties(snapshot=snapshot.id, account=account_vpc.account)
    )
    info = await outside.info()
    assert info.nic is None and account_vpc.identity(outside) == str(info.address)
    inside = await account_vpc.create("10.0.0.6", snapshot=snapshot.id)
    assert account_vpc.identity(inside) == "10.0.0.6"


async def test_a_create_that_fails_frees_its_address(account_vpc: VpcWithVms) -> None:
    await account_vpc.server.machines.template()
    account_vpc.server.host.fail("restore", HostError("no"))
    with pytest.raises(StartFailed):
        await account_vpc.create("10.0.0.5")
    assert await account_vpc.addresses() == []


async def test_a_vpc_with_vms_is_not_deleted(account_vpc: VpcWithVms) -> None:
    machine = await account_vpc.create()
    with pytest.raises(VpcInUse, match=machine.id):
        await account_vpc.networks.delete(account_vpc.account, account_vpc.vpc)
    assert account_vpc.vpc in account_vpc.server.world.networks
    await machine.delete()
    await account_vpc.networks.delete(account_vpc.account, account_vpc.vpc)
    assert account_vpc.vpc not in account_vpc.server.world.networks


async def test_a_vpc_that_the_host_cannot_set_up_does_not_exist(account_vpc: VpcWithVms) -> None:
    account_vpc.server.host.fail("vpcs.add", HostError("no namespaces"))
    with pytest.raises(HostError):
        await account_vpc.networks.create(account_vpc.account, "10.0.0.0/24")
    assert [each.id for each in await account_vpc.networks.list(account_vpc.account)] == [account_vpc.vpc]


async def test_a_packet_wakes_a_vm(account_vpc: VpcWithVms) -> None:
    machine = await account_vpc.create()
    await machine.suspend()
    for _ in range(5):
        account_vpc.server.host.wanted(machine.id)

    async def up() -> bool:
        return (await machine.info()).state is State.RUNNING

    await until(up, 60)
    assert account_vpc.server.host.calls.count("load") == 1


async def test_a_vm_of_the_pool_joins_the_vpc() -> None:
    async with installation(pool=1) as server:
        account_vpc = await VpcWithVms.of(server, "10.0.0.0/29")
        await server.machines.template()
        assert await inside(server.machines).pool.filled(30)
        machine = await account_vpc.create("10.0.0.3")
        assert server.host.calls.count("nics.join") == 1
        assert account_vpc.identity(machine) == "10.0.0.3"
        assert server.world.of(machine.id).vm_slot.account == account_vpc.account
        other = await server.machines.create(Properties(account=account_vpc.account))
        assert account_vpc.identity(other) == str((await other.info()).address)


@pytest.mark.parametrize("call", ["nics.join", "vm.resume"])
async def test_a_vm_of_the_pool_that_cannot_join_is_not_created(call: str) -> None:
    async with installation(pool=1) as server:
        account_vpc = await VpcWithVms.of(server, "10.0.0.0/29")
        await server.machines.template()
        assert await inside(server.machines).pool.filled(30)
        server.host.fail(call, HostError("no"))
        with pytest.raises(StartFailed, match="cannot create a VM: no"):
            await account_vpc.create("10.0.0.3")
        assert await account_vpc.addresses() == []


_REQUESTS = st.lists(st.sampled_from([None, "10.0.0.1", "10.0.0.2", "10.0.0.5"]), min_size=2, max_size=9)


@settings(max_examples=25, deadline=None)
@given(requests=_REQUESTS, pool=st.integers(0, 1))
def test_concurrent_creates_never_share_an_address(requests: list[str | None], pool: int) -> None:
    async def race() -> None:
        async with installation(pool=pool) as server:
            account_vpc = await VpcWithVms.of(server, "10.0.0.0/29")
            await server.machines.template()
            made = await asyncio.gather(
                *(account_vpc.create(each) for each in requests), return_exceptions=True
            )
            machines = [each for each in made if isinstance(each, Machine)]
            failed = [each for each in made if not isinstance(each, Machine)]
            assert all(isinstance(each, AddressTaken | VpcFull) for each in failed), failed
            told = [account_vpc.identity(machine) for machine in machines]
            assert len(set(told)) == len(told) and sorted(told) == await account_vpc.addresses()
            fixed = {each for each in requests if each is not None}
            free = requests.count(None)
            assert len(machines) >= min(6, max(len(fixed), free))
            if not pool:
                await audit(server)

    asyncio.run(race())
