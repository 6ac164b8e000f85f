"""Pre-forked processes under a user of git, which exec a git command on request.

Starting a process, switching its user and starting git take about equally long; this leaves only the last
step.
"""

import asyncio
import contextlib
import os
import shlex
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence

from stead.processes import EXPENDABLE, set_oom_score
from stead.tasks import cancel_and_wait

READY = 4
_REFILL_AFTER = 0.05
"""Seconds to wait before refilling the pool, so as not to delay the request that took a process."""
_MAX_COMMAND = 4096
"""Maximum bytes of a command line: the shell reads it byte by byte."""
# The shell reads to the end of the line only: the rest of the input is for git.
_WAIT = 'IFS= read -r order && eval "$order"'


class PreforkPool:
    """A pool of launcher processes; they exit when their stdin pipe is closed."""

    def __init__(self, drop: Sequence[str], environment: Mapping[str, str], limit: int) -> None:
        """`drop` is the command prefix that switches to the user."""
        self._command = [*drop, "sh", "-c", _WAIT]
        self._environment = environment
        self._limit = limit
        self._ready: deque[Process] = deque()
        self._refilling: asyncio.Task[None] | None = None

    def launch(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        quiet: bool = False,
        memory: int | None = None,
        file: int | None = None,
    ) -> Process | None:
        """A process that runs this command with this environment; None if no launcher can.

        `memory` and `file` are limits in bytes.
        """
        order = _order(command, environment, self._environment, _bounds(memory, file), quiet=quiet)
        if order is None:
            return None
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
                    *self._command,
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


def _bounds(memory: int | None, file: int | None) -> list[str]:
    """ulimit commands: the shell counts memory in KiB and file sizes in 512-byte blocks."""
    limits = [] if memory is None else [f"ulimit -d {memory // 1024} &&"]
    return limits if file is None else [*limits, f"ulimit -f {file // 512} &&"]


def _order(
    command: Sequence[str],
    environment: Mapping[str, str],
    known: Mapping[str, str],
    bounds: Sequence[str],
    *,
    quiet: bool,
) -> bytes | None:
    """The command as one shell line; None if it is too long or has unsafe characters."""
    given = [
        f"{name}={shlex.quote(value)}" for name, value in environment.items() if known.get(name) != value
    ]
    silence = ["2>/dev/null"] if quiet else []
    line = os.fsencode(" ".join([*bounds, *given, "exec", shlex.join(command), *silence]))
    return None if len(line) > _MAX_COMMAND or not line.isascii() or b"\n" in line else line + b"\n"
