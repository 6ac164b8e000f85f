"""Processes that are git's user already, and wait to be told which git to become.

To start a process, to make it another user's and to start git in it are about equally slow. With this only
the last is left to be waited for.
"""

import asyncio
import contextlib
import os
import shlex
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence

READY = 4
_REFILL_AFTER = 0.05
"""Seconds: whoever has just been given one is not to be disturbed."""
_LONGEST = 4096
"""Bytes of an order: it is read one by one."""
# It reads no further than the end of the line: what comes after it is for git.
_WAIT = 'IFS= read -r order && eval "$order"'


class Launchers:
    """Some of them; they end with whoever has the other end of their pipes."""

    def __init__(self, drop: Sequence[str], environment: Mapping[str, str], limit: int) -> None:
        """`drop` is the command that makes another command git's user's."""
        self._command = [*drop, "sh", "-c", _WAIT]
        self._environment = environment
        self._limit = limit
        self._ready: deque[Process] = deque()
        self._refilling: asyncio.Task[None] | None = None

    def take(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        quiet: bool = False,
        memory: int | None = None,
        file: int | None = None,
    ) -> Process | None:
        """One that becomes this command, with all of this environment; None when there is none for it.

        It may have so many bytes of memory, and write so many to one file.
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
            _let_go(process)
        return None

    def _refill(self) -> None:
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        await asyncio.sleep(_REFILL_AFTER)
        # Where it cannot be done, whoever starts a git without this hears why.
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
                self._ready.append(process)

    async def close(self) -> None:
        """Have them all gone."""
        if self._refilling is not None:
            self._refilling.cancel()
            await asyncio.gather(self._refilling, return_exceptions=True)
        for process in self._ready:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            _let_go(process)
        self._ready.clear()


def _let_go(process: Process) -> None:
    # Its pipes are closed nowhere else.
    process._transport.close()  # type: ignore[attr-defined]


def _bounds(memory: int | None, file: int | None) -> list[str]:
    """The shell counts memory in KiB, and files in blocks of half of that."""
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
    """A line of shell; None when it would be long, or has what a shell may not take as it is."""
    given = [
        f"{name}={shlex.quote(value)}" for name, value in environment.items() if known.get(name) != value
    ]
    silence = ["2>/dev/null"] if quiet else []
    line = os.fsencode(" ".join([*bounds, *given, "exec", shlex.join(command), *silence]))
    return None if len(line) > _LONGEST or not line.isascii() or b"\n" in line else line + b"\n"
