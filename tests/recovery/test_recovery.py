"""Crash recovery: Stead is killed at every journal step and the next start makes everything consistent."""

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from stead.deadlines import scaled
from stead.errors import HostError, StartFailed, TemplateError
from stead.host import cgroups, network, template_builder, templates
from stead.host.commands import run
from stead.host.image import BaseImage
from stead.host.vm import running_machines
from stead.installation import open_machines
from stead.machines import Machine, Machines, SnapshotState, State
from stead.machines.events import MachineEvent
from stead.machines.records import Properties, Record, record_of
from stead.machines.states import (
    KINDS,
    Deleted,
    Lost,
    MachineState,
    Run,
    Running,
    Starting,
    Stopped,
    Stopping,
    Suspended,
    Suspending,
    Waking,
    steps,
)
from stead.processes import ProcessId
from stead.settings import Settings
from stead.store.database import open_database
from stead.store.layers import LayerStore
from stead.store.machines import MachineRow, MachineStore
from support import ROOT
from support.crash_driver import Report
from support.installations import (
    another_installation,
    delete_all,
    disk_files,
    leftovers,
    local_host,
    local_template,
    other_settings,
)
from support.internals import inside
from support.waiting import until


async def crash(settings: Settings, operation: str) -> Report:
    """Run Stead on an installation until it is killed; returns a report of the operations under way."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "support.crash_driver", settings.data, settings.cache_folder, operation),
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    async with asyncio.timeout(scaled(300)):
        said, complaints = await process.communicate()
    assert process.returncode == -signal.SIGKILL, complaints.decode()
    return Report.parse(said.decode())


@contextlib.asynccontextmanager
async def rows_of(settings: Settings) -> AsyncIterator[MachineStore]:
    """The rows of an installation that no process has open."""
    database = await open_database(settings.data / "stead.db")
    try:
        yield MachineStore(database)
    finally:
        await database.dispose()


async def states(machines: Machines) -> dict[str, State]:
    return {row.id: State(row.state) for row in await inside(machines).store.list()}


async def taps(machines: Machines) -> set[int]:
    """The slots that have a tap device."""
    namespace = f"--net={network.namespace_path(inside(machines).settings)}"
    listed = await run("nsenter", namespace, "ip", "-json", "link", "show", "type", "tun")
    return {int(link["ifname"][2:]) for link in json.loads(listed.stdout) if link}


async def in_step(machines: Machines) -> None:
    """Processes, files, groups and taps on the host are exactly those of the rows."""
    rows = await inside(machines).store.list()
    inventory = inside(machines).host.inventory()
    alive = {row.id: row.pid for row in rows if row.state in (State.RUNNING, State.PREPARED)}
    assert {machine: process.pid for process, machine in inventory.processes.items()} == alive
    assert inventory.machines == {row.id for row in rows if row.state != State.DELETED}
    assert local_host(machines).groups.machines() <= alive.keys()
    assert await taps(machines) == {row.slot for row in rows if row.id in alive}
    assert [row for row in rows if row.step is not None or row.next_top is not None] == []
    await inside(machines).layers.collect()
    store = LayerStore(inside(machines).database)
    assert names(inside(machines).settings.data / "layers") == {layer.file for layer in await store.list()}
    assert names(inside(machines).settings.data / "checkpoints") == await store.checkpoints()
    for row in rows:
        own = inside(machines).settings.data / "machines" / row.id
        assert names(own) == ({f"{row.top}.qcow2"} if row.top else set())
        if row.id in alive:
            await _writes_its_own_disk(machines, row)


async def _writes_its_own_disk(machines: Machines, row: MachineRow) -> None:
    """The files that a QEMU has open are the layers of its row."""
    live = inside(machines).processes.get(row.id)
    assert live is not None and row.top is not None
    assert await live.vm.written_layer() == row.top
    record = record_of(row)
    disks = inside(machines).disks
    async with disks.opened(record, row.top, disks.template_of(record)) as disk:
        layers = disk_files(machines, row.id, disk)
        opened = [each.readlink() for each in Path(f"/proc/{row.pid}/fd").iterdir()]
        assert {path for path in opened if path.suffix in (".qcow2", ".raw")} == set(layers)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*")}


async def data_of(machine: Machine) -> bytes:
    return (await machine.exec("cat /root/data")).stdout.strip()


async def it_is_all_there(machine: Machine) -> None:
    """Files on disk, files in memory and a running process."""
    # Shell builtins only: there are hundreds of VMs, and programs start slowly under emulation.
    show = 'while read -r line; do echo "$line"; done'
    found = await machine.exec(
        f"{show} < /root/data; {show} < /run/data; read -r pid < /run/pid && kill -0 $pid"
    )
    assert (found.stdout, found.exit_code) == (b"kept\nmemory\n", 0), found


# Killed at every step

# The state after recovery when nothing, something or everything of the operation was recorded.
OUTCOMES: dict[str, tuple[State | None, State | None, State | None]] = {
    "create": (None, None, State.RUNNING),
    "create_from_pool": (None, None, State.RUNNING),
    "prepare": (None, None, State.PREPARED),
    "stop": (State.RUNNING, State.STOPPED, State.STOPPED),
    "kill": (State.RUNNING, State.STOPPED, State.STOPPED),
    "start": (State.STOPPED, State.STOPPED, State.RUNNING),
    "start_on_a_new_layer": (State.STOPPED, State.STOPPED, State.RUNNING),
    "suspend": (State.RUNNING, State.RUNNING, State.SUSPENDED),
    "wake": (State.SUSPENDED, State.SUSPENDED, State.RUNNING),
    "fork": (State.RUNNING, State.RUNNING, State.RUNNING),
    "snapshot": (State.RUNNING, State.RUNNING, State.RUNNING),
    "snapshot_stopped": (State.STOPPED, State.STOPPED, State.STOPPED),
    "resize": (State.STOPPED, State.STOPPED, State.STOPPED),
    "delete": (State.RUNNING, None, None),
    "delete_suspended": (State.SUSPENDED, None, None),
}


def expected_of(operation: str, report: Report) -> dict[str, State | None]:
    """The state of each VM after recovery.

    A child of a fork that was recorded as running stays, and is in the list, though the fork did not return:
    its owner may delete it or use it. One that was not is gone, as everything that nobody was told of.
    """
    nothing, something, everything = OUTCOMES[operation]
    expected: dict[str, State | None] = {}
    for case in report.cases:
        whole = report.whole(case)
        if case.machine is not None:
            begun = something if case.number > 1 or not case.before else nothing
            expected[case.machine] = everything if whole else begun
        expected |= dict.fromkeys(case.children, State.RUNNING if whole else None)
    return expected


EVERY_TIME = ("create", "suspend")
"""Operations that every run kills at every step; the slow trials kill the others."""


def test_the_number_of_crash_operations_is_right() -> None:
    promise = f"{len(EVERY_TIME)} operations in every run, all {len(OUTCOMES)} as a trial"
    assert promise in (ROOT / "SPECIFICATION.md").read_text()


@pytest.mark.parametrize(
    "operation",
    [
        pytest.param(operation, marks=() if operation in EVERY_TIME else pytest.mark.slow)
        for operation in OUTCOMES
    ],
)
async def test_recovery_from_a_crash_at_every_step(
    settings: Settings, image: BaseImage, operation: str
) -> None:
    with other_settings(settings) as other:
        report = await crash(other, operation)
        expected = expected_of(operation, report)
        assert len(expected) > report.points >= 1, "a VM was held at every step"
        async with open_machines(other) as machines:

            async def recovered() -> bool:
                found = await states(machines)
                return all(found.get(machine) == state for machine, state in expected.items())

            try:
                await until(recovered, 60)
            except TimeoutError:
                reasons = {row.id: row.reason for row in await inside(machines).store.list()}
                assert await states(machines) == expected, (report, reasons)
            extra = [state for machine, state in (await states(machines)).items() if machine not in expected]
            assert extra == ([State.PREPARED] if operation == "create_from_pool" else [])
            await in_step(machines)
            await _usable(machines, operation, expected)
            await AFTERWARDS.get(operation, _nothing_more)(machines, report)
            await in_step(machines)
            fresh = await machines.create()
            assert (await fresh.exec("true")).ok
            await delete_all(machines)


async def _usable(machines: Machines, operation: str, expected: dict[str, State | None]) -> None:
    """Running VMs answer and suspended VMs wake, both with their data."""
    if operation.startswith("start"):
        return
    for machine, state in expected.items():
        if state not in (State.RUNNING, State.SUSPENDED):
            continue
        if operation.startswith("create"):
            assert (await Machine(machines, machine).exec("true")).ok
        else:
            await it_is_all_there(Machine(machines, machine))


async def _nothing_more(machines: Machines, report: Report) -> None:
    pass


async def _one_can_be_started(machines: Machines, report: Report) -> None:
    """The VM whose start was interrupted first can be started."""
    found = [await machines.info(case.machine) for case in report.cases if case.machine]
    assert {info.reason for info in found} == {None, "killed", "failed to start: the start was interrupted"}
    # Kill the ones that are still booting: they would slow this one down.
    for info in found:
        if info.state is State.RUNNING:
            await machines.kill(info.id)
    first = next(info for info in found if info.reason == "failed to start: the start was interrupted")
    assert await data_of(Machine(machines, first.id)) == b"kept"


async def _parents_have_whole_disks(machines: Machines, report: Report) -> None:
    """Also the one whose QEMU had switched to a layer that its row did not record."""
    (case,) = (case for case in report.cases if case.point == "freeze" and case.before)
    parent = Machine(machines, str(case.machine))
    assert (await parent.exec("echo written after the crash >> /root/data")).ok
    for other in await machines.list():
        if other.id != parent.id:
            await machines.delete(other.id)
    await parent.stop()
    assert await data_of(parent) == b"kept\nwritten after the crash"


async def _snapshots_are_whole_or_gone(machines: Machines, report: Report) -> None:
    """A VM can be created from a snapshot that was ready before the crash."""
    found = {snapshot.source_machine: snapshot for snapshot in await machines.snapshots.list()}
    whole = [case.machine for case in report.cases if report.whole(case)]
    assert set(found) == set(whole)
    assert {snapshot.state for snapshot in found.values()} == {SnapshotState.READY}
    snapshot = found[str(whole[-1])]
    copy = await machines.create(Properties(snapshot=snapshot.id))
    if snapshot.has_memory:
        await it_is_all_there(copy)
    else:
        assert await data_of(copy) == b"kept"


async def _stopped_ones_boot(machines: Machines, report: Report) -> None:
    """Also one whose layer was recorded as read-only before its file was moved."""
    (frozen,) = (case for case in report.cases if case.point == "freeze" and not case.before)
    _, data = await asyncio.gather(
        _snapshots_are_whole_or_gone(machines, report), data_of(Machine(machines, str(frozen.machine)))
    )
    assert data == b"kept"


async def _the_disk_is_as_large_as_it_is_said(machines: Machines, report: Report) -> None:
    """A disk that grew without a record can be resized to that size again."""
    sizes = {case.machine: (await machines.info(str(case.machine))).size.disk_gib for case in report.cases}
    assert sizes == {case.machine: 21 if report.whole(case) else 20 for case in report.cases}
    (interrupted,) = (machine for machine, size in sizes.items() if size == 20)
    machine = Machine(machines, str(interrupted))
    await machine.resize(disk_gib=21)
    assert await data_of(machine) == b"kept"
    room = await machine.exec("df --block-size=1M --output=size / | tail -1")
    assert int(room.stdout) > 20 << 10


AFTERWARDS: dict[str, Callable[[Machines, Report], Awaitable[None]]] = {
    "start": _one_can_be_started,
    "start_on_a_new_layer": _one_can_be_started,
    "fork": _parents_have_whole_disks,
    "snapshot": _snapshots_are_whole_or_gone,
    "snapshot_stopped": _stopped_ones_boot,
    "resize": _the_disk_is_as_large_as_it_is_said,
}


async def test_a_running_vm_survives_a_crash_of_stead(settings: Settings, image: BaseImage) -> None:
    """After a kill and restart of Stead: same boot, same processes, and its end is noticed."""
    with other_settings(settings) as other:
        report = await crash(other, "run")
        (pid,) = running_machines(other)
        async with open_machines(other) as machines:
            machine = await machines.get(str(report.cases[0].machine))
            assert (await machine.info()).state is State.RUNNING
            boot = await machine.exec("cat /proc/sys/kernel/random/boot_id")
            assert boot.stdout.decode().strip() == report.facts["boot"]
            await it_is_all_there(machine)
            await in_step(machines)
            os.kill(pid, signal.SIGKILL)

            async def noticed() -> bool:
                return (await machine.info()).state is State.STOPPED

            await until(noticed, 60)
            await machine.delete()


# Leftovers of any origin


@contextlib.contextmanager
def stranger() -> Iterator[ProcessId]:
    """A process that does not belong to Stead."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        identity = ProcessId.of(process.pid)
        assert identity is not None
        yield identity
    finally:
        process.kill()
        process.wait()


async def test_recovery_of_every_state_and_step_without_a_process(
    settings: Settings, image: BaseImage
) -> None:
    """All states at all their steps, with no pid, a dead pid and a reused pid."""
    settled = {
        Running: State.STOPPED,
        Suspending: State.STOPPED,
        Suspended: State.SUSPENDED,
        Stopping: State.STOPPED,
        Starting: State.STOPPED,
        Waking: State.SUSPENDED,
        Stopped: State.STOPPED,
        Deleted: State.DELETED,
        Lost: State.LOST,
    }
    with other_settings(settings) as other, stranger() as somebody:
        dead, reused = ProcessId(4_194_303, 1), ProcessId(somebody.pid, 1)
        runs = [None, *(Run(process, None) for process in (dead, somebody, reused))]
        kinds: dict[str, type[MachineState]] = {}
        rows: list[MachineRow] = []
        for kind, run in itertools.product(KINDS, runs):
            given = {"run": run, "reason": "why", "recreated": False, "next_top": None}
            for step in steps(kind) or (None,):
                values: Any = {
                    field.name: (given | {"step": step}).get(field.name, "a") for field in fields(kind)
                }
                name = f"{kind.__name__.lower()}{runs.index(run)}x{step or ''}".ljust(20, "x")[:20]
                machine = (name, len(rows), other.default_size, "gone", "somebody", "0" * 32, None)
                rows.append(Record(*machine, Properties(), kind(**values)).to_row())
                kinds[name] = kind
        (other.data / "checkpoints/a").mkdir(parents=True)
        async with rows_of(other) as store:
            for row in rows:
                await store.insert(row)
                if row.state != State.DELETED:
                    (other.data / "machines" / row.id).mkdir(parents=True)
                if row.top:
                    (other.data / "machines" / row.id / "a.qcow2").touch()
        async with open_machines(other) as machines:

            async def all_settled() -> bool:
                return set((await states(machines)).values()) <= set(settled.values())

            await until(all_settled, 60)
            expected = {row.id: settled[kinds[row.id]] for row in rows if kinds[row.id] in settled}
            assert await states(machines) == expected
            await in_step(machines)
            assert somebody.alive()
            await delete_all(machines)
        assert somebody.alive()


async def test_recovery_does_not_touch_a_reused_pid(settings: Settings, image: BaseImage) -> None:
    """The pid of the row is now another program's: it is not killed, and the VM is recorded as crashed."""
    with other_settings(settings) as other, stranger() as somebody:
        async with open_machines(other) as machines:
            machine = await machines.create()
        async with rows_of(other) as store:
            await store.update(machine.id, pid=somebody.pid, pid_started=somebody.started)
        events: list[MachineEvent] = []
        async with open_machines(other) as machines:
            machines.watch(events.append)
            assert [event.message for event in events] == [
                f"VM {machine.id} crashed: QEMU ended while Stead was not running"
            ]
            assert (await machines.info(machine.id)).state is State.STOPPED
            assert somebody.alive()
            await in_step(machines)
            await machines.delete(machine.id)
        assert somebody.alive()


async def test_recovery_removes_orphaned_processes_files_and_groups(
    settings: Settings, image: BaseImage
) -> None:
    """A QEMU without a row, a folder without a row, a group without a row."""
    with other_settings(settings) as other:
        async with open_machines(other) as machines:
            forgotten, kept = await machines.create(), await machines.create()
        async with rows_of(other) as store:
            await store.delete(forgotten.id)
        assert forgotten.id in running_machines(other).values()
        (other.data / "machines/template-of-an-old-build").mkdir()
        (other.runtime / other.instance / "runtime-of-nobody").mkdir()
        hierarchy = cgroups.detect()
        if hierarchy.version:
            base = Path(
                "/sys/fs/cgroup", "memory" if hierarchy.version == 1 else "", f"stead-{other.instance}"
            )
            (base / "group-of-nobody").mkdir()
        async with open_machines(other) as machines:
            assert await states(machines) == {kept.id: State.RUNNING}
            await in_step(machines)
            assert (await Machine(machines, kept.id).exec("true")).ok
            await machines.delete(kept.id)


async def _network_facts(settings: Settings) -> list[bytes]:
    within = ("nsenter", f"--net={network.namespace_path(settings)}")
    shown = (
        ("ip", "-4", "-o", "addr", "show", "dev", f"st{settings.instance}h"),
        (*within, "ip", "-4", "route"),
        (*within, "nft", "list", "ruleset"),
        (*within, "cat", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/conf/all/rp_filter"),
        ("nft", "list", "table", "inet", f"stead_{settings.instance}"),
    )
    return [re.sub(rb"if\d+|^\d+:", b"", (await run(*command)).stdout) for command in shown]


async def test_recovery_completes_a_partial_network(
    settings: Settings, image: BaseImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start is killed after each of its commands, or leaves an empty file for a namespace."""
    done: list[str] = []
    with other_settings(settings) as other:
        for limit in itertools.count():

            async def stumble(*argv: str, **options: Any) -> object:
                if len(done) == limit:  # noqa: B023
                    raise HostError("killed")
                result = await run(*argv, **options)
                done.append(argv[0])
                return result

            with monkeypatch.context() as patch:
                patch.setattr(network, "run", stumble)
                try:
                    await (await network.Network.open(other)).close()
                except HostError as error:
                    assert str(error) == "killed"
                else:
                    break
            if limit == 0:
                Path("/run/netns", f"stead-{other.instance}").touch()
            async with open_machines(other):
                found = await _network_facts(other)
            assert leftovers(other) == []
            done.clear()
            if limit == 0:
                whole = found
            assert (limit, found) == (limit, whole)
        assert limit > 3
        await network.remove(other)


# Missing templates and images


@contextlib.contextmanager
def own_cache(settings: Settings) -> Iterator[Path]:
    """A copy of the cache, without packages for tests, from which tests remove files."""
    with tempfile.TemporaryDirectory(prefix=".test-", dir=settings.cache_folder) as name:
        folder = Path(name)
        for part in ("ca", "images", "templates"):
            shutil.copytree(
                settings.cache_folder / part,
                folder / part,
                copy_function=os.link,
                ignore=shutil.ignore_patterns(".*"),
            )
        yield folder


async def _stopped_machine(machines: Machines) -> Machine:
    machine = await machines.create()
    await machine.kill()
    return machine


async def _is_lost(machine: Machine) -> None:
    with pytest.raises(StartFailed, match="is lost: disk layers are missing"):
        await machine.start()
    info = await machine.info()
    assert (info.state, info.reason) == (State.LOST, "lost: disk layers are missing")


async def test_a_vm_without_its_template_is_lost(settings: Settings, image: BaseImage) -> None:
    with own_cache(settings) as cache:
        async with another_installation(settings, cache=cache) as installation:
            machines = installation.machines
            template = await machines.template()
            machine = await _stopped_machine(machines)
            shutil.rmtree(local_template(template).folder)
            await _is_lost(machine)
            await machine.delete()
            assert await states(machines) == {}


async def test_a_vm_is_lost_when_its_image_was_rebuilt(settings: Settings, image: BaseImage) -> None:
    """A rebuilt image under the same key does not match the VM's disk."""
    with own_cache(settings) as cache, other_settings(settings, cache=cache) as other:
        async with open_machines(other) as machines:
            template = local_template(await machines.template())
            machine, second = await _stopped_machine(machines), await _stopped_machine(machines)
            template.image.disk.unlink()
            template.image.disk.touch()
            template.image.build.unlink(missing_ok=True)
            template.image.build.write_text("another")
            await _is_lost(machine)
            template.image.disk.unlink()
            await _is_lost(second)
            await delete_all(machines)
        async with open_machines(other) as machines:
            assert await local_host(machines).templates.find(other.default_size) is None


async def test_files_of_an_interrupted_template_build_are_removed(
    machines: Machines, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = await machines.template()
    key, _ = template.id.split("-")
    with own_cache(settings) as cache, other_settings(settings, cache=cache) as other:
        async with open_machines(other) as others:
            host = local_host(others)
            shutil.rmtree(cache / "templates" / template.id)
            leftover, foreign = (cache / "templates" / f".building-{name}-1" for name in (key, "another"))
            for folder in (leftover, foreign):
                folder.mkdir()
                (folder / "memory").write_bytes(b"half")
            seen: list[bool] = []

            async def build(*_: object) -> templates.LocalTemplate:
                seen.append(leftover.exists())
                raise TemplateError("not in this test")

            monkeypatch.setattr(template_builder, "_build", build)
            with pytest.raises(TemplateError, match="not in this test"):
                await others.create()
            assert seen == [False]
            assert foreign.exists(), "another process may use it"
            assert host.inventory().machines == frozenset()
