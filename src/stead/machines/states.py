"""State machine of a VM, without IO: typed states, legal transitions, operations and recovery decisions."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

from stead.processes import ProcessId


class State(StrEnum):
    """The name of a state, in the database and for users."""

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


# States with exactly their data. `step` is recorded before the side effects of the step.


@dataclass(frozen=True)
class Run:
    """One run of a VM: its process, and the template whose memory it maps (None when it was booted)."""

    process: ProcessId
    memory_base: str | None


@dataclass(frozen=True)
class Preparing:
    name = State.PREPARING
    step: Literal["allocate", "disk", "process", "restore", "warm"]
    top: str
    """The disk layer that the VM writes."""
    run: Run | None = None


@dataclass(frozen=True)
class Prepared:
    name = State.PREPARED
    top: str
    run: Run


@dataclass(frozen=True)
class Creating:
    name = State.CREATING
    step: Literal["allocate", "disk", "process", "restore", "boot", "identify"]
    top: str
    run: Run | None = None
    recreated: bool = False
    """Under the id of a deleted VM, which callers know."""


@dataclass(frozen=True)
class Running:
    name = State.RUNNING
    top: str
    run: Run
    next_top: str | None = None
    """The layer that will replace `top`; recorded before QEMU switches to it."""
    reason: str | None = None
    """A note on how it came up."""


@dataclass(frozen=True)
class Suspending:
    name = State.SUSPENDING
    top: str
    run: Run


@dataclass(frozen=True)
class Suspended:
    name = State.SUSPENDED
    checkpoint: str
    """Its saved memory."""
    reason: str


@dataclass(frozen=True)
class Starting:
    """Boots from its disk."""

    name = State.STARTING
    step: Literal["disk", "process", "boot", "identify"]
    top: str
    run: Run | None = None


@dataclass(frozen=True)
class Waking:
    """Is restored from its saved memory."""

    name = State.STARTING
    step: Literal["disk", "process", "restore", "identify"]
    top: str
    checkpoint: str
    reason: str
    """Why it was suspended: a failure leaves it so."""
    run: Run | None = None


@dataclass(frozen=True)
class Stopping:
    name = State.STOPPING
    step: Literal["shutdown", "clean"]
    top: str | None
    run: Run | None = None
    next_top: str | None = None


@dataclass(frozen=True)
class Stopped:
    name = State.STOPPED
    top: str | None
    """None while all of its disk is read-only."""
    reason: str


@dataclass(frozen=True)
class Deleting:
    name = State.DELETING
    step: Literal["end", "clean"]
    run: Run | None = None


@dataclass(frozen=True)
class Deleted:
    name = State.DELETED
    reason: str


@dataclass(frozen=True)
class Lost:
    """Keeps what it refers to, so that nothing of it is collected as garbage."""

    name = State.LOST
    reason: str
    top: str | None = None
    next_top: str | None = None
    checkpoint: str | None = None
    run: Run | None = None


MachineState = (
    Preparing
    | Prepared
    | Creating
    | Running
    | Suspending
    | Suspended
    | Starting
    | Waking
    | Stopping
    | Stopped
    | Deleting
    | Deleted
    | Lost
)
KINDS: tuple[type[MachineState], ...] = get_args(MachineState)

# States by the data that they have, so that each is read by its type.
HasStep = Preparing | Creating | Starting | Waking | Stopping | Deleting
HasTop = (
    Preparing | Prepared | Creating | Running | Suspending | Starting | Waking | Stopping | Stopped | Lost
)
HasNextTop = Running | Stopping | Lost
HasRun = (
    Preparing | Prepared | Creating | Running | Suspending | Starting | Waking | Stopping | Deleting | Lost
)
HasCheckpoint = Suspended | Waking | Lost
HasReason = Running | Suspended | Waking | Stopped | Deleted | Lost
_CAPTURE = "freeze"
"""The step of a running VM whose state is being captured."""


_STEPS: Mapping[type[MachineState], tuple[str, ...]] = {
    kind: next((get_args(field.type) for field in fields(kind) if field.name == "step"), ()) for kind in KINDS
}


def steps(kind: type[MachineState]) -> tuple[str, ...]:
    """The journal steps of a state, in their order."""
    return _STEPS[kind]


def top_of(state: MachineState) -> str | None:
    """The disk layer that the VM writes; None when all of its disk is read-only."""
    return state.top if isinstance(state, HasTop) else None


def next_top_of(state: MachineState) -> str | None:
    """The layer that will replace the top one."""
    return state.next_top if isinstance(state, HasNextTop) else None


def run_of(state: MachineState) -> Run | None:
    return state.run if isinstance(state, HasRun) else None


def reason_of(state: MachineState) -> str | None:
    return state.reason if isinstance(state, HasReason) else None


# Columns


def to_columns(state: MachineState) -> dict[str, Any]:
    """What a row holds in this state; all else that belongs to a state is null."""
    run = run_of(state)
    return {
        "state": state.name.value,
        "step": _step(state),
        "top": top_of(state),
        "next_top": next_top_of(state),
        "checkpoint": state.checkpoint if isinstance(state, HasCheckpoint) else None,
        "reason": reason_of(state),
        "recreated": isinstance(state, Creating) and state.recreated,
        "pid": None if run is None else run.process.pid,
        "pid_started": None if run is None else run.process.started,
        "memory_base": None if run is None else run.memory_base,
    }


def _step(state: MachineState) -> str | None:
    if isinstance(state, HasStep):
        return state.step
    capturing = isinstance(state, Suspending) or (isinstance(state, Running) and state.next_top is not None)
    return _CAPTURE if capturing else None


def from_columns(columns: Mapping[str, Any]) -> MachineState:
    """The state of a row. A row that fits no state is read as the state that its VM really is in.

    Without a process a VM has stopped, and a new VM that lacks something is removed. Any other is lost; what
    its row refers to is kept.
    """
    run = None
    if columns["pid"] is not None and columns["pid_started"] is not None:
        run = Run(ProcessId(columns["pid"], columns["pid_started"]), columns["memory_base"])
    values = {name: columns[name] for name in _OWN_COLUMNS} | {"run": run}
    kind = _kind(columns["state"], columns["checkpoint"])
    if kind is not None:
        if "reason" in _REQUIRED[kind]:
            values["reason"] = columns["reason"] or columns["state"]
        if steps(kind):
            # Not `disk` for a boot: the layer of that step is only being made, so recovery removes it.
            values["step"] = columns["step"] or ("process" if kind is Starting else steps(kind)[0])
        state = kind(**{field.name: values[field.name] for field in fields(kind)})
        if _complete(state):
            return state
    if kind in (Preparing, Prepared, Creating):
        return Deleting("end", run)
    if kind in (Running, Suspending) and columns["top"] is not None:
        return Stopping("clean", columns["top"], None, columns["next_top"])
    found = f"state {columns['state']!r}, step {columns['step']!r}"
    text = f"{State.LOST}: its row in the database is inconsistent ({found})"
    return Lost(text, columns["top"], columns["next_top"], columns["checkpoint"], run)


def _kind(name: str, checkpoint: str | None) -> type[MachineState] | None:
    if name == State.STARTING:
        return Starting if checkpoint is None else Waking
    return next((kind for kind in KINDS if kind.name == name), None)


_OWN_COLUMNS = ("step", "top", "next_top", "checkpoint", "reason", "recreated")
"""Fields of states that are columns; a run has three."""
_REQUIRED: Mapping[type[MachineState], tuple[str, ...]] = {
    kind: tuple(name for name, hint in get_type_hints(kind).items() if NoneType not in get_args(hint))
    for kind in KINDS
}
"""Fields that cannot be None."""


def _complete(state: MachineState) -> bool:
    """Whether a state that was read has all of its data, and a step that it can be in."""
    if any(getattr(state, name) is None for name in _REQUIRED[type(state)]):
        return False
    return not isinstance(state, HasStep) or state.step in steps(type(state))


# Transitions

_NEXT: Mapping[type[MachineState] | None, tuple[type[MachineState], ...]] = {
    None: (Preparing, Creating),
    Preparing: (Preparing, Prepared, Deleting),
    Prepared: (Creating, Deleting),
    Creating: (Creating, Running, Deleting),
    Running: (Running, Suspending, Stopping, Stopped, Deleting),
    Suspending: (Running, Suspended, Stopped, Deleting),
    Suspended: (Waking, Stopping, Stopped, Lost, Deleting),
    Starting: (Starting, Running, Stopped, Deleting),
    Waking: (Waking, Running, Suspended, Deleting),
    Stopping: (Stopping, Stopped, Deleting),
    Stopped: (Stopped, Starting, Lost, Deleting),
    Deleting: (Deleting, Deleted),
    Deleted: (Creating, Deleting),
    Lost: (Deleting,),
}
"""Which state may follow which; None is a VM without a row."""


class IllegalTransition(Exception):
    """A defect of this program: it tried to record a state that cannot follow the recorded one."""


def check_transition(before: MachineState | None, after: MachineState) -> None:
    """IllegalTransition unless `after` may be recorded when `before` is."""
    if type(after) not in _NEXT[None if before is None else type(before)]:
        raise IllegalTransition(f"{before} -> {after}")
    if isinstance(before, Running) and isinstance(after, Running):
        # The layer that QEMU writes is known before it is replaced, or it is one of two.
        tops = (before.top,) if before.next_top is None else (before.top, before.next_top)
        legal = after.top in tops and (before.next_top is None or after.next_top is None)
    elif isinstance(before, Running | Suspending) and isinstance(after, Running | Suspending):
        # The captured disk is that of the saved memory.
        legal = before.top == after.top and next_top_of(before) is None
    elif isinstance(before, Prepared) and isinstance(after, Creating):
        legal = (before.top, before.run) == (after.top, after.run) and not after.recreated
    elif isinstance(before, Suspended | Waking) and isinstance(after, Suspended | Waking):
        # Saved memory is given up only by a VM that runs or has stopped.
        legal = before.checkpoint == after.checkpoint
    elif before is None:
        legal = isinstance(after, Preparing | Creating) and after.step == "allocate" and after.run is None
    elif isinstance(before, Creating) and isinstance(after, Creating):
        legal = before.recreated == after.recreated
    elif isinstance(before, Deleted) and isinstance(after, Creating):
        legal = after.recreated and after.run is None
    else:
        legal = True
    if isinstance(before, Running | Suspending) and isinstance(after, Running | Suspending):
        # It is one run: QEMU is never replaced under a running VM.
        legal = legal and before.run == after.run
    if not legal or not _in_order(before, after):
        raise IllegalTransition(f"{before} -> {after}")


def _in_order(before: MachineState | None, after: MachineState) -> bool:
    """Steps of one state go forward; only an attempt to bring a guest up may be repeated."""
    if type(before) is not type(after) or not isinstance(before, HasStep) or not isinstance(after, HasStep):
        return True
    order = steps(type(after))
    return order.index(after.step) >= order.index(before.step) or after.step in ("disk", "process")


# Operations

UNOWNED = frozenset({State.PREPARING, State.PREPARED})
PASSING = frozenset(kind.name for kind in KINDS if steps(kind)) | {State.SUSPENDING}
"""Transient states: other operations wait for their end."""
DOWN = frozenset({State.STOPPED, State.SUSPENDED, State.DELETED})
"""States without a process from which a VM can be started."""


class Operation(StrEnum):
    USE = "use"
    WAKE = "wake"
    """Use by a client whose guest must not have ended: a stopped VM is not started."""
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
    REFUSE = "refuse"
    DONE = "done"
    """Already in the requested state."""


_GO: Mapping[Operation, frozenset[State]] = {
    Operation.USE: frozenset({State.RUNNING}),
    Operation.WAKE: frozenset({State.RUNNING}),
    Operation.START: DOWN,
    Operation.STOP: frozenset({State.RUNNING}),
    Operation.KILL: frozenset({State.RUNNING, State.STOPPING, State.SUSPENDED}),
    Operation.SUSPEND: frozenset({State.RUNNING}),
    Operation.SNAPSHOT: frozenset({State.RUNNING, State.STOPPED, State.SUSPENDED}),
    Operation.FORK: frozenset({State.RUNNING}),
    Operation.RESIZE: frozenset({State.RUNNING, State.STOPPED}),
    Operation.DELETE: frozenset(State) - PASSING - UNOWNED | {State.STOPPING},
}
_WAKE: Mapping[Operation, frozenset[State]] = {
    Operation.USE: DOWN,
    Operation.WAKE: frozenset({State.SUSPENDED}),
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
    """What to do with an operation on a VM in this state, once no other operation is under way."""
    for verdict, table in ((Verdict.GO, _GO), (Verdict.WAKE, _WAKE), (Verdict.DONE, _DONE)):
        if state in table.get(operation, ()):
            return verdict
    return Verdict.REFUSE


# Recovery


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


def recover(state: MachineState, *, alive: bool) -> Recovery:
    """What to do with a VM after a restart, given whether its process is alive."""
    match state:
        case Running() | Suspending():
            return Recovery.ADOPT if alive else Recovery.STOPPED
        case Prepared():
            return Recovery.ADOPT if alive else Recovery.REMOVE
        case Preparing() | Creating() | Deleting():
            return Recovery.REMOVE
        case Starting():
            return Recovery.END_AND_STOP
        case Waking():
            return Recovery.END_AND_SLEEP
        case Stopping():
            return Recovery.FINISH_STOP
        case Stopped() | Suspended() | Deleted() | Lost():
            # A process of such a row is an orphan, which recovery kills.
            return Recovery.KEEP


@dataclass(frozen=True)
class End:
    """Why a QEMU ended without an operation, and whether its VM is started again."""

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
