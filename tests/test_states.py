"""The state machine, by exhaustion: every state meets every operation and every crash."""

import itertools

import pytest

from stead.machines.states import (
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
    elif verdict is Verdict.REFUSE:
        assert state in STABLE, "a passing state is waited for, not refused"


def test_what_can_be_done_with_a_running_machine() -> None:
    assert {operation: decide(operation, State.RUNNING) for operation in Operation} == {
        Operation.EXEC: Verdict.GO,
        Operation.START: Verdict.DONE,
        Operation.STOP: Verdict.GO,
        Operation.KILL: Verdict.GO,
        Operation.DELETE: Verdict.GO,
    }


def test_what_can_be_done_with_a_stopped_machine() -> None:
    assert {operation: decide(operation, State.STOPPED) for operation in Operation} == {
        Operation.EXEC: Verdict.REFUSE,
        Operation.START: Verdict.GO,
        Operation.STOP: Verdict.DONE,
        Operation.KILL: Verdict.DONE,
        Operation.DELETE: Verdict.GO,
    }


def test_a_lost_machine_can_only_be_deleted() -> None:
    allowed = {operation for operation in Operation if decide(operation, State.LOST) is not Verdict.REFUSE}
    assert allowed == {Operation.DELETE}


@pytest.mark.parametrize(("state", "alive"), list(itertools.product(State, (True, False))))
def test_every_row_can_be_recovered(state: State, alive: bool) -> None:
    action = recover(state, alive)
    if state in PASSING:
        assert action not in (Recovery.KEEP, Recovery.ADOPT), "nothing stays half done"
    if action is Recovery.ADOPT:
        assert alive, "only what lives is adopted"
    if state is State.RUNNING:
        assert action in (Recovery.ADOPT, Recovery.STOPPED), "an acknowledged machine is never removed"
    if state in (State.STOPPING, State.STOPPED, State.STARTING, State.LOST):
        assert action is not Recovery.REMOVE, "an acknowledged machine is never removed"


def test_every_passing_state_has_a_journal_and_no_other_has() -> None:
    assert set(STEPS) == PASSING


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
