"""The state machine, exhaustively: every transition, every operation in every state, every crash."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stead.machines.states import (
    DOWN,
    KINDS,
    PASSING,
    UNOWNED,
    Creating,
    Deleted,
    Deleting,
    End,
    HasCheckpoint,
    HasNextTop,
    HasReason,
    HasRun,
    HasStep,
    HasTop,
    IllegalTransition,
    Lost,
    MachineState,
    Operation,
    Prepared,
    Preparing,
    Recovery,
    Run,
    Running,
    Starting,
    State,
    Stopped,
    Stopping,
    Suspended,
    Suspending,
    Verdict,
    Waking,
    check_transition,
    decide,
    from_columns,
    recover,
    steps,
    to_columns,
    unexpected_end,
)
from stead.processes import ProcessId

RUN = Run(ProcessId(100, 1), "template")
OTHER_RUN = Run(ProcessId(101, 2), None)

STEPS: dict[type[MachineState], tuple[str, ...]] = {
    Preparing: ("allocate", "disk", "process", "restore", "warm"),
    Creating: ("allocate", "disk", "process", "restore", "boot", "identify"),
    Starting: ("disk", "process", "boot", "identify"),
    Waking: ("disk", "process", "restore", "identify"),
    Stopping: ("shutdown", "clean"),
    Deleting: ("end", "clean"),
}


def changed(state: Any, **changes: Any) -> MachineState:
    result: MachineState = replace(state, **changes)
    return result


def allowed(before: MachineState | None, after: MachineState) -> bool:
    try:
        check_transition(before, after)
    except IllegalTransition:
        return False
    return True


# Transitions

FIRST: dict[str, MachineState] = {
    "preparing": Preparing("allocate", "top"),
    "prepared": Prepared("top", RUN),
    "creating": Creating("allocate", "top"),
    "recreating": Creating("allocate", "top", recreated=True),
    "claimed": Creating("identify", "top", RUN),
    "running": Running("top", RUN),
    "suspending": Suspending("top", RUN),
    "suspended": Suspended("memory", "idle"),
    "starting": Starting("disk", "top"),
    "waking": Waking("disk", "top", "memory", "idle"),
    "stopping": Stopping("shutdown", "top", RUN),
    "stopped": Stopped("top", "requested"),
    "deleting": Deleting("end", RUN),
    "deleted": Deleted("requested"),
    "lost": Lost("a layer is missing"),
}
"""One state of each kind at its first step, all of the same run and the same saved memory."""

LEGAL = {
    None: "preparing creating recreating",
    "preparing": "preparing prepared deleting",
    "prepared": "claimed deleting",
    "creating": "creating claimed running deleting",
    "claimed": "claimed running deleting",
    "recreating": "recreating running deleting",
    "running": "running suspending stopping stopped deleting",
    "suspending": "running suspended stopped deleting",
    "suspended": "waking stopping stopped lost deleting",
    "starting": "starting running stopped deleting",
    "waking": "waking running suspended deleting",
    "stopping": "stopping stopped deleting",
    "stopped": "stopped starting lost deleting",
    "deleting": "deleting deleted",
    "deleted": "recreating deleting",
    "lost": "deleting",
}


def test_every_kind_of_state_is_in_the_table() -> None:
    assert {type(state) for state in FIRST.values()} == set(KINDS)
    assert set(LEGAL) == {None, *FIRST}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(LEGAL, FIRST)))
def test_transition_table(before: str | None, after: str) -> None:
    state = None if before is None else FIRST[before]
    assert allowed(state, FIRST[after]) == (after in LEGAL[before].split())


def test_the_journal_steps_of_every_state() -> None:
    assert {kind: steps(kind) for kind in KINDS if steps(kind)} == STEPS


@pytest.mark.parametrize("kind", STEPS)
def test_steps_go_forward_and_only_an_attempt_to_start_a_guest_is_repeated(kind: type[MachineState]) -> None:
    (first,) = (
        state
        for name, state in FIRST.items()
        if type(state) is kind and name not in ("recreating", "claimed")
    )
    at: dict[str, MachineState] = {step: changed(first, step=step) for step in STEPS[kind]}
    for (earlier, before), (later, after) in itertools.product(enumerate(at), repeat=2):
        expected = later >= earlier or after in ("disk", "process")
        assert allowed(at[before], at[after]) == expected, (before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Running("top", RUN), Running("top", OTHER_RUN)),
        (Running("top", RUN), Suspending("top", OTHER_RUN)),
        (Suspending("top", RUN), Running("top", OTHER_RUN)),
    ],
)
def test_the_process_of_a_running_vm_is_never_replaced(before: MachineState, after: MachineState) -> None:
    assert not allowed(before, after)
    assert allowed(before, changed(after, run=RUN))


def test_the_layer_that_a_running_vm_writes_is_settled_before_it_is_replaced() -> None:
    """A row that named the wrong layer would lose what was written since the switch."""
    running, switching = Running("top", RUN), Running("top", RUN, "next")
    assert allowed(running, switching)
    assert allowed(switching, running)
    assert allowed(switching, Running("next", RUN))
    for after in (Running("top", RUN, "another"), Running("another", RUN), Suspending("top", RUN)):
        assert not allowed(switching, after)
    for after in (Running("another", RUN), Suspending("another", RUN)):
        assert not allowed(running, after)
    assert not allowed(Suspending("top", RUN), Running("another", RUN))


def test_a_prepared_vm_is_claimed_with_its_process_and_disk() -> None:
    prepared = Prepared("top", RUN)
    for after in (Creating("identify", "another", RUN), Creating("identify", "top", OTHER_RUN)):
        assert not allowed(prepared, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Suspended("memory", "idle"), Waking("disk", "top", "other", "idle")),
        (Waking("identify", "top", "memory", "idle", RUN), Suspended("other", "idle")),
        (Waking("disk", "top", "memory", "idle"), Waking("process", "top", "other", "idle")),
    ],
)
def test_saved_memory_is_not_given_up_by_a_wake(before: MachineState, after: MachineState) -> None:
    assert not allowed(before, after)
    assert allowed(before, changed(after, checkpoint="memory"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, Creating("disk", "top")),
        (None, Creating("allocate", "top", RUN)),
        (None, Preparing("restore", "top", RUN)),
        (Deleted("idle"), Creating("allocate", "top")),
        (Deleted("idle"), Creating("allocate", "top", RUN, recreated=True)),
        (Creating("allocate", "top", recreated=True), Creating("disk", "top")),
        (Creating("allocate", "top"), Creating("disk", "top", recreated=True)),
    ],
)
def test_a_vm_begins_without_a_process_and_stays_recreated(
    before: MachineState | None, after: MachineState
) -> None:
    assert not allowed(before, after)


# Columns


def all_states() -> Iterator[MachineState]:
    """Every kind at every step, with and without its optional data, and with two values of the rest."""
    first = [state for state in FIRST.values() if type(state) in STEPS]
    stopping = FIRST["stopping"]
    first += [
        changed(stopping, next_top="next"),
        changed(stopping, top=None),
        changed(FIRST["waking"], checkpoint="other"),
    ]
    for run in (None, RUN, OTHER_RUN):
        for state in first:
            yield from (changed(state, step=step, run=run) for step in STEPS[type(state)])
        if run is not None:
            yield Prepared("top", run)
            yield Suspending("top", run)
            for top, next_top, note in (("top", None, None), ("top", "next", None), ("next", None, "booted")):
                yield Running(top, run, next_top, note)
        yield Lost("missing", "top", "next", "memory", run)
    yield from (Suspended("memory", "idle"), Suspended("other", "idle"))
    yield from (Stopped("top", "requested"), Stopped("next", "requested"), Stopped(None, "requested"))
    yield from (Deleted("requested"), Lost("missing"))


STATES = list(all_states())
COLUMNS = (
    "state",
    "step",
    "top",
    "next_top",
    "checkpoint",
    "reason",
    "recreated",
    "pid",
    "pid_started",
    "memory_base",
)


@pytest.mark.parametrize("state", STATES)
def test_a_state_is_read_back_as_it_was_written(state: MachineState) -> None:
    columns = to_columns(state)
    assert set(columns) == set(COLUMNS)
    assert from_columns(columns) == state


def test_a_recreated_vm_is_known_by_its_column_and_not_by_its_reason() -> None:
    assert from_columns(row(Creating("disk", "top"), reason="a note")) == Creating("disk", "top")
    recreated = Creating("disk", "top", recreated=True)
    assert to_columns(recreated) == to_columns(Creating("disk", "top")) | {"recreated": True}


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_grouped_by_the_fields_that_they_have(kind: type[MachineState]) -> None:
    groups: dict[str, Any] = {
        "step": HasStep,
        "top": HasTop,
        "next_top": HasNextTop,
        "run": HasRun,
        "checkpoint": HasCheckpoint,
        "reason": HasReason,
    }
    names = {field.name for field in fields(kind)}
    assert names - {"recreated"} <= groups.keys()
    assert {name for name, group in groups.items() if kind in get_args(group)} == names - {"recreated"}


OPTIONAL: dict[type[MachineState], set[str]] = {
    Preparing: {"run"},
    Creating: {"run"},
    Running: {"next_top", "reason"},
    Starting: {"run"},
    Waking: {"run"},
    Stopping: {"top", "run", "next_top"},
    Stopped: {"top"},
    Deleting: {"run"},
    Lost: {"top", "next_top", "checkpoint", "run"},
}
EMPTY: dict[str, dict[str, None]] = {"run": dict.fromkeys(("pid", "pid_started", "memory_base"))}


@pytest.mark.parametrize("state", FIRST.values(), ids=FIRST)
def test_a_row_without_data_that_its_state_needs_is_not_in_that_state(state: MachineState) -> None:
    """But for a step, and for a reason, which have a default."""
    for name in {field.name for field in fields(state)} - {"step", "reason", "recreated"}:
        if isinstance(state, Waking) and name == "checkpoint":
            continue  # A VM that starts without saved memory boots.
        read = from_columns(row(state, **EMPTY.get(name, {name: None})))
        assert (type(read) is type(state)) == (name in OPTIONAL.get(type(state), set())), name


def row(of: MachineState, /, **changes: Any) -> dict[str, Any]:
    return to_columns(of) | changes


@pytest.mark.parametrize(
    "columns",
    [
        row(Running("top", RUN), state="dreaming"),
        row(Running("top", RUN), top=None),
        row(Suspending("top", RUN), top=None),
        row(Suspended("memory", "idle"), checkpoint=None),
        row(Starting("disk", "top"), top=None),
        row(Starting("boot", "top", RUN), step="restore"),
        row(Waking("restore", "top", "memory", "idle", RUN), step="boot"),
        row(Waking("disk", "top", "memory", "idle"), top=None),
        row(Stopping("clean", "top", RUN, "next"), step="shut"),
    ],
)
def test_a_row_that_fits_no_state_is_lost_and_keeps_what_it_refers_to(columns: dict[str, Any]) -> None:
    state = from_columns(columns)
    assert isinstance(state, Lost)
    kept = {name: columns[name] for name in ("top", "next_top", "checkpoint")}
    assert {name: getattr(state, name) for name in kept} == kept
    assert (state.run is not None) == (columns["pid"] is not None)
    assert from_columns(to_columns(state)) == state


@pytest.mark.parametrize(
    ("columns", "state"),
    [
        (row(Running("top", RUN), pid=None), Stopping("clean", "top")),
        (row(Running("top", RUN, "next"), pid_started=None), Stopping("clean", "top", None, "next")),
        (row(Suspending("top", RUN), pid=None), Stopping("clean", "top")),
        (row(Prepared("top", RUN), pid=None), Deleting("end")),
        (row(Prepared("top", RUN), top=None), Deleting("end", RUN)),
        (row(Creating("disk", "top", RUN), step="dance"), Deleting("end", RUN)),
        (row(Creating("disk", "top", RUN), step=None), Creating("allocate", "top", RUN)),
        (row(Starting("boot", "top", RUN), step=None), Starting("process", "top", RUN)),
        (row(Deleting("clean"), step=None), Deleting("end")),
    ],
)
def test_a_row_with_missing_data_is_read_as_what_its_vm_really_is(
    columns: dict[str, Any], state: MachineState
) -> None:
    assert from_columns(columns) == state


@pytest.mark.parametrize("state", [Suspended("memory", "idle"), Stopped(None, "requested"), Deleted("idle")])
def test_a_row_without_a_reason_is_still_in_its_state(state: MachineState) -> None:
    assert from_columns(row(state, reason=None)) == changed(state, reason=state.name.value)


# Operations

GO, WAKE, DONE, REFUSE = Verdict.GO, Verdict.WAKE, Verdict.DONE, Verdict.REFUSE
VERDICTS: dict[State, tuple[Verdict, ...]] = {
    # use, wake, start, stop, kill, suspend, snapshot, fork, resize, delete
    State.RUNNING: (GO, GO, DONE, GO, GO, GO, GO, GO, GO, GO),
    # Without memory there is nothing to suspend.
    State.STOPPED: (WAKE, REFUSE, GO, DONE, DONE, REFUSE, GO, WAKE, GO, GO),
    # Woken for a stop or resize, so that its page cache reaches the disk.
    State.SUSPENDED: (WAKE, WAKE, GO, WAKE, GO, DONE, GO, WAKE, WAKE, GO),
    # The next use creates it again; there is no disk or memory to snapshot or kill.
    State.DELETED: (WAKE, REFUSE, GO, REFUSE, REFUSE, REFUSE, REFUSE, WAKE, REFUSE, GO),
    State.LOST: (*(REFUSE,) * 9, GO),
    # Kill and delete end a shutdown that is under way.
    State.STOPPING: (REFUSE, REFUSE, REFUSE, REFUSE, GO, REFUSE, REFUSE, REFUSE, REFUSE, GO),
    State.CREATING: (REFUSE,) * 10,
    State.STARTING: (REFUSE,) * 10,
    State.SUSPENDING: (REFUSE,) * 10,
    State.DELETING: (REFUSE,) * 10,
    State.PREPARING: (REFUSE,) * 10,
    State.PREPARED: (REFUSE,) * 10,
}


@pytest.mark.parametrize("state", State)
def test_verdict_of_every_operation(state: State) -> None:
    assert dict(zip(Operation, VERDICTS[state], strict=True)) == {
        operation: decide(operation, state) for operation in Operation
    }


@pytest.mark.parametrize(("operation", "state"), list(itertools.product(Operation, sorted(DOWN))))
def test_only_startable_states_are_woken(operation: Operation, state: State) -> None:
    if decide(operation, state) is Verdict.WAKE:
        assert decide(Operation.START, state) is Verdict.GO
        assert decide(operation, State.RUNNING) is Verdict.GO


def test_passing_states_are_those_with_journal_steps_and_suspending() -> None:
    assert {kind.name for kind in STEPS} | {State.SUSPENDING} == PASSING
    assert not PASSING & DOWN


# Recovery

RECOVERIES: dict[type[MachineState], tuple[Recovery, Recovery]] = {
    # Its process is alive, its process has ended.
    Preparing: (Recovery.REMOVE, Recovery.REMOVE),
    Prepared: (Recovery.ADOPT, Recovery.REMOVE),
    Creating: (Recovery.REMOVE, Recovery.REMOVE),
    Running: (Recovery.ADOPT, Recovery.STOPPED),
    Suspending: (Recovery.ADOPT, Recovery.STOPPED),
    Suspended: (Recovery.KEEP, Recovery.KEEP),
    Starting: (Recovery.END_AND_STOP, Recovery.END_AND_STOP),
    Waking: (Recovery.END_AND_SLEEP, Recovery.END_AND_SLEEP),
    Stopping: (Recovery.FINISH_STOP, Recovery.FINISH_STOP),
    Stopped: (Recovery.KEEP, Recovery.KEEP),
    Deleting: (Recovery.REMOVE, Recovery.REMOVE),
    Deleted: (Recovery.KEEP, Recovery.KEEP),
    Lost: (Recovery.KEEP, Recovery.KEEP),
}


@pytest.mark.parametrize("state", STATES)
def test_recovery_action_of_every_state(state: MachineState) -> None:
    found = recover(state, alive=True), recover(state, alive=False)
    assert found == RECOVERIES[type(state)]
    if state.name in PASSING:
        assert Recovery.KEEP not in found, "nothing stays half done"
    known = state.name not in {*UNOWNED, State.CREATING, State.DELETING}
    assert not known or Recovery.REMOVE not in found, "a VM that a caller knows is never removed"


def recovered(state: MachineState, *, alive: bool) -> list[MachineState | None]:
    """The states that recovery records, in their order; None is no row."""
    run, top = getattr(state, "run", None), getattr(state, "top", None)
    match recover(state, alive=alive):
        case Recovery.ADOPT if isinstance(state, Suspending):
            return [Running(state.top, state.run)]
        case Recovery.ADOPT if isinstance(state, Running) and state.next_top is not None:
            return [Running(state.next_top, state.run, None, state.reason)]
        case Recovery.STOPPED | Recovery.FINISH_STOP if getattr(state, "next_top", None) is not None:
            settled = changed(state, top="next", next_top=None)
            return [settled, Stopped("next", "crashed")]
        case Recovery.STOPPED | Recovery.FINISH_STOP | Recovery.END_AND_STOP:
            return [Stopped(top, "crashed")]
        case Recovery.END_AND_SLEEP if isinstance(state, Waking):
            return [Suspended(state.checkpoint, state.reason)]
        case Recovery.REMOVE:
            end: MachineState = state if isinstance(state, Deleting) else Deleting("end", run)
            return [end, Deleting("clean"), Deleted("interrupted") if recreates(state) else None]
        case _:
            return []


def recreates(state: MachineState) -> bool:
    return isinstance(state, Creating) and state.recreated


@pytest.mark.parametrize(("state", "alive"), list(itertools.product(STATES, (True, False))))
def test_recovery_leads_to_a_stable_state_by_legal_transitions(state: MachineState, alive: bool) -> None:
    before = state
    for after in recovered(state, alive=alive):
        if after is None:
            assert isinstance(before, Deleting)
            return
        check_transition(before, after)
        before = after
    assert before.name not in PASSING


@functools.cache
def successors(state: MachineState | None) -> list[MachineState]:
    return [each for each in STATES if allowed(state, each)]


class Transitions(RuleBasedStateMachine):
    """Random legal transitions from no row to no row, with crashes in between."""

    state: MachineState | None = None

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        following = successors(self.state)
        assert following, "no state is a dead end"
        if isinstance(self.state, Deleting) and data.draw(st.booleans()):
            self.state = None
            return
        after = data.draw(st.sampled_from(following))
        if isinstance(self.state, Suspended | Waking) and isinstance(after, Suspended | Waking):
            assert after.checkpoint == self.state.checkpoint
        self.state = after

    @rule(alive=st.booleans())
    def crash(self, alive: bool) -> None:
        if self.state is None:
            return
        for after in recovered(self.state, alive=alive):
            if after is None:
                self.state = None
                return
            check_transition(self.state, after)
            self.state = after
        assert self.state.name not in PASSING

    @invariant()
    def it_is_read_back(self) -> None:
        assert self.state is None or from_columns(to_columns(self.state)) == self.state

    @invariant()
    def it_can_be_deleted(self) -> None:
        assert self.state is None or isinstance(self.state, Deleting) or allowed(self.state, Deleting("end"))


Transitions.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTransitions = Transitions.TestCase


@pytest.mark.parametrize(
    ("cause", "how", "words", "restart", "crashed"),
    [
        ("guest-shutdown", "exited with status 0", "guest shut down", False, False),
        ("guest-reset", "exited with status 0", "guest rebooted", True, False),
        ("guest-panic", "exited with status 0", "guest kernel panicked", False, True),
        (None, "ended by SIGKILL", "QEMU ended by SIGKILL", False, True),
        ("host-signal", "exited with status 0", "QEMU exited with status 0 (host-signal)", False, True),
    ],
)
def test_unexpected_end_tells_shutdown_reboot_and_crash_apart(
    cause: str | None, how: str, words: str, restart: bool, crashed: bool
) -> None:
    assert unexpected_end(cause, how) == End(words, restart, crashed)
