"""What one account may take of a host, and what it loses when there is not enough, on a host in memory."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.errors import CapacityExceeded, DiskSpaceExceeded, MachineNotFound, TooBusy
from stead.host.interface import Report
from stead.identity.accounts import Accounts
from stead.limits import UNLIMITED, HostResources, LimitExceeded, Limits
from stead.machines import Ephemeral, Machine, Machines, Properties, State, Sticky, idle
from stead.machines.events import Origin, Use
from stead.machines.idle import RestingVm, suspended_first
from stead.machines.persistence import Evictable, EvictionScope, eviction_order
from stead.machines.records import Record
from stead.settings import Size
from stead.shares import KeyedLimit
from stead.store.repos import RepoRow, RepoStore
from stead.store.snapshots import SnapshotRow, SnapshotStore
from stead.tasks import Threads, cancel_and_wait
from support.engine import SIZE, audit, installation, run, used
from support.fake_host import FakeVm
from support.fake_server import FakeServer
from support.fake_world import FakeTemplate
from support.internals import inside
from support.waiting import until

ALICE, BOB, CAROL = "alice", "bob", "carol"


async def delete(_: str) -> None: ...


async def sleeping(
    server: FakeServer, account: str, priority: int | None = None, data: int = 0, state: State = State.STOPPED
) -> Machine:
    """A stopped or suspended VM with something on its disk; without a priority it is persistent."""
    kept = {} if priority is None else {"persistence": Sticky(priority)}
    machine = await used(server, account=account, **kept)
    for number in range(data):
        await run(machine, f"write file{number} text")
    await (machine.stop() if state is State.STOPPED else machine.suspend())
    return machine


async def ids(machines: Machines) -> set[str]:
    return {info.id for info in await machines.list()}


def fill(server: FakeServer, over: int = 0) -> None:
    """The disk is full until `over` + 1 files or VMs are deleted."""
    server.world.full_at = len(server.world.files) + len(server.world.folders) - over


def limit(machines: Machines, **limits: dict[str, int]) -> None:
    """Limits by account."""

    async def limits_of(account: str) -> Limits:
        return Limits(**limits.get(account, {}))

    machines.limit(limits_of)


# Eviction


async def test_an_account_pays_for_its_own_requests_first(server: FakeServer) -> None:
    """A priority is what an owner chooses among its own things."""
    dear, theirs = await sleeping(server, ALICE, 9), await sleeping(server, BOB, 0)
    fill(server)
    new = await server.machines.create(Properties(account=ALICE))
    assert await ids(server.machines) == {theirs.id, new.id}
    with pytest.raises(MachineNotFound):
        await dear.info()
    await audit(server)


async def test_an_account_below_its_share_loses_nothing(server: FakeServer) -> None:
    """A tenant with large persistent VMs cannot have the small sticky ones of others deleted."""
    for _ in range(2):
        await sleeping(server, ALICE, data=50)
    small = await sleeping(server, BOB, 0)
    fill(server)
    with pytest.raises(DiskSpaceExceeded, match="delete VMs or snapshots"):
        await server.machines.create(Properties(account=ALICE))
    assert small.id in await ids(server.machines)
    await audit(server)


async def test_accounts_above_their_share_make_room_for_others(server: FakeServer) -> None:
    large = [await sleeping(server, ALICE, 9, data=50) for _ in range(2)]
    small = await sleeping(server, BOB, 0)
    fill(server)
    new = await server.machines.create(Properties(account=CAROL))
    left = await ids(server.machines)
    assert {small.id, new.id} <= left and len(left & {each.id for each in large}) == 1
    await audit(server)


async def test_repositories_count_in_the_share_of_an_account(server: FakeServer) -> None:
    """An account that fills the disk by git does not make those with VMs pay for it."""
    victim = await sleeping(server, BOB, 0, data=50)
    account = (await Accounts(server.database, UNLIMITED).create("git")).id
    rows = RepoRow("a", account, None, False, size=1000, lfs_size=1 << 20), RepoRow("b", account, None, False)
    for row in rows:
        await RepoStore(server.database).insert(row)
    usage = await inside(server.machines).eviction.usage.by_account()
    assert usage[account] == 1000 + (1 << 20) and usage[BOB] > 50
    fill(server)
    with pytest.raises(DiskSpaceExceeded):
        await server.machines.create(Properties(account=CAROL))
    assert victim.id in await ids(server.machines)


async def test_an_account_above_its_share_evicts_only_its_own(server: FakeServer) -> None:
    await sleeping(server, ALICE, data=60)
    other = await sleeping(server, BOB, 0, data=50)
    await sleeping(server, CAROL)
    fill(server)
    with pytest.raises(DiskSpaceExceeded):
        await server.machines.create(Properties(account=ALICE))
    assert other.id in await ids(server.machines)


async def test_an_eviction_lists_vms_once(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        await sleeping(server, ALICE, 0)
    lists = 0
    found = server.machines.snapshots.sticky

    async def count() -> Sequence[SnapshotRow]:
        nonlocal lists
        lists += 1
        return await found()

    monkeypatch.setattr(server.machines.snapshots, "sticky", count)
    fill(server, over=4)
    await server.machines.create(Properties(account=ALICE))
    assert len(await ids(server.machines)) == 1 and lists == 1


@pytest.mark.parametrize("state", [State.STOPPED, State.SUSPENDED])
@pytest.mark.parametrize("use", [each for each in Use if each.origin is Origin.STRANGER])
async def test_a_stranger_has_nothing_deleted(server: FakeServer, use: Use, state: State) -> None:
    """A request for a mapped domain, or a packet, finds a full disk; so does the owner's own, for others."""
    asleep, own, theirs = (
        await sleeping(server, ALICE, state=state),
        await sleeping(server, ALICE, 0),
        await sleeping(server, BOB, 0, data=50),
    )
    fill(server)
    with pytest.raises(DiskSpaceExceeded):
        await server.machines.ensure_up(asleep.id, use)
    assert (await asleep.info()).state is state
    assert await ids(server.machines) == {asleep.id, own.id, theirs.id}
    await asleep.start()
    assert await ids(server.machines) == {asleep.id, theirs.id}
    await audit(server)


def test_requests_without_a_credential_are_strangers() -> None:
    assert {use for use in Use if use.origin is Origin.STRANGER} == {Use.DOMAIN, Use.NETWORK}


@pytest.mark.parametrize("state", [State.STOPPED, State.SUSPENDED])
async def test_a_start_deletes_nothing_of_others(server: FakeServer, state: State) -> None:
    asleep = await sleeping(server, ALICE, state=state)
    theirs = await sleeping(server, BOB, 0, data=50)
    fill(server)
    with pytest.raises(DiskSpaceExceeded):
        await asleep.start()
    assert (await asleep.info()).state is state
    assert theirs.id in await ids(server.machines)
    await audit(server)


@pytest.mark.parametrize("refused", ["create", "snapshot", "fork"])
async def test_nothing_is_evicted_for_what_a_limit_refuses(server: FakeServer, refused: str) -> None:
    own, up = await sleeping(server, ALICE, 0), await used(server, account=ALICE)
    limit(server.machines, alice={"vms": 2, "snapshots": 0})
    fill(server)
    work: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: server.machines.create(Properties(account=ALICE)),
        "snapshot": up.snapshot,
        "fork": up.fork,
    }
    with pytest.raises(LimitExceeded):
        await work[refused]()
    assert await ids(server.machines) == {own.id, up.id}
    await audit(server)


accounts = st.sampled_from([ALICE, BOB, CAROL, None])


@given(
    st.lists(st.tuples(accounts, st.integers(0, 10), st.integers(0, 99)), max_size=20),
    st.dictionaries(accounts, st.integers(0, 1000)),
    accounts,
    st.sampled_from(EvictionScope),
)
def test_the_order_of_eviction(
    things: list[tuple[str | None, int, int]],
    usage: dict[str | None, int],
    account: str | None,
    scope: EvictionScope,
) -> None:
    candidates = [
        Evictable(str(number), priority, used, delete, owner)
        for number, (owner, priority, used) in enumerate(things)
    ]
    order = eviction_order(candidates, account, scope, usage)
    own = [each for each in order if each.account == account]
    share = sum(usage.values()) / len({*usage, account})
    assert order[: len(own)] == own, "own things go first"
    assert own == sorted(own, key=lambda each: (each.priority, each.used_at, each.id))
    for other in order[len(own) :]:
        assert scope is EvictionScope.ABOVE_SHARE and usage[other.account] > share
    assert scope is EvictionScope.NOTHING or len(own) == sum(owner == account for owner, *_ in things)


# Reservation


async def test_the_disks_of_all_accounts_together_are_bounded() -> None:
    """By size, before anything is made: a thin disk may be written in full later."""
    async with installation(disk_overcommit=2) as server:
        server.world.resources = HostResources(cpus=2, memory_mib=8192, disk_gib=150)
        await restarted(server)
        parent = await used(server, account=ALICE)
        for _ in range(13):
            await server.machines.create(Properties(account=ALICE))
        work: list[Callable[[], Awaitable[object]]] = [
            lambda: server.machines.create(Properties(account=BOB), Size(1, 512, 40)),
            lambda: parent.fork(2),
            lambda: parent.resize(disk_gib=60),
        ]
        before = len(server.host.calls)
        for each in work:
            with pytest.raises(DiskSpaceExceeded, match=r"280 of the 300 GiB|260 of the 300 GiB"):
                await each()
        assert "templates.ensure" not in server.host.calls[before:]
        assert (await parent.info()).state is State.RUNNING
        await parent.resize(disk_gib=40)
        await audit(server)


async def test_the_memory_of_all_accounts_together_is_bounded() -> None:
    """By size, whatever the limits of accounts are; a VM that sleeps takes none."""
    async with installation(memory_overcommit=2) as server:
        server.world.resources = HostResources(cpus=2, memory_mib=2048, disk_gib=1 << 16)
        await restarted(server)
        vms = [await used(server, account=account) for account in (ALICE, ALICE, ALICE, BOB, BOB, CAROL)]
        asleep = [await used(server, account=CAROL), await used(server, account=CAROL)]
        await asleep[0].suspend()
        await asleep[1].stop()
        await server.machines.create(Properties(account=ALICE), Size(1, 1024, 20))
        size = vms[0].resize(memory_mib=1024)
        work: list[Awaitable[object]] = [
            server.machines.create(Properties(account="new")),
            vms[5].fork(),
            asleep[0].start(),
            asleep[1].start(),
            run(asleep[0], "recall program"),
            size,
        ]
        for each in work:
            with pytest.raises(
                CapacityExceeded, match=r"have (4|3.5) of the 4 GiB that this host may promise"
            ):
                await each
        await vms[0].suspend()
        await asleep[0].start()
        assert await run(asleep[0], "recall program") == "running"
        with pytest.raises(CapacityExceeded):
            await vms[0].start()
        await audit(server)


async def test_snapshots_count_as_what_they_took(server: FakeServer) -> None:
    """They never grow; without them, an account fills its disks again and again and keeps all of it."""
    machine = await used(server, account=ALICE)
    limit(server.machines, alice={"total_disk_gib": 45})
    snapshot = await machine.snapshot()
    await SnapshotStore(server.database).update(snapshot.id, size_bytes=10 << 30)
    with pytest.raises(LimitExceeded, match="limited to 45, 30 in use, 20 more requested"):
        await server.machines.create(Properties(account=ALICE))
    more = await machine.snapshot()
    await SnapshotStore(server.database).update(more.id, size_bytes=16 << 30)
    with pytest.raises(LimitExceeded, match="limited to 45, 46 in use"):
        await machine.snapshot()
    await server.machines.snapshots.delete(more.id)
    await machine.snapshot()
    await server.machines.snapshots.delete(snapshot.id)
    await server.machines.create(Properties(account=ALICE))


async def test_snapshots_count_in_what_the_host_promises() -> None:
    async with installation(disk_overcommit=1) as server:
        server.world.resources = HostResources(cpus=2, memory_mib=1 << 20, disk_gib=210)
        await restarted(server)
        machine = await used(server, account=ALICE)
        snapshot = await machine.snapshot()
        await SnapshotStore(server.database).update(snapshot.id, size_bytes=171 << 30)
        with pytest.raises(DiskSpaceExceeded, match="VMs and snapshots have 191 of the 210 GiB"):
            await server.machines.create(Properties(account=BOB))
        await SnapshotStore(server.database).update(snapshot.id, size_bytes=191 << 30)
        with pytest.raises(DiskSpaceExceeded):
            await machine.snapshot()


async def restarted(server: FakeServer) -> None:
    """The bounds of a host are read when the server starts."""
    await server.stop()
    await server.start()


async def test_a_small_disk_still_has_room_for_some_vms() -> None:
    async with installation() as server:
        server.world.resources = HostResources(cpus=2, memory_mib=8192, disk_gib=1)
        await restarted(server)
        for _ in range(10):
            await server.machines.create()
        with pytest.raises(DiskSpaceExceeded):
            await server.machines.create()


async def test_a_vm_larger_than_the_host_is_refused_before_its_template_is_built(server: FakeServer) -> None:
    server.world.resources = HostResources(cpus=2, memory_mib=8192, disk_gib=1000)
    await restarted(server)
    with pytest.raises(CapacityExceeded, match="at most 8 GiB"):
        await server.machines.create(Properties(account=ALICE), Size(2, 16384, 20))
    assert "templates.ensure" not in server.host.calls
    await server.machines.create(Properties(account=ALICE), Size(2, 8192, 20))


async def test_a_fork_that_a_limit_refuses_does_not_wake_its_vm(server: FakeServer) -> None:
    machine = await sleeping(server, ALICE)
    limit(server.machines, alice={"running": 10, "vms": 3})
    with pytest.raises(LimitExceeded, match="1 in use, 3 more requested"):
        await machine.fork(3)
    assert (await machine.info()).state is State.STOPPED
    await machine.fork(2)


async def test_a_resize_that_a_limit_refuses_does_not_wake_its_vm(server: FakeServer) -> None:
    machine = await used(server, account=ALICE)
    await machine.suspend()
    limit(server.machines, alice={"disk_gib": 30})
    with pytest.raises(LimitExceeded):
        await machine.resize(disk_gib=40)
    assert (await machine.info()).state is State.SUSPENDED


# Restores and captures


class SlowCaptures:
    """Captures of one account keep a thread busy until they are let go."""

    def __init__(self, server: FakeServer, account: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = 0
        self.most = 0
        self.go_on = threading.Event()
        capture, save = FakeVm.capture, FakeVm.save_and_pause

        async def wait(vm: FakeVm) -> None:
            if vm._process.vm_slot.account == account:
                self.running += 1
                self.most = max(self.most, self.running)
            await Threads.COPIES.run(
                lambda: vm._process.vm_slot.account != account or self.go_on.wait(60),
            )
            if vm._process.vm_slot.account == account:
                self.running -= 1

        async def slow_capture(vm: FakeVm, *args: Any, **options: Any) -> Any:
            await wait(vm)
            return await capture(vm, *args, **options)

        async def slow_save(vm: FakeVm, *args: Any, **options: Any) -> Any:
            await wait(vm)
            return await save(vm, *args, **options)

        monkeypatch.setattr(FakeVm, "capture", slow_capture)
        monkeypatch.setattr(FakeVm, "save_and_pause", slow_save)


@pytest.mark.parametrize("kind", ["snapshot", "suspend", "fork"])
async def test_captures_of_one_account_do_not_delay_those_of_another(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    work: dict[str, Callable[[Machine], Awaitable[object]]] = {
        "snapshot": Machine.snapshot,
        "suspend": Machine.suspend,
        "fork": Machine.fork,
    }
    ours = [await used(server, account=ALICE) for _ in range(20)]
    theirs = await used(server, account=BOB)
    captures = SlowCaptures(server, ALICE, monkeypatch)
    share = inside(server.machines).captures._per_key
    assert share is not None and 2 * share <= (inside(server.machines).captures._total or 0)
    flood = [asyncio.ensure_future(work[kind](machine)) for machine in ours]
    try:
        await until(lambda: captures.running == share, 60)
        async with asyncio.timeout(30):
            await theirs.snapshot()
            await theirs.suspend()
            await theirs.start()
        assert captures.most == share and not any(each.done() for each in flood)
    finally:
        captures.go_on.set()
    await asyncio.gather(*flood)
    assert captures.most == share
    await audit(server)


async def test_an_idle_suspend_that_waits_for_its_turn_has_no_lock(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, idle = await used(server, account=ALICE), await used(server, account=ALICE)
    captures = inside(server.machines).captures
    captures._per_key = 1
    slow = SlowCaptures(server, ALICE, monkeypatch)
    flood = asyncio.ensure_future(busy.snapshot())
    await until(lambda: slow.running == 1, 60)
    waiting = asyncio.ensure_future(inside(server.machines).suspend.suspend_if_idle(idle.id))
    await until(lambda: captures.waiting == 1, 60)
    async with asyncio.timeout(30):
        await idle.stop()
    slow.go_on.set()
    await asyncio.gather(flood, waiting)
    assert (await idle.info()).state is State.STOPPED
    await audit(server)


@pytest.mark.parametrize("full", ["slots", "unfinished", "captures"])
async def test_a_call_waits_for_a_place_for_some_time_only(server: FakeServer, full: str) -> None:
    machine = await used(server, account=ALICE)
    slots = inside(server.machines).slots
    limit = {"slots": slots, "unfinished": slots.unfinished, "captures": inside(server.machines).captures}[
        full
    ]
    limit._total, limit._max_wait = 1, 0.05
    slots._max_wait = 0.05
    if full == "captures":
        async with limit.hold("other"):
            for refused in (machine.snapshot, machine.suspend, machine.fork):
                with pytest.raises(TooBusy, match="wait to be captured"):
                    await refused()
    else:
        await machine.stop()
        async with KeyedLimit.hold(limit, "other"):
            with pytest.raises(TooBusy, match="wait to be started"):
                await machine.start()
            assert (await machine.info()).state is State.STOPPED
        await machine.start()
    assert await run(machine, "read file") == "saved"
    await audit(server)


async def test_a_resize_takes_a_slot_before_it_stops_the_vm(server: FakeServer) -> None:
    machine = await used(server, account=ALICE)
    slots = inside(server.machines).slots
    slots._total, slots._max_wait = 1, 0.05
    async with slots.hold("other"):
        with pytest.raises(TooBusy):
            await machine.resize(memory_mib=1024)
        assert (await machine.info()).state is State.RUNNING
        assert await run(machine, "recall program") == "running"
    await machine.resize(memory_mib=1024)
    assert (await machine.info()).size.memory_mib == 1024


async def test_restores_that_do_not_end_are_bounded_by_account(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot is released after some seconds, and its restore goes on."""
    await server.machines.template()
    slots = inside(server.machines).slots
    slots._release_after = 0.01
    slots.unfinished._per_key = 3

    async def never(_: object) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.world, "dial", never)
    stuck = [asyncio.create_task(server.machines.create(Properties(account=ALICE))) for _ in range(8)]
    await until(lambda: slots.unfinished.waiting == 5, 60)
    await until(lambda: slots.used == 0, 60)
    assert slots.unfinished.held_by(ALICE) == 3
    await cancel_and_wait(*stuck)
    assert slots.unfinished.used == 0


# Templates


async def test_an_account_has_few_sizes(server: FakeServer) -> None:
    """Each has a template, which takes disk and memory for a week. Disks have no part in it."""
    limit(server.machines, alice={"templates": 2}, bob={})
    for vcpus in (1, 2):
        for disk in (20, 21):
            await server.machines.create(Properties(account=ALICE), Size(vcpus, 512, disk))
    with pytest.raises(LimitExceeded, match="templates is limited to 2"):
        await server.machines.create(Properties(account=ALICE), Size(4, 512, 20))
    await server.machines.create(Properties(account=BOB), Size(4, 512, 20))
    # It exists by now.
    await server.machines.create(Properties(account=ALICE), Size(4, 512, 30))


async def test_the_limit_of_sizes_holds_for_creates_at_the_same_time(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(server.machines, alice={"templates": 2}, bob={})
    ensure, building, go_on = server.host.templates.ensure, list[Size](), asyncio.Event()

    async def build(size: Size, report: Report) -> object:
        building.append(size)
        await go_on.wait()
        return await ensure(size, report)

    monkeypatch.setattr(server.host.templates, "ensure", build)
    sizes = [Size(2**number, 512, 20 + number) for number in range(4)]
    creates = [
        asyncio.create_task(server.machines.create(Properties(account=ALICE), size))
        for size in (sizes[0], *sizes)
    ]
    await asyncio.wait(creates[3:], timeout=60)
    for each in creates[3:]:
        assert isinstance(each.exception(), LimitExceeded), "those before it have no VM yet, but count"
    assert len(building) == 1 and not any(each.done() for each in creates[:3])
    go_on.set()
    made = await asyncio.gather(*creates[:3])
    assert {(await each.info()).size for each in made} == set(sizes[:2])
    with pytest.raises(LimitExceeded):
        await server.machines.create(Properties(account=ALICE), sizes[2])
    # What is not built any more does not count.
    for machine in made:
        await machine.delete()
    for size in sizes[2:]:
        await server.machines.create(Properties(account=ALICE), size)


async def test_a_template_counts_until_its_vm_does(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(server.machines, alice={"templates": 1})
    creates = server.machines._create
    proceed = creates._from_template
    refused: list[LimitExceeded] = []

    async def later(*arguments: Any) -> Record:
        assert list(server.world.templates) == ["template-1x512Mx20G"]
        monkeypatch.setattr(creates, "_from_template", proceed)
        with pytest.raises(LimitExceeded) as caught:
            await server.machines.create(Properties(account=ALICE), Size(2, 512, 20))
        refused.append(caught.value)
        return await proceed(*arguments)

    monkeypatch.setattr(creates, "_from_template", later)
    await server.machines.create(Properties(account=ALICE), Size(1, 512, 20))
    assert len(refused) == 1


async def test_a_size_counts_once_for_all_versions_of_its_template(server: FakeServer) -> None:
    limit(server.machines, alice={"templates": 2})
    for version in range(3):
        machine = await server.machines.create(Properties(account=ALICE), Size(1, 512, 20))
        old = FakeTemplate(f"old-{version}", Size(1, 512, 20 + version))
        server.world.templates[old.id] = old
        await inside(server.machines).store.update(machine.id, template=old.id)
    await server.machines.create(Properties(account=ALICE), Size(2, 512, 20))
    with pytest.raises(LimitExceeded):
        await server.machines.create(Properties(account=ALICE), Size(4, 512, 20))


async def test_template_builds_are_shared_between_accounts(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One account asks for many sizes at once; another one's build is the next that begins."""
    building: list[Size] = []
    done = asyncio.Event()
    ensure = server.host.templates.ensure
    bobs = Size(64, 512, 20)

    async def build(size: Size, report: Report) -> object:
        building.append(size)
        if size != bobs:
            await done.wait()
        return await ensure(size, report)

    monkeypatch.setattr(server.host.templates, "ensure", build)
    flood = [
        asyncio.create_task(server.machines.template(Size(vcpus, memory, 20), account=ALICE))
        for vcpus in (1, 2, 4, 8)
        for memory in (512, 1024, 2048, 4096, 8192)
    ]
    async with asyncio.timeout(60):
        await server.machines.template(bobs, account=BOB)
    assert bobs in building and len(building) < 10
    refused = [each for each in flood if each.done()]
    assert refused and all(isinstance(each.exception(), TooBusy) for each in refused)
    done.set()
    await asyncio.gather(*flood, return_exceptions=True)
    assert sum(each.exception() is None for each in flood) == len(flood) - len(refused)


async def test_a_template_build_ends_when_no_caller_waits_for_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.machines._templates._builds, "_linger", 0)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def build(size: Size, report: object) -> object:
        begun.set()
        try:
            return await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(server.host.templates, "ensure", build)
    callers = [asyncio.create_task(server.machines.template(SIZE, account=each)) for each in (ALICE, BOB)]
    await begun.wait()
    callers[0].cancel()
    await asyncio.wait({callers[0]})
    assert not ended.is_set()
    callers[1].cancel()
    await asyncio.wait_for(ended.wait(), 60)
    assert server.machines._templates._places.used == 0


# Memory


async def test_logs_of_running_vms_are_bounded_by_each_check(server: FakeServer) -> None:
    running, stopped = await used(server), await used(server)
    await stopped.stop()
    server.host.bounded.clear()
    await inside(server.machines).idle._check()
    assert server.host.bounded == [running.id]


async def test_idle_vms_are_suspended_when_memory_is_short(server: FakeServer) -> None:
    resting = await used(server, account=ALICE, idle_timeout=3600)
    others = [
        await used(server, account=ALICE),
        await used(server, account=ALICE, idle_timeout=3600, persistence=Ephemeral()),
    ]
    watch = inside(server.machines).idle
    loop = asyncio.get_running_loop()
    await watch.find_idle()
    for activity in watch._activities.values():
        activity.active_at = loop.time() - 60
    for machine in (resting, *others):
        live = inside(server.machines).processes.running(machine.id)
        assert live is not None
        live.last_used = loop.time() - 60
    assert await watch.find_idle() == []
    assert watch.find_expendable() == []
    server.world.memory_short = True
    assert watch.find_expendable() == [resting.id]
    await watch._check()

    async def suspended() -> bool:
        return (await resting.info()).state is State.SUSPENDED

    await until(suspended, 60)
    info = await resting.info()
    assert info.reason == "suspended: idle, and the host is short of memory"
    assert [(await machine.info()).state for machine in others] == [State.RUNNING] * 2


async def test_an_account_above_its_share_does_not_stay_awake_by_having_no_timeout(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise only the VMs of others are suspended."""
    monkeypatch.setattr(idle, "_AT_ONCE", 10)
    large = [await used(server, account=ALICE) for _ in range(3)]
    kept = await used(server, account=ALICE, persistence=Ephemeral())
    small = await used(server, account=BOB)
    timed = await used(server, account=BOB, idle_timeout=3600)
    watch = inside(server.machines).idle
    loop = asyncio.get_running_loop()
    await watch.find_idle()
    for machine in (*large, kept, small, timed):
        live = inside(server.machines).processes.running(machine.id)
        assert live is not None
        live.last_used = watch._activities[machine.id].active_at = loop.time() - 60
    server.world.memory_short = True
    busy = inside(server.machines).processes.running(large[0].id)
    assert busy is not None
    with busy.leased():
        await watch.find_idle()
        chosen = watch.find_expendable()
    assert chosen[0] == timed.id and {*chosen} == {timed.id, large[1].id, large[2].id}


@given(
    st.lists(st.tuples(st.sampled_from([ALICE, BOB, CAROL]), st.floats(0, 1000)), max_size=20),
    st.dictionaries(st.sampled_from([ALICE, BOB, CAROL]), st.integers(0, 1 << 20), min_size=3),
    st.integers(0, 5),
)
def test_accounts_above_their_share_are_suspended_first(
    vms: list[tuple[str, float]], running: dict[str | None, int], count: int
) -> None:
    resting = [RestingVm(str(number), owner, 512, rest) for number, (owner, rest) in enumerate(vms)]
    chosen = suspended_first(resting, running, count)
    assert len(chosen) <= count and all(each.seconds >= 10 for each in chosen)
    share = sum(running.values()) / 3
    left = [each for each in resting if each not in chosen and each.seconds >= 10]
    if any(running[each.account] <= share for each in chosen):
        assert all(running[each.account] <= share for each in left)
