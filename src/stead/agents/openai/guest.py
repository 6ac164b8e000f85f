"""Calls into the VM of a session, repeated across broken connections where that is safe."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from stead.sdk import (
    AsyncVm,
    Exited,
    NoAnswerInTime,
    Output,
    ServerUnreachable,
    SteadApiError,
    SteadException,
)

OUTAGE = 60.0
"""Seconds that the server may be unreachable, for example while it restarts, before a call fails."""
_PAUSES = (0.1, 0.25, 0.5, 1.0, 2.0)


Result = TypeVar("Result")


@dataclass(frozen=True)
class Finished:
    """The end of a command, with its output so far if it was killed after its timeout."""

    stdout: bytes
    stderr: bytes
    exit_code: int
    timed_out: bool = False


async def repeated(call: Callable[[], Awaitable[Result]], *, harmless: bool = False) -> Result:
    """Make a call again while the server is unreachable, up to `OUTAGE` seconds.

    Only a call that had no effect is repeated, unless `harmless`: then a second one changes nothing.
    """
    start, attempt = time.monotonic(), 0
    while True:
        try:
            return await call()
        except SteadException as error:
            pause = _PAUSES[min(attempt, len(_PAUSES) - 1)]
            late = time.monotonic() + pause - start > OUTAGE
            if late or not (error.retryable or (harmless and is_outage(error))):
                raise
        attempt += 1
        await asyncio.sleep(pause)


def is_outage(error: SteadException) -> bool:
    """The server was unreachable or is stopping; the request may have been executed."""
    if isinstance(error, NoAnswerInTime):
        return False
    if isinstance(error, ServerUnreachable):
        return True
    return isinstance(error, SteadApiError) and (error.status in (0, 502, 503, 504) or error.retryable)


async def run(
    vm: AsyncVm,
    command: Sequence[str],
    *,
    cwd: str = "/",
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    user: str | None = None,
    timeout: float | None = None,
    harmless: bool = False,
) -> Finished:
    """Run a command to its end. Its output is bytes of any size, also if it is killed after `timeout`."""

    async def once() -> Finished:
        parts: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        events = vm.exec_stream(list(command), cwd=cwd, env=env, stdin=stdin, user=user, timeout=timeout)
        end: Exited | None = None
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Output):
                    parts[event.stream].append(event.data)
                else:
                    end = event
        if end is None:
            raise ServerUnreachable("the stream was cut before the command ended", sent=True)
        stdout, stderr = b"".join(parts["stdout"]), b"".join(parts["stderr"])
        return Finished(stdout, stderr, end.status_code, end.timed_out)

    return await repeated(once, harmless=harmless)
