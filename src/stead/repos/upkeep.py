"""Repositories kept in order: few packs, not one for each push; indexes for quick clones; no old locks."""

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from stead.errors import SteadError
from stead.logs import get_logger
from stead.repos.git import Git
from stead.repos.repository import Repository
from stead.tasks import in_thread

MAX_PACKS = 50
"""Each push and each commit by API leaves one; every reader looks through all of them."""
WORTH_INDEXING = 1 << 20
"""Bytes from which on a repository has bitmaps, by which clones need not walk through its history."""
_AT_ONCE = 1
_TIMEOUT = 3600.0
_ORPHANS_GRACE = 60.0
"""Seconds in which a git that outlived its server comes to its end."""

log = get_logger("stead.repos")


class Upkeep:
    def __init__(self, git: Git) -> None:
        self._git = git
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def look(self, repository: Repository) -> None:
        """Join the packs of a repository that was written to, when that is worth it; beside all else."""
        if repository.id not in self._tasks and _untidy(repository.path):
            task = asyncio.create_task(self._join(repository))
            self._tasks[repository.id] = task
            task.add_done_callback(lambda _: self._tasks.pop(repository.id, None))

    async def _join(self, repository: Repository) -> None:
        async with self._turns:
            try:
                # Packs of about the same size are joined, so that large ones are not written again each time,
                # with all that is in them: what nobody refers to may be about to be referred to.
                options = ("-d", "-q", "--geometric=2", "--write-midx", "--write-bitmap-index")
                await self._git.run(repository.path, "repack", *options, timeout=_TIMEOUT)
                await self._git.run(repository.path, "pack-refs", "--all")
                graph = ("commit-graph", "write", "--reachable", "--split")
                await self._git.run(repository.path, *graph, timeout=_TIMEOUT)
            except SteadError as error:
                log.warning("packs could not be joined", repo=repository.id, error=str(error))

    async def settled(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _untidy(path: Path) -> bool:
    try:
        with os.scandir(path / "objects" / "pack") as found:
            entries = list(found)
        packs = [entry for entry in entries if entry.name.endswith(".pack")]
        if len(packs) > MAX_PACKS:
            return True
        indexed = any(entry.name.endswith(".bitmap") for entry in entries)
        return not indexed and sum(pack.stat().st_size for pack in packs) > WORTH_INDEXING
    except FileNotFoundError:
        return False


async def remove_old_locks(folder: Path, started: float) -> None:
    """Remove locks from before this time: whoever held them was ended with the server, or ends soon."""
    await in_thread(_remove_locks, folder, started - _ORPHANS_GRACE)
    await asyncio.sleep(max(0.0, started + _ORPHANS_GRACE - time.time()))
    await in_thread(_remove_locks, folder, started)


def _remove_locks(folder: Path, before: float) -> None:
    for lock in _locks(folder):
        with contextlib.suppress(FileNotFoundError):
            if lock.stat().st_mtime < before:
                log.warning("an old lock was removed", path=str(lock))
                lock.unlink()


def _locks(folder: Path) -> Iterator[Path]:
    for repository in folder.glob("??/*.git"):
        yield from repository.glob("*.lock")
        yield from (repository / "refs").rglob("*.lock")
