"""What the operations on VMs share. Nothing outside of this package sees it."""

import os
from dataclasses import dataclass

from stead.deadlines import scaled
from stead.host.interface import Host
from stead.machines.disks import Disks
from stead.machines.events import Events
from stead.machines.journal import Journal
from stead.machines.layers import Layers
from stead.machines.locks import Locks
from stead.machines.processes import Processes
from stead.machines.quotas import Quotas
from stead.store.layers import LayerStore
from stead.store.machines import MachineStore
from stead.tasks import KeyedLimit, TaskSet

_RESTORE_DEADLINE = scaled(10.0)
"""Seconds that a restore counts as one. It takes about one; a guest that does not answer takes minutes."""


@dataclass(frozen=True, eq=False)
class Engine:
    """The parts that all operations work on. It has no behaviour: an operation is a class that takes it."""

    host: Host
    journal: Journal
    locks: Locks
    quotas: Quotas
    processes: Processes
    layers: Layers
    disks: Disks
    events: Events
    slots: KeyedLimit
    """Restores and boots under way, shared between accounts."""
    tasks: TaskSet
    """Work that outlives the call that started it."""


def open_engine(host: Host, machines: MachineStore, layer_rows: LayerStore) -> Engine:
    tasks, events = TaskSet(), Events()
    journal = Journal(machines, host.slots)
    layers = Layers(host, layer_rows, tasks)
    return Engine(
        host=host,
        journal=journal,
        locks=Locks(journal),
        quotas=Quotas(machines),
        processes=Processes(host, journal, tasks),
        layers=layers,
        disks=Disks(host, journal, layers, events),
        events=events,
        # More concurrent restores than cores would make all of them slow.
        slots=KeyedLimit(max(2, os.cpu_count() or 2), release_after=_RESTORE_DEADLINE),
        tasks=tasks,
    )
