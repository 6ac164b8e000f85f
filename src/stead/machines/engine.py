"""What the operations on VMs share. Nothing outside of this package sees it."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Hashable
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
"""VMs of an account that wait for a place to be restored, booted or captured in."""
MAX_WAIT = scaled(120.0)
"""Seconds that one of them waits."""
RESTORE_DEADLINE = scaled(10.0)
"""Seconds that a restore counts as one. It takes about one; a guest that does not answer takes minutes."""
_UNFINISHED = 64
"""Restores and boots under way at least, with those of guests that do not answer."""


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
    slots: "RestoreSlots"
    """Restores and boots under way, shared between accounts."""
    captures: KeyedLimit
    """Captures of memory and disk under way, shared between accounts, with their writes to disk."""
    tasks: TaskSet
    """Work that outlives the call that started it."""


class RestoreSlots(KeyedLimit):
    """One account may have as many restores as there are cores: more would make all of them slow.

    There are slots beyond these, so that restores of one account never leave another one without any. In the
    same way, wakes by strangers never leave the owner of the VMs without any. A slot is released after
    `RESTORE_DEADLINE`, and the restore continues: `unfinished` bounds those as well.
    """

    def __init__(self) -> None:
        cores = _cores()
        super().__init__(
            cores + share_of(cores),
            cores,
            per_caller=cores - 1,
            max_waiting=_MAX_WAITING,
            max_wait=MAX_WAIT,
            busy=_busy("started"),
            release_after=RESTORE_DEADLINE,
        )
        most = max(_UNFINISHED, 16 * cores)
        self.unfinished = KeyedLimit(
            most, share_of(most), max_waiting=_MAX_WAITING, max_wait=MAX_WAIT, busy=_busy("started")
        )

    @contextlib.asynccontextmanager
    async def hold(
        self, key: Hashable = None, caller: Hashable = None, *, amount: int = 1, max_wait: float | None = None
    ) -> AsyncIterator[None]:
        async with (
            self.unfinished.hold(key, caller, amount=amount, max_wait=max_wait),
            super().hold(key, caller, amount=amount, max_wait=max_wait),
        ):
            yield


def _captures() -> KeyedLimit:
    """A capture keeps a core and the disk busy for seconds; others wait for the same threads and disk.

    A caller that waits has the lock of its VM; a caller that has a place waits for no lock of a VM.
    """
    cores = _cores()
    most = cores + share_of(cores)
    return KeyedLimit(
        most, max(1, most // 2), max_waiting=_MAX_WAITING, max_wait=MAX_WAIT, busy=_busy("captured")
    )


def _cores() -> int:
    return max(2, os.cpu_count() or 2)


def _busy(done: str) -> Callable[[], TooBusy]:
    return lambda: TooBusy(
        f"too many VMs of this account wait to be {done}: at most {_MAX_WAITING}, for at most {MAX_WAIT:g} s;"
        " try again in 5 s"
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
        slots=RestoreSlots(),
        captures=_captures(),
        tasks=tasks,
    )
