"""Pre-forked launchers under a user of git, each of which becomes a git command on request.

Starting a process, switching its user and starting git take about equally long; this leaves only the last
step.
"""

import asyncio
import contextlib
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from stead.launcher import Launch, waiting
from stead.processes import EXPENDABLE, set_oom_score
from stead.tasks import cancel_and_wait

READY = 4
_REFILL_AFTER = 0.05
"""Seconds to wait before refilling the pool, so as not to delay the request that took a process."""


class PreforkPool:
    """A pool of launcher processes; they exit when their stdin pipe is closed."""

    def __init__(
        self,
        confine: Callable[[], Sequence[str]],
        environment: Mapping[str, str],
        limit: int,
        options: Sequence[str] = (),
    ) -> None:
        """`confine` returns the command prefix that switches to the user.

        Launchers obey `options` ahead of time, and leave them out later.
        """
        self._options = options
        self._confine = confine
        self._environment = environment
        self._limit = limit
        self._ready: deque[Process] = deque()
        self._refilling: asyncio.Task[None] | None = None

    def launch(self, launch: Launch) -> Process | None:
        """A launcher that becomes this program; None if none is ready."""
        order = launch.order(self._options)
        self._refill()
        while self._ready:
            process = self._ready.popleft()
            if process.returncode is None and process.stdin is not None:
                process.stdin.write(order)
                return process
            _close_pipes(process)
        return None

    def _refill(self) -> None:
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        await asyncio.sleep(_REFILL_AFTER)
        # If a launcher cannot start, the direct start of git reports the error.
        with contextlib.suppress(OSError):
            while len(self._ready) < READY:
                process = await asyncio.create_subprocess_exec(
                    *self._confine(),
                    *waiting(self._options),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    env=self._environment,
                    cwd="/",
                    start_new_session=True,
                    limit=self._limit,
                )
                set_oom_score(process.pid, EXPENDABLE)
                self._ready.append(process)

    async def close(self) -> None:
        """Stop all launchers."""
        if self._refilling is not None:
            await cancel_and_wait(self._refilling)
        for process in self._ready:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            _close_pipes(process)
        self._ready.clear()


def _close_pipes(process: Process) -> None:
    # asyncio closes the pipes only here.
    process._transport.close()  # type: ignore[attr-defined]
