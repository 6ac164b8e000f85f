"""The state machine, by exhaustion: every state meets every operation and every crash."""

import itertools

import pytest

from stead.machines.states import (
    DOWN,
    PASSING,
    STEPS,
    UNOWNED,
    Operation,
    Recovery,
    State,
    Verdict,
    decide,
    recover,
    unexpected_end,
)

STABLE = set(State) - PASSING


@pytest.mark.parametrize(("operation", "state"), list(itertools.product(Operation, State)))
def test_every_operation_has_a_verdict_in_every_state(operation: Operation, state: State) -> None:
    verdict = decide(operation, state)
    if state in UNOWNED or state is State.DELETING:
        assert verdict is Verdict.REFUSE
    elif verdict is Verdict.WAIT:
        assert state in PASSING, "only a state that ends by itself is worth waiting for"
    elif verdict is Verdict.WAKE:
        assert state in DOWN, "only what has no process is brought up"
    elif verdict is Verdict.REFUSE:
        assert state in STABLE, "a passing state is waited for, not refused"


def verdicts(state: State) -> dict[Operation, Verdict]:
    return {operation: decide(operation, state) for operation in Operation}


def test_what_can_be_done_with_a_running_machine() -> None:
    assert verdicts(State.RUNNING) == {
        Operation.USE: Verdict.GO,
        Operation.START: Verdict.DONE,
        Operation.STOP: Verdict.GO,
        Operation.KILL: Verdict.GO,
        Operation.SUSPEND: Verdict.GO,
        Operation.SNAPSHOT: Verdict.GO,
        Operation.FORK: Verdict.GO,
        Operation.RESIZE: Verdict.GO,
        Operation.DELETE: Verdict.GO,
    }


def test_what_can_be_done_with_a_stopped_machine() -> None:
    """There is no memory to keep: it cannot be suspended."""
    assert verdicts(State.STOPPED) == {
        Operation.USE: Verdict.WAKE,
        Operation.START: Verdict.GO,
        Operation.STOP: Verdict.DONE,
        Operation.KILL: Verdict.DONE,
        Operation.SUSPEND: Verdict.REFUSE,
        Operation.SNAPSHOT: Verdict.GO,
        Operation.FORK: Verdict.WAKE,
        Operation.RESIZE: Verdict.GO,
        Operation.DELETE: Verdict.GO,
    }


def test_what_can_be_done_with_a_suspended_machine() -> None:
    """What is only in its memory reaches the disk before it is stopped or gets another size."""
    assert verdicts(State.SUSPENDED) == {
        Operation.USE: Verdict.WAKE,
        Operation.START: Verdict.GO,
        Operation.STOP: Verdict.WAKE,
        Operation.KILL: Verdict.GO,
        Operation.SUSPEND: Verdict.DONE,
        Operation.SNAPSHOT: Verdict.GO,
        Operation.FORK: Verdict.WAKE,
        Operation.RESIZE: Verdict.WAKE,
        Operation.DELETE: Verdict.GO,
    }


def test_what_can_be_done_with_a_deleted_machine_whose_name_is_kept() -> None:
    """It is made anew by whoever uses it; of what it was there is nothing left."""
    assert verdicts(State.DELETED) == {
        Operation.USE: Verdict.WAKE,
        Operation.START: Verdict.GO,
        Operation.STOP: Verdict.REFUSE,
        Operation.KILL: Verdict.REFUSE,
        Operation.SUSPEND: Verdict.REFUSE,
        Operation.SNAPSHOT: Verdict.REFUSE,
        Operation.FORK: Verdict.WAKE,
        Operation.RESIZE: Verdict.REFUSE,
        Operation.DELETE: Verdict.GO,
    }


def test_a_lost_machine_can_only_be_deleted() -> None:
    refused = dict.fromkeys(Operation, Verdict.REFUSE)
    assert verdicts(State.LOST) == refused | {Operation.DELETE: Verdict.GO}


def test_what_is_shutting_down_need_not_be_waited_for_to_be_ended() -> None:
    waited = dict.fromkeys(Operation, Verdict.WAIT)
    at_once = {Operation.KILL: Verdict.GO, Operation.DELETE: Verdict.GO}
    assert verdicts(State.STOPPING) == waited | at_once


@pytest.mark.parametrize("state", [State.CREATING, State.SUSPENDING, State.STARTING])
def test_what_is_under_way_is_waited_for(state: State) -> None:
    assert verdicts(state) == dict.fromkeys(Operation, Verdict.WAIT)


@pytest.mark.parametrize(("operation", "state"), list(itertools.product(Operation, sorted(DOWN))))
def test_only_what_can_be_started_is_brought_up(operation: Operation, state: State) -> None:
    """Whoever is told that a machine is brought up first can rely on a start that goes."""
    if decide(operation, state) is Verdict.WAKE:
        assert decide(Operation.START, state) is Verdict.GO
        assert decide(operation, State.RUNNING) is Verdict.GO


# After a crash

# What becomes of each state when its process lives, when it is gone, and the same with memory kept on disk.
RECOVERIES: dict[State, tuple[Recovery, Recovery, Recovery, Recovery]] = {
    State.PREPARING: (Recovery.REMOVE,) * 4,
    State.PREPARED: (Recovery.ADOPT, Recovery.REMOVE) * 2,
    State.CREATING: (Recovery.REMOVE,) * 4,
    State.RUNNING: (Recovery.ADOPT, Recovery.STOPPED) * 2,
    State.SUSPENDING: (Recovery.ADOPT, Recovery.STOPPED) * 2,
    State.SUSPENDED: (Recovery.KEEP,) * 4,
    State.STOPPING: (Recovery.FINISH_STOP,) * 4,
    State.STOPPED: (Recovery.KEEP,) * 4,
    State.STARTING: (*(Recovery.END_AND_STOP,) * 2, *(Recovery.END_AND_SLEEP,) * 2),
    State.DELETING: (Recovery.REMOVE,) * 4,
    State.DELETED: (Recovery.KEEP,) * 4,
    State.LOST: (Recovery.KEEP,) * 4,
}
ACKNOWLEDGED = set(State) - UNOWNED - {State.CREATING, State.DELETING}
CRASHES = list(itertools.product((False, True), (True, False)))


@pytest.mark.parametrize("state", State)
def test_what_becomes_of_a_row_after_a_crash(state: State) -> None:
    found = tuple(recover(state, alive=alive, asleep=asleep) for asleep, alive in CRASHES)
    assert found == RECOVERIES[state]


@pytest.mark.parametrize(("state", "crash"), list(itertools.product(State, CRASHES)))
def test_every_row_can_be_recovered(state: State, crash: tuple[bool, bool]) -> None:
    asleep, alive = crash
    action = recover(state, alive=alive, asleep=asleep)
    if state in PASSING:
        assert action is not Recovery.KEEP, "nothing stays half done"
    if action is Recovery.ADOPT:
        assert alive, "only what lives is adopted"
        # A machine that was being suspended still has its memory: it goes on.
        assert state not in PASSING - {State.SUSPENDING}, "nothing stays half done"
    if action is Recovery.END_AND_SLEEP:
        assert asleep, "it sleeps on only when its memory was kept"
    if state in ACKNOWLEDGED:
        assert action is not Recovery.REMOVE, "an acknowledged machine is never removed"
    if state is State.STARTING and asleep:
        assert action is Recovery.END_AND_SLEEP, "memory that was kept is not thrown away"


def test_every_state_in_which_something_is_under_way_has_a_journal_and_no_other_has() -> None:
    assert set(STEPS) == PASSING | {State.RUNNING}, "a running machine may be frozen"
    assert all(STEPS.values())


@pytest.mark.parametrize(
    ("cause", "how", "words", "restart"),
    [
        ("guest-shutdown", "exited with status 0", "the guest shut itself down", False),
        ("guest-reset", "exited with status 0", "the guest rebooted", True),
        ("guest-panic", "exited with status 0", "the guest's kernel panicked", False),
        (None, "ended by SIGKILL", "QEMU ended by SIGKILL", False),
        ("host-signal", "exited with status 0", "QEMU exited with status 0 (host-signal)", False),
    ],
)
def test_an_unexpected_end_says_what_happened(cause: str | None, how: str, words: str, restart: bool) -> None:
    end = unexpected_end(cause, how)
    assert (end.reason, end.restart) == (words, restart)
