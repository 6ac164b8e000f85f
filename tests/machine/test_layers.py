"""Disk layers: adoption, garbage collection and merging, with a stateful property test and real disks."""

import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest.mock import AsyncMock

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stead.errors import HostError
from stead.files import allocated
from stead.host import layer_files
from stead.host.checkpoints import CheckpointFolders
from stead.host.interface import Host
from stead.host.layer_files import LayerFiles
from stead.host.quarantine import Quarantine
from stead.host.templates import LocalTemplate
from stead.machines import layers as layers_module
from stead.machines.chains import how_many_to_merge, needed
from stead.machines.layers import MAX_CHAIN, Collected, Layers
from stead.store.database import Database, open_database
from stead.store.layers import LayerStore
from stead.store.machines import LayerRow, MachineRow, MachineStore
from stead.store.snapshots import SnapshotRow, SnapshotStore
from stead.tasks import TaskSet
from support.waiting import until

pytestmark = pytest.mark.usefixtures("root")  # frozen layers are given to root

T = TypeVar("T")

MIB = 1 << 20
TEMPLATE = "template"


class Bottom(LocalTemplate):
    """A template whose disk is these files."""

    files: tuple[Path, ...]

    def __init__(self, *files: Path) -> None:
        vars(self)["files"] = files

    @property
    def layers(self) -> tuple[Path, ...]:
        return self.files


class Files:
    """What `Layers` needs of a host."""

    def __init__(self, data: Path) -> None:
        for folder in ("layers", "checkpoints"):
            (data / folder).mkdir(exist_ok=True)
        self.layers = LayerFiles(data / "layers", data / "machines", Quarantine(data))
        self.checkpoints = CheckpointFolders(data / "checkpoints", AsyncMock(), bool, Quarantine(data))


class Stage:
    """A data folder with its database; VMs are only rows and folders."""

    def __init__(self, data: Path, database: Database) -> None:
        self.data = data
        self.database = database
        self.store = LayerStore(database)
        self.machines = MachineStore(database)
        self.snapshots = SnapshotStore(database)
        self._made = 0
        self.open()

    def open(self) -> None:
        self.host = Files(self.data)
        self.layers = Layers(cast("Host", self.host), self.store, TaskSet())

    async def chain(self, layer: str | None) -> list[Path]:
        return [self.host.layers.path(file) for file in await self.layers.chain(layer)]

    def new_id(self, kind: str) -> str:
        self._made += 1
        return f"{kind}{self._made}"

    def top(self, machine: str, top: str) -> Path:
        return self.data / "machines" / machine / f"{top}.qcow2"

    async def machine(self, layer: str | None = None) -> str:
        name = self.new_id("machine")
        row = MachineRow(
            name, None, "running", None, 1, 512, 1, self._made, TEMPLATE, name, name, layer=layer
        )
        (self.data / "machines" / name).mkdir(parents=True)
        await self.machines.insert(row)
        return name

    async def record(self, machine: str, layer: str, **changes: object) -> None:
        """Record a VM's top layer as read-only without moving its file."""
        row = await self.machines.get(machine)
        assert row is not None
        frozen = LayerRow(layer, row.layer, TEMPLATE, f"{layer}.qcow2")
        assert await self.machines.transition(machine, {}, changes | {"layer": layer}, frozen)

    async def frozen(self, machine: str, content: bytes = b"content") -> str:
        """A new read-only layer below a VM."""
        layer = self.new_id("layer")
        self.top(machine, layer).write_bytes(content)
        await self.record(machine, layer)
        await self.layers.adopt(layer, machine)
        return layer

    async def snapshot(self, layer: str | None, checkpoint: str | None = None) -> str:
        name = self.new_id("snapshot")
        row = SnapshotRow(name, None, "ready", "machine", 1, 512, 1, TEMPLATE, layer, checkpoint)
        await self.snapshots.insert(row)
        return name

    async def remove_machine(self, machine: str) -> None:
        await self.machines.delete(machine)
        shutil.rmtree(self.data / "machines" / machine)

    def files(self) -> set[str]:
        return {path.name for path in (self.data / "layers").iterdir()}

    def checkpoints(self) -> set[str]:
        return {path.name for path in (self.data / "checkpoints").iterdir()}

    async def rows(self) -> dict[str, LayerRow]:
        return {row.id: row for row in await self.store.list()}


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    database = await open_database(tmp_path / "stead.db")
    yield Stage(tmp_path, database)
    await database.dispose()


# Rules


@given(
    sizes=st.lists(st.integers(0, 1 << 40), max_size=60),
    limit=st.integers(1, 12),
)
def test_a_merge_shortens_the_chain_and_spares_large_old_layers(sizes: list[int], limit: int) -> None:
    count = how_many_to_merge(sizes, limit)
    if len(sizes) <= limit:
        assert count == 0
        return
    assert 2 <= count <= len(sizes)
    assert len(sizes) - count + 1 <= limit
    assert count == len(sizes) or sizes[count] > 2 * sum(sizes[:count])
    # One fewer would have left the chain too long, or a layer behind that is no larger than what is merged.
    fewer = count - 1
    assert fewer < 2 or len(sizes) - fewer + 1 > limit or sizes[fewer] <= 2 * sum(sizes[:fewer])


@given(st.integers(2, 600), st.integers(1, 1 << 30), st.sampled_from([6, MAX_CHAIN]))
@settings(max_examples=30, deadline=None)
def test_merging_copies_a_layer_only_a_few_times(appended: int, size: int, limit: int) -> None:
    chain: list[int] = []
    copied = 0
    for _ in range(appended):
        chain.insert(0, size)
        count = how_many_to_merge(chain, limit)
        if count:
            merged = sum(chain[:count])
            copied += merged
            chain[:count] = [merged]
        assert len(chain) <= limit
    assert sum(chain) == appended * size
    assert copied <= size * appended * math.log(appended, 1.5)


def test_layers_below_a_referenced_layer_are_needed() -> None:
    parents = {"a": None, "b": "a", "c": "b", "d": "b", "e": None}
    assert needed(parents, ["d"]) == {"a", "b", "d"}
    assert needed(parents, []) == set()


# Stateful property test


@dataclass
class Layer:
    parent: str | None
    text: str
    users: int = 0
    """VMs, snapshots and layers that refer to it."""


@dataclass
class Model:
    """The model: layers with reference counts."""

    layers: dict[str, Layer] = field(default_factory=dict)
    machines: dict[str, str | None] = field(default_factory=dict)
    asleep: dict[str, str] = field(default_factory=dict)
    """Checkpoints of suspended VMs."""
    snapshots: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)

    def use(self, layer: str | None) -> str | None:
        if layer is not None:
            self.layers[layer].users += 1
        return layer

    def release(self, layer: str | None) -> None:
        if layer is not None:
            self.layers[layer].users -= 1
            if self.layers[layer].users == 0:
                self.release(self.layers.pop(layer).parent)

    def freeze(self, machine: str, layer: str, text: str) -> None:
        # The new layer refers to the parent now, not the VM.
        self.layers[layer] = Layer(self.machines[machine], text, users=1)
        self.machines[machine] = layer

    def lineage(self, layer: str | None) -> list[str]:
        return [] if layer is None else [layer, *self.lineage(self.layers[layer].parent)]

    def content(self, layer: str | None) -> str:
        return "".join(self.layers[each].text for each in reversed(self.lineage(layer)))

    def merge(self, layer: str, count: int) -> None:
        merged = self.lineage(layer)[:count]
        new, old = self.layers[merged[-1]].parent, self.layers[layer].parent
        self.layers[layer].text = "".join(self.layers[each].text for each in reversed(merged))
        self.layers[layer].parent = self.use(new)
        self.release(old)

    @property
    def checkpoints(self) -> set[str]:
        kept = {checkpoint for _, checkpoint in self.snapshots.values() if checkpoint is not None}
        return kept | set(self.asleep.values())


class PowerCut(BaseException):
    """Interrupts an operation like the end of the process."""


async def join(layers: Sequence[Path], _: Sequence[Path], target: Path) -> None:
    """Replaces the merge of disks: text files that append to those below."""
    target.write_text("".join(layer.read_text() for layer in reversed(layers)))


class Histories(RuleBasedStateMachine):
    """Create, freeze, fork, suspend, snapshot, delete, merge and crash in any order."""

    empty_database = b""
    """Shared: a migration takes longer than most runs."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = contextlib.ExitStack()
        # In memory: that writes are durable is not what this is about.
        folder = self.exits.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self.runner = self.exits.enter_context(asyncio.Runner())
        self.patch = self.exits.enter_context(pytest.MonkeyPatch.context())
        self.patch.setattr(layer_files, "merge", join)
        self.model = Model()
        self.data = Path(folder)

    @initialize()
    def begin(self) -> None:
        database = self.data / "stead.db"
        database.write_bytes(Histories.empty_database)
        self.stage = Stage(self.data, self.run(open_database(database)))
        Histories.empty_database = Histories.empty_database or database.read_bytes()

    def teardown(self) -> None:
        if hasattr(self, "stage"):
            self.run(self.stage.database.dispose())
        self.exits.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def pick(self, data: st.DataObject, names: Sequence[str]) -> str:
        return data.draw(st.sampled_from(names))

    def awake(self) -> list[str]:
        return [machine for machine in self.model.machines if machine not in self.model.asleep]

    def freeze(self, machine: str, *, adopt: bool = True, **changes: object) -> str:
        layer = self.stage.new_id("layer")
        text = f"<{layer}>"
        self.stage.top(machine, layer).write_text(text)
        self.run(self.stage.record(machine, layer, **changes))
        self.model.freeze(machine, layer, text)
        if adopt:
            self.run(self.stage.layers.adopt(layer, machine))
        return layer

    def make_checkpoint(self) -> str:
        checkpoint = self.stage.new_id("checkpoint")
        folder = self.stage.host.checkpoints.folder(checkpoint)
        folder.mkdir()
        (folder / "memory").write_text("memory")
        return checkpoint

    def restart(self) -> None:
        self.stage.open()
        self.run(self.stage.layers.finish_adoptions())
        self.collect()

    # VMs and snapshots

    @rule(data=st.data())
    def create(self, data: st.DataObject) -> None:
        layer = None
        if source := data.draw(st.sampled_from([None, *self.model.snapshots])):
            layer, _ = self.model.snapshots[source]
        machine = self.run(self.stage.machine(layer))
        self.model.machines[machine] = self.model.use(layer)

    @precondition(lambda self: self.awake())
    @rule(data=st.data(), children=st.integers(0, 2))
    def fork(self, data: st.DataObject, children: int) -> None:
        layer = self.freeze(self.pick(data, self.awake()))
        for _ in range(children):
            child = self.run(self.stage.machine(layer))
            self.model.machines[child] = self.model.use(layer)

    @precondition(lambda self: self.awake())
    @rule(data=st.data(), memory=st.booleans())
    def snapshot(self, data: st.DataObject, memory: bool) -> None:
        layer = self.freeze(self.pick(data, self.awake()))
        checkpoint = None
        with contextlib.ExitStack() as stack:
            if memory:
                checkpoint = self.make_checkpoint()
                stack.enter_context(self.stage.layers.building(checkpoint))
                # Someone else's collection comes while the row is still to be written.
                self.run(self.stage.layers.collect())
            snapshot = self.run(self.stage.snapshot(layer, checkpoint))
        self.model.snapshots[snapshot] = self.model.use(layer), checkpoint

    @precondition(lambda self: self.awake())
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        machine = self.pick(data, self.awake())
        checkpoint = self.make_checkpoint()
        with self.stage.layers.building(checkpoint):
            self.freeze(machine, checkpoint=checkpoint)
        self.model.asleep[machine] = checkpoint

    @precondition(lambda self: self.model.asleep)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        machine = self.pick(data, list(self.model.asleep))
        self.run(self.stage.machines.update(machine, checkpoint=None))
        del self.model.asleep[machine]

    @precondition(lambda self: self.model.machines)
    @rule(data=st.data())
    def delete_machine(self, data: st.DataObject) -> None:
        machine = self.pick(data, list(self.model.machines))
        self.run(self.stage.remove_machine(machine))
        self.model.asleep.pop(machine, None)
        self.model.release(self.model.machines.pop(machine))

    @precondition(lambda self: self.model.snapshots)
    @rule(data=st.data())
    def delete_snapshot(self, data: st.DataObject) -> None:
        snapshot = self.pick(data, list(self.model.snapshots))
        self.run(self.stage.snapshots.delete(snapshot))
        self.model.release(self.model.snapshots.pop(snapshot)[0])

    # Merging and collecting

    def mergeable(self) -> list[str]:
        return [layer for layer in self.model.layers if len(self.model.lineage(layer)) > 1]

    def choose_merge(self, data: st.DataObject) -> tuple[str, int]:
        layer = self.pick(data, self.mergeable())
        count = data.draw(st.integers(2, len(self.model.lineage(layer))))
        self.patch.setattr(layers_module, "how_many_to_merge", lambda _sizes, _limit: count)
        return layer, count

    @precondition(lambda self: self.mergeable())
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        layer, count = self.choose_merge(data)
        assert self.run(self.stage.layers.merge_if_long(layer, Bottom()))
        self.model.merge(layer, count)

    @rule()
    def collect(self) -> None:
        self.run(self.stage.layers.collect())
        rows = self.run(self.stage.rows())
        assert rows.keys() == self.model.layers.keys()
        assert {name: row.parent for name, row in rows.items()} == {
            name: layer.parent for name, layer in self.model.layers.items()
        }
        assert self.stage.files() == {row.file for row in rows.values()}
        assert self.stage.checkpoints() == self.model.checkpoints
        for name, layer in self.model.layers.items():
            assert (self.data / "layers" / rows[name].file).read_text() == layer.text
        assert self.run(self.stage.layers.collect()) == Collected()

    # The power fails

    @rule()
    def lose_power(self) -> None:
        self.restart()

    @precondition(lambda self: self.awake())
    @rule(data=st.data())
    def lose_power_before_a_frozen_layer_is_taken_in(self, data: st.DataObject) -> None:
        self.freeze(self.pick(data, self.awake()), adopt=False)
        self.restart()

    @rule()
    def lose_power_before_a_checkpoint_has_a_row(self) -> None:
        self.make_checkpoint()
        self.restart()

    @rule()
    def lose_power_while_merging(self) -> None:
        (self.data / "layers" / ".merging-0123456789.qcow2").write_text("half")
        self.restart()

    @precondition(lambda self: self.mergeable())
    @rule(data=st.data(), recorded=st.booleans())
    def lose_power_around_the_record_of_a_merge(self, data: st.DataObject, recorded: bool) -> None:
        layer, count = self.choose_merge(data)
        rebase = self.stage.store.rebase

        async def cut(layer_id: str, file: str, parent: str | None) -> bool:
            if recorded:
                await rebase(layer_id, file, parent)
            raise PowerCut

        with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCut):
            patch.setattr(self.stage.store, "rebase", cut)
            self.run(self.stage.layers.merge_if_long(layer, Bottom()))
        if recorded:
            self.model.merge(layer, count)
        self.restart()

    @rule()
    def lose_power_before_files_are_removed(self) -> None:
        async def cut(*_: object) -> None:
            raise PowerCut

        with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCut):
            patch.setattr(layer_files, "in_thread", cut)
            self.run(self.stage.layers.collect())
        self.restart()

    # Always

    @invariant()
    def every_disk_is_whole(self) -> None:
        """Every reference reads the content that was frozen, whatever was collected and merged since."""
        users = [*self.model.machines.values(), *(layer for layer, _ in self.model.snapshots.values())]
        for layer in set(users):
            files = self.run(self.stage.chain(layer))
            assert "".join(file.read_text() for file in reversed(files)) == self.model.content(layer)


Histories.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestHistories = pytest.mark.heavy(Histories.TestCase)


# Adoption


async def test_adopt_moves_a_layer_to_root_and_is_idempotent(stage: Stage) -> None:
    machine = await stage.machine()
    top = stage.top(machine, "frozen")
    top.write_bytes(b"disk")
    os.chown(top, 12345, 12345)
    top.chmod(0o644)
    await stage.record(machine, "frozen")
    with pytest.raises(HostError, match="a disk layer is missing"):
        await stage.layers.chain("frozen")
    for _ in range(2):
        await stage.layers.adopt("frozen", machine)
    (file,) = await stage.chain("frozen")
    facts = file.stat()
    assert (facts.st_uid, facts.st_gid, facts.st_mode & 0o777) == (0, 0, 0o600)
    assert file.read_bytes() == b"disk"
    assert not top.exists()


async def test_adopt_refuses_links_and_pipes(stage: Stage) -> None:
    """A link or a pipe stays in place, and recovery adopts the other layers."""
    secret = stage.data / "secret"
    secret.write_text("secret")
    secret.chmod(0o640)
    hostile, honest = await stage.machine(), await stage.machine()
    stage.top(hostile, "link").symlink_to(secret)
    os.mkfifo(stage.top(hostile, "pipe"))
    stage.top(honest, "disk").write_bytes(b"disk")
    for machine, layer in ((hostile, "link"), (hostile, "pipe"), (honest, "disk")):
        await stage.record(machine, layer)
    for layer in ("link", "pipe"):
        with pytest.raises(HostError, match="disk layer"):
            await stage.layers.adopt(layer, hostile)
    await stage.layers.finish_adoptions()
    assert stage.files() == {"disk.qcow2"}
    assert secret.stat().st_mode & 0o777 == 0o640


async def test_a_layer_without_file_or_row_is_reported_as_missing(stage: Stage) -> None:
    machine = await stage.machine()
    below, above = await stage.frozen(machine), await stage.frozen(machine)
    assert [path.stem for path in await stage.chain(above)] == [above, below]
    assert await stage.layers.chain(None) == []
    (stage.data / "layers" / f"{below}.qcow2").unlink()
    for layer in (above, "unknown"):
        with pytest.raises(HostError, match="a disk layer is missing"):
            await stage.layers.chain(layer)
    with pytest.raises(HostError, match="a disk layer is missing"):
        await stage.layers.adopt(below, machine)


# Garbage collection


async def test_collect_returns_what_it_removed(stage: Stage) -> None:
    machine = await stage.machine()
    layers = {await stage.frozen(machine), await stage.frozen(machine)}
    stage.host.checkpoints.folder("checkpoint").mkdir()
    assert await stage.layers.collect() == Collected(checkpoints=frozenset({"checkpoint"}))
    await stage.remove_machine(machine)
    files = frozenset(f"{layer}.qcow2" for layer in layers)
    assert await stage.layers.collect() == Collected(layers=frozenset(layers), files=files)
    assert (stage.files(), await stage.rows()) == (set(), {})


async def test_collect_waits_for_readers(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files stay while a reader that got them is active; later readers do not delay their removal."""
    machine = await stage.machine()
    layer = await stage.frozen(machine)
    stage.host.checkpoints.folder("checkpoint").mkdir()
    looked = asyncio.Event()
    checkpoints = stage.store.checkpoints

    async def look() -> set[str]:
        found = await checkpoints()
        looked.set()
        return found

    monkeypatch.setattr(stage.store, "checkpoints", look)
    async with contextlib.AsyncExitStack() as later:
        async with stage.layers.reading():
            files = await stage.chain(layer)
            await stage.remove_machine(machine)
            collecting = asyncio.create_task(stage.layers.collect())
            await asyncio.wait_for(looked.wait(), 10)
            await later.enter_async_context(stage.layers.reading())
            assert await stage.rows() == {}
            assert all(file.exists() for file in files)
            assert stage.checkpoints() == {"checkpoint"}
            assert not collecting.done()
        collected = await asyncio.wait_for(collecting, 10)
    assert collected.files == {file.name for file in files}
    assert (stage.files(), stage.checkpoints()) == (set(), set())


async def test_collect_keeps_a_layer_that_gets_a_reference_meanwhile(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot refers to a layer between the query for references and its removal."""
    machine = await stage.machine()
    below, above = await stage.frozen(machine), await stage.frozen(machine)
    await stage.remove_machine(machine)
    referenced = stage.store.referenced

    async def then_used() -> set[str]:
        found = await referenced()
        await stage.snapshot(below)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(stage.store, "referenced", then_used)
        assert await stage.layers.collect() == Collected()
    assert len(await stage.layers.chain(above)) == 2
    assert (await stage.layers.collect()).layers == {above}
    assert len(await stage.layers.chain(below)) == 1


async def test_collect_keeps_a_checkpoint_that_gets_its_row_meanwhile(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = stage.store.checkpoints
    building = stage.layers.building("memory")

    async def just_before() -> set[str]:
        found = await checkpoints()
        await stage.snapshot(None, "memory")
        building.__exit__(None, None, None)
        return found

    building.__enter__()
    stage.host.checkpoints.folder("memory").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(stage.store, "checkpoints", just_before)
        await stage.layers.collect()
    await stage.layers.collect()
    assert stage.checkpoints() == {"memory"}


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

    def __init__(self, stage: Stage, seed: int, bottom: tuple[Path, ...]) -> None:
        self.stage = stage
        self.random = random.Random(seed)
        self.bottom = bottom
        self.expected = bytearray(content(bottom))
        self.machine = ""
        self.layer: str | None = None

    async def chain(self) -> list[Path]:
        return await self.stage.chain(self.layer)

    async def add_layer(self, writes: int, size: int = 0, large: bool = False) -> str:
        """Freeze a layer with data, zeros and discards here and there."""
        self.machine = self.machine or await self.stage.machine()
        self.expected.extend(bytes(max(0, size - len(self.expected))))
        layer = self.stage.new_id("layer")
        top = self.stage.top(self.machine, layer)
        backing = ("-u", "-b", "/nowhere", "-F", "qcow2")
        create = ("qemu-img", "create", "-q", "-f", "qcow2", *backing, top, str(len(self.expected)))
        call(*create)
        commands = [self._write(large) for _ in range(writes)]
        node = described([top, *await self.chain(), *self.bottom]) | {"discard": "unmap"}
        output = call("qemu-io", f"json:{json.dumps(node)}", stdin="\n".join((*commands, "")))
        assert output.count("bytes at offset") == writes
        await self.stage.record(self.machine, layer)
        await self.stage.layers.adopt(layer, self.machine)
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
    stage: Stage, bottom: tuple[Path, ...], large: int
) -> None:
    """Twelve layers with writes, zeros, discards and growth are merged; no byte changes."""
    disk = Disk(stage, 1, bottom)
    for number in range(12):
        size = (32 + 16 * (number // 4)) * MIB + 512
        await disk.add_layer(writes=12 if number < large else 6, size=size, large=number < large)
    assert disk.layer is not None
    before = await disk.chain()
    kept = checksums([*before, *bottom])
    count = how_many_to_merge([allocated(path) for path in before], MAX_CHAIN)
    assert count == 12 - large

    assert await stage.layers.merge_if_long(disk.layer, Bottom(*bottom))

    after = await disk.chain()
    assert after[1:] == before[count:]
    assert len(after) == 1 + large
    assert checksums([*before, *bottom]) == kept
    assert content([*after, *bottom]) == disk.expected
    # It holds what the merged layers held, and nothing of what is below them.
    assert allocated(after[0]) <= sum(allocated(path) for path in before[:count])
    assert after[0].stat().st_mode & 0o777 == 0o600
    assert not await stage.layers.merge_if_long(disk.layer, Bottom(*bottom))

    collected = await stage.layers.collect()
    assert collected.files == {path.name for path in before[:count]}
    assert content([*after, *bottom]) == disk.expected
    assert stage.files() == {path.name for path in after}


async def test_repeated_merges_keep_a_chain_short_and_its_content(stage: Stage, tmp_path: Path) -> None:
    """A merge after each layer, while another VM refers to one in the middle."""
    bottom = make_bottom(tmp_path, ["raw"])
    disk = Disk(stage, 2, bottom)
    for number in range(18):
        layer = await disk.add_layer(writes=4, size=(64 if number > 12 else 32) * MIB)
        if number == 6:
            await stage.snapshot(layer)
            middle, expected = layer, bytes(disk.expected)
        await stage.layers.merge_if_long(layer, Bottom(*bottom))
        await stage.layers.collect()
        assert len(await disk.chain()) <= MAX_CHAIN
    assert content([*await disk.chain(), *bottom]) == disk.expected
    assert content([*await stage.chain(middle), *bottom]) == expected


async def test_a_merge_keeps_zeros_of_a_grown_disk(stage: Stage, tmp_path: Path) -> None:
    """Data of a larger image beyond the end of the first layers stays hidden."""
    image = tmp_path / "image.raw"
    image.write_bytes(b"\x33" * (64 * MIB))
    disk = Disk(stage, 3, (image,))
    del disk.expected[32 * MIB :]
    for number in range(MAX_CHAIN + 1):
        await disk.add_layer(writes=2, size=(64 if number > 4 else 32) * MIB)
    assert disk.layer is not None
    assert await stage.layers.merge_if_long(disk.layer, Bottom(image))
    assert len(await disk.chain()) == 1
    assert content([*await disk.chain(), image]) == disk.expected


# Failing merges


@pytest_asyncio.fixture
async def long_disk(stage: Stage, tmp_path: Path) -> Disk:
    disk = Disk(stage, 4, make_bottom(tmp_path, ["raw"]))
    for _ in range(MAX_CHAIN + 1):
        await disk.add_layer(writes=3)
    return disk


@contextlib.asynccontextmanager
async def nothing_changes(disk: Disk) -> AsyncIterator[str]:
    """A merge in this block may fail: rows and files are unchanged, and the next one works."""
    assert disk.layer is not None
    rows, files, kept = await disk.stage.rows(), disk.stage.files(), checksums(await disk.chain())
    yield disk.layer
    assert await disk.stage.rows() == rows
    assert disk.stage.files() == files
    assert checksums(await disk.chain()) == kept


@pytest.fixture
def other_qemu_img(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A `qemu-img` whose commit is this script; all else is the real one's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "qemu-img"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = commit ]; then . {folder}/commit; fi\nexec {shutil.which("qemu-img")} "$@"\n'
    )
    script.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield folder / "commit"


async def test_a_killed_merge_changes_nothing(long_disk: Disk, other_qemu_img: Path) -> None:
    """qemu-img is killed after the first layers."""
    other_qemu_img.write_text(
        f"echo >> {other_qemu_img}ted\n[ $(wc -l < {other_qemu_img}ted) -le 3 ] || kill -9 $$\n"
    )
    async with nothing_changes(long_disk) as layer:
        with pytest.raises(HostError, match="signal 9"):
            await long_disk.stage.layers.merge_if_long(layer, Bottom(*long_disk.bottom))
    other_qemu_img.write_text("")
    assert await long_disk.stage.layers.merge_if_long(layer, Bottom(*long_disk.bottom))
    assert content([*await long_disk.chain(), *long_disk.bottom]) == long_disk.expected


async def test_a_cancelled_merge_changes_nothing(long_disk: Disk, other_qemu_img: Path) -> None:
    begun = other_qemu_img.with_name("begun")
    other_qemu_img.write_text(f"touch {begun}\nexec sleep 1000\n")

    async def has_begun() -> bool:
        return begun.exists()

    async with nothing_changes(long_disk) as layer:
        merging = asyncio.create_task(long_disk.stage.layers.merge_if_long(layer, Bottom(*long_disk.bottom)))
        await until(has_begun, 10)
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
        disk = Disk(Stage(data, database), 5, make_bottom(tmp_path, ["raw"]))
        for _ in range(MAX_CHAIN + 1):
            await disk.add_layer(writes=2, large=True)
        filler = data / "filler"
        free = shutil.disk_usage(data).free - 2 * MIB
        filler.write_bytes(bytes(free))
        async with nothing_changes(disk) as layer:
            with pytest.raises(HostError, match="No space left on device"):
                await disk.stage.layers.merge_if_long(layer, Bottom(*disk.bottom))
        filler.unlink()
        assert await disk.stage.layers.merge_if_long(layer, Bottom(*disk.bottom))
        assert content([*await disk.chain(), *disk.bottom]) == disk.expected
        await database.dispose()
    finally:
        call("umount", data)


async def test_a_layer_with_a_backing_file_of_the_host_is_not_merged(long_disk: Disk) -> None:
    """A guest that escaped into QEMU could write any backing file into the header of its disk."""
    file = (await long_disk.chain())[3]
    original = file.read_bytes()
    unclean, external = ((1 << bit).to_bytes(8, "big") for bit in (0, 2))
    for place, changed in ((0, b"LUKS"), (7, b"\x02"), (72, unclean), (72, external), (88, external)):
        file.write_bytes(original[:place] + changed + original[place + len(changed) :])
        async with nothing_changes(long_disk) as layer:
            with pytest.raises(HostError, match="disk layer"):
                await long_disk.stage.layers.merge_if_long(layer, Bottom(*long_disk.bottom))


async def test_a_layer_deleted_during_its_merge_leaves_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await stage.machine()
    for _ in range(MAX_CHAIN + 1):
        layer = await stage.frozen(machine)

    async def meanwhile(layers: Sequence[Path], below: Sequence[Path], target: Path) -> None:
        await join(layers, below, target)
        await stage.remove_machine(machine)
        assert await stage.store.remove(list(await stage.rows()))

    monkeypatch.setattr(layer_files, "merge", meanwhile)
    assert not await stage.layers.merge_if_long(layer, Bottom())
    assert len((await stage.layers.collect()).files) == MAX_CHAIN + 1
    assert stage.files() == set()
    assert not await stage.layers.merge_if_long(layer, Bottom())
