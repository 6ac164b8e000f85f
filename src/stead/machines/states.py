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
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Disk kept, memory gone; `reason` says why."""
    STARTING = "starting"
    DELETING = "deleting"
    LOST = "lost"
    """Its disk cannot be put together any more; it can only be deleted."""


UNOWNED = frozenset({State.PREPARING, State.PREPARED})
PASSING = frozenset({State.PREPARING, State.CREATING, State.STOPPING, State.STARTING, State.DELETING})
"""States that end by themselves: whoever needs the machine waits for them."""


class Operation(StrEnum):
    EXEC = "use"
    START = "start"
    STOP = "stop"
    KILL = "kill"
    DELETE = "delete"


class Verdict(StrEnum):
    GO = "go"
    WAIT = "wait"
    REFUSE = "refuse"
    DONE = "done"
    """What is asked for is already so."""


STEPS: Mapping[State, tuple[str, ...]] = {
    State.PREPARING: ("allocate", "disk", "process", "restore", "warm"),
    State.CREATING: ("allocate", "disk", "process", "restore", "identify"),
    State.STARTING: ("process", "boot", "identify"),
    State.STOPPING: ("shutdown", "clean"),
    State.DELETING: ("end", "clean"),
}
"""The journal of each passing state: a step is recorded before its side effects begin."""


def decide(operation: Operation, state: State) -> Verdict:
    """Whether an operation may begin on a machine in this state."""
    if state in UNOWNED or state is State.DELETING:
        # Nobody can name these: to a caller they do not exist.
        return Verdict.REFUSE
    match operation:
        case Operation.DELETE:
            return Verdict.WAIT if state in PASSING - {State.STOPPING} else Verdict.GO
        case Operation.KILL:
            if state is State.STOPPED:
                return Verdict.DONE
            return Verdict.GO if state in (State.RUNNING, State.STOPPING) else _wait_or_refuse(state)
        case Operation.STOP:
            if state is State.STOPPED:
                return Verdict.DONE
            return Verdict.GO if state is State.RUNNING else _wait_or_refuse(state)
        case Operation.START:
            if state is State.RUNNING:
                return Verdict.DONE
            return Verdict.GO if state is State.STOPPED else _wait_or_refuse(state)
        case Operation.EXEC:
            return Verdict.GO if state is State.RUNNING else _wait_or_refuse(state)


def _wait_or_refuse(state: State) -> Verdict:
    return Verdict.WAIT if state in PASSING else Verdict.REFUSE


class Recovery(StrEnum):
    """What to do with a row that a dead process left behind."""

    ADOPT = "adopt"
    """Its process runs: take hold of it."""
    STOPPED = "stopped"
    """It had been running and its process is gone: say so."""
    FINISH_STOP = "finish stop"
    END_AND_STOP = "end and stop"
    """A start that nobody heard of: end it; the disk is as before."""
    REMOVE = "remove"
    """Nobody was ever told of it, or its removal had begun."""
    KEEP = "keep"


def recover(state: State, alive: bool) -> Recovery:
    """How to make a row true again, given whether its process is alive."""
    match state:
        case State.RUNNING:
            return Recovery.ADOPT if alive else Recovery.STOPPED
        case State.PREPARED:
            return Recovery.ADOPT if alive else Recovery.REMOVE
        case State.PREPARING | State.CREATING | State.DELETING:
            return Recovery.REMOVE
        case State.STARTING:
            return Recovery.END_AND_STOP
        case State.STOPPING:
            return Recovery.FINISH_STOP
        case State.STOPPED | State.LOST:
            # A process that outlived its row's stop is an orphan; the reaper ends it.
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
