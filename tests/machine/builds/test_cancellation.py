"""Builds whose clients leave."""

import asyncio
import contextlib

import pytest

from stead.builds.builder import Builder, SnapshotOrder
from stead.builds.errors import BuildBudgetExceeded
from stead.creation.creation import Creation
from stead.errors import ServerStopping
from stead.machines import Machine, Machines, SnapshotState
from stead.repos.transfer.bundles import Bundles
from stead.store.builds import BuildStore
from support.builds import Lines, create_vm, hidden, phase_names, said, vm_order, with_commands
from support.internals import inside
from support.waiting import until


async def test_a_build_is_cancelled_after_its_last_client_disconnects(
    builder: Builder, machines: Machines, account: str, lines: Lines
) -> None:
    """Of two clients, one disconnects and the build continues; with the other it ends and leaves nothing."""
    order = SnapshotOrder(account, with_commands("echo at work; sleep 600"))
    waiting = [asyncio.create_task(builder.ensure_snapshot(order)) for _ in range(2)]

    await until(lambda: said(lines, account, "at work"), 180)
    (waiter, starter), _ = await builder.records.list(account)
    assert (starter.state, starter.current_phase) == ("running", "services")
    assert (waiter.state, waiter.current_phase) == ("running", "waiting")
    waiting[0].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting[0]
    assert not waiting[1].done()
    # The request that started the layer has gone; its record is finished with the layer.
    assert (await builder.records.get(account, starter.id)).state == "running"
    assert len(await hidden(machines, account)) == 1
    assert await machines.list(account) == []

    waiting[1].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting[1]
    assert await hidden(machines, account) == []
    assert await machines.snapshots.list(account, deleted=True) == []
    builds, _ = await builder.records.list(account)
    assert [build.state for build in builds] == ["failed", "failed"]
    assert {build.failure for build in builds} == {"cancelled: the client disconnected"}


async def test_a_cancelled_create_leaves_no_vm(
    creation: Creation, machines: Machines, account: str, lines: Lines
) -> None:
    task = asyncio.create_task(
        create_vm(creation, vm_order(account, spec=with_commands("echo at work; sleep 600")))
    )

    await until(lambda: said(lines, account, "at work"), 180)
    assert await machines.list(account) == []
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert await hidden(machines, account) == []
    assert await machines.snapshots.list(account, deleted=True) == []


async def test_a_repeated_request_joins_the_build_that_lingers(
    machines: Machines, account: str, lines: Lines, bundles: Bundles
) -> None:
    """A client whose connection broke repeats its request; also the time limit of a build, and a stop."""
    builder = Builder(machines, BuildStore(inside(machines).database), lines, bundles, linger=60)
    order = SnapshotOrder(account, with_commands("echo at work; until [ -e /root/go ]; do sleep 0.1; done"))
    first = asyncio.create_task(builder.ensure_snapshot(order))

    await until(lambda: said(lines, account, "at work"), 180)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    second = asyncio.create_task(builder.ensure_snapshot(order))
    (machine_id,) = await hidden(machines, account)
    await Machine(machines, machine_id).files().write("/root/go", b"")
    snapshot = await second
    assert snapshot.state is SnapshotState.READY

    async def both_succeeded() -> bool:
        return (await builder.records.list(account, "succeeded"))[1] == 2

    await until(both_succeeded, 60)
    assert await phase_names(builder, account, snapshot.build or "") == [
        "vm",
        "files",
        "services",
        "snapshot",
    ]

    hurried = Builder(machines, BuildStore(inside(machines).database), lines, bundles, budget=4, linger=60)
    with pytest.raises(BuildBudgetExceeded) as raised:
        await hurried.ensure_snapshot(SnapshotOrder(account, with_commands("sleep 600")))
    reached = (await builder.records.phases(account, raised.value.build or ""))[-1]
    assert (raised.value.phase, raised.value.seconds) == (reached.name, 4)
    assert raised.value.snapshot == reached.snapshot
    assert await hidden(machines, account) == []

    abandoned = asyncio.create_task(
        builder.ensure_snapshot(SnapshotOrder(account, with_commands("echo second; sleep 600")))
    )

    await until(lambda: said(lines, account, "second"), 180)
    await builder.close()
    with pytest.raises(ServerStopping):
        await abandoned
    assert await hidden(machines, account) == []
