"""Creation of VMs with their NIC, domains and Git access, or of nothing, on a host in memory."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from stead.builds.plan import Plan, plan_machine
from stead.builds.spec import Layer
from stead.creation.creation import VmOrder
from stead.creation.results import CreatedVm
from stead.domains.domains import Domains, Target
from stead.errors import HostError, InvalidRequest, SnapshotNotFound, SteadError
from stead.installation import OpenedVms, open_parts
from stead.installation_parts import Installation
from stead.machines import Machine, Properties
from stead.machines.nics import NicRequest
from stead.store.logs import LogQuery
from support.engine import audit, installation
from support.fake_host import DATABASE, When
from support.fake_server import FakeServer
from support.internals import inside
from support.waiting import until

PLAIN = plan_machine(None, None, Layer())


@contextlib.asynccontextmanager
async def parts_of(server: FakeServer) -> AsyncIterator[Installation]:
    vms = OpenedVms(server.machines, server.host, server.store)
    async with open_parts(server.settings, server.database, vms, None) as here:
        yield here


async def order_of(here: Installation, plan: Plan = PLAIN) -> VmOrder:
    """A VM with a NIC and a domain."""
    account = (await here.accounts.default()).id
    vpc = await here.networks.create(account, "10.0.0.0/24")
    return VmOrder(
        plan,
        Properties(name="mine", account=account, request="ri-1"),
        nic=NicRequest(vpc.id, "10.0.0.5"),
        targets=(Target("mine.style.dev", 3000),),
    )


async def nothing_left(server: FakeServer, here: Installation, order: VmOrder) -> None:
    """No VM, no domain, no address and no identity of the order."""
    await audit(server)
    rows = await inside(server.machines).journal.list()
    assert [record for record in rows if record.account is not None] == []
    assert here.domains.mapped_names() == []
    assert order.nic is not None
    assert await here.networks.members(order.account, order.nic.vpc) == []
    assert (await here.identities.list(order.account, managed=True)).items == []


async def test_vm_has_all_that_its_order_asks_for(server: FakeServer) -> None:
    async with parts_of(server) as here:
        order = await order_of(here, plan_machine(None, None, Layer(idle_timeout=7)))
        made = await here.creation.create(replace(order, warnings=("unknown key x (ignored)",)))
        assert made == CreatedVm(made.id, None, ("mine.style.dev",))
        info = await server.machines.info(made.id)
        assert (info.name, info.account, info.idle_timeout) == ("mine", order.account, 7)
        assert info.nic is not None and str(info.nic.address) == "10.0.0.5"
        assert [each.machine for each in here.domains.of_machine(made.id)] == [made.id]
        assert await here.creation.made_for("ri-1", running=True) == made
        found = await here.creation.named(order.account, "mine")
        assert found == [replace(made, created=False)]

        async def logged() -> bool:
            lines = await here.logbook.find(LogQuery(order.account, 0, 2**62, machine=made.id))
            return "unknown key x (ignored)" in [line.message for line in lines]

        await until(logged, 60)


async def test_order_that_cannot_succeed_is_refused_before_anything_is_made(server: FakeServer) -> None:
    async with parts_of(server) as here:
        order = await order_of(here)
        taken = NicRequest("vpc-none")
        for wrong in (
            replace(order, nic=taken),
            replace(order, targets=(Target("mine.example.com", 80),)),
            replace(order, git_access="00000000-0000-4000-8000-000000000000"),
        ):
            server.host.calls.clear()
            with pytest.raises(SteadError):
                await here.creation.create(wrong)
            assert server.host.calls == []
        with pytest.raises(InvalidRequest, match="1 to 200 printable characters"):
            await here.creation.create(replace(order, properties=replace(order.properties, name="")))
        missing = plan_machine(None, None, Layer(snapshot_id="sc-none"))
        with pytest.raises(SnapshotNotFound):
            await here.creation.create(replace(order, plan=missing))
        await nothing_left(server, here, order)


async def test_failure_after_the_vm_runs_deletes_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity of its Git access and its domains go with it."""

    async def fail(*_: object, **__: object) -> None:
        raise HostError("no")

    async with parts_of(server) as here:
        order = await order_of(here)
        repo = await here.repos.create(order.account)
        for kind, method in ((Machine, "exec"), (Domains, "map_all")):
            with monkeypatch.context() as patched, pytest.raises(HostError, match="no"):
                patched.setattr(kind, method, fail)
                await here.creation.create(replace(order, git_access=repo.id))
    async with parts_of(server) as here:
        await nothing_left(server, here, order)


async def cancelled_at(number: int, call: str | None, when: When, pool: int) -> bool:
    """Cancel a create at its nth call of the host or write of the database; whether there were as many."""
    async with installation(pool=pool) as server:
        await server.machines.template()
        assert await inside(server.machines).pool.filled(60)
        async with parts_of(server) as here:
            order = await order_of(here)
            creating = asyncio.create_task(here.creation.create(order))
            server.host.fail(call, lambda: creating.cancel(), skip=number, when=when)
            await asyncio.wait({creating})
            reached = not server.host.has_faults
            server.host.forget_faults()
        async with parts_of(server) as here:
            if creating.cancelled():
                await inside(server.machines).pool.close()
                await nothing_left(server, here, order)
            else:
                assert [info.id for info in await server.machines.list()] == [creating.result().id]
        return reached


@pytest.mark.parametrize("pool", [0, 1], ids=["restored", "from the pool"])
@pytest.mark.parametrize("call", [None, DATABASE], ids=["host", "database"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_create_that_is_cancelled_at_any_call_leaves_nothing(
    call: str | None, when: When, pool: int
) -> None:
    number = 0
    while await cancelled_at(number, call, when, pool):
        number += 1
    assert number > 2
