"""Repository maintenance: repack, pack-refs, bitmaps, and removal of stale temporary files."""

import asyncio
import contextlib
import functools
import os
import re
import shutil
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

from stead.errors import SteadError
from stead.logs import get_logger
from stead.repos.errors import RepoDamaged
from stead.repos.folders import folder_below
from stead.repos.git import Git
from stead.repos.repository import Repository
from stead.shares import KeyedLimit
from stead.tasks import SingleFlight

MAX_PACKS = 50
"""Each push and each API commit adds a pack, and every reader searches all packs."""
MAX_LOOSE_REFS = 1000
"""Each ref is a file until pack-refs."""
BITMAP_FROM = 1 << 20
"""Minimum bytes for bitmap indexes, which speed up clones."""
ORPHANS_GRACE = 60.0
"""Seconds for git processes of a previous server to exit."""
TIMEOUT = 3600.0
_AT_ONCE = 2
"""Repacks and prunes, one of an account: the repositories of one do not keep those of others waiting."""
_SPARE = 4 << 20
_STALE_FILES = {
    (): r".*\.lock|packed-refs\.new|fast_import_crash_.*",
    ("refs",): r".*\.lock",
    ("objects",): r".*\.(lock|keep)|\.?tmp[_-].*",
    ("lfs", "incoming"): r".*",
}
"""Locks and temporary files of killed processes, by folder of a repository."""

log = get_logger("stead.repos")

AccountOf = Callable[[str], Awaitable[str | None]]
"""The account that a repository belongs to, by its id; None if it was deleted."""
Repacked = Callable[[str], Awaitable[object]]
"""Callback with the id of a repository whose size changed."""


class Housekeeping:
    def __init__(self, git: Git, account_of: AccountOf, repacked: Repacked) -> None:
        self._git = git
        self._account_of = account_of
        self._repacked = repacked
        self.slots = KeyedLimit(_AT_ONCE, 1)
        """Of background jobs with heavy disk writes, by account."""
        self._repacks = SingleFlight[None]()

    def schedule(self, repository: Repository, loose_refs: int = 0) -> asyncio.Task[None] | None:
        """Repack a repository in the background if it has too many packs or loose refs."""
        if loose_refs > MAX_LOOSE_REFS or _needs_repack(repository.path):
            return self._repacks.start(repository.id, functools.partial(self._repack, repository))
        return None

    async def _repack(self, repository: Repository) -> None:
        async with self.slots.hold(await self._account_of(repository.id)):
            if not has_room(repository.path):
                log.info("repack skipped: disk full", repo=repository.id)
                return
            try:
                # Geometric repack: merge packs of similar size, so that large ones are not rewritten each
                # time. Unreachable objects are kept: they may be referenced soon.
                options = ("-d", "-q", "--geometric=2", "--write-midx", "--write-bitmap-index")
                await self._git.run(repository.path, "repack", *options, timeout=TIMEOUT)
                await self._git.run(repository.path, "pack-refs", "--all")
                graph = ("commit-graph", "write", "--reachable", "--split")
                await self._git.run(repository.path, *graph, timeout=TIMEOUT)
            except SteadError as error:
                log.warning("repack failed", repo=repository.id, error=str(error))
        await self._repacked(repository.id)

    async def join(self) -> None:
        """Wait for running repacks."""
        await self._repacks.join()

    async def close(self) -> None:
        await self._repacks.close()


def _needs_repack(path: Path) -> bool:
    try:
        with os.scandir(path / "objects" / "pack") as found:
            entries = list(found)
        packs = [entry for entry in entries if entry.name.endswith(".pack")]
        if len(packs) > MAX_PACKS:
            return True
        indexed = any(entry.name.endswith(".bitmap") for entry in entries)
        return not indexed and sum(pack.stat().st_size for pack in packs) > BITMAP_FROM
    except FileNotFoundError:
        return False


def has_room(path: Path) -> bool:
    """Whether there is space to write all packs again: an aborted repack leaves its files behind."""
    with contextlib.suppress(FileNotFoundError):
        size = sum(pack.stat().st_size for pack in (path / "objects" / "pack").glob("*.pack"))
        return shutil.disk_usage(path).free > 2 * size + _SPARE
    return False


def remove_stale_files(folder: Path, before: float) -> None:
    """Remove locks and temporary files older than `before`: their writers ended with the server.

    Stale locks would block all later writes, and temporary files use space that is not counted.
    """
    for repository in folder.glob("??/*.git"):
        for place, pattern in _STALE_FILES.items():
            try:
                with folder_below(repository, *place) as top:
                    _remove_stale(top, repository.joinpath(*place), pattern, before, recursive=bool(place))
            except FileNotFoundError:
                continue
            except RepoDamaged as error:
                log.error("cannot tidy up a repository", path=str(repository), error=str(error))


def _remove_stale(top: int, path: Path, pattern: str, before: float, *, recursive: bool) -> None:
    for above, folders, files, inside in os.fwalk(dir_fd=top):
        for name in [name for name in (*folders, *files) if re.fullmatch(pattern, name)]:
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=inside, follow_symlinks=False)
                if status.st_mtime >= before:
                    continue
                log.warning("removed incomplete repository", path=str(path / above / name))
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(name, ignore_errors=True, dir_fd=inside)
                else:
                    os.unlink(name, dir_fd=inside)
        if not recursive:
            break
