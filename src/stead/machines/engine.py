"""What the operations on VMs share. Nothing outside of this package sees it."""

import os
from dataclasses import dataclass

from stead.deadlines import scaled
from stead.errors import TooBusy
from stead.host.interface import Host
from stead.machines.disks import Disks
from stead.machines.events import Events
from stead.machines.journal import Journal
from stead.machines.layers import Layers
from stead.machines.locks import Locks
from stead.machines.processes import Processes
from stead.machines.quotas import Quotas
from stead.shares import KeyedLimit, share_of
from stead.store.layers import LayerStore
from stead.store.machines import MachineStore
from stead.tasks import TaskSet

_MAX_WAITING = 1000
"""VMs of an account that wait for a slot to be restored or booted in."""
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


def _restore_slots() -> KeyedLimit:
    """One account may have as many restores as there are cores: more would make all of them slow.

    There are slots beyond these, so that restores of one account never leave another one without any. In the
    same way, wakes by strangers never leave the owner of the VMs without any.
    """
    cores = max(2, os.cpu_count() or 2)
    return KeyedLimit(
        cores + share_of(cores),
        cores,
        per_caller=cores - 1,
        max_waiting=_MAX_WAITING,
        busy=lambda: TooBusy(
            f"too many VMs of this account wait to be started: at most {_MAX_WAITING}; try again in 5 s"
        ),
        release_after=_RESTORE_DEADLINE,
    )


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
        slots=_restore_slots(),
        tasks=tasks,
    )
