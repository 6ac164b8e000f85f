"""Runs git with streamed output and a deadline, and stops it early when enough was read."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from stead.repos.git import Finished, GitFailed
from stead.repos.git_messages import GitMessage
from stead.repos.repository import Repository
from stead.repos.search.query import Query
from stead.tasks import cancel_and_wait

MAX_PRINTED = 64 << 20
MAX_SEARCHED = 64 << 20
"""Maximum bytes of a searched file: git loads it into memory."""
SHA_LINE = 41
"""Bytes of a line with an object id."""
_PIECE = 1 << 20
_MAX_LINE = 16 << 20
_MAX_MEMORY = 512 << 20

OnOutput = Callable[[bytes], bool]
"""Receives output pieces; returns whether more is wanted."""


class LargeFile(Exception):
    """Git stopped at a file that is too large to search."""


async def run(
    repository: Repository,
    arguments: list[str],
    on_output: OnOutput,
    until: float,
    *,
    query: Query | None = None,
    stdin: bytes = b"",
    cwd: Path | None = None,
) -> bool:
    """Run git; returns whether it ran to completion.

    Otherwise it was stopped: at the deadline, when `on_output` had enough, or when it ran out of memory.
    """
    grep = arguments[0] == "grep"
    env = {"GIT_ALLOC_LIMIT": str(MAX_SEARCHED)} if grep else None
    process = await repository.git.start(repository.path, *arguments, cwd=cwd, env=env, memory=_MAX_MEMORY)
    feeding = asyncio.create_task(process.feed(stdin))
    try:
        async with asyncio.timeout_at(until):
            while piece := await process.stdout.read(_PIECE):
                if not on_output(piece):
                    return False
            stderr = await process.errors()
            status = await process.wait()
    except TimeoutError:
        return False
    finally:
        await process.end()
        await cancel_and_wait(feeding)
    # git grep exits with 1 if nothing matches.
    if status not in ((0, 1) if grep else (0,)):
        if grep and GitMessage.ALLOCATION_LIMIT.found_in(stderr):
            raise LargeFile
        if GitMessage.OUT_OF_MEMORY.found_in(stderr):
            return False
        if query is not None:
            query.explain(stderr)
        raise GitFailed(arguments[0], Finished(status, b"", stderr))
    return True


def first_phase(until: float) -> float:
    """The deadline of the first phase, which leaves time to read the results."""
    now = asyncio.get_running_loop().time()
    return now + (until - now) * 0.8


class OutputBuffer:
    """Collects output up to a limit."""

    def __init__(self, most: int = MAX_PRINTED) -> None:
        self._most = most
        self._size = 0
        self._pieces: list[bytes] = []

    def __call__(self, piece: bytes) -> bool:
        self._pieces.append(piece)
        self._size += len(piece)
        return self._size <= self._most

    @property
    def data(self) -> bytes:
        return b"".join(self._pieces)


class LineSplitter:
    """Splits output into lines; very long lines are truncated."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        first, *others = piece.split(b"\n")
        self._keep(first)
        if not others:
            return []
        lines = [b"".join(self._parts), *others[:-1]]
        self._parts, self._size = [], 0
        self._keep(others[-1])
        return lines

    def _keep(self, part: bytes) -> None:
        part = part[: _MAX_LINE - self._size]
        if part:
            self._parts.append(part)
            self._size += len(part)
