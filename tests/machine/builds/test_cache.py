"""Layers are built once and cached."""

import asyncio
import time
import uuid
from dataclasses import replace
from typing import Any

import pytest

from stead.builds.builder import Builder, SnapshotOrder
from stead.builds.errors import BaseSnapshotDeleted, InvalidSpec
from stead.builds.records import BuildInfo
from stead.builds.spec import File, Layer, Restart, Service, ServicePatch, User
from stead.creation.creation import Creation
from stead.errors import SnapshotNotFound
from stead.machines import Machine, Machines, Persistent, SnapshotState, State, Sticky
from stead.machines.lifetimes import FOREVER, Lifetime
from stead.machines.snapshots import SnapshotInfo
from stead.store.builds import BuildRow, BuildStore
from support.builds import Lines, builds_of, create_vm, layers_built, note, phase_names, vm_order
from support.guests import sh
from support.internals import inside
from support.waiting import until


async def test_ten_concurrent_requests_share_one_build(
    builder: Builder, creation: Creation, machines: Machines, account: str, lines: Lines
) -> None:
    """Each request has a record; nine of them say which build they wait for."""
    order = SnapshotOrder(account, note("shared"), name="first name")
    other = replace(order, name=None)
    snapshots = await asyncio.gather(*(builder.ensure_snapshot(each) for each in [order, *[other] * 9]))
    (one,) = {snapshot.id for snapshot in snapshots}
    builds, total = await builder.records.list(account, "succeeded")
    assert total == 10
    phases = [await phase_names(builder, account, build.id) for build in builds]
    assert sorted(phases) == [["vm", "files", "snapshot"], *[["waiting"]] * 9]
    assert all(list(build.planned_phases) == names for build, names in zip(builds, phases, strict=True))
    (owner,) = {(await machines.snapshots.get(one)).build}
    assert lines.of(account).count(f"waiting for build {owner}, which builds the same layer") == 9
    assert (await builder.records.list(account, limit=3, offset=8))[0] == builds[8:]
    assert await builder.records.list(account, "failed") == ([], 0)

    kept = await machines.snapshots.get(one)
    assert (kept.name, kept.persistence, kept.state) == ("first name", Persistent(), SnapshotState.READY)
    stranger = str(uuid.uuid4())
    with pytest.raises(SnapshotNotFound):
        await create_vm(creation, vm_order(stranger, top=Layer(snapshot_id=one)))
    assert await machines.snapshots.find(stranger, kept.template_hash or "") is None

    await machines.snapshots.delete(one)
    with pytest.raises(BaseSnapshotDeleted):
        await create_vm(creation, vm_order(account, top=Layer(snapshot_id=one)))
    anew = await builder.ensure_snapshot(order)
    assert anew.id != one


async def test_a_changed_layer_discriminator_or_skip_cache_rebuilds(
    builder: Builder, machines: Machines, account: str
) -> None:
    """The newest snapshot of a layer is the one that later requests get."""

    async def ensure(layer: Layer, persistence: Any = None, lifetime: Lifetime = FOREVER) -> SnapshotInfo:
        return await builder.ensure_snapshot(
            SnapshotOrder(account, layer, persistence=persistence or Sticky(), lifetime=lifetime)
        )

    def ends_in(snapshot: SnapshotInfo, seconds: int) -> bool:
        return snapshot.expires_at is not None and abs(snapshot.expires_at - time.time() - seconds) < 600

    first = await ensure(note("one"), lifetime=Lifetime(ttl=3600))
    assert ends_in(first, 3600)
    # A request extends the lifetime of what it finds in the cache, and never shortens it.
    assert ends_in(await ensure(note("one"), lifetime=Lifetime(ttl=7200)), 7200)
    assert ends_in(await ensure(note("one"), lifetime=Lifetime(ttl=3600)), 7200)
    again = await ensure(note("one"))
    assert (again.id, again.expires_at) == (first.id, None)
    assert (await ensure(note("one"), lifetime=Lifetime(ttl=3600))).expires_at is None
    assert (await ensure(note("one", discriminator="x"))).id != first.id
    fresh = await ensure(note("one", skip_cache=True))
    assert fresh.id != first.id
    assert (await ensure(note("one"))).id == fresh.id
    assert await layers_built(builder, account) == 3

    assert fresh.persistence == Sticky()
    assert (await ensure(note("one"), Persistent())).persistence == Persistent()
    assert (await ensure(note("one"))).persistence == Persistent()


async def test_only_changed_layers_are_rebuilt(
    builder: Builder, creation: Creation, machines: Machines, account: str
) -> None:
    """A changed layer is built on the cached one below; services keep running from layer to layer."""
    counter = Service("counter", exec=("/bin/sh -c 'while :; do echo >>/srv/ticks; sleep 0.1; done'",))
    inner = Layer(users=(User("bob"),), services=(counter,), discriminator="inner")
    patch = ServicePatch("counter", env={"COLOUR": "red"}, restart=Restart("always"))

    async def create(text: str) -> tuple[Machine, BuildInfo]:
        layer = Layer(snapshot=inner, files=(File("/home/bob/note", text.encode()),), patches=(patch,))
        machine = await create_vm(creation, vm_order(account, spec=Layer(snapshot=layer)))
        info = await machine.info()
        return machine, await builder.records.get(account, info.build or "")

    machine, build = await create("one")
    assert build.planned_phases == (
        *("layer 1: vm", "layer 1: users", "layer 1: services", "layer 1: snapshot"),
        *("layer 2: vm", "layer 2: files", "layer 2: services", "layer 2: snapshot"),
        "vm",
    )
    assert await phase_names(builder, account, build.id) == list(build.planned_phases)
    assert len(await builds_of(machines, account)) == 1
    assert await sh(machine, "cat /home/bob/note") == "one"
    environ = "tr '\\0' '\\n' </proc/$(systemctl show -P MainPID counter)/environ"
    assert "COLOUR=red" in await sh(machine, environ)
    before = int(await sh(machine, "wc -l </srv/ticks"))

    async def ticked() -> bool:
        return int(await sh(machine, "wc -l </srv/ticks")) > before

    await until(ticked, 60)
    machine, build = await create("two")
    assert await sh(machine, "cat /home/bob/note; id -un bob") == "twobob"
    assert (await phase_names(builder, account, build.id))[:2] == ["layer 1: cached", "layer 2: vm"]
    assert await layers_built(builder, account) == 3


async def test_requests_without_set_up_have_no_build_record(
    builder: Builder, creation: Creation, machines: Machines, account: str
) -> None:
    """A snapshot of the base image is built on request; a layer without changes is its base."""
    machine = await create_vm(creation, vm_order(account, spec=Layer(packages=(), skip_cache=True)))
    assert (await machine.info()).state is State.RUNNING
    assert await builds_of(machines, account) == []

    base = await builder.ensure_snapshot(SnapshotOrder(account, Layer(), name="base"))
    assert (await builder.ensure_snapshot(SnapshotOrder(account, Layer()))).id == base.id
    empty = Layer(snapshot=Layer(snapshot_id=base.id))
    assert (await builder.ensure_snapshot(SnapshotOrder(account, empty))).id == base.id
    with pytest.raises(InvalidSpec) as raised:
        await builder.ensure_snapshot(SnapshotOrder(account, Layer(vcpus=3)))
    assert raised.value.rule == "vcpus_not_power_of_two"
    builds, _ = await builder.records.list(account)
    assert [build.planned_phases for build in builds] == [("cached",), ("vm", "snapshot")]


async def test_recovery_fails_unfinished_builds(builder: Builder, machines: Machines, account: str) -> None:
    store = BuildStore(inside(machines).database)
    await store.insert(BuildRow("bld-" + "a" * 20, account, "running", "[]"))
    await store.insert(BuildRow("bld-" + "b" * 20, account, "running", "[]"))
    await store.finish("bld-" + "b" * 20, "succeeded")
    await builder.records.recover()
    lost = await builder.records.get(account, "bld-" + "a" * 20)
    assert (lost.state, lost.failure) == ("failed", "the Stead server stopped during the build")
    assert lost.finished_at is not None
    assert (await builder.records.get(account, "bld-" + "b" * 20)).state == "succeeded"
