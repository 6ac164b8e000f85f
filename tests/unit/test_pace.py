"""Minimum rates of transfers, without IO."""

import pytest

from stead.api.admission import Admission
from stead.api.answer_memory import AnswerMemory
from stead.api.calls import STALLED_ANSWER, Call
from stead.api.pace import MIN_RATE, Pace
from stead.api.protocol import Connection
from stead.identity.callers import Caller

WINDOW = 10.0
ENOUGH = int(MIN_RATE * WINDOW)


def ends_at(moved: list[int | None]) -> int | None:
    """The second at which a transfer ends; None in `moved` is a second without waiting for the client."""
    pace, total = Pace(WINDOW), 0
    for second, each in enumerate(moved):
        total += each or 0
        if pace.too_slow(float(second), total, waiting=each is not None):
            return second
    return None


def test_a_transfer_that_stands_still_ends_after_the_window() -> None:
    assert ends_at([0] * 100) == WINDOW


def test_a_byte_now_and_then_is_not_progress() -> None:
    assert ends_at([1] * 100) == WINDOW


def test_the_minimum_rate_is_enough() -> None:
    assert ends_at([MIN_RATE + 1] * 1000) is None
    assert ends_at([0, 0, 0, 0, 0, 0, 0, 0, ENOUGH] * 100) is None


def test_a_fast_start_does_not_pay_for_a_pause() -> None:
    assert ends_at([1 << 30, *[0] * 100]) == WINDOW


def test_time_in_which_the_server_is_not_ready_does_not_count() -> None:
    assert ends_at([None] * 1000) is None
    assert ends_at([0, 0, 0, None] * 100) is None


class SlowClient(Connection):
    """Everything that the server has, and the client has not taken, waits."""

    lost, full, unsent = False, True, 0

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("caller", "rate", "ends"),
    [(None, 4096, True), (None, 17 << 10, False), (Caller("account"), 4096, False), (Caller("a"), 512, True)],
)
async def test_strangers_have_to_take_answers_faster(caller: Caller | None, rate: int, ends: bool) -> None:
    call = Call({"headers": []}, Admission(100, 100, 100), AnswerMemory(), [])
    call.connection, call.caller = SlowClient(), caller
    call.respond(200)
    seconds = range(int(3 * STALLED_ANSWER))
    found = []
    for now in seconds:
        call.sent = now * rate
        found.append(call.stalled(float(now)))
    assert any(found) is ends
    assert not any(found[: int(STALLED_ANSWER)])
