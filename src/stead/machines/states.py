"""State machine of a VM: states, operations and recovery decisions, without IO."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    PREPARING = "preparing"
    """In the pool: being restored ahead of time."""
    PREPARED = "prepared"
    """In the pool: restored, warmed and paused."""
    CREATING = "creating"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    """Memory and disk saved, no process; the next use wakes it."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Disk only; `reason` says why."""
    STARTING = "starting"
    """Being booted, or woken when it has a checkpoint."""
    DELETING = "deleting"
    DELETED = "deleted"
    """Only the row is left, because of `recreate`; the next use creates it again."""
    LOST = "lost"
    """Layers of its disk are missing; it can only be deleted."""


UNOWNED = frozenset({State.PREPARING, State.PREPARED})
PASSING = frozenset(
    {
        State.PREPARING,
        State.CREATING,
        State.SUSPENDING,
        State.STOPPING,
        State.STARTING,
        State.DELETING,
    }
)
"""Transient states: other operations wait for their end."""
DOWN = frozenset({State.STOPPED, State.SUSPENDED, State.DELETED})
"""States without a process from which a VM can be started."""


class Operation(StrEnum):
    USE = "use"
    START = "start"
    STOP = "stop"
    KILL = "kill"
    SUSPEND = "suspend"
    SNAPSHOT = "snapshot"
    FORK = "fork"
    RESIZE = "resize"
    DELETE = "delete"


class Verdict(StrEnum):
    GO = "go"
    WAKE = "wake"
    """Wake or start it first."""
    WAIT = "wait"
    REFUSE = "refuse"
    DONE = "done"
    """Already in the requested state."""


STEPS: Mapping[State, tuple[str, ...]] = {
    State.PREPARING: ("allocate", "disk", "process", "restore", "warm"),
    State.CREATING: ("allocate", "disk", "process", "restore", "boot", "identify"),
    State.RUNNING: ("freeze",),
    State.SUSPENDING: ("freeze",),
    State.STARTING: ("disk", "process", "boot", "restore", "identify"),
    State.STOPPING: ("shutdown", "clean"),
    State.DELETING: ("end", "clean"),
}
"""Journal steps of each state: a step is recorded before its side effects."""

_GO: Mapping[Operation, frozenset[State]] = {
    Operation.USE: frozenset({State.RUNNING}),
    Operation.START: DOWN,
    Operation.STOP: frozenset({State.RUNNING}),
    Operation.KILL: frozenset({State.RUNNING, State.STOPPING, State.SUSPENDED}),
    Operation.SUSPEND: frozenset({State.RUNNING}),
    Operation.SNAPSHOT: frozenset({State.RUNNING, State.STOPPED, State.SUSPENDED}),
    Operation.FORK: frozenset({State.RUNNING}),
    Operation.RESIZE: frozenset({State.RUNNING, State.STOPPED}),
    Operation.DELETE: frozenset(State) - PASSING | {State.STOPPING},
}
_WAKE: Mapping[Operation, frozenset[State]] = {
    Operation.USE: DOWN,
    Operation.FORK: DOWN,
    # A suspended VM is woken to be shut down, so that its page cache reaches the disk.
    Operation.STOP: frozenset({State.SUSPENDED}),
    Operation.RESIZE: frozenset({State.SUSPENDED}),
}
_DONE: Mapping[Operation, frozenset[State]] = {
    Operation.START: frozenset({State.RUNNING}),
    Operation.STOP: frozenset({State.STOPPED}),
    Operation.KILL: frozenset({State.STOPPED}),
    Operation.SUSPEND: frozenset({State.SUSPENDED}),
}


def decide(operation: Operation, state: State) -> Verdict:
    """Whether an operation may start in this state."""
    if state in UNOWNED or state is State.DELETING:
        # To callers these VMs do not exist.
        return Verdict.REFUSE
    for verdict, table in ((Verdict.GO, _GO), (Verdict.WAKE, _WAKE), (Verdict.DONE, _DONE)):
        if state in table.get(operation, ()):
            return verdict
    return Verdict.WAIT if state in PASSING else Verdict.REFUSE


class Recovery(StrEnum):
    """What recovery does with a row."""

    ADOPT = "adopt"
    """Its process runs: reconnect, and resume it if it was paused."""
    STOPPED = "stopped"
    """It was running and its process has ended: record that."""
    FINISH_STOP = "finish stop"
    END_AND_STOP = "end and stop"
    """Undo a start that did not finish; the disk is as before."""
    END_AND_SLEEP = "end and sleep"
    """Undo a wake that did not finish; saved memory and disk are as before."""
    REMOVE = "remove"
    """Its creation did not finish, or its deletion had started."""
    KEEP = "keep"


def recover(state: State, *, alive: bool, asleep: bool) -> Recovery:
    """What to do with a row, given whether its process is alive and whether it has saved memory."""
    match state:
        case State.RUNNING | State.SUSPENDING:
            return Recovery.ADOPT if alive else Recovery.STOPPED
        case State.PREPARED:
            return Recovery.ADOPT if alive else Recovery.REMOVE
        case State.PREPARING | State.CREATING | State.DELETING:
            return Recovery.REMOVE
        case State.STARTING:
            return Recovery.END_AND_SLEEP if asleep else Recovery.END_AND_STOP
        case State.STOPPING:
            return Recovery.FINISH_STOP
        case State.STOPPED | State.SUSPENDED | State.DELETED | State.LOST:
            # A process of such a row is an orphan, which recovery kills.
            return Recovery.KEEP


@dataclass(frozen=True)
class End:
    """Why a QEMU ended that no operation ended, and what follows for its VM."""

    reason: str
    restart: bool = False
    crashed: bool = False


def unexpected_end(cause: str | None, how: str) -> End:
    """Map QEMU's stop cause and exit status to a guest shutdown, a reboot, a panic or a crash of QEMU."""
    match cause:
        case "guest-shutdown":
            return End("guest shut down")
        case "guest-reset":
            return End("guest rebooted", restart=True)
        case "guest-panic":
            return End("guest kernel panicked", crashed=True)
        case None:
            return End(f"QEMU {how}", crashed=True)
        case _:
            return End(f"QEMU {how} ({cause})", crashed=True)
