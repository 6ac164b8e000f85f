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
from support.engine import audit, installation, restart
from support.fake_server import FakeServer
from support.internals import inside
from support.vpc_stage import VpcStage
from support.waiting import until


class Stage(VpcStage):
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
async def stage(server: FakeServer) -> AsyncIterator[Stage]:
    yield await Stage.of(server, "10.0.0.0/29")
    await audit(server)


async def test_guest_has_the_fixed_address(stage: Stage) -> None:
    machine = await stage.create("10.0.0.5")
    info = await machine.info()
    assert info.nic is not None
    assert (info.nic.vpc, info.nic.address) == (stage.vpc, IPv4Address("10.0.0.5"))
    assert stage.identity(machine) == "10.0.0.5"
    assert stage.server.world.of(machine.id).vm_slot.nic == info.nic


async def test_free_addresses_are_given_lowest_first(stage: Stage) -> None:
    await stage.create("10.0.0.2")
    machines = [await stage.create() for _ in range(3)]
    assert [stage.identity(machine) for machine in machines] == ["10.0.0.1", "10.0.0.3", "10.0.0.4"]
    await machines[1].delete()
    assert stage.identity(await stage.create()) == "10.0.0.3"


async def test_a_taken_address_is_refused(stage: Stage) -> None:
    first = await stage.create("10.0.0.5")
    await first.suspend()
    with pytest.raises(AddressTaken, match=r"address 10\.0\.0\.5 of VPC vpc-"):
        await stage.create("10.0.0.5")
    assert len(await stage.server.machines.list(stage.account)) == 1
    await first.delete()
    await stage.create("10.0.0.5")


async def test_one_address_in_two_vpcs(stage: Stage) -> None:
    other = await stage.networks.create(stage.account, "10.0.0.0/29")
    await stage.create("10.0.0.5")
    nic = NicRequest(other.id, "10.0.0.5")
    assert await stage.server.machines.create(Properties(account=stage.account), nic=nic)


@pytest.mark.parametrize(
    ("address", "error"), [("10.0.0.8", InvalidAddress), ("10.0.0.0", InvalidAddress), ("x", InvalidAddress)]
)
async def test_invalid_addresses_leave_nothing(stage: Stage, address: str, error: type[SteadError]) -> None:
    with pytest.raises(error):
        await stage.create(address)
    assert await stage.server.machines.list() == []


async def test_a_vpc_of_another_account_is_not_found(stage: Stage) -> None:
    with pytest.raises(InvalidRequest, match="not found"):
        await stage.server.machines.create(Properties(account="stranger"), nic=NicRequest(stage.vpc))


async def test_a_full_vpc_is_refused(stage: Stage) -> None:
    for _ in range(6):
        await stage.create()
    with pytest.raises(VpcFull, match=r"no free address in 10\.0\.0\.0/29"):
        await stage.create()


async def test_the_address_survives_every_state(stage: Stage) -> None:
    machine = await stage.create("10.0.0.5", recreate=True)
    await machine.suspend()
    await machine.start()
    assert stage.identity(machine) == "10.0.0.5"
    await machine.stop()
    await machine.start()
    assert stage.identity(machine) == "10.0.0.5"
    await machine.resize(memory_mib=1024)
    assert stage.identity(machine) == "10.0.0.5"
    await restart(stage.server)
    machine = await stage.server.machines.get(machine.id)
    await machine.delete()
    assert await stage.addresses() == ["10.0.0.5"]
    with pytest.raises(AddressTaken):
        await stage.create("10.0.0.5")
    await machine.start()
    assert stage.identity(machine) == "10.0.0.5"


async def test_forks_of_a_vm_with_a_free_address_have_their_own(stage: Stage) -> None:
    machine = await stage.create()
    children = await machine.fork(3)
    assert [stage.identity(child) for child in children] == ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
    assert stage.identity(machine) == "10.0.0.1"
    with pytest.raises(VpcFull):
        await machine.fork(3)
    assert len(await stage.addresses()) == 4


async def test_a_vm_with_a_fixed_address_is_not_forked(stage: Stage) -> None:
    machine = await stage.create("10.0.0.5")
    with pytest.raises(ForkUnsupported, match="fixed address"):
        await machine.fork()
    assert await stage.addresses() == ["10.0.0.5"]
    # It is refused before anything is done for it.
    await machine.suspend()
    with pytest.raises(ForkUnsupported, match="fixed address"):
        await machine.fork()
    assert (await machine.info()).state is State.SUSPENDED
    assert "load" not in stage.server.host.calls


async def test_a_snapshot_has_no_nic(stage: Stage) -> None:
    machine = await stage.create("10.0.0.5")
    snapshot = await machine.snapshot()
    outside = await stage.server.machines.create(Properties(snapshot=snapshot.id, account=stage.account))
    info = await outside.info()
    assert info.nic is None and stage.identity(outside) == str(info.address)
    inside = await stage.create("10.0.0.6", snapshot=snapshot.id)
    assert stage.identity(inside) == "10.0.0.6"


async def test_a_create_that_fails_frees_its_address(stage: Stage) -> None:
    await stage.server.machines.template()
    stage.server.host.fail("restore", HostError("no"))
    with pytest.raises(StartFailed):
        await stage.create("10.0.0.5")
    assert await stage.addresses() == []


async def test_a_vpc_with_vms_is_not_deleted(stage: Stage) -> None:
    machine = await stage.create()
    with pytest.raises(VpcInUse, match=machine.id):
        await stage.networks.delete(stage.account, stage.vpc)
    assert stage.vpc in stage.server.world.networks
    await machine.delete()
    await stage.networks.delete(stage.account, stage.vpc)
    assert stage.vpc not in stage.server.world.networks


async def test_a_vpc_that_the_host_cannot_set_up_does_not_exist(stage: Stage) -> None:
    stage.server.host.fail("vpcs.add", HostError("no namespaces"))
    with pytest.raises(HostError):
        await stage.networks.create(stage.account, "10.0.0.0/24")
    assert [each.id for each in await stage.networks.list(stage.account)] == [stage.vpc]


async def test_a_packet_wakes_a_vm(stage: Stage) -> None:
    machine = await stage.create()
    await machine.suspend()
    for _ in range(5):
        stage.server.host.wanted(machine.id)

    async def up() -> bool:
        return (await machine.info()).state is State.RUNNING

    await until(up, 60)
    assert stage.server.host.calls.count("load") == 1


async def test_a_vm_of_the_pool_joins_the_vpc() -> None:
    async with installation(pool=1) as server:
        stage = await Stage.of(server, "10.0.0.0/29")
        await server.machines.template()
        assert await inside(server.machines).pool.filled(30)
        machine = await stage.create("10.0.0.3")
        assert server.host.calls.count("nics.join") == 1
        assert stage.identity(machine) == "10.0.0.3"
        assert server.world.of(machine.id).vm_slot.account == stage.account
        other = await server.machines.create(Properties(account=stage.account))
        assert stage.identity(other) == str((await other.info()).address)


@pytest.mark.parametrize("call", ["nics.join", "vm.resume"])
async def test_a_vm_of_the_pool_that_cannot_join_is_not_created(call: str) -> None:
    async with installation(pool=1) as server:
        stage = await Stage.of(server, "10.0.0.0/29")
        await server.machines.template()
        assert await inside(server.machines).pool.filled(30)
        server.host.fail(call, HostError("no"))
        with pytest.raises(StartFailed, match="cannot create a VM: no"):
            await stage.create("10.0.0.3")
        assert await stage.addresses() == []


_REQUESTS = st.lists(st.sampled_from([None, "10.0.0.1", "10.0.0.2", "10.0.0.5"]), min_size=2, max_size=9)


@settings(max_examples=25, deadline=None)
@given(requests=_REQUESTS, pool=st.integers(0, 1))
def test_concurrent_creates_never_share_an_address(requests: list[str | None], pool: int) -> None:
    async def race() -> None:
        async with installation(pool=pool) as server:
            stage = await Stage.of(server, "10.0.0.0/29")
            await server.machines.template()
            made = await asyncio.gather(*(stage.create(each) for each in requests), return_exceptions=True)
            machines = [each for each in made if isinstance(each, Machine)]
            failed = [each for each in made if not isinstance(each, Machine)]
            assert all(isinstance(each, AddressTaken | VpcFull) for each in failed), failed
            told = [stage.identity(machine) for machine in machines]
            assert len(set(told)) == len(told) and sorted(told) == await stage.addresses()
            fixed = {each for each in requests if each is not None}
            free = requests.count(None)
            assert len(machines) >= min(6, max(len(fixed), free))
            if not pool:
                await audit(server)

    asyncio.run(race())
