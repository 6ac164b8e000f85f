"""Event-loop watchdog: measures the loop's lag, names what holds it, and ends a guest that holds it for long.

The server has one event loop for all accounts. Reading from a guest and from a client yields to it often, so
it should never be held: by a long computation, or an answer that takes very long to parse.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from stead.deadlines import scaled
from stead.logs import get_logger

STUCK_AFTER = scaled(10.0)
"""Seconds without a turn of the event loop after which a connection to a guest is closed."""
SLOW_AFTER = 0.1
"""Seconds without a turn of the event loop that are worth a warning."""
_TICK = 0.05
_WARNING_EVERY = 1.0
"""Seconds between two warnings: a host without free CPUs would fill the log."""

log = get_logger("stead.watchdog")

_work: ContextVar[Any] = ContextVar("work")
_work_of_task: "WeakKeyDictionary[asyncio.Task[Any], Any]" = WeakKeyDictionary()
_CONTEXT_IS_KNOWN = hasattr(asyncio.Task, "get_context")
"""Python 3.11 does not tell the context of another task: what its child tasks work on stays unknown."""
_OWN_CODE = f"{os.sep}stead{os.sep}"

_current: tuple[str, socket.socket] | None = None


def works_on(work: object) -> None:
    """Note what the running task works on, such as a call: its text and its `trace` are in warnings."""
    _work.set(work)
    if not _CONTEXT_IS_KNOWN and (task := asyncio.current_task()) is not None:
        _work_of_task[task] = work


def parsing(guest: str, link: socket.socket) -> None:
    """Note whose data the event loop parses from now on."""
    global _current
    _current = guest, link


class Watchdog:
    """Watches one event loop from a thread of its own."""

    def __init__(
        self,
        stuck_after: float = STUCK_AFTER,
        slow_after: float = SLOW_AFTER,
        measured: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`measured` gets the lag of the loop, in seconds, at each tick."""
        self._stuck_after = stuck_after
        self._slow_after = slow_after
        self._measured = measured
        self._tick_every = min(_TICK, stuck_after / 4)
        self._turned = time.monotonic()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._held_by: dict[str, str] = {}
        self._warned = -_WARNING_EVERY
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._watch, name="stead-watchdog", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._turned = time.monotonic()
        self._task = asyncio.create_task(self._tick())
        self._thread.start()

    async def close(self) -> None:
        self._stop.set()
        self._thread.join()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _tick(self) -> None:
        global _current
        cpu = time.thread_time()
        while True:
            self._turned = time.monotonic()
            # What was parsed before this turn did not hold the loop.
            _current = None
            await asyncio.sleep(self._tick_every)
            lag = max(0.0, time.monotonic() - self._turned - self._tick_every)
            self._measured(lag)
            used = time.thread_time() - cpu
            cpu += used
            if lag > self._slow_after:
                self._warn(lag, used)
            self._held_by = {}

    def _warn(self, lag: float, cpu: float) -> None:
        """`cpu` far below `lag`: the host had no CPU for the loop, or the loop waited for a disk."""
        now = time.monotonic()
        if now - self._warned >= _WARNING_EVERY:
            self._warned = now
            log.warning(
                "event loop was held", ms=round(lag * 1000), cpu_ms=round(cpu * 1000), **self._held_by
            )

    def _watch(self) -> None:
        stuck_check = self._turned
        while not self._stop.wait(self._tick_every):
            now = time.monotonic()
            held = now - self._turned
            if held > self._slow_after and not self._held_by:
                self._held_by = self._running()
            if held > self._stuck_after and now - stuck_check > self._stuck_after / 4:
                stuck_check = now
                self._end_exchange(held)

    def _running(self) -> dict[str, str]:
        """What the loop's task works on, and where it is. Code in C lets this thread run when it ends."""
        found = {"at": _place(sys._current_frames().get(self._loop_thread))}
        task = asyncio.current_task(self._loop)
        if task is None:
            return found
        known: Any = task
        work = known.get_context().get(_work) if _CONTEXT_IS_KNOWN else _work_of_task.get(task)
        if work is None:
            return {**found, "task": task.get_name()}
        return {**found, "call": str(work), "trace": str(getattr(work, "trace", ""))}

    def _end_exchange(self, stuck: float) -> None:
        current = _current
        if current is None:
            log.error("event loop is stuck", seconds=round(stuck, 1), **self._held_by)
            return
        guest, link = current
        log.error("event loop is stuck: closing the connection to a guest", vm=guest, seconds=round(stuck, 1))
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


def _place(frame: FrameType | None) -> str:
    """The innermost line of Stead's own code."""
    while frame is not None and _OWN_CODE not in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition(_OWN_CODE)[2]}:{frame.f_lineno}"


@contextlib.asynccontextmanager
async def watching_the_loop(measured: Callable[[float], None] = lambda _: None) -> AsyncIterator[None]:
    """Watch the running event loop during this block."""
    watchdog = Watchdog(measured=measured)
    watchdog.start()
    try:
        yield
    finally:
        await watchdog.close()
