"""Supervision: what must run as long as the server is started again when it ends, with a growing delay."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn

from stead.errors import SteadError
from stead.logs import get_logger

log = get_logger("stead.supervision")


@dataclass(frozen=True)
class Backoff:
    """Seconds before a restart: from `shortest`, doubled up to `longest`, until a run lasts `healthy`."""

    shortest: float
    longest: float
    healthy: float

    def next(self, last: float | None, lasted: float) -> float:
        """The delay after a run of `lasted` seconds; `last` is the delay before that run."""
        if last is None or lasted > self.healthy:
            return self.shortest
        return min(2 * last, self.longest)


async def keep_running(name: str, run: Callable[[], Awaitable[None]], backoff: Backoff) -> NoReturn:
    """Call `run` again whenever it returns or raises, whatever it raises, until this task is cancelled."""
    clock = asyncio.get_running_loop().time
    delay = None
    while True:
        started = clock()
        error = await _failure_of(run)
        delay = backoff.next(delay, clock() - started)
        details = {"exc_info": error} if error is not None and not _expected(error) else {}
        log.error(f"{name} ended, restarting", error=str(error or "no error"), seconds=delay, **details)
        await asyncio.sleep(delay)


async def _failure_of(run: Callable[[], Awaitable[None]]) -> BaseException | None:
    try:
        await run()
    except asyncio.CancelledError as error:
        # Something that `run` awaited was cancelled; only a cancellation of this task ends it.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error
    except Exception as error:
        return error
    return None


def _expected(error: BaseException) -> bool:
    return isinstance(error, SteadError | OSError)
