"""Shares of resources: bounds, fair order and cancellation, without IO."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stead.errors import HostError
from stead.shares import KeyedLimit, KeyedLock, RateLimit, SharedEntries
from stead.tasks import cancel_and_wait
from support.waiting import turns


class TestKeyedLock:
    @given(st.lists(st.sampled_from("ab"), max_size=12))
    def test_a_lock_is_exclusive_per_key_and_removed_after_use(self, users: list[str]) -> None:
        async def story() -> None:
            locks, holding, most = KeyedLock(), Counter[str](), 0

            async def use(key: str) -> None:
                nonlocal most
                async with locks.hold(key):
                    holding[key] += 1
                    assert holding[key] == 1
                    most = max(most, holding.total())
                    await asyncio.sleep(0)
                    holding[key] -= 1

            await asyncio.gather(*(use(key) for key in users))
            assert most == len(set(users))
            assert (locks._held, locks._waiting) == (Counter(), [])

        asyncio.run(story())

    async def test_a_cancelled_waiter_passes_the_lock_on(self) -> None:
        locks, order = KeyedLock(), []

        async def use(name: str) -> None:
            async with locks.hold("key"):
                order.append(name)

        async with locks.hold("key"):
            first, second, third = (asyncio.create_task(use(name)) for name in ("1", "2", "3"))
            await turns()
            await cancel_and_wait(first)
        second.cancel()  # the lock is its own by now
        await asyncio.gather(second, third, return_exceptions=True)
        assert order == ["3"]
        assert (locks._held, locks._waiting) == (Counter(), [])


class Holder:
    """A task in a place of a limit, until the test ends it."""

    def __init__(self, limit: KeyedLimit, key: str, **options: Any) -> None:
        self.key = key
        self.holds = False
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._run(limit, options))

    async def _run(self, limit: KeyedLimit, options: dict[str, Any]) -> None:
        async with limit.hold(self.key, **options):
            self.holds = True
            try:
                await self._end.wait()
            finally:
                self.holds = False

    async def end(self) -> None:
        self._end.set()
        await self.task


@pytest.fixture
async def hold() -> AsyncIterator[Callable[..., Holder]]:
    holders: list[Holder] = []

    def make(limit: KeyedLimit, key: str, **options: Any) -> Holder:
        holders.append(Holder(limit, key, **options))
        return holders[-1]

    yield make
    await cancel_and_wait(*(each.task for each in holders))


Hold = Callable[..., Holder]


class TestKeyedLimit:
    @given(
        st.integers(1, 3) | st.none(),
        st.integers(1, 2) | st.none(),
        st.lists(st.tuples(st.sampled_from(["come", "end", "cancel"]), st.integers(0, 9)), max_size=30),
    )
    def test_bounds_hold_and_no_place_stays_empty(
        self, total: int | None, per_key: int | None, steps: list[tuple[str, int]]
    ) -> None:
        async def story() -> None:
            limit = KeyedLimit(total, per_key)
            holders: list[Holder] = []
            for step, number in steps:
                if step == "come":
                    holders.append(Holder(limit, "abc"[number % 3]))
                elif holders:
                    leaving = holders.pop(number % len(holders))
                    if step == "end" and leaving.holds:
                        await leaving.end()
                    leaving.task.cancel()
                if number % 2:
                    await turns()
            await turns()
            held = Counter(each.key for each in holders if each.holds)
            assert total is None or held.total() <= total
            assert per_key is None or max(held.values(), default=0) <= per_key
            for waiting in (each for each in holders if not each.holds):
                assert held.total() == total or held[waiting.key] == per_key
            await cancel_and_wait(*(each.task for each in holders))
            assert (limit._used, limit._held, limit._waiting) == (0, Counter(), [])

        asyncio.run(story())

    async def test_a_free_place_goes_to_the_key_that_holds_the_fewest(self, hold: Hold) -> None:
        limit = KeyedLimit(2)
        first, second, third = (hold(limit, "greedy") for _ in range(3))
        await turns()
        other = hold(limit, "other")
        await turns()
        assert [second.holds, other.holds] == [True, False]
        await first.end()
        await turns()
        assert [other.holds, third.holds] == [True, False]
        await second.end()
        await turns()
        assert third.holds

    async def test_a_wait_ends_with_the_error_of_the_caller(self, hold: Hold) -> None:
        limit = KeyedLimit(1, max_wait=0.001, busy=lambda: HostError("busy"))
        holder = hold(limit, "a")
        await turns()
        with pytest.raises(HostError, match="busy"):
            async with limit.hold("b"):
                pytest.fail("there was no place")
        late = hold(limit, "b", max_wait=60)
        await turns()
        await holder.end()
        await turns()
        assert late.holds

    async def test_an_error_of_the_block_is_not_taken_for_a_full_limit(self) -> None:
        limit = KeyedLimit(1, max_wait=60, busy=lambda: HostError("busy"))
        with pytest.raises(TimeoutError):
            async with limit.hold():
                raise TimeoutError
        assert limit._used == 0

    async def test_a_place_is_released_once_after_its_time(self, hold: Hold) -> None:
        limit = KeyedLimit(2, release_after=0.001)
        stuck = [hold(limit, "hostile") for _ in range(2)]
        await turns()
        async with asyncio.timeout(60), limit.hold("other"):
            assert all(each.holds for each in stuck)
        for each in stuck:
            await each.end()
        limit._release_after = None
        later = [hold(limit, "later") for _ in range(3)]
        await turns()
        assert [each.holds for each in later] == [True, True, False]

    async def test_a_waiter_that_is_cancelled_as_its_place_comes_passes_it_on(self, hold: Hold) -> None:
        limit = KeyedLimit(1)
        holding, leaving, granted, last = (hold(limit, key) for key in "abcd")
        await turns()
        leaving.task.cancel()
        holding._end.set()
        while not holding.task.done():  # noqa: ASYNC110  # the place is given on in the same turn
            await asyncio.sleep(0)
        granted.task.cancel()
        await turns()
        assert last.holds and not granted.holds

    async def test_callers_of_one_key_have_shares_of_their_own(self, hold: Hold) -> None:
        limit = KeyedLimit(4, 3, per_caller=2)
        greedy = [hold(limit, "account", caller="one") for _ in range(3)]
        await turns()
        other = hold(limit, "account", caller="two")
        await turns()
        assert [each.holds for each in greedy] == [True, True, False]
        assert other.holds
        await greedy[0].end()
        await turns()
        assert greedy[2].holds
        for each in (*greedy[1:], other):
            await each.end()
        assert (limit._used, limit._held, limit._held_by_caller) == (0, Counter(), Counter())

    async def test_too_many_waiters_of_a_key_are_refused_at_once(self, hold: Hold) -> None:
        limit = KeyedLimit(1, max_waiting=1, max_wait=60, busy=lambda: HostError("busy"))
        holding, waiting = hold(limit, "greedy"), hold(limit, "greedy")
        await turns()
        with pytest.raises(HostError, match="busy"):
            await limit.acquire("greedy")
        other = hold(limit, "other")
        await turns()
        await holding.end()
        await turns()
        # Both hold none, and the first has waited longer.
        assert [waiting.holds, other.holds] == [True, False]
        await waiting.end()
        await turns()
        assert other.holds
        assert limit._waiting_by_key == Counter()

    @given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 6), st.booleans()), max_size=20))
    def test_amounts_are_bounded_and_an_amount_above_the_bound_waits_to_be_alone(
        self, steps: list[tuple[str, int, bool]]
    ) -> None:
        async def story() -> None:
            limit = KeyedLimit(5, 4)
            holders: list[Holder] = []
            for key, amount, end in steps:
                holders.append(Holder(limit, key, amount=amount))
                await turns()
                if end and (holding := [each for each in holders if each.holds]):
                    await holding[0].end()
                assert limit.used <= 5 or limit.used == max(limit.held_by("a"), limit.held_by("b"))
            for _ in holders:
                for each in [one for one in holders if one.holds]:
                    await each.end()
                await turns()
            assert all(each.task.done() for each in holders)
            assert (limit.used, limit.waiting) == (0, 0)

        asyncio.run(story())

    async def test_a_released_place_is_released_once(self) -> None:
        limit = KeyedLimit(1)
        release = await limit.acquire("a")
        assert limit.try_acquire("b") is None
        release()
        release()
        assert limit.used == 0
        assert limit.try_acquire("b") is not None
        assert limit.try_acquire("c") is None


class TestRateLimit:
    def test_a_burst_is_allowed_and_then_one_in_each_interval(self) -> None:
        now = 100.0
        limit = RateLimit(3, 10.0, clock=lambda: now)
        assert [limit.allow("a") for _ in range(4)] == [0, 0, 0, 10]
        assert limit.allow("b") == 0
        now += 9.5
        assert limit.allow("a") == 1
        now += 0.5
        assert [limit.allow("a"), limit.allow("a")] == [0, 10]
        now += 60
        assert [limit.allow("a") for _ in range(4)] == [0, 0, 0, 10]

    def test_keys_are_bounded_and_the_oldest_is_forgotten(self) -> None:
        limit = RateLimit(1, 10.0, most_keys=3, clock=lambda: 0.0)
        assert [limit.allow(key) for key in "abcd"] == [0, 0, 0, 0]
        assert [limit.wait(key) for key in "abcd"] == [0, 10, 10, 10]


class TestSharedEntries:
    def test_the_key_with_the_most_entries_gives_up_its_oldest(self) -> None:
        entries: SharedEntries[str] = SharedEntries(3)
        assert [entries.add(name, "a") for name in ("a1", "a2")] == [None, None]
        assert entries.add("b1", "b") is None
        assert entries.add("b2", "b") == "a1"
        entries.remove("a1")
        assert entries.add("b3", "b") == "b1"
        entries.remove("b1")
        assert sorted(entries) == ["a2", "b2", "b3"]
        assert len(entries) == 3 and "a2" in entries and "a1" not in entries
