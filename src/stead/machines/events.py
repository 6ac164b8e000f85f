"""Lifecycle events of VMs: what happened and why, for the log that users read."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from stead.store.machines import MachineRow

REQUESTED = "requested"


class EventKind(StrEnum):
    CREATED = "created"
    STARTED = "started"
    """Booted from disk."""
    WOKEN = "woken"
    """Resumed from the memory that was saved when it was suspended."""
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    KILLED = "killed"
    CRASHED = "crashed"
    """The guest's kernel panicked or its QEMU ended, and no caller asked for it."""
    START_FAILED = "failed to start"
    LOST = "lost"
    """Its disk is incomplete; it can only be deleted."""
    DELETED = "deleted"


FAILURES = frozenset({EventKind.CRASHED, EventKind.START_FAILED, EventKind.LOST})


class Use(StrEnum):
    """What a VM is needed for; the log line of a wake or start names it."""

    COMMAND = "command"
    FILES = "file access"
    WATCH = "file watch"
    TERMINAL = "terminal"
    GUEST = "guest access"
    START = "start request"
    STOP = "stop request"
    FORK = "fork"
    RESIZE = "resize"


@dataclass(frozen=True)
class MachineEvent:
    kind: EventKind
    row: MachineRow
    """The VM as it was before the event when it ended its run; else as it is now."""
    reason: str | None = None
    row_removed: bool = False
    """Deleted with its id: it cannot be recreated under it."""

    @property
    def message(self) -> str:
        """`VM abc suspended: idle for 300 s`."""
        return f"VM {self.row.id} {status(self.kind, self.reason)}"

    @property
    def failed(self) -> bool:
        return self.kind in FAILURES

    @property
    def instance(self) -> str | None:
        return instance_of(self.row)


OnEvent = Callable[[MachineEvent], None]


def status(kind: EventKind, reason: str | None) -> str:
    """How a run ended, in words: `stopped`, `crashed: guest kernel panicked`."""
    return kind.value if reason is None else f"{kind.value}: {reason}"


def instance_of(row: MachineRow) -> str | None:
    """The id of a VM's current run: a new one after every start; None when it has no process."""
    if row.pid is None:
        return None
    return hashlib.sha256(f"{row.id} {row.pid} {row.pid_started}".encode()).hexdigest()[:20]
