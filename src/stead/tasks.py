"""Concurrency: cancellation, threads by purpose, background tasks, single flight."""

import asyncio
import contextlib
import contextvars
import functools
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, ParamSpec, Self, TypeVar

from stead.errors import ServerStopping, SteadError
from stead.logs import get_logger
from stead.shares import KeyedLimit

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


# Threads

_account: ContextVar[Hashable] = ContextVar("account", default=None)


def work_for(account: Hashable) -> None:
    """The running task, and those that it starts, work for this account; None: for the server itself."""
    _account.set(account)


@contextlib.contextmanager
def working_for(account: Hashable) -> Iterator[None]:
    """The block works for this account; None: for the server itself."""
    token = _account.set(account)
    try:
        yield
    finally:
        _account.reset(token)


_CPUS = os.cpu_count() or 1


class Threads(Enum):
    """Executors by purpose, so that one kind of work cannot take the threads of another.

    Where work takes long, each account has a share of the threads, and free ones go to accounts in fair
    order. Work of the server itself has no share. A function never waits for another one of its kind.
    Name lookups have no threads: they are asynchronous.
    """

    FILES = "files", 16, None
    """Small work on files of this host, that ends within milliseconds."""
    QUERIES = "queries", 8, 4
    """Reads of the database that may be slow."""
    COPIES = "copies", 2 * (4 + _CPUS), 4 + _CPUS
    """Memory, disks and images of VMs: seconds each."""
    MEASUREMENTS = "measurements", 2, None
    """What accounts take of the disk. It decides whose VMs are paused, so it waits for no work of theirs."""
    OBJECTS = "objects", 16, 8
    """Pieces of LFS objects."""
    PARSING = "parsing", 2 + _CPUS, (2 + _CPUS) // 2
    """What tenants sent or asked for: archives, search results, patterns, large bodies and answers."""
    TREES = "trees", 4, 2
    """Whole repositories: measured, removed, given to another user."""

    def __init__(self, label: str, most: int, share: int | None) -> None:
        self._executor = ThreadPoolExecutor(most, thread_name_prefix=f"stead-{label}")
        self._places = None if share is None else KeyedLimit(most, share)

    async def run(self, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Run a function in a thread and always wait for its end: threads cannot be cancelled.

        A caller that undoes the work after a cancellation can rely on the thread having ended.
        """
        context = contextvars.copy_context()
        work = functools.partial(context.run, function, *arguments, **options)
        account = _account.get()
        if self._places is None or account is None:
            return await finished(self._start(work))
        release = self._places.try_acquire(account)
        if release is None:
            return await finished(self._run_in_turn(self._places, account, work))
        try:
            return await finished(self._start(work))
        finally:
            release()

    async def _run_in_turn(self, places: KeyedLimit, account: Hashable, work: Callable[[], T]) -> T:
        async with places.hold(account):
            return await finished(self._start(work))

    def _start(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._executor, work)


async def in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run small work on files in a thread, see `Threads`."""
    return await Threads.FILES.run(function, *arguments, **options)


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

    def running(self, key: Hashable) -> bool:
        """Whether the next caller of this key joins a call."""
        return key in self._calls

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
