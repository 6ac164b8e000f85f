"""Random histories of disk layers, with power cuts."""

import asyncio
import contextlib
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stead.host import layer_files
from stead.host.layer_files import LayerFiles
from stead.machines import layers as layers_module
from stead.machines.layers import Collected
from stead.store.database import open_database
from support.databases import put_database
from support.layers_on_disk import Bottom, LayersOnDisk, join

pytestmark = pytest.mark.usefixtures("root")  # frozen layers are given to root
T = TypeVar("T")


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


class Histories(RuleBasedStateMachine):
    """Create, freeze, fork, suspend, snapshot, delete, merge and crash in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = contextlib.ExitStack()
        # In memory: that writes are durable is not what this is about.
        folder = self.exits.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self.runner = self.exits.enter_context(asyncio.Runner())
        self.patch = self.exits.enter_context(pytest.MonkeyPatch.context())
        self.patch.setattr(LayerFiles, "_merge", join)
        self.model = Model()
        self.data = Path(folder)

    @initialize()
    def begin(self) -> None:
        database = self.run(put_database(self.data / "stead.db"))
        self.on_disk = LayersOnDisk(self.data, self.run(open_database(database)))

    def teardown(self) -> None:
        if hasattr(self, "on_disk"):
            self.run(self.on_disk.database.dispose())
        self.exits.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def pick(self, data: st.DataObject, names: Sequence[str]) -> str:
        return data.draw(st.sampled_from(names))

    def awake(self) -> list[str]:
        return [machine for machine in self.model.machines if machine not in self.model.asleep]

    def freeze(self, machine: str, *, adopt: bool = True, **changes: object) -> str:
        layer = self.on_disk.new_id("layer")
        text = f"<{layer}>"
        self.on_disk.top(machine, layer).write_text(text)
        self.run(self.on_disk.record(machine, layer, **changes))
        self.model.freeze(machine, layer, text)
        if adopt:
            self.run(self.on_disk.layers.adopt(layer, machine))
        return layer

    def make_checkpoint(self) -> str:
        checkpoint = self.on_disk.new_id("checkpoint")
        folder = self.on_disk.host.checkpoints.folder(checkpoint)
        folder.mkdir()
        (folder / "memory").write_text("memory")
        return checkpoint

    def restart(self) -> None:
        self.on_disk.open()
        self.run(self.on_disk.layers.finish_adoptions())
        self.collect()

    # VMs and snapshots

    @rule(data=st.data())
    def create(self, data: st.DataObject) -> None:
        layer = None
        if source := data.draw(st.sampled_from([None, *self.model.snapshots])):
            layer, _ = self.model.snapshots[source]
        machine = self.run(self.on_disk.machine(layer))
        self.model.machines[machine] = self.model.use(layer)

    @precondition(lambda self: self.awake())
    @rule(data=st.data(), children=st.integers(0, 2))
    def fork(self, data: st.DataObject, children: int) -> None:
        layer = self.freeze(self.pick(data, self.awake()))
        for _ in range(children):
            child = self.run(self.on_disk.machine(layer))
            self.model.machines[child] = self.model.use(layer)

    @precondition(lambda self: self.awake())
    @rule(data=st.data(), memory=st.booleans())
    def snapshot(self, data: st.DataObject, memory: bool) -> None:
        layer = self.freeze(self.pick(data, self.awake()))
        checkpoint = None
        with contextlib.ExitStack() as stack:
            if memory:
                checkpoint = self.make_checkpoint()
                stack.enter_context(self.on_disk.layers.building(checkpoint))
                # Someone else's collection comes while the row is still to be written.
                self.run(self.on_disk.layers.collect())
            snapshot = self.run(self.on_disk.snapshot(layer, checkpoint))
        self.model.snapshots[snapshot] = self.model.use(layer), checkpoint

    @precondition(lambda self: self.awake())
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        machine = self.pick(data, self.awake())
        checkpoint = self.make_checkpoint()
        with self.on_disk.layers.building(checkpoint):
            self.freeze(machine, checkpoint=checkpoint)
        self.model.asleep[machine] = checkpoint

    @precondition(lambda self: self.model.asleep)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        machine = self.pick(data, list(self.model.asleep))
        self.run(self.on_disk.machines.update(machine, checkpoint=None))
        del self.model.asleep[machine]

    @precondition(lambda self: self.model.machines)
    @rule(data=st.data())
    def delete_machine(self, data: st.DataObject) -> None:
        machine = self.pick(data, list(self.model.machines))
        self.run(self.on_disk.remove_machine(machine))
        self.model.asleep.pop(machine, None)
        self.model.release(self.model.machines.pop(machine))

    @precondition(lambda self: self.model.snapshots)
    @rule(data=st.data())
    def delete_snapshot(self, data: st.DataObject) -> None:
        snapshot = self.pick(data, list(self.model.snapshots))
        self.run(self.on_disk.snapshots.delete(snapshot))
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
        assert self.run(self.on_disk.layers.merge_if_long(layer, Bottom()))
        self.model.merge(layer, count)

    @rule()
    def collect(self) -> None:
        self.run(self.on_disk.layers.collect())
        rows = self.run(self.on_disk.rows())
        assert rows.keys() == self.model.layers.keys()
        assert {name: row.parent for name, row in rows.items()} == {
            name: layer.parent for name, layer in self.model.layers.items()
        }
        assert self.on_disk.files() == {row.file for row in rows.values()}
        assert self.on_disk.checkpoints() == self.model.checkpoints
        for name, layer in self.model.layers.items():
            assert (self.data / "layers" / rows[name].file).read_text() == layer.text
        assert self.run(self.on_disk.layers.collect()) == Collected()

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
        rebase = self.on_disk.store.rebase

        async def cut(layer_id: str, file: str, parent: str | None) -> bool:
            if recorded:
                await rebase(layer_id, file, parent)
            raise PowerCut

        with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCut):
            patch.setattr(self.on_disk.store, "rebase", cut)
            self.run(self.on_disk.layers.merge_if_long(layer, Bottom()))
        if recorded:
            self.model.merge(layer, count)
        self.restart()

    @rule()
    def lose_power_before_files_are_removed(self) -> None:
        async def cut(*_: object) -> None:
            raise PowerCut

        with pytest.MonkeyPatch.context() as patch, pytest.raises(PowerCut):
            patch.setattr(layer_files, "Threads", SimpleNamespace(COPIES=SimpleNamespace(run=cut)))
            self.run(self.on_disk.layers.collect())
        self.restart()

    # Always

    @invariant()
    def every_disk_is_whole(self) -> None:
        """Every reference reads the content that was frozen, whatever was collected and merged since."""
        users = [*self.model.machines.values(), *(layer for layer, _ in self.model.snapshots.values())]
        for layer in set(users):
            files = self.run(self.on_disk.chain(layer))
            assert "".join(file.read_text() for file in reversed(files)) == self.model.content(layer)


Histories.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestHistories = pytest.mark.heavy(Histories.TestCase)
