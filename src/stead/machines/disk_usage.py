"""Disk space of each account: VMs and snapshots as measured on the host, repositories as recorded."""

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stead.errors import HostError
from stead.host.interface import Host
from stead.store.layers import LayerStore
from stead.store.machines import LayerRow, MachineRow, MachineStore
from stead.store.repos import RepoStore
from stead.store.snapshots import SnapshotRow, SnapshotStore
from stead.tasks import Threads


@dataclass(frozen=True, eq=False)
class DiskUsage:
    host: Host
    machines: MachineStore
    snapshots: SnapshotStore
    layers: LayerStore
    repos: RepoStore

    async def by_account(self) -> Mapping[str | None, int]:
        """Bytes on disk of each account that has any VM, snapshot or repository.

        A layer that several of them share counts once. Layers of templates belong to no account.
        """
        machines = await self.machines.list()
        snapshots = [row for row in await self.snapshots.list() if row.deleted_at is None]
        layers = {row.id: row for row in await self.layers.list()}
        used = await Threads.MEASUREMENTS.run(self._measure, machines, snapshots, layers)
        used.update(await self.repos.sizes())
        return used

    def _measure(
        self,
        machines: Sequence[MachineRow],
        snapshots: Sequence[SnapshotRow],
        layers: Mapping[str, LayerRow],
    ) -> Counter[str | None]:
        used: Counter[str | None] = Counter()
        counted: defaultdict[str | None, set[str]] = defaultdict(set)
        rows: list[MachineRow | SnapshotRow] = [*machines, *snapshots]
        for row in rows:
            used[row.account] += 0
            if row.checkpoint is not None:
                used[row.account] += _allocated(self.host.checkpoints.allocated, row.checkpoint)
            layer = row.layer
            while layer is not None and layer in layers and layer not in counted[row.account]:
                counted[row.account].add(layer)
                used[row.account] += _allocated(self.host.layers.allocated, layers[layer].file)
                layer = layers[layer].parent
        for machine in machines:
            used[machine.account] += _allocated(self.host.disks.allocated, machine.id)
        return used


def _allocated(measure: Callable[[str], int], name: str) -> int:
    """Bytes of something on disk; 0 if it has just been removed or cannot be read."""
    with contextlib.suppress(OSError, HostError, KeyError):
        return measure(name)
    return 0
