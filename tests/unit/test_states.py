"""The state machine, exhaustively: every state with every operation and every crash."""

import itertools

import pytest

from stead.machines.states import (
    DOWN,
    PASSING,
    STEPS,
    UNOWNED,
    End,
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


def test_verdicts_for_a_running_vm() -> None:
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


def test_verdicts_for_a_stopped_vm() -> None:
    """It has no memory to save: it cannot be suspended."""
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


def test_verdicts_for_a_suspended_vm() -> None:
    """It is woken for a stop or resize, so that its page cache reaches the disk."""
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


def test_verdicts_for_a_deleted_vm_with_recreate() -> None:
    """The next use creates it again; there is no disk or memory to snapshot or kill."""
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


def test_a_lost_vm_can_only_be_deleted() -> None:
    refused = dict.fromkeys(Operation, Verdict.REFUSE)
    assert verdicts(State.LOST) == refused | {Operation.DELETE: Verdict.GO}


def test_kill_and_delete_do_not_wait_for_a_shutdown() -> None:
    waited = dict.fromkeys(Operation, Verdict.WAIT)
    at_once = {Operation.KILL: Verdict.GO, Operation.DELETE: Verdict.GO}
    assert verdicts(State.STOPPING) == waited | at_once


@pytest.mark.parametrize("state", [State.CREATING, State.SUSPENDING, State.STARTING])
def test_operations_wait_for_transient_states(state: State) -> None:
    assert verdicts(state) == dict.fromkeys(Operation, Verdict.WAIT)


@pytest.mark.parametrize(("operation", "state"), list(itertools.product(Operation, sorted(DOWN))))
def test_only_startable_states_are_woken(operation: Operation, state: State) -> None:
    """Every state that an operation wakes from allows a start."""
    if decide(operation, state) is Verdict.WAKE:
        assert decide(Operation.START, state) is Verdict.GO
        assert decide(operation, State.RUNNING) is Verdict.GO


# Recovery

# Action for each state: process alive, process ended, and both again with saved memory.
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
def test_recovery_action_of_every_state(state: State) -> None:
    found = tuple(recover(state, alive=alive, asleep=asleep) for asleep, alive in CRASHES)
    assert found == RECOVERIES[state]


@pytest.mark.parametrize(("state", "crash"), list(itertools.product(State, CRASHES)))
def test_recovery_keeps_what_the_row_promises(state: State, crash: tuple[bool, bool]) -> None:
    asleep, alive = crash
    action = recover(state, alive=alive, asleep=asleep)
    if state in PASSING:
        assert action is not Recovery.KEEP, "nothing stays half done"
    if action is Recovery.ADOPT:
        assert alive, "only what lives is adopted"
        # A VM that was being suspended still runs: it is resumed.
        assert state not in PASSING - {State.SUSPENDING}, "nothing stays half done"
    if action is Recovery.END_AND_SLEEP:
        assert asleep, "it stays suspended only with saved memory"
    if state in ACKNOWLEDGED:
        assert action is not Recovery.REMOVE, "a VM that a caller knows is never removed"
    if state is State.STARTING and asleep:
        assert action is Recovery.END_AND_SLEEP, "saved memory is not dropped"


def test_exactly_the_transient_states_and_running_have_journal_steps() -> None:
    assert set(STEPS) == PASSING | {State.RUNNING}, "a running VM may be captured"
    assert all(STEPS.values())


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
