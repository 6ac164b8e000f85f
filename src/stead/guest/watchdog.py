"""Event-loop watchdog: a thread that ends the exchange with a guest that holds the event loop for too long.

Reading from a guest yields to the loop often, so this should never act. It is the last defence against an
answer that takes very long to parse: the server, which serves all VMs, must not stand still for one of them.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator

from stead.deadlines import scaled
from stead.logs import get_logger

STUCK_AFTER = scaled(10.0)
"""Seconds without a turn of the event loop."""
_TICK = 1.0

log = get_logger("stead.watchdog")

_current: tuple[str, socket.socket] | None = None


def parsing(guest: str, link: socket.socket) -> None:
    """Note whose data the event loop parses from now on."""
    global _current
    _current = guest, link


class Watchdog:
    """Watches one event loop from a thread of its own."""

    def __init__(self, stuck_after: float = STUCK_AFTER) -> None:
        self._stuck_after = stuck_after
        self._turned = time.monotonic()
        self._stop = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._watch, name="stead-watchdog", daemon=True)

    def start(self) -> None:
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
        while True:
            self._turned = time.monotonic()
            # What was parsed before this turn did not hold the loop.
            _current = None
            await asyncio.sleep(min(_TICK, self._stuck_after / 4))

    def _watch(self) -> None:
        while not self._stop.wait(self._stuck_after / 4):
            stuck = time.monotonic() - self._turned
            if stuck > self._stuck_after:
                self._end_exchange(stuck)

    def _end_exchange(self, stuck: float) -> None:
        current = _current
        if current is None:
            log.error("event loop is stuck", seconds=round(stuck, 1))
            return
        guest, link = current
        log.error("event loop is stuck: closing the connection to a guest", vm=guest, seconds=round(stuck, 1))
        with contextlib.suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)


@contextlib.asynccontextmanager
async def watching_the_loop() -> AsyncIterator[None]:
    """Watch the running event loop during this block."""
    watchdog = Watchdog()
    watchdog.start()
    try:
        yield
    finally:
        await watchdog.close()
