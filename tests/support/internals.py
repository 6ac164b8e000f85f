"""What is inside of `Machines`: the one way in which tests reach it."""

from stead.machines import Machines
from stead.store.database import Database


class Internals:
    """The parts of the VM engine, which only tests see from outside."""

    def __init__(self, machines: Machines) -> None:
        engine = machines._engine
        # Shared by all operations
        self.host = engine.host
        self.journal = engine.journal
        self.locks = engine.locks
        self.quotas = engine.quotas
        self.processes = engine.processes
        self.layers = engine.layers
        self.disks = engine.disks
        self.events = engine.events
        self.slots = engine.slots
        self.captures = engine.captures
        self.tasks = engine.tasks
        # Operations and background work
        self.pool = machines._pool
        self.idle = machines._idle
        self.suspend = machines._suspend
        self.wake = machines._start.wake
        self.capture = machines._fork.capture
        self.eviction = machines._eviction
        self.disk_watch = machines._disk_watch
        self.deletion = machines._deletion
        self.recovery = machines._recovery
        # Rows
        self.settings = machines._settings
        self.store = machines._store
        self.snapshot_store = machines._snapshots._store

    @property
    def database(self) -> Database:
        return self.store.database


def inside(machines: Machines) -> Internals:
    return Internals(machines)
