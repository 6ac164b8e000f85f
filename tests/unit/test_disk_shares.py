"""Shares of the disk, and who is paused while it is nearly full: rules without IO."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.disk_marks import DiskMarks
from stead.machines.disk_shares import DiskObservation, PauseCause, above_share, accounts_to_pause
from stead.machines.persistence import Evictable, EvictionScope, eviction_order

GIB = 1 << 30
ALICE, BOB, CAROL = "alice", "bob", "carol"
MARKS = DiskMarks.of(200 * GIB)


async def delete(_: str) -> None: ...


# Marks


@given(st.integers(16 << 20, 1 << 50))
def test_marks_are_in_order_on_every_disk(total: int) -> None:
    """Each kind of writer is stopped before the next one, and git before the reserve is needed."""
    marks = DiskMarks.of(total)
    assert total > marks.enough > marks.low > marks.critical > marks.floor > marks.reserve > 0


def test_marks_of_a_large_and_of_a_small_disk() -> None:
    assert MARKS.low == 200 * GIB * 3 // 100 and MARKS.critical == 3 * GIB // 2
    assert (MARKS.floor, MARKS.reserve) == (512 << 20, 256 << 20)
    assert DiskMarks.of(100 << 20).low == 10 << 20


# Shares


def test_equal_accounts_are_not_above_their_share() -> None:
    assert above_share({}) == above_share({ALICE: 5}) == above_share({ALICE: 5, BOB: 5, CAROL: 5}) == set()


def test_the_largest_are_above_their_share() -> None:
    assert above_share({ALICE: 90, BOB: 5, CAROL: 5}) == {ALICE}
    assert above_share({ALICE: 50, BOB: 48, CAROL: 2}) == {ALICE, BOB}


def test_many_small_accounts_do_not_make_the_share_small() -> None:
    """An attacker creates a thousand of them: an equal share would be less than 1 % of what others have."""
    crowd: dict[str | None, int] = {f"tiny{number}": 1 for number in range(1000)}
    assert above_share({ALICE: 100_000, BOB: 5_000, **crowd}) == {ALICE}


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1 << 40), max_size=20))
def test_who_uses_more_is_above_a_share_first(usage: dict[str | None, int]) -> None:
    above = above_share(usage)
    rest = [used for account, used in usage.items() if account not in above]
    assert all(usage[account] > max(rest, default=0) for account in above)
    assert not usage or max(usage.values()) == min(usage.values()) or above
    assert len(usage) == 0 or len(above) < len(usage)


# Eviction


def evicted_for(account: str, usage: dict[str | None, int]) -> list[str | None]:
    """The accounts that lose something, in order; each has one sticky thing."""
    things = [Evictable(str(owner), 5, 0, delete, owner) for owner in usage]
    return [each.account for each in eviction_order(things, account, EvictionScope.ABOVE_SHARE, usage)]


def test_a_modest_account_loses_nothing_to_many_small_ones() -> None:
    crowd: dict[str | None, int] = {f"tiny{number}": 1 for number in range(1000)}
    assert evicted_for("tiny1", {ALICE: 100_000, BOB: 5_000, **crowd}) == ["tiny1", ALICE]


def test_an_account_above_its_share_evicts_its_own_things_only() -> None:
    assert evicted_for(ALICE, {ALICE: 60, BOB: 55, CAROL: 1}) == [ALICE]
    assert evicted_for(BOB, {ALICE: 60, BOB: 55, CAROL: 1}) == [BOB]
    assert evicted_for(CAROL, {ALICE: 60, BOB: 55, CAROL: 1}) == [CAROL, ALICE, BOB]


# Pauses


def seen(free: int, at: float = 0.0, **usage: int) -> DiskObservation:
    return DiskObservation(at, free, dict(usage.items()))


def step(
    now: DiskObservation,
    before: DiskObservation | None = None,
    paused: dict[str | None, PauseCause] | None = None,
    running: set[str | None] | None = None,
) -> dict[str | None, PauseCause]:
    there = {ALICE, BOB, CAROL} if running is None else running
    return accounts_to_pause(paused or {}, now, before, there, MARKS)


SHARES = {ALICE: 90 * GIB, BOB: 60 * GIB, CAROL: GIB}
JUST_LOW = MARKS.low - 1


def test_nothing_is_paused_above_the_mark() -> None:
    assert step(seen(MARKS.low, **SHARES), seen(MARKS.enough, **SHARES)) == {}


def test_the_largest_is_paused_first_and_the_next_only_if_the_disk_goes_on_filling() -> None:
    first = step(seen(JUST_LOW, **SHARES))
    assert first == {ALICE: PauseCause.SHARE}
    still = seen(JUST_LOW, 1.0, **SHARES)
    assert step(still, seen(JUST_LOW, **SHARES), first) == first
    assert step(seen(JUST_LOW - 1, 2.0, **SHARES), still, first).keys() == {ALICE, BOB}


def test_an_account_without_running_vms_does_not_stand_in_for_one_that_has_some() -> None:
    assert step(seen(JUST_LOW, **SHARES), running={BOB, CAROL}) == {BOB: PauseCause.SHARE}


def test_a_small_account_is_paused_only_when_it_would_fill_the_rest() -> None:
    before = seen(MARKS.critical - 1, **SHARES)
    logs = SHARES | {CAROL: GIB + (1 << 20)}
    floods = SHARES | {CAROL: GIB + (100 << 20)}
    assert CAROL not in step(seen(MARKS.critical - (1 << 20), 1.0, **logs), before)
    found = step(seen(MARKS.critical - (100 << 20), 1.0, **floods), before)
    assert found == {ALICE: PauseCause.SHARE, BOB: PauseCause.SHARE, CAROL: PauseCause.WRITES}
    # The less is left, the less it takes.
    last = seen(MARKS.floor, **SHARES)
    assert CAROL in step(seen(MARKS.floor - (1 << 20), 1.0, **logs), last)


def test_a_single_account_is_paused_before_the_disk_is_full() -> None:
    """It is not above its share."""
    before = seen(JUST_LOW, alice=150 * GIB)
    assert step(before) == {}
    now = seen(MARKS.critical - 1, 1.0, alice=152 * GIB)
    assert step(now, before) == {ALICE: PauseCause.WRITES}


@pytest.mark.parametrize("cause", PauseCause)
def test_a_paused_account_goes_on_when_there_is_space(cause: PauseCause) -> None:
    paused: dict[str | None, PauseCause] = {ALICE: cause}
    assert step(seen(MARKS.enough - 1, **SHARES), paused=paused) == paused
    assert step(seen(MARKS.enough, **SHARES), paused=paused) == {}


def test_a_paused_account_that_deletes_goes_on_earlier() -> None:
    small = SHARES | {ALICE: GIB}
    paused: dict[str | None, PauseCause] = {ALICE: PauseCause.SHARE, CAROL: PauseCause.WRITES}
    assert ALICE not in step(seen(JUST_LOW, **small), paused=paused)
    assert CAROL in step(seen(JUST_LOW, **small), paused=paused)
    assert CAROL not in step(seen(MARKS.low, **small), paused=paused)
