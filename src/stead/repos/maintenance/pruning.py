"""Pruning: removes unreachable objects after a grace period.

Objects become unreachable by forced pushes, deletions, and API commits that lost a race. The grace period
starts when git first finds an object unreachable; until then it is in a cruft pack, which records that time.
Writers run concurrently: expired packs are first moved aside, and restored if an object in them is referenced
again.
"""

import asyncio
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stead.errors import SteadError
from stead.logs import get_logger
from stead.repos.errors import DiskFull
from stead.repos.folders import folder_below, names_in
from stead.repos.git import GitFailed
from stead.repos.git_messages import GitMessage
from stead.repos.maintenance.housekeeping import TIMEOUT, AccountOf, has_room
from stead.repos.quotas import RepoQuotas, SupersededRef
from stead.repos.repository import Repository
from stead.shares import KeyedLimit
from stead.store.repos import RepoRow, RepoStore
from stead.supervision import repeat
from stead.tasks import Threads

GRACE = 14 * 86400.0
"""Seconds that an object must be unreachable before it is removed."""
EVERY = 86400.0
"""Seconds between two prune runs of a repository."""
_CHECK_EVERY = 600.0
_MAX_WAIT = 900.0
"""Seconds to wait for writers; after that the next run tries again."""
_MAX_COMPARED = 1000
_REPACKS = 3
"""Attempts while pushes move refs to commits that are not in the packs being indexed."""
_EXPIRED = "expired"
_LOOSE = re.compile("[0-9a-f]{2}")
"""Folders of objects that are in no pack."""

log = get_logger("stead.repos")


class Pruning:
    def __init__(
        self,
        store: RepoStore,
        quotas: RepoQuotas,
        slots: KeyedLimit,
        account_of: AccountOf,
        repository_of: Callable[[str], Repository],
    ) -> None:
        self._store = store
        self._quotas = quotas
        self._slots = slots
        self._account_of = account_of
        self._repository_of = repository_of
        self._rescheduled: set[str] = set()

    async def schedule_if_unreachable(
        self, repository: Repository, superseded: Sequence[SupersededRef]
    ) -> None:
        """After a ref update: if it left objects unreachable, schedule a prune within a day."""
        if superseded and await self._leaves_unreachable(repository, superseded):
            self._rescheduled.add(repository.id)
            await self._store.prune_by(repository.id, time.time_ns() + _nanoseconds(EVERY))

    async def _leaves_unreachable(self, repository: Repository, superseded: Sequence[SupersededRef]) -> bool:
        """Whether the updates were not all fast-forward; True if unknown."""
        if len(superseded) > _MAX_COMPARED or any(new is None for _, new in superseded):
            return True
        lines = "".join(f"{old}\n^{new}\n" for old, new in superseded)
        finished = await repository.finish("rev-list", "--max-count=1", "--stdin", stdin=lines.encode())
        return finished.status != 0 or bool(finished.stdout)

    async def run(self, folder: Path) -> None:
        """Background loop: prune repositories when they are due."""
        # Restore packs that an interrupted prune moved aside.
        await Threads.TREES.run(_restore_all_expired, folder)
        await repeat("prune check", self._prune_all_due, _CHECK_EVERY, at_once=True)

    async def _prune_all_due(self) -> None:
        for row in await self._store.due(time.time_ns()):
            try:
                await self._prune_due(row)
            except (SteadError, OSError) as error:
                log.warning("prune failed", repo=row.id, error=str(error))

    async def _prune_due(self, row: RepoRow) -> None:
        self._rescheduled.discard(row.id)
        # Schedule the next run first, in case this one fails or the server stops.
        await self._store.update(row.id, prune_at=time.time_ns() + _nanoseconds(EVERY))
        again = await self.prune(self._repository_of(row.id))
        if row.id not in self._rescheduled:
            at = None if again is None else time.time_ns() + _nanoseconds(again)
            await self._store.update(row.id, prune_at=at)

    async def prune(self, repository: Repository, grace: float = GRACE) -> float | None:
        """Remove objects that have been unreachable for `grace` seconds.

        Returns the seconds until the next objects expire; None if there are no unreachable objects.
        """
        git, path = repository.git, repository.path
        account = await self._account_of(repository.id)
        async with self._slots.hold(account):
            if not has_room(path):
                raise DiskFull
            await Threads.TREES.run(_restore_expired, path)
            await git.run(path, "commit-graph", "write", "--reachable", "--split=replace", timeout=TIMEOUT)
            await Threads.TREES.run(_touch_objects, path)
            for attempt in range(_REPACKS):
                try:
                    await self._repack(repository, grace)
                    break
                except GitFailed as error:
                    if attempt == _REPACKS - 1 or not GitMessage.BITMAP_RACE.found_in(error.finished.stderr):
                        raise
        await repository.cat_files.stop(path)
        if expired := _expired_packs(path):
            if not await self._is_complete_without_expired(repository):
                log.info("prune aborted: object referenced again", repo=repository.id)
                await Threads.TREES.run(_restore_expired, path)
                return EVERY
            await Threads.TREES.run(_remove, expired)
        await self._quotas.measure(repository.id)
        return grace if any((path / "objects" / "pack").glob("*.mtimes")) else None

    async def _repack(self, repository: Repository, grace: float) -> None:
        path = repository.path
        try:
            await repository.git.run(
                path,
                "repack",
                "--cruft",
                f"--cruft-expiration={int(time.time() - grace)}",
                f"--expire-to={path / _EXPIRED}",
                *("-d", "-q", "--write-midx", "--write-bitmap-index"),
                timeout=TIMEOUT,
            )
        except BaseException:
            await Threads.TREES.run(_restore_expired, path)
            raise

    async def _is_complete_without_expired(self, repository: Repository) -> bool:
        """Whether the packs moved aside are still unreferenced after current writers finished."""
        if not await _is_complete(repository):
            return False
        try:
            async with asyncio.timeout(_MAX_WAIT):
                await self._quotas.wait_for_writers(repository.id)
        except TimeoutError:
            return False
        return await _is_complete(repository)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


async def _is_complete(repository: Repository) -> bool:
    try:
        everything = "rev-list", "--objects", "--all", "--quiet"
        finished = await repository.finish(*everything, timeout=TIMEOUT)
    except SteadError:
        return False
    return finished.status == 0


def _touch_objects(path: Path) -> None:
    """Set the time of all objects outside cruft packs to now, where their grace period starts."""
    with folder_below(path, "objects", "pack") as packs:
        names = set(names_in(packs))
        for name in names:
            if name.endswith(".pack") and f"{name.removesuffix('.pack')}.mtimes" not in names:
                os.utime(name, dir_fd=packs, follow_symlinks=False)
    with folder_below(path, "objects") as objects:
        for folder in filter(_LOOSE.fullmatch, names_in(objects)):
            with folder_below(path, "objects", folder) as loose:
                for name in names_in(loose):
                    os.utime(name, dir_fd=loose, follow_symlinks=False)


def _expired_packs(path: Path) -> list[Path]:
    """The files moved aside, each pack before its index: readers that see an index expect its pack."""
    return sorted(path.glob(f"{_EXPIRED}-*"), key=lambda part: part.suffix == ".idx")


def _restore_expired(path: Path) -> None:
    if not (expired := _expired_packs(path)):
        return
    with folder_below(path, "objects", "pack") as packs:
        for part in expired:
            os.rename(part, part.name.replace(_EXPIRED, "pack", 1), dst_dir_fd=packs)


def _restore_all_expired(folder: Path) -> None:
    for path in folder.glob("??/*.git"):
        _restore_expired(path)


def _remove(expired: list[Path]) -> None:
    for part in expired:
        part.unlink()
