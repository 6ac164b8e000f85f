"""Concurrency: cancellation, background tasks, lock by key, single flight, limits by key."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Self, TypeVar

from stead.errors import ServerStopping, SteadError
from stead.logs import get_logger

P = ParamSpec("P")
T = TypeVar("T")

log = get_logger("stead.tasks")

# Cancellation


async def finished(work: Awaitable[T]) -> T:
    """Await work to its end even when the caller is cancelled; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _ended(task)
        if not task.cancelled():
            # Retrieve the exception so asyncio does not log it as never retrieved.
            task.exception()
        raise


async def in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run a function in a thread and always wait for its end: threads cannot be cancelled.

    A caller that undoes the work after a cancellation can rely on the thread having ended.
    """
    return await finished(asyncio.to_thread(function, *arguments, **options))


async def or_undo(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]]) -> T:
    """Await work that creates something; a cancelled caller never gets the result, so it is undone."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await _ended(task)
        with contextlib.suppress(SteadError):
            await finished(undo(task.result()))
        raise


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their ends, also when the caller is cancelled meanwhile.

    Their errors are dropped: for tasks whose results the caller has looked at. The calling task is left out.
    """
    others = set(tasks) - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await finished(asyncio.gather(*others, return_exceptions=True))


@contextlib.asynccontextmanager
async def in_background(
    work: Coroutine[Any, Any, T], name: str | None = None
) -> "AsyncIterator[asyncio.Task[T]]":
    """Run work during a block that looks at its result; it is cancelled at the end of the block."""
    task = asyncio.create_task(work, name=name)
    try:
        yield task
    finally:
        await cancel_and_wait(task)


async def _ended(task: "asyncio.Future[Any]") -> None:
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})


# Background tasks


class TaskSet:
    """Background tasks that end with their owner. An error that no caller gets is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._awaited: Counter[asyncio.Task[Any]] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run work in the background; its name is in the log line of its failure."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def run(self, work: Coroutine[Any, Any, T], name: str | None = None) -> T:
        """Run work for a caller: a cancelled caller stops waiting, and the work continues."""
        return await self.wait_for(self.start(work, name))

    async def wait_for(self, task: asyncio.Task[T]) -> T:
        """Wait for a task of this set without cancelling it; its error goes to the caller, not to the log."""
        self._awaited[task] += 1
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                raise ServerStopping from None
            if task.done():
                _log_failure(task)
            raise
        finally:
            self._awaited[task] -= 1
            if not self._awaited[task]:
                del self._awaited[task]

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task not in self._awaited:
            _log_failure(task)

    async def join(self) -> None:
        """Wait until all tasks have ended by themselves."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Cancel all tasks and wait for their ends."""
        while others := self._tasks - {asyncio.current_task()}:
            await cancel_and_wait(*others)


def _log_failure(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    if isinstance(error, SteadError):
        log.warning("background task failed", task=task.get_name(), error=str(error))
    elif error is not None:
        log.error("background task failed", task=task.get_name(), error=repr(error), exc_info=error)


# Single flight


@dataclass(eq=False)
class _Call(Generic[T]):
    task: "asyncio.Task[T]"
    waiters: int = 0
    linger: asyncio.TimerHandle | None = None


class SingleFlight(Generic[T]):
    """Calls by key that run once: a caller joins the running call and gets its result, or its error."""

    def __init__(self, linger: float | None = None) -> None:
        """`linger`: seconds that a call continues after its last waiter was cancelled; None: to its end."""
        self._linger = linger
        self._calls: dict[Hashable, _Call[T]] = {}
        self._tasks = TaskSet()
        self._closed = False

    async def run(
        self,
        key: Hashable,
        work: Callable[[], Coroutine[Any, Any, T]],
        *,
        name: str | None = None,
        joined: Callable[[str], Awaitable[None]] | None = None,
    ) -> T:
        """Wait for the call of this key, and start it with `work` unless it is running.

        `joined` is awaited before waiting for a call that another caller started, with the name of that call.
        """
        running = key in self._calls
        call = self._start(key, work, name)
        call.waiters += 1
        if call.linger is not None:
            call.linger.cancel()
        try:
            if running and joined is not None:
                await joined(call.task.get_name())
            return await self._tasks.wait_for(call.task)
        finally:
            call.waiters -= 1
            if not call.waiters and not call.task.done():
                await self._leave(key, call)

    def start(
        self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]], name: str | None = None
    ) -> asyncio.Task[T]:
        """Start the call of this key unless it is running, without waiting for it."""
        return self._start(key, work, name).task

    def _start(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]], name: str | None) -> _Call[T]:
        call = self._calls.get(key)
        if call is None:
            if self._closed:
                raise ServerStopping
            call = self._calls[key] = _Call(self._tasks.start(work(), name))
            call.task.add_done_callback(lambda _: self._forget(key, call))
        return call

    def forget(self, key: Hashable) -> None:
        """Let the next caller start a new call, because the running one may miss what it asks for."""
        self._calls.pop(key, None)

    def _forget(self, key: Hashable, call: _Call[T]) -> None:
        if self._calls.get(key) is call:
            del self._calls[key]

    async def _leave(self, key: Hashable, call: _Call[T]) -> None:
        if self._linger is None:
            return
        if self._linger:
            loop = asyncio.get_running_loop()
            call.linger = loop.call_later(self._linger, self._abandon, key, call)
        else:
            self._abandon(key, call)
            await cancel_and_wait(call.task)

    def _abandon(self, key: Hashable, call: _Call[T]) -> None:
        self._forget(key, call)
        call.task.cancel()

    async def join(self) -> None:
        """Wait until all running calls have ended by themselves."""
        await self._tasks.join()

    async def close(self) -> None:
        """Cancel all calls and wait until they have undone what they started; refuse new ones."""
        self._closed = True
        await self._tasks.close()


# Limits and locks by key


class KeyedLimit:
    """A semaphore with `total` places of which each key holds at most `per_key`.

    A free place goes to the waiting key that holds the fewest, then to the caller that has waited longest.
    """

    def __init__(
        self,
        total: int | None = None,
        per_key: int | None = None,
        *,
        max_wait: float | None = None,
        busy: Callable[[], Exception] = TimeoutError,
        release_after: float | None = None,
    ) -> None:
        """`busy` makes the error that is raised after `max_wait` seconds without a place.

        A place that is held for `release_after` seconds is released; the work in it continues.
        """
        self._total = total
        self._per_key = per_key
        self._max_wait = max_wait
        self._busy = busy
        self._release_after = release_after
        self._used = 0
        self._held: Counter[Hashable] = Counter()
        self._waiting: list[tuple[Hashable, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def hold(self, key: Hashable = None, *, max_wait: float | None = None) -> AsyncIterator[None]:
        """Hold a place during a block."""
        await self._acquire(key, self._max_wait if max_wait is None else max_wait)
        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                self._release(key)

        timer = None
        if self._release_after is not None:
            timer = asyncio.get_running_loop().call_later(self._release_after, release)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            release()

    async def _acquire(self, key: Hashable, max_wait: float | None) -> None:
        if self._has_place(key):
            self._take(key)
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = key, granted
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(max_wait) as limit:
                await granted
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:
                self._release(key)
            if isinstance(error, TimeoutError) and limit.expired():
                raise self._busy() from None
            raise

    def _has_place(self, key: Hashable) -> bool:
        return (self._total is None or self._used < self._total) and (
            self._per_key is None or self._held[key] < self._per_key
        )

    def _take(self, key: Hashable) -> None:
        self._used += 1
        self._held[key] += 1

    def _release(self, key: Hashable) -> None:
        self._used -= 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        # One place became free, so at most one waiter can go on. min() takes the first of equals.
        able = [each for each in self._waiting if self._has_place(each[0]) and not each[1].done()]
        if able:
            chosen = min(able, key=lambda each: self._held[each[0]])
            self._waiting.remove(chosen)
            self._take(chosen[0])
            chosen[1].set_result(None)


class KeyedLock(KeyedLimit):
    """One lock per key, removed when no task holds or awaits it; waiters get it in their order."""

    def __init__(self) -> None:
        super().__init__(per_key=1)
