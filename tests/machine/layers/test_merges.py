"""Merging of disk layers, with real disks."""

import asyncio
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from stead.errors import HostError
from stead.files import allocated
from stead.host.disk_process import DiskProcess
from stead.host.interface import Template
from stead.host.layer_files import LayerFiles
from stead.machines.chains import how_many_to_merge
from stead.machines.layers import MAX_CHAIN
from stead.processes import ProcessId, of_user
from stead.settings import Settings
from stead.store.database import open_database
from support.layers_on_disk import MIB, Bottom, LayersOnDisk, join
from support.waiting import until

pytestmark = pytest.mark.usefixtures("root")  # frozen layers are given to root


# Merging, with real disks
CLUSTER = 64 << 10


def described(chain: Sequence[Path]) -> dict[str, Any]:
    """A chain as QEMU gets it; backing files in the headers are ignored."""
    path, *below = chain
    file = {"driver": "file", "filename": str(path), "locking": "off"}
    if path.suffix == ".raw":
        return {"driver": "raw", "file": file}
    return {"driver": "qcow2", "file": file, "backing": described(below) if below else None}


def content(chain: Sequence[Path]) -> bytes:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        raw = Path(folder) / "content"
        source = f"json:{json.dumps(described(chain))}"
        call("qemu-img", "convert", "-O", "raw", source, raw)
        return raw.read_bytes()


def call(*arguments: str | Path, stdin: str = "") -> str:
    return subprocess.run(arguments, input=stdin, check=True, capture_output=True, text=True).stdout


class Disk:
    """A disk of real qcow2 layers, and its expected content."""

    def __init__(self, on_disk: LayersOnDisk, seed: int, bottom: tuple[Path, ...]) -> None:
        self.on_disk = on_disk
        self.random = random.Random(seed)
        self.bottom = bottom
        self.expected = bytearray(content(bottom))
        self.machine = ""
        self.layer: str | None = None

    async def chain(self) -> list[Path]:
        return await self.on_disk.chain(self.layer)

    async def add_layer(self, writes: int, size: int = 0, large: bool = False) -> str:
        """Freeze a layer with data, zeros and discards here and there."""
        self.machine = self.machine or await self.on_disk.machine()
        self.expected.extend(bytes(max(0, size - len(self.expected))))
        layer = self.on_disk.new_id("layer")
        top = self.on_disk.top(self.machine, layer)
        backing = ("-u", "-b", "/nowhere", "-F", "qcow2")
        create = ("qemu-img", "create", "-q", "-f", "qcow2", *backing, top, str(len(self.expected)))
        call(*create)
        commands = [self._write(large) for _ in range(writes)]
        node = described([top, *await self.chain(), *self.bottom]) | {"discard": "unmap"}
        output = call("qemu-io", f"json:{json.dumps(node)}", stdin="\n".join((*commands, "")))
        assert output.count("bytes at offset") == writes
        await self.on_disk.record(self.machine, layer)
        await self.on_disk.layers.adopt(layer, self.machine)
        self.layer = layer
        return layer

    def _write(self, large: bool) -> str:
        end = len(self.expected)
        kind = "data" if large else self.random.choice(("data", "data", "zeros", "unmap", "discard"))
        unit = CLUSTER if kind == "discard" else 512
        length = 4 * MIB if large else unit * self.random.randint(1, 4 * CLUSTER // unit)
        start = self.random.randrange(0, end - length, unit)
        value = self.random.randint(1, 255) if kind == "data" else 0
        self.expected[start : start + length] = bytes([value]) * length
        return {
            "data": f"write -P {value} {start} {length}",
            "zeros": f"write -z {start} {length}",
            "unmap": f"write -z -u {start} {length}",
            "discard": f"discard {start} {length}",
        }[kind]


def make_bottom(folder: Path, kinds: Sequence[str]) -> tuple[Path, ...]:
    """A template's disk on a base image, or an image alone, half filled."""
    raw = folder / "image.raw"
    raw.write_bytes(b"\x11" * (24 * MIB) + bytes(8 * MIB))
    if "qcow2" not in kinds:
        return (raw,)
    template = folder / "template.qcow2"
    create = ("qemu-img", "create", "-q", "-f", "qcow2", "-u", "-b", "/nowhere", "-F", "raw")
    call(*create, template, "48M")
    node = f"json:{json.dumps(described([template, raw]))}"
    writes = ("write -P 0x22 20M 6M", "write -z 2M 2M")
    commands = [argument for write in writes for argument in ("-c", write)]
    call("qemu-io", *commands, node)
    return template, raw


def checksums(paths: Sequence[Path]) -> dict[Path, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@pytest.fixture(params=["raw", "qcow2 raw"])
def bottom(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, ...]:
    return make_bottom(tmp_path, request.param.split())


@pytest.mark.parametrize("large", [0, 2], ids=["all merged", "large old layers kept"])
async def test_a_merge_does_not_change_the_content_of_a_disk(
    on_disk: LayersOnDisk, bottom: tuple[Path, ...], large: int
) -> None:
    """Twelve layers with writes, zeros, discards and growth are merged; no byte changes."""
    disk = Disk(on_disk, 1, bottom)
    for number in range(12):
        size = (32 + 16 * (number // 4)) * MIB + 512
        await disk.add_layer(writes=12 if number < large else 6, size=size, large=number < large)
    assert disk.layer is not None
    before = await disk.chain()
    kept = checksums([*before, *bottom])
    count = how_many_to_merge([allocated(path) for path in before], MAX_CHAIN)
    assert count == 12 - large

    assert await on_disk.layers.merge_if_long(disk.layer, Bottom(*bottom))

    after = await disk.chain()
    assert after[1:] == before[count:]
    assert len(after) == 1 + large
    assert checksums([*before, *bottom]) == kept
    assert content([*after, *bottom]) == disk.expected
    # It holds what the merged layers held, and nothing of what is below them.
    assert allocated(after[0]) <= sum(allocated(path) for path in before[:count])
    assert after[0].stat().st_mode & 0o777 == 0o600
    assert not await on_disk.layers.merge_if_long(disk.layer, Bottom(*bottom))

    collected = await on_disk.layers.collect()
    assert collected.files == {path.name for path in before[:count]}
    assert content([*after, *bottom]) == disk.expected
    assert on_disk.files() == {path.name for path in after}


async def test_repeated_merges_keep_a_chain_short_and_its_content(
    on_disk: LayersOnDisk, tmp_path: Path
) -> None:
    """A merge after each layer, while another VM refers to one in the middle."""
    bottom = make_bottom(tmp_path, ["raw"])
    disk = Disk(on_disk, 2, bottom)
    for number in range(18):
        layer = await disk.add_layer(writes=4, size=(64 if number > 12 else 32) * MIB)
        if number == 6:
            await on_disk.snapshot(layer)
            middle, expected = layer, bytes(disk.expected)
        await on_disk.layers.merge_if_long(layer, Bottom(*bottom))
        await on_disk.layers.collect()
        assert len(await disk.chain()) <= MAX_CHAIN
    assert content([*await disk.chain(), *bottom]) == disk.expected
    assert content([*await on_disk.chain(middle), *bottom]) == expected


async def test_a_merge_keeps_zeros_of_a_grown_disk(on_disk: LayersOnDisk, tmp_path: Path) -> None:
    """Data of a larger image beyond the end of the first layers stays hidden."""
    image = tmp_path / "image.raw"
    image.write_bytes(b"\x33" * (64 * MIB))
    disk = Disk(on_disk, 3, (image,))
    del disk.expected[32 * MIB :]
    for number in range(MAX_CHAIN + 1):
        await disk.add_layer(writes=2, size=(64 if number > 4 else 32) * MIB)
    assert disk.layer is not None
    assert await on_disk.layers.merge_if_long(disk.layer, Bottom(image))
    assert len(await disk.chain()) == 1
    assert content([*await disk.chain(), image]) == disk.expected


# Failing merges


@pytest_asyncio.fixture
async def long_disk(on_disk: LayersOnDisk, tmp_path: Path) -> Disk:
    disk = Disk(on_disk, 4, make_bottom(tmp_path, ["raw"]))
    for _ in range(MAX_CHAIN + 1):
        await disk.add_layer(writes=3)
    return disk


@contextlib.asynccontextmanager
async def nothing_changes(disk: Disk) -> AsyncIterator[str]:
    """A merge in this block may fail: rows and files are unchanged, and the next one works."""
    assert disk.layer is not None
    rows, files, kept = await disk.on_disk.rows(), disk.on_disk.files(), checksums(await disk.chain())
    yield disk.layer
    assert await disk.on_disk.rows() == rows
    assert disk.on_disk.files() == files
    assert checksums(await disk.chain()) == kept


def workers(disk: Disk) -> list[ProcessId]:
    """The processes that merge layers."""
    return list(of_user(Settings(data=disk.on_disk.data).disk_uid))


@pytest.fixture
def held_commits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """So many commits are done; the process of the next one is there, and does nothing."""
    allowed = [0]
    commit = DiskProcess.commit

    async def counted(self: DiskProcess, into: str) -> None:
        if allowed[0] == 0:
            await asyncio.Event().wait()
        allowed[0] -= 1
        await commit(self, into)

    monkeypatch.setattr(DiskProcess, "commit", counted)
    return allowed


async def test_a_killed_merge_changes_nothing(
    long_disk: Disk, held_commits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed after the first layers."""
    execute = DiskProcess._execute

    async def execute_or_die(self: DiskProcess, command: str, **arguments: object) -> Any:
        if command == "block-commit" and held_commits[0] == 0:
            for process in workers(long_disk):
                os.kill(process.pid, signal.SIGKILL)
        return await execute(self, command, **arguments)

    held_commits[0] = 4
    monkeypatch.setattr(DiskProcess, "_execute", execute_or_die)
    async with nothing_changes(long_disk) as layer:
        with pytest.raises(HostError, match="SIGKILL"):
            await long_disk.on_disk.layers.merge_if_long(layer, Bottom(*long_disk.bottom))
    held_commits[0] = 100
    assert await long_disk.on_disk.layers.merge_if_long(layer, Bottom(*long_disk.bottom))
    assert content([*await long_disk.chain(), *long_disk.bottom]) == long_disk.expected


async def test_a_cancelled_merge_changes_nothing(long_disk: Disk, held_commits: list[int]) -> None:
    async with nothing_changes(long_disk) as layer:
        merging = asyncio.create_task(
            long_disk.on_disk.layers.merge_if_long(layer, Bottom(*long_disk.bottom))
        )
        await until(lambda: bool(workers(long_disk)), 60)
        merging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await merging
        assert not workers(long_disk)


async def test_a_merge_is_the_work_of_a_user_without_rights(long_disk: Disk, held_commits: list[int]) -> None:
    assert long_disk.layer is not None
    merging = asyncio.create_task(
        long_disk.on_disk.layers.merge_if_long(long_disk.layer, Bottom(*long_disk.bottom))
    )
    await until(lambda: bool(workers(long_disk)), 60)
    (worker,) = workers(long_disk)
    await until(lambda: Path(f"/proc/{worker.pid}/exe").readlink().name.startswith("qemu"), 60)
    assert not Path(f"/proc/{worker.pid}/root/etc/passwd").exists()
    merging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await merging


async def test_a_merge_on_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    """The merged file does not fit on the disk; the merge works once there is space."""
    data = tmp_path / "data"
    data.mkdir()
    call("mount", "-t", "tmpfs", "-o", "size=128M", "tmpfs", data)
    try:
        database = await open_database(data / "stead.db")
        disk = Disk(LayersOnDisk(data, database), 5, make_bottom(tmp_path, ["raw"]))
        for _ in range(MAX_CHAIN + 1):
            await disk.add_layer(writes=2, large=True)
        filler = data / "filler"
        free = shutil.disk_usage(data).free - 2 * MIB
        filler.write_bytes(bytes(free))
        async with nothing_changes(disk) as layer:
            with pytest.raises(HostError, match="No space left on device"):
                await disk.on_disk.layers.merge_if_long(layer, Bottom(*disk.bottom))
        filler.unlink()
        assert await disk.on_disk.layers.merge_if_long(layer, Bottom(*disk.bottom))
        assert content([*await disk.chain(), *disk.bottom]) == disk.expected
        await database.dispose()
    finally:
        call("umount", data)


async def test_a_layer_with_foreign_header_fields_is_not_merged(long_disk: Disk) -> None:
    """A guest that escaped into QEMU could write any backing file into the header of its disk."""
    file = (await long_disk.chain())[3]
    original = file.read_bytes()
    unclean, external = ((1 << bit).to_bytes(8, "big") for bit in (0, 2))
    for place, changed in ((0, b"LUKS"), (7, b"\x02"), (72, unclean), (72, external), (88, external)):
        file.write_bytes(original[:place] + changed + original[place + len(changed) :])
        async with nothing_changes(long_disk) as layer:
            with pytest.raises(HostError, match="disk layer"):
                await long_disk.on_disk.layers.merge_if_long(layer, Bottom(*long_disk.bottom))


async def test_a_layer_deleted_during_its_merge_leaves_nothing(
    on_disk: LayersOnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await on_disk.machine()
    for _ in range(MAX_CHAIN + 1):
        layer = await on_disk.frozen(machine)

    async def meanwhile(
        self: LayerFiles, files: Sequence[str], below: Sequence[str], template: Template, target: Path
    ) -> None:
        await join(self, files, below, template, target)
        await on_disk.remove_machine(machine)
        assert await on_disk.store.remove(list(await on_disk.rows()))

    monkeypatch.setattr(LayerFiles, "_merge", meanwhile)
    assert not await on_disk.layers.merge_if_long(layer, Bottom())
    assert len((await on_disk.layers.collect()).files) == MAX_CHAIN + 1
    assert on_disk.files() == set()
    assert not await on_disk.layers.merge_if_long(layer, Bottom())
