"""The minimum rate of clients, without IO."""

from dataclasses import dataclass

from stead.repos.transfer.pace import ClientPace


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def transfer(step: float, size: int, steps: int) -> float:
    """Seconds after which a client that moves `size` bytes every `step` seconds is too slow."""
    clock = Clock()
    pace = ClientPace(1024, 10.0, 60.0, clock)
    for _ in range(steps):
        if (left := pace.wait()) < step:
            return clock.now + left
        clock.now += step
        pace.moved(size)
    return clock.now


def test_a_byte_a_minute_ends_after_the_grace_period() -> None:
    assert transfer(60.0, 1, 100) == 10.0


def test_a_byte_a_second_ends_soon_after_the_grace_period() -> None:
    assert 10.0 <= transfer(1.0, 1, 10_000) < 11.0


def test_the_minimum_rate_is_enough() -> None:
    assert transfer(1.0, 1024, 3600) == 3600.0
    assert transfer(8.0, 8 * 1024, 450) == 3600.0


def test_bytes_of_the_past_earn_a_bounded_stall() -> None:
    clock = Clock()
    pace = ClientPace(1024, 10.0, 60.0, clock)
    for _ in range(10):
        pace.wait()
        pace.moved(1 << 30)
    assert pace.wait() == 60.0


def test_time_in_which_nobody_waits_for_the_client_is_free() -> None:
    clock = Clock()
    pace = ClientPace(1024, 10.0, 60.0, clock)
    pace.wait()
    pace.moved(0)
    clock.now += 3000
    assert pace.wait() == 10.0
