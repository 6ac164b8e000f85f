"""The concurrency tools: every cancellation path, without IO."""

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from stead.errors import HostError, ServerStopping
from stead.tasks import (
    SingleFlight,
    TaskSet,
    Threads,
    cancel_and_wait,
    finished,
    in_background,
    or_undo,
    work_for,
    working_for,
)
from support.waiting import turns, until


class Work:
    """Work that lasts until the test ends it; its clean-up after a cancellation takes a moment."""

    def __init__(self) -> None:
        self.runs = 0
        self.end = asyncio.Event()
        self.error: Exception | None = None
        self.undone = 0

    async def __call__(self) -> int:
        self.runs += 1
        run = self.runs
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            await turns(3)
            self.undone += 1
            raise
        if self.error is not None:
            raise self.error
        return run


def failures(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    records = [each for each in caplog.records if each.name == "stead.tasks"]
    return [(each.levelname, each.__dict__["fields"]["task"]) for each in records]


class TestCancellation:
    async def test_finished_work_outlasts_every_cancellation_of_its_caller(self) -> None:
        work = Work()
        caller = asyncio.create_task(finished(work()))
        for _ in range(3):
            await turns()
            caller.cancel()
        await turns()
        assert not caller.done()
        work.end.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert (work.runs, work.undone) == (1, 0)

    @pytest.mark.parametrize("cancellations", [1, 3])
    async def test_what_a_cancelled_caller_created_is_undone(self, cancellations: int) -> None:
        work, undone = Work(), []

        async def undo(result: int) -> None:
            await turns(3)
            undone.append(result)

        caller = asyncio.create_task(or_undo(work(), undo))
        for _ in range(cancellations):
            await turns()
            caller.cancel()
        await turns()
        work.end.set()
        await turns(2)
        caller.cancel()  # during the undo
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert undone == [1]

    async def test_work_that_failed_is_not_undone(self) -> None:
        work = Work()
        work.error = HostError("no space")
        caller = asyncio.create_task(or_undo(work(), lambda _: pytest.fail("nothing was created")))
        await turns()
        caller.cancel()
        await turns()
        work.end.set()
        with pytest.raises(asyncio.CancelledError):
            await caller

    async def test_cancel_and_wait_waits_for_the_clean_up_even_when_cancelled(self) -> None:
        work = Work()
        task = asyncio.create_task(work())
        await turns()
        canceller = asyncio.create_task(cancel_and_wait(task))
        await turns(2)
        canceller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await canceller
        assert work.undone == 1

    async def test_a_task_that_cancels_itself_among_others_is_left_out(self) -> None:
        work = Work()
        other = asyncio.create_task(work())
        await turns()

        async def end_all() -> str:
            current = asyncio.current_task()
            assert current is not None
            await cancel_and_wait(current, other)
            return "went on"

        assert await asyncio.create_task(end_all()) == "went on"
        assert other.cancelled()

    async def test_work_beside_a_block_ends_with_it(self) -> None:
        work = Work()
        with pytest.raises(ZeroDivisionError):
            async with in_background(work()) as task:
                await turns()
                assert not task.done()
                raise ZeroDivisionError
        assert task.cancelled() and work.undone == 1


class TestTaskSet:
    async def test_an_unexpected_error_is_logged_with_the_name(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        work = Work()
        work.error = ZeroDivisionError()
        work.end.set()
        expected = Work()
        expected.error = HostError("no space")
        expected.end.set()
        with caplog.at_level(logging.WARNING):
            async with TaskSet() as tasks:
                tasks.start(work(), "first")
                tasks.start(expected(), "second")
                await tasks.join()
        assert failures(caplog) == [("ERROR", "first"), ("WARNING", "second")]

    async def test_close_cancels_and_waits_also_for_what_a_clean_up_starts(self) -> None:
        tasks, late = TaskSet(), Work()

        async def starts_more() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                tasks.start(late())
                await turns()

        tasks.start(starts_more())
        await turns()
        await tasks.close()
        assert late.undone == 1

    async def test_a_task_may_close_its_own_set(self) -> None:
        tasks, work = TaskSet(), Work()
        other = tasks.start(work())
        await turns()
        await tasks.start(tasks.close())
        assert other.cancelled()

    async def test_work_continues_when_its_caller_is_cancelled(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        tasks, work = TaskSet(), Work()
        work.error = ZeroDivisionError()
        caller = asyncio.create_task(tasks.run(work(), "left"))
        await turns()
        await cancel_and_wait(caller)
        assert caller.cancelled() and not work.undone
        work.end.set()
        await tasks.join()
        assert failures(caplog) == [("ERROR", "left")]

    async def test_the_caller_gets_the_error_instead_of_the_log(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        tasks, work = TaskSet(), Work()
        work.error = ZeroDivisionError()
        work.end.set()
        with pytest.raises(ZeroDivisionError):
            await tasks.run(work())
        assert failures(caplog) == []

    async def test_an_error_that_meets_the_cancellation_of_its_caller_is_logged(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        tasks, work = TaskSet(), Work()
        work.error = ZeroDivisionError()
        caller = asyncio.create_task(tasks.run(work(), "met"))
        await turns()
        work.end.set()
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled()
        assert failures(caplog) == [("ERROR", "met")]

    async def test_a_caller_whose_work_is_closed_is_told_that_the_server_stops(self) -> None:
        tasks, work = TaskSet(), Work()
        caller = asyncio.create_task(tasks.run(work()))
        await turns()
        await tasks.close()
        with pytest.raises(ServerStopping):
            await caller


class TestSingleFlight:
    async def test_callers_share_one_call_and_its_result(self) -> None:
        flights, work = SingleFlight[int](), Work()
        callers = [asyncio.create_task(flights.run("key", work)) for _ in range(3)]
        other = asyncio.create_task(flights.run("other", work))
        await turns()
        work.end.set()
        assert await asyncio.gather(*callers, other) == [1, 1, 1, 2]
        assert await flights.run("key", work) == 3
        assert flights._calls == {}

    async def test_callers_share_the_error(self, caplog: pytest.LogCaptureFixture) -> None:
        flights, work = SingleFlight[int](), Work()
        work.error = HostError("no space")
        callers = [asyncio.create_task(flights.run("key", work)) for _ in range(2)]
        await turns()
        work.end.set()
        assert await asyncio.gather(*callers, return_exceptions=True) == [work.error, work.error]
        assert failures(caplog) == []

    async def test_a_joining_caller_learns_which_call_it_waits_for(self) -> None:
        flights, work, names = SingleFlight[int](), Work(), []

        async def joined(name: str) -> None:
            names.append(name)

        callers = [
            asyncio.create_task(flights.run("key", work, name=name, joined=joined))
            for name in ("1", "2", "3")
        ]
        await turns()
        work.end.set()
        await asyncio.gather(*callers)
        assert names == ["1", "1"]

    @pytest.mark.parametrize("first", [True, False], ids=["starter", "joiner"])
    async def test_a_cancelled_caller_does_not_end_the_call_of_the_others(self, first: bool) -> None:
        flights, work = SingleFlight[int](linger=0), Work()
        callers = [asyncio.create_task(flights.run("key", work)) for _ in range(2)]
        await turns()
        leaving, staying = callers if first else reversed(callers)
        await cancel_and_wait(leaving)
        work.end.set()
        assert await staying == 1
        assert work.undone == 0

    async def test_the_last_caller_cancels_the_call_and_waits_for_its_clean_up(self) -> None:
        flights, work = SingleFlight[int](linger=0), Work()
        callers = [asyncio.create_task(flights.run("key", work)) for _ in range(2)]
        await turns()
        for caller in callers:
            caller.cancel()
        await turns(3)
        again = asyncio.create_task(flights.run("key", work))  # while the first is undone
        await asyncio.gather(*callers, return_exceptions=True)
        assert work.undone == 1
        work.end.set()
        assert await again == 2

    async def test_a_caller_that_returns_within_the_linger_finds_the_call(self) -> None:
        flights, work = SingleFlight[int](linger=60), Work()
        caller = asyncio.create_task(flights.run("key", work))
        await turns()
        await cancel_and_wait(caller)
        (call,) = flights._calls.values()
        assert call.linger is not None and not call.linger.cancelled()
        again = asyncio.create_task(flights.run("key", work))
        await turns()
        assert call.linger.cancelled()
        work.end.set()
        assert await again == 1

    async def test_a_call_without_callers_ends_after_the_linger(self) -> None:
        flights, work = SingleFlight[int](linger=0.001), Work()
        caller = asyncio.create_task(flights.run("key", work))
        await turns()
        await cancel_and_wait(caller)
        async with asyncio.timeout(60):
            await flights.join()
        assert (work.undone, flights._calls) == (1, {})

    async def test_a_call_runs_to_its_end_without_callers(self, caplog: pytest.LogCaptureFixture) -> None:
        flights, work = SingleFlight[int](), Work()
        work.error = ZeroDivisionError()
        caller = asyncio.create_task(flights.run("key", work, name="left"))
        await turns()
        await cancel_and_wait(caller)
        assert flights.start("key", work).get_name() == "left"
        work.end.set()
        await flights.join()
        assert (work.runs, work.undone) == (1, 0)
        assert failures(caplog) == [("ERROR", "left")]

    async def test_a_forgotten_call_is_not_joined(self) -> None:
        flights, work = SingleFlight[int](), Work()
        first = asyncio.create_task(flights.run("key", work))
        await turns()
        flights.forget("key")
        second = asyncio.create_task(flights.run("key", work))
        await turns()
        assert work.runs == 2
        work.end.set()
        assert [await first, await second] == [1, 2]

    async def test_close_undoes_all_calls_and_refuses_new_ones(self) -> None:
        flights, work = SingleFlight[int](linger=60), Work()
        waiting, leaving = (asyncio.create_task(flights.run(key, work)) for key in "ab")
        await turns()
        flights.forget("a")
        await cancel_and_wait(leaving)
        await flights.close()
        assert work.undone == 2
        with pytest.raises(ServerStopping):
            await waiting
        with pytest.raises(ServerStopping):
            await flights.run("key", work)
        assert work.runs == 2


class Blocking:
    """Functions that hold their threads until the test ends them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.end = threading.Event()

    def of(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self.end.wait(60)
            return name

        return run


async def run_for(account: str | None, threads: Threads, function: Callable[[], str]) -> str:
    work_for(account)
    return await threads.run(function)


SHARED = [each for each in Threads if each not in (Threads.FILES, Threads.MEASUREMENTS)]
"""The server alone measures, and work on files ends at once."""


class TestThreads:
    @pytest.mark.parametrize("threads", SHARED)
    @pytest.mark.parametrize("other", ["victim", None], ids=["account", "server"])
    async def test_an_account_leaves_threads_to_others(self, threads: Threads, other: str | None) -> None:
        work = Blocking()
        greedy = [
            asyncio.create_task(run_for("greedy", threads, work.of(str(number)))) for number in range(100)
        ]
        try:
            async with asyncio.timeout(60):
                await until(lambda: work.begun, 60)
                await asyncio.sleep(0.2)
                assert len(work.begun) < 50
                assert await run_for(other, threads, lambda: "served") == "served"
            assert not any(task.done() for task in greedy)
        finally:
            work.end.set()
        assert await asyncio.gather(*greedy) == [str(number) for number in range(100)]
        # In their order, but for those that began at once.
        assert sorted(work.begun, key=int)[:1] == ["0"] and len(set(work.begun)) == 100

    async def test_accounts_take_turns(self) -> None:
        work = Blocking()
        order: list[str] = []

        def note(name: str) -> Callable[[], str]:
            return lambda: order.append(name) or name  # type: ignore[func-returns-value]

        holding = [
            asyncio.create_task(run_for(account, Threads.TREES, work.of(account)))
            for account in ("a", "a", "b", "b")
        ]
        await until(lambda: len(work.begun) == 4, 60)
        waiting = [asyncio.create_task(run_for("a", Threads.TREES, note("a"))) for _ in range(20)]
        await turns()
        waiting += [asyncio.create_task(run_for("c", Threads.TREES, note("c")))]
        await turns()
        work.end.set()
        await asyncio.gather(*holding, *waiting)
        assert order.index("c") < 4

    async def test_a_function_of_a_cancelled_caller_runs_to_its_end(self) -> None:
        """As without a queue: what cleans up may rely on it."""
        work = Blocking()
        holding = [asyncio.create_task(run_for("a", Threads.TREES, work.of("held"))) for _ in range(2)]
        await until(lambda: len(work.begun) == 2, 60)
        caller = asyncio.create_task(run_for("a", Threads.TREES, work.of("waiting")))
        await turns()
        caller.cancel()
        await turns()
        assert not caller.done() and work.begun == ["held"] * 2
        work.end.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        await asyncio.gather(*holding)
        assert work.begun == ["held", "held", "waiting"]
        assert await run_for("a", Threads.TREES, lambda: "free") == "free"

    async def test_tasks_work_for_the_account_of_their_starter(self) -> None:
        """Each then counts in one share, also where a block works for another account meanwhile."""
        work = Blocking()
        try:
            with working_for("a"):
                tasks = [asyncio.create_task(Threads.TREES.run(work.of("a"))) for _ in range(4)]
                with working_for("b"):
                    tasks.append(asyncio.create_task(Threads.TREES.run(work.of("b"))))
                tasks.append(asyncio.create_task(Threads.TREES.run(work.of("a"))))
            await until(lambda: "b" in work.begun, 60)
            await asyncio.sleep(0.2)
            assert sorted(work.begun) == ["a", "a", "b"]
        finally:
            work.end.set()
        await asyncio.gather(*tasks)

    async def test_errors_give_their_threads_back(self) -> None:
        work_for("a")
        for _ in range(10):
            with pytest.raises(ZeroDivisionError):
                await Threads.TREES.run(lambda: 1 // 0)
