"""What a machine can be and what may happen to it. Nothing here does anything: it only decides."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    PREPARING = "preparing"
    """Being restored ahead of time; belongs to nobody."""
    PREPARED = "prepared"
    """Restored, warmed and paused; belongs to nobody and waits to be handed out."""
    CREATING = "creating"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    """Memory and disk kept, no process; it wakes when it is used."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Disk kept, memory gone; `reason` says why."""
    STARTING = "starting"
    """Being booted, or woken when it has a checkpoint."""
    DELETING = "deleting"
    DELETED = "deleted"
    """Nothing is left but its name, under which it can be made anew."""
    LOST = "lost"
    """Its disk cannot be put together any more; it can only be deleted."""


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
"""States that end by themselves: whoever needs the machine waits for them."""
DOWN = frozenset({State.STOPPED, State.SUSPENDED, State.DELETED})
"""States without a process, out of which a machine can be brought up."""


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
    """It is brought up first."""
    WAIT = "wait"
    REFUSE = "refuse"
    DONE = "done"
    """What is asked for is already so."""


STEPS: Mapping[State, tuple[str, ...]] = {
    State.PREPARING: ("allocate", "disk", "process", "restore", "warm"),
    State.CREATING: ("allocate", "disk", "process", "restore", "boot", "identify"),
    State.RUNNING: ("freeze",),
    State.SUSPENDING: ("freeze",),
    State.STARTING: ("disk", "process", "boot", "restore", "identify"),
    State.STOPPING: ("shutdown", "clean"),
    State.DELETING: ("end", "clean"),
}
"""The journal of each state in which something is under way: a step is recorded before its side effects."""

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
    # What is only in memory is to reach the disk: a machine that sleeps is woken to be shut down.
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
    """Whether an operation may begin on a machine in this state."""
    if state in UNOWNED or state is State.DELETING:
        # Nobody can name these: to a caller they do not exist.
        return Verdict.REFUSE
    for verdict, table in ((Verdict.GO, _GO), (Verdict.WAKE, _WAKE), (Verdict.DONE, _DONE)):
        if state in table.get(operation, ()):
            return verdict
    return Verdict.WAIT if state in PASSING else Verdict.REFUSE


class Recovery(StrEnum):
    """What to do with a row that a dead process left behind."""

    ADOPT = "adopt"
    """Its process runs: take hold of it, and let it go on if it was paused."""
    STOPPED = "stopped"
    """It had been running and its process is gone: say so."""
    FINISH_STOP = "finish stop"
    END_AND_STOP = "end and stop"
    """A start that nobody heard of: end it; the disk is as before."""
    END_AND_SLEEP = "end and sleep"
    """A wake that nobody heard of: end it; memory and disk are as before."""
    REMOVE = "remove"
    """Nobody was ever told of it, or its removal had begun."""
    KEEP = "keep"


def recover(state: State, *, alive: bool, asleep: bool) -> Recovery:
    """How to make a row true again, given whether its process is alive and whether it has a checkpoint."""
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
            # A process that outlived its row's end is an orphan; the reaper ends it.
            return Recovery.KEEP


@dataclass(frozen=True)
class End:
    """What the end of a QEMU that nobody asked for means for its machine."""

    reason: str
    restart: bool = False


def unexpected_end(cause: str | None, how: str) -> End:
    """Read QEMU's last words: a guest may have shut down, rebooted, panicked, or QEMU itself died."""
    match cause:
        case "guest-shutdown":
            return End("the guest shut itself down")
        case "guest-reset":
            return End("the guest rebooted", restart=True)
        case "guest-panic":
            return End("the guest's kernel panicked")
        case None:
            return End(f"QEMU {how}")
        case _:
            return End(f"QEMU {how} ({cause})")
