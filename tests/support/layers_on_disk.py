"""Disk layers with their rows: VMs are only rows and folders."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast
from unittest.mock import AsyncMock

from stead.host.checkpoints import CheckpointFolders
from stead.host.interface import Host, Template
from stead.host.layer_files import LayerFiles
from stead.host.quarantine import Quarantine
from stead.host.sandbox import Sandbox
from stead.host.templates import LocalTemplate
from stead.machines.layers import Layers
from stead.settings import Settings
from stead.store.database import Database
from stead.store.layers import LayerStore
from stead.store.machines import LayerRow, MachineRow, MachineStore
from stead.store.snapshots import SnapshotRow, SnapshotStore
from stead.tasks import TaskSet

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
        self.sandbox = Sandbox()
        self.layers = LayerFiles(
            data / "layers", data / "machines", Quarantine(data), self.sandbox, Settings(data=data).disk_uid
        )
        self.checkpoints = CheckpointFolders(data / "checkpoints", AsyncMock(), Quarantine(data))


class LayersOnDisk:
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


async def join(
    self: LayerFiles, files: Sequence[str], below: Sequence[str], template: Template, target: Path
) -> None:
    """Replaces the merge of disks: text files that append to those below."""
    target.write_text("".join(self.path(file).read_text() for file in reversed(files)))
