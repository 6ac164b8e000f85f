"""Pool of `git cat-file` processes that read objects."""

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stead.repos.errors import AmbiguousRevision, RepoDamaged, TooLarge
from stead.repos.git import Git, GitProcess
from stead.repos.names import SHA
from stead.tasks import cancel_and_wait

MAX_PROCESSES = 32
IDLE = 60.0
"""Seconds after which an unused reader is stopped."""
MAX_OBJECT = 64 << 20
"""Maximum bytes of an object that is held in memory."""
_ANSWER_TIMEOUT = 60.0


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
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            sending = asyncio.create_task(self._send("info", names))
            try:
                return [await self._header(name) for name in names]
            finally:
                await sending

    async def contents(
        self, names: Sequence[str], most: int = MAX_OBJECT
    ) -> list[tuple[ObjectInfo, bytes] | None]:
        """Whole objects, in order; None for missing ones."""
        async with asyncio.timeout(_ANSWER_TIMEOUT):
            sending = asyncio.create_task(self._send("contents", names))
            try:
                return [await self._content(name, most) for name in names]
            finally:
                await sending

    async def _send(self, command: str, names: Sequence[str]) -> None:
        for name in names:
            self._process.stdin.write(f"{command} {name}".encode() + b"\0")
            await self._process.stdin.drain()

    async def _content(self, name: str, most: int) -> tuple[ObjectInfo, bytes] | None:
        info = await self._header(name)
        if info is None:
            return None
        if info.size > most:
            raise TooLarge(
                f"object {info.sha} has {info.size} bytes (max {most} per response): clone the repository"
            )
        data = await self._process.stdout.readexactly(info.size + 1)
        return info, data[:-1]

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
        self._idle: OrderedDict[Path, list[tuple[float, CatFile]]] = OrderedDict()
        self._count = 0
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
        await self._put_back(repo, reader)

    def _pop_idle(self, repo: Path) -> CatFile | None:
        waiting = self._idle.get(repo, [])
        while waiting:
            _, reader = waiting.pop()
            self._count -= 1
            if not waiting:
                del self._idle[repo]
            if reader.alive:
                return reader
        return None

    async def _put_back(self, repo: Path, reader: CatFile) -> None:
        self._idle.setdefault(repo, []).append((time.monotonic(), reader))
        self._idle.move_to_end(repo)
        self._count += 1
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())
        while self._count > self._most:
            await self._drop_oldest()

    async def _drop_oldest(self) -> None:
        repo = next(iter(self._idle))
        _, reader = self._idle[repo].pop(0)
        self._count -= 1
        if not self._idle[repo]:
            del self._idle[repo]
        await reader.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(IDLE / 4)
            old = time.monotonic() - IDLE
            for repo, waiting in list(self._idle.items()):
                while waiting and waiting[0][0] < old:
                    _, reader = waiting.pop(0)
                    self._count -= 1
                    await reader.close()
                if not waiting:
                    self._idle.pop(repo, None)

    async def stop(self, repo: Path) -> None:
        """Stop the readers of a repository that is about to be deleted."""
        for _, reader in self._idle.pop(repo, []):
            self._count -= 1
            await reader.close()

    async def close(self) -> None:
        if self._sweeper is not None:
            await cancel_and_wait(self._sweeper)
        for repo in list(self._idle):
            await self.stop(repo)
