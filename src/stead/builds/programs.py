"""Programs that a set-up runs in the guest; their output goes into the build's log."""

import collections
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

from stead.builds.errors import ProgramFailed
from stead.builds.records import Part
from stead.guest.execution import Ended
from stead.machines.machine import Machine

MAX_LINES = 2000
"""Lines of one program that are logged; a failure shows the end of the output in any case."""
MAX_LINE = 2000
_TAIL_LINES = 60
_TAIL_CHARACTERS = 8000


async def run_program(
    machine: Machine,
    part: Part,
    what: str,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: AsyncIterator[bytes] | None = None,
) -> None:
    """Run a program; ProgramFailed, with the end of its output, unless it exits with 0."""
    tail: collections.deque[str] = collections.deque(maxlen=_TAIL_LINES)
    noted = 0
    async with contextlib.aclosing(_lines(machine, argv, env or {}, stdin)) as lines:
        async for line in lines:
            if isinstance(line, Ended):
                if line.exit_code != 0:
                    output = "".join(f"{each}\n" for each in tail)[-_TAIL_CHARACTERS:]
                    raise ProgramFailed(part.step, what, line.exit_code, output)
                continue
            tail.append(line)
            noted += 1
            if noted <= MAX_LINES:
                await part.note(line)
            elif noted == MAX_LINES + 1:
                await part.note(f"(output limited to {MAX_LINES} lines)")


async def _lines(
    machine: Machine, argv: Sequence[str], env: Mapping[str, str], stdin: AsyncIterator[bytes] | None
) -> AsyncGenerator[str | Ended, None]:
    """Lines of standard output and standard error, then the exit."""
    rest = {"stdout": b"", "stderr": b""}
    async with contextlib.aclosing(machine.stream(argv, env=env, stdin=stdin)) as events:
        async for event in events:
            if isinstance(event, Ended):
                for left in rest.values():
                    if left.strip():
                        yield _readable(left)
                yield event
                return
            *lines, last = (rest[event.stream] + event.data).split(b"\n")
            # Bound the memory for a program that prints no line breaks.
            rest[event.stream] = last[-65_536:]
            for line in lines:
                if line.strip():
                    yield _readable(line)


def _readable(line: bytes) -> str:
    """A line as a terminal shows it: text before a carriage return is overwritten."""
    text = line.decode(errors="replace").rstrip().rsplit("\r", 1)[-1].replace("\0", "")
    return text[:MAX_LINE]
