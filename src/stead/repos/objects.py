"""Pool of `git cat-file` processes that read objects."""

import asyncio
import contextlib
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stead.repos.errors import AmbiguousRevision, RepoDamaged, TooLarge
from stead.repos.git import Git, GitProcess
from stead.repos.names import SHA
from stead.shares import MemoryReservation, Reserve, unlimited
from stead.supervision import repeat
from stead.tasks import cancel_and_wait

MAX_PROCESSES = 32
IDLE = 60.0
"""Seconds after which an unused reader is stopped."""
MAX_OBJECT = 64 << 20
"""Maximum bytes of an object, or of the objects of one request, that are held in memory."""
_PIECE = 1 << 20
_ANSWER_TIMEOUT = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class ObjectInfo:
    sha: str
    kind: str
    size: int


class CatFile:
    """One `git cat-file --batch-command` process, for sequential requests."""

    def __init__(self, process: GitProcess) -> None:
        self._process = process

    @classmethod
    async def start(cls, git: Git, repo: Path) -> "CatFile":
        return cls(await git.start(repo, "cat-file", "--batch-command", "-z", quiet=True))

    @property
    def alive(self) -> bool:
        return self._process.alive

    async def close(self) -> None:
        await self._process.end()

    async def infos(self, names: Sequence[str]) -> list[ObjectInfo | None]:
        """Type and size of each name; None for missing ones."""
        return await self._ask("info", names, self._header)

    async def contents(
        self, names: Sequence[str], most: int = MAX_OBJECT, reserve: Reserve = unlimited
    ) -> list[tuple[ObjectInfo, bytes] | None]:
        """Whole objects, in order; None for missing ones.

        TooLarge if they have more than `most` bytes together. `reserve` is asked for memory of large ones.
        """
        memory, left = MemoryReservation(reserve), most

        async def content(name: str) -> tuple[ObjectInfo, bytes] | None:
            nonlocal left
            info = await self._header(name)
            if info is None:
                return None
            if info.size > left:
                what = f"object {info.sha} has {info.size} bytes"
                if info.size <= most:
                    what = f"{len(names)} objects have more than {most} bytes together"
                raise TooLarge(f"{what} (max {most} per response): clone the repository")
            left -= info.size
            await memory.add(info.size)
            return info, await self._data(info.size)

        return await self._ask("contents", names, content)

    async def _ask(self, command: str, names: Sequence[str], read: Callable[[str], Awaitable[T]]) -> list[T]:
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            sending = asyncio.create_task(self._send(command, names))
            try:
                found = [await read(name) for name in names]
                await sending
                return found
            finally:
                # After an error, git takes no more names, because nothing reads its answers.
                await cancel_and_wait(sending)

    async def _send(self, command: str, names: Sequence[str]) -> None:
        for name in names:
            self._process.stdin.write(f"{command} {name}".encode() + b"\0")
            await self._process.stdin.drain()

    async def _data(self, size: int) -> bytes:
        if size <= _PIECE:
            return (await self._process.stdout.readexactly(size + 1))[:-1]
        # BytesIO gives its bytes away without a copy.
        data = io.BytesIO()
        while (left := size - data.tell()) > 0:
            data.write(await self._process.stdout.readexactly(min(left, _PIECE)))
        await self._process.stdout.readexactly(1)
        return data.getvalue()

    async def _header(self, name: str) -> ObjectInfo | None:
        line = await self._process.stdout.readuntil(b"\n")
        words = line.split()
        if len(words) == 3 and SHA.fullmatch(words[0].decode(errors="replace")) and words[2].isdigit():
            return ObjectInfo(words[0].decode(), words[1].decode(), int(words[2]))
        # Git echoes a missing name, which may contain line ends.
        echoed = name.encode()
        while len(line) < len(echoed) + 2 or not line.startswith(echoed):
            line += await self._process.stdout.readuntil(b"\n")
        status = line[len(echoed) :].strip()
        if status == b"ambiguous":
            raise AmbiguousRevision(name)
        if status != b"missing":
            raise RepoDamaged(f"git cannot read {name}: {status.decode(errors='replace')}")
        return None


class CatFilePool:
    """The pool: a bounded number of readers, each used by one request at a time."""

    def __init__(self, git: Git, most: int = MAX_PROCESSES) -> None:
        self._git = git
        self._most = most
        self._idle: dict[CatFile, tuple[Path, float]] = {}
        """Readers with their repositories and the times of their last use, which is their order."""
        self._sweeper: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def lease(self, repo: Path) -> AsyncIterator[CatFile]:
        """A reader of this repository. A reader that fails or is interrupted is not reused."""
        reader = self._pop_idle(repo) or await CatFile.start(self._git, repo)
        try:
            yield reader
        except BaseException:
            await reader.close()
            raise
        if not reader.alive:
            await reader.close()
            return
        self._idle[reader] = repo, time.monotonic()
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(repeat("sweep of idle git readers", self._sweep, IDLE / 4))
        while len(self._idle) > self._most:
            await self._drop_oldest()

    def _pop_idle(self, repo: Path) -> CatFile | None:
        for reader in [each for each, (path, _) in reversed(self._idle.items()) if path == repo]:
            del self._idle[reader]
            if reader.alive:
                return reader
        return None

    async def _drop_oldest(self) -> None:
        reader = next(iter(self._idle))
        del self._idle[reader]
        await reader.close()

    async def _sweep(self) -> None:
        while self._idle and next(iter(self._idle.values()))[1] < time.monotonic() - IDLE:
            await self._drop_oldest()

    async def stop(self, repo: Path) -> None:
        """Stop the readers of a repository that is about to be deleted."""
        for reader in [each for each, (path, _) in self._idle.items() if path == repo]:
            # A request may have taken it meanwhile.
            if self._idle.pop(reader, None) is not None:
                await reader.close()

    async def close(self) -> None:
        if self._sweeper is not None:
            await cancel_and_wait(self._sweeper)
        while self._idle:
            await self._drop_oldest()
