"""Git asked for something that may be much, and ended as soon as enough is known."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from stead.repos.git import Finished, GitFailed, out_of_memory
from stead.repos.repository import Repository
from stead.repos.search_query import Query

MAX_PRINTED = 64 << 20
MAX_SEARCHED = 64 << 20
"""Bytes of a file in which lines are looked for: git has it in memory for that."""
SHA_LINE = 41
"""Bytes of a line with the id of an object."""
_PIECE = 1 << 20
_MAX_LINE = 16 << 20
_MAX_MEMORY = 512 << 20
_TOO_MUCH_AT_ONCE = "attempting to allocate"

Take = Callable[[bytes], bool]
"""Is given what is printed, piece by piece, and tells whether more is wanted."""


class LargeFile(Exception):
    """Git came to a file that is too large to be searched, and stopped there."""


async def run(
    repository: Repository,
    arguments: list[str],
    take: Take,
    until: float,
    *,
    query: Query | None = None,
    stdin: bytes = b"",
    cwd: Path | None = None,
) -> bool:
    """Tells whether git came to its end.

    Else it was ended, at that moment, when `take` had enough, or when it would have taken too much memory.
    """
    grep = arguments[0] == "grep"
    env = {"GIT_ALLOC_LIMIT": str(MAX_SEARCHED)} if grep else None
    process = await repository.git.start(repository.path, *arguments, cwd=cwd, env=env, memory=_MAX_MEMORY)
    feeding = asyncio.create_task(process.feed(stdin))
    try:
        async with asyncio.timeout_at(until):
            while piece := await process.stdout.read(_PIECE):
                if not take(piece):
                    return False
            said = await process.errors()
            status = await process.wait()
    except TimeoutError:
        return False
    finally:
        await process.end()
        feeding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await feeding
    # Of those that look for something, 1 is told when there is nothing.
    if status not in ((0, 1) if grep else (0,)):
        if grep and _TOO_MUCH_AT_ONCE in said:
            raise LargeFile
        if out_of_memory(said):
            return False
        if query is not None:
            query.explain(said)
        raise GitFailed(arguments[0], Finished(status, b"", said))
    return True


def first_part(until: float) -> float:
    """When git has to have found what there is, so that it can still be shown."""
    now = asyncio.get_running_loop().time()
    return now + (until - now) * 0.8


class Gathered:
    """All that is printed, up to so many bytes."""

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


class Lines:
    """Lines out of pieces; of a very long one, only its beginning."""

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
