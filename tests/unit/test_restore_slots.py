"""Restore slots and the pool: no account waits for the guests of another."""

import asyncio
from typing import Any

import pytest

from stead.machines.pool import Pool
from stead.machines.restore_slots import RestoreSlots


class Work:
    """Work in a slot, which lasts until the test ends it."""

    def __init__(self, slots: RestoreSlots, account: str | None) -> None:
        self._slots = slots
        self._account = account
        self.began = asyncio.Event()
        self.may_end = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._slots.held(self._account):
            self.began.set()
            await self.may_end.wait()

    async def end(self) -> None:
        self.may_end.set()
        await self.task


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_one_account_uses_all_slots_while_no_other_waits() -> None:
    slots = RestoreSlots(2)
    works = [Work(slots, "a") for _ in range(3)]
    await settled()
    assert [work.began.is_set() for work in works] == [True, True, False]
    await works[0].end()
    await settled()
    assert works[2].began.is_set()
    for work in works[1:]:
        await work.end()


async def test_a_free_slot_goes_to_the_account_that_holds_the_fewest() -> None:
    slots = RestoreSlots(2)
    first, second, third = (Work(slots, "greedy") for _ in range(3))
    await settled()
    other = Work(slots, "other")
    await settled()
    await first.end()
    await settled()
    assert other.began.is_set() and not third.began.is_set()
    await second.end()
    await settled()
    assert third.began.is_set()
    await third.end()
    await other.end()


async def test_work_that_lasts_too_long_loses_its_slot_and_goes_on() -> None:
    """Two VMs whose agents do not answer are waited for, but not by everybody."""
    slots = RestoreSlots(2, longest=0.05)
    stuck = [Work(slots, "hostile") for _ in range(2)]
    await settled()
    other = Work(slots, "other")
    async with asyncio.timeout(30):
        await other.began.wait()
    assert not any(work.task.done() for work in stuck)
    for work in (*stuck, other):
        await work.end()
    works = [Work(slots, "later") for _ in range(3)]
    await settled()
    assert [work.began.is_set() for work in works] == [True, True, False]  # none was given back twice
    for work in works:
        await work.end()


async def test_a_cancelled_waiter_keeps_no_slot() -> None:
    slots = RestoreSlots(1)
    holding, waiting, granted, last = (Work(slots, account) for account in "abcd")
    await settled()
    waiting.task.cancel()
    await settled()
    holding.may_end.set()
    while not holding.task.done():  # noqa: ASYNC110  # the slot is given on in the same turn
        await asyncio.sleep(0)
    granted.task.cancel()
    await settled()
    assert last.began.is_set()
    await last.end()


async def test_a_create_that_lasts_too_long_does_not_keep_the_pool_from_refilling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stead.machines.pool._LONGEST_WAIT", 0.05)
    monkeypatch.setattr("stead.machines.pool._QUIET", 0.0)
    nothing: Any = None
    pool = Pool(nothing, nothing, nothing, nothing, nothing, 1)
    with pool.giving_way():
        assert pool._busy == 1
        async with asyncio.timeout(30):
            await pool._wanted.wait()
        assert pool._busy == 0
    assert pool._busy == 0
