"""Snapshots and forks: copies have the memory, processes and files of their source, and own identities."""

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stead.errors import (
    CheckpointUnusable,
    HostError,
    InvalidRequest,
    MachineNotFound,
    SnapshotNotFound,
    StartFailed,
)
from stead.files import allocated
from stead.host import checkpoints
from stead.machines import Machine, Machines, SnapshotState, State, Sticky
from stead.machines.records import Properties
from stead.machines.snapshots import SnapshotInfo
from stead.settings import Size
from support.guests import sh
from support.installations import local_host
from support.internals import inside
from support.waiting import until

COUNTER = """
setsid python3 -c '
import time, mmap
store = mmap.mmap(-1, 4096)
n = 0
while True:
    n += 1
    store[:8] = n.to_bytes(8, "little")
    open("/run/counter", "w").write(str(n))
    time.sleep(0.2)
' >/dev/null 2>&1 & echo $! > /run/counter.pid
"""


async def count(machine: Machine) -> int:
    """The value of the counter in its file, which lags behind memory."""
    for _ in range(100):
        if said := await sh(machine, "cat /run/counter"):
            return int(said)
    raise AssertionError("the counter does not count")


@pytest_asyncio.fixture(scope="module")
async def source(machines: Machines) -> AsyncIterator[Machine]:
    """A VM with a running process and with files on disk and in memory."""
    machine = await machines.create(Properties(name="source"))
    await sh(machine, COUNTER)
    await sh(machine, "echo on-disk > /root/file && echo in-memory > /run/file")
    await sh(machine, "until [ -s /run/counter ]; do sleep 0.1; done")
    yield machine
    await machine.delete()


@pytest_asyncio.fixture(scope="module")
async def snapshot(source: Machine, machines: Machines) -> AsyncIterator[SnapshotInfo]:
    info = await source.snapshot("prepared")
    yield info
    await machines.snapshots.delete(info.id)


async def everything_is_there(machine: Machine) -> None:
    assert await sh(machine, "cat /root/file /run/file") == "on-disk\nin-memory"
    pid = await sh(machine, "cat /run/counter.pid")
    assert "python3" in await sh(machine, f"cat /proc/{pid}/cmdline")
    before = await count(machine)

    async def counts_on() -> bool:
        return await count(machine) > before

    await until(counts_on, 60)


async def read_again(machine: Machine, files: str) -> str:
    """The content of files on disk, read with an empty page cache after a suspend and wake."""
    await sh(machine, "sync && echo 3 > /proc/sys/vm/drop_caches")
    await machine.suspend()
    return await sh(machine, f"cat {files}")


async def test_a_snapshot_has_running_processes_and_its_source_keeps_running(
    machines: Machines, source: Machine, snapshot: SnapshotInfo
) -> None:
    boot = await sh(source, "cat /proc/sys/kernel/random/boot_id && cat /proc/uptime")
    assert snapshot.state is SnapshotState.READY
    assert snapshot.has_memory
    assert snapshot.source_machine == source.id
    assert re.fullmatch(r"sc-[a-z0-9]{20}", snapshot.id)
    await everything_is_there(source)
    copy = await machines.create(Properties(snapshot=snapshot.id))
    assert (await copy.info()).snapshot == snapshot.id
    await everything_is_there(copy)
    assert (await sh(copy, "cat /proc/sys/kernel/random/boot_id")) == boot.split()[0], "it was not booted"
    await copy.delete()


async def test_forks_do_not_see_each_others_writes(machines: Machines, source: Machine) -> None:
    """Memory and disk, in both directions."""
    (child,) = await source.fork()
    await sh(source, "echo parent > /root/mine && echo parent > /run/mine && sync")
    await sh(child, "echo child > /root/file && echo child > /run/file && sync")
    assert (await child.exec("cat /root/mine /run/mine")).exit_code == 1
    assert await sh(source, "cat /root/file /run/file") == "on-disk\nin-memory"
    await sh(child, "echo 3 > /proc/sys/vm/drop_caches")
    await sh(source, "echo 3 > /proc/sys/vm/drop_caches")
    assert (await child.exec("cat /root/mine")).exit_code == 1
    assert await sh(child, "cat /root/file") == "child"
    assert await sh(source, "cat /root/file /root/mine") == "on-disk\nparent"
    await sh(source, "rm /root/mine /run/mine")
    await child.delete()
    await everything_is_there(source)


FACTS = {
    "urandom": "head -c 16 /dev/urandom | od -An -tx1",
    "uuid": "cat /proc/sys/kernel/random/uuid",
    "machine_id": "cat /etc/machine-id",
    "hostname": "hostname",
    "host_key": "cat /etc/ssh/ssh_host_ed25519_key.pub",
    "address": "ip -4 -o addr show dev eth0 | awk '{print $4}'",
    "tls_random": """python3 -c '
import ssl
outgoing = ssl.MemoryBIO()
session = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="a")
try:
    session.do_handshake()
except ssl.SSLWantReadError:
    print(outgoing.read()[11:43].hex())
'""",
}


async def test_forks_and_copies_differ_in_identity_keys_and_random_numbers(
    machines: Machines, source: Machine
) -> None:
    twins = await source.fork(2)
    told = {
        name: await asyncio.gather(*(sh(machine, command) for machine in (source, *twins)))
        for name, command in FACTS.items()
    }
    for name, answers in told.items():
        assert all(answers), (name, answers)
        assert len(set(answers)) == 3, (name, answers)
    assert told["hostname"] == [source.id, *(twin.id for twin in twins)]
    addresses = [str((await twin.info()).address) for twin in twins]
    assert [answer.split("/")[0] for answer in told["address"]][1:] == addresses
    for twin in twins:
        # The kernel that knows of vmgenid has noticed by itself; the agent made sure in any case.
        assert "crng reseeded due to virtual machine fork" in await sh(twin, "dmesg")
        await twin.delete()


async def test_forks_reseed_the_random_number_generator(machines: Machines, source: Machine) -> None:
    noise = "setsid sh -c 'while sleep 0.1; do head -c 64 /dev/urandom; done' > /run/noise"
    await sh(source, f"{noise} & echo $! > /run/noise.pid; until [ -s /run/noise ]; do sleep 0.1; done")
    twins = await source.fork(2)
    await sh(source, "kill $(cat /run/noise.pid)")
    reads = await asyncio.gather(*(sh(twin, "head -c 256 /dev/urandom | sha256sum") for twin in twins))
    assert reads[0] != reads[1]
    for twin in twins:
        await twin.delete()


async def test_fork_fails_when_a_child_does_not_confirm_its_identity(
    machines: Machines, source: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {info.id for info in await machines.list()}
    monkeypatch.setattr("stead.guest.identity._clock_error", lambda *_: 10.0)
    with pytest.raises(StartFailed, match="did not confirm its clock"):
        await source.fork(2)
    monkeypatch.undo()
    assert {info.id for info in await machines.list()} == before
    await everything_is_there(source)


async def test_a_fork_of_a_fork(machines: Machines, source: Machine) -> None:
    (child,) = await source.fork()
    await sh(child, "echo second > /root/second && echo second > /run/second")
    (grandchild,) = await child.fork()
    await child.delete()
    await everything_is_there(grandchild)
    assert await sh(grandchild, "cat /root/second /run/second") == "second\nsecond"
    assert await read_again(grandchild, "/root/file /root/second") == "on-disk\nsecond"
    await grandchild.delete()


async def test_deleting_a_snapshot_keeps_layers_that_vms_need(machines: Machines, source: Machine) -> None:
    info = await source.snapshot()
    copy = await machines.create(Properties(snapshot=info.id))
    await machines.snapshots.delete(info.id)
    with pytest.raises(SnapshotNotFound):
        await machines.snapshots.get(info.id)
    await inside(machines).layers.collect()
    assert await read_again(copy, "/root/file") == "on-disk"
    await copy.delete()


async def test_list_and_rename_snapshots(machines: Machines, snapshot: SnapshotInfo) -> None:
    assert snapshot.id in [each.id for each in await machines.snapshots.list()]
    renamed = await machines.snapshots.update(snapshot.id, name="another name")
    assert renamed.name == "another name"
    assert (await machines.snapshots.get(snapshot.id)).name == "another name"
    with pytest.raises(InvalidRequest):
        await machines.snapshots.update(snapshot.id, name=" ")
    with pytest.raises(SnapshotNotFound):
        await machines.snapshots.update("sc-nothing", name="x")
    with pytest.raises(SnapshotNotFound):
        await machines.create(Properties(snapshot="sc-nothing"))


async def test_a_snapshot_of_a_stopped_vm_has_the_disk_only(machines: Machines) -> None:
    machine = await machines.create()
    await sh(machine, "echo kept > /root/file && echo gone > /run/file")
    await machine.stop()
    info = await machine.snapshot(persistence=Sticky(3))
    assert not info.has_memory
    assert info.persistence == Sticky(3)
    copy = await machines.create(Properties(snapshot=info.id))
    assert await sh(copy, "cat /root/file; ls /run/file 2>/dev/null || true") == "kept"
    assert await sh(copy, "hostname") == copy.id
    for each in (machine, copy):
        await each.delete()
    await machines.snapshots.delete(info.id)


@pytest.mark.slow
async def test_create_from_a_snapshot_with_another_size_boots_from_its_disk(
    machines: Machines, snapshot: SnapshotInfo
) -> None:
    copy = await machines.create(Properties(snapshot=snapshot.id), Size(1, 512, 21))
    assert await sh(copy, "nproc; cat /root/file") == "1\non-disk"
    assert int(await sh(copy, "df -BG --output=size / | tail -1 | tr -dc 0-9")) >= 20
    assert (await copy.exec("cat /run/file")).exit_code == 1
    await copy.delete()
    with pytest.raises(InvalidRequest, match="a power of two"):
        await machines.create(Properties(snapshot=snapshot.id), Size(3, 512, 20))


# Damaged memory


def flip(path: Path, position: int = -100) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("part", ["memory", "devices", "pages", "checkpoint.json"])
async def test_a_flipped_byte_in_saved_memory_is_detected(
    machines: Machines, snapshot: SnapshotInfo, part: str, tmp_path: Path
) -> None:
    row = await machines.snapshots.row(snapshot.id)
    assert row.checkpoint is not None
    kept = tmp_path / "kept"
    shutil.copytree(local_host(machines).checkpoints.folder(row.checkpoint), kept)
    platform = await local_host(machines).platform()

    def use() -> None:
        state = checkpoints.read(kept, platform, snapshot.size)
        try:
            state.memory.verify()
        finally:
            state.close()

    use()
    flip(kept / part)
    with pytest.raises(CheckpointUnusable, match=r"checksum mismatch|invalid"):
        use()


@pytest.mark.slow
async def test_create_from_a_damaged_snapshot_boots_from_its_disk(
    machines: Machines, source: Machine
) -> None:
    info = await source.snapshot()
    row = await machines.snapshots.row(info.id)
    assert row.checkpoint is not None
    flip(local_host(machines).checkpoints.folder(row.checkpoint) / "memory")
    copy = await machines.create(Properties(snapshot=info.id))
    told = (await copy.info()).reason
    assert told is not None
    assert told.startswith("saved memory of the snapshot was unusable, booted from disk: ")
    assert await sh(copy, "cat /root/file") == "on-disk"
    assert (await copy.exec("cat /run/file")).exit_code == 1
    await copy.delete()
    await machines.snapshots.delete(info.id)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("version", [6, 0, 0], "saved with QEMU 6.0, and this host has"),
        ("host_cpu", "another", "saved with a different CPU than this host has"),
        ("accelerator", "another", "saved with a different accelerator than this host has"),
        ("machine", "pc-q35-5.0", "saved with a different machine type than this host has"),
        ("format", 99, "unsupported format 99 (this version reads 1)"),
    ],
)
async def test_saved_memory_of_another_platform_is_refused(
    machines: Machines, snapshot: SnapshotInfo, field: str, value: object, words: str, tmp_path: Path
) -> None:
    row = await machines.snapshots.row(snapshot.id)
    assert row.checkpoint is not None
    folder = local_host(machines).checkpoints.folder(row.checkpoint)
    facts = json.loads((folder / "checkpoint.json").read_bytes())["facts"]
    (facts if field == "format" else facts["platform"])[field] = value
    checkpoints.copy(folder, tmp_path / "altered")
    altered = tmp_path / "altered" / "checkpoint.json"
    altered.unlink()
    altered.write_text(json.dumps({"facts": facts, "sha256": checkpoints._checksum(facts)}))
    with pytest.raises(CheckpointUnusable, match=re.escape(words)):
        checkpoints.read(tmp_path / "altered", await local_host(machines).platform(), snapshot.size)


# Failing captures


async def test_a_vm_keeps_running_when_its_memory_cannot_be_copied(
    machines: Machines, source: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise HostError("no memory left")

    before = {info.id for info in await machines.snapshots.list()}
    monkeypatch.setattr("stead.host.memory_delta.Delta.copy_from", refuse)
    with pytest.raises(HostError, match="no memory left"):
        await source.snapshot()
    monkeypatch.undo()
    await everything_is_there(source)
    assert {info.id for info in await machines.snapshots.list()} == before
    row = await machines._row(source.id)
    assert (row.next_top, row.step, row.state) == (None, None, State.RUNNING)
    (child,) = await source.fork()
    await everything_is_there(child)
    await child.delete()


@pytest.mark.parametrize("number", [0, 101, -1])
async def test_fork_refuses_a_count_outside_1_to_100(source: Machine, number: int) -> None:
    with pytest.raises(InvalidRequest, match=f"cannot fork {number} VMs: must be 1 to 100"):
        await source.fork(number)


async def test_fork_names_its_children_and_rename_changes_a_name(machines: Machines, source: Machine) -> None:
    children = await source.fork(2, name="worker")
    assert [(await child.info()).name for child in children] == ["worker-1", "worker-2"]
    (only,) = await children[0].fork(name="alone")
    assert (await only.info()).name == "alone"
    renamed = await only.rename("another")
    assert renamed.name == (await machines.info(only.id)).name == "another"
    assert renamed.hostname == only.id
    assert (await only.rename(None)).name is None
    for child in (*children, only):
        await child.delete()
    with pytest.raises(MachineNotFound):
        await only.rename("too late")


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "x" * 201, "\0"])
async def test_rename_and_fork_refuse_invalid_names(source: Machine, name: str) -> None:
    for attempt in (source.rename(name), source.fork(name=name)):
        with pytest.raises(InvalidRequest, match=r"invalid name .*: must be 1 to 200 printable characters"):
            await attempt


async def test_fork_refuses_a_name_that_its_number_makes_too_long(source: Machine) -> None:
    with pytest.raises(InvalidRequest, match="invalid name"):
        await source.fork(10, name="x" * 198)


async def test_snapshots_record_their_size_on_disk(
    machines: Machines, source: Machine, snapshot: SnapshotInfo
) -> None:
    row = await machines.snapshots.row(snapshot.id)
    assert row.checkpoint is not None
    host = local_host(machines)
    memory = sum(allocated(path) for path in host.checkpoints.folder(row.checkpoint).iterdir())
    disk = sum(allocated(host.layers.path(file)) for file in await inside(machines).layers.chain(row.layer))
    assert memory > 0 < disk
    assert snapshot.size_bytes == memory + disk
    await inside(machines).snapshot_store.update(snapshot.id, size_bytes=None)
    await machines.snapshots.recover()
    assert (await machines.snapshots.get(snapshot.id)).size_bytes is not None, "measured on the next start"
    info = await source.snapshot()
    await machines.snapshots.delete(info.id)
    assert (await machines.snapshots.get(info.id, deleted=True)).size_bytes is None
