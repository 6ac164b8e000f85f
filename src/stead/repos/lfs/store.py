"""Git LFS object store: content-addressed files beside each repository."""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stead.files import sync_folder
from stead.repos.errors import DiskFull, RepoError, RepoNotFound, TooLarge
from stead.repos.quotas import QuotaReservation, RepoQuotas
from stead.repos.repository import Repository
from stead.repos.sizes import on_disk
from stead.tasks import in_thread

MAX_OBJECT = 5 << 30
MAX_BATCH = 1000
PIECE = 1 << 20
_OID = re.compile(r"[0-9a-f]{64}")
_ABANDONED_AFTER = 24 * 3600.0


class LfsObjectNotFound(RepoError):
    def __init__(self, oid: str) -> None:
        super().__init__(f"no LFS object {oid}")
        self.oid = oid


class LfsObjectMismatch(RepoError):
    """The uploaded content does not match its announced hash or size."""


class InvalidLfsObject(RepoError):
    """The announced hash or size is malformed."""


@dataclass(frozen=True)
class LfsObject:
    oid: str
    size: int

    def __post_init__(self) -> None:
        if not _OID.fullmatch(self.oid):
            raise InvalidLfsObject(f"invalid LFS object id {self.oid!r}: use 64 hexadecimal digits")
        if self.size < 0:
            raise InvalidLfsObject(f"invalid LFS object size {self.size}")


@dataclass(frozen=True)
class StoredLfsObject:
    """An open object: it can be read to the end even if it is deleted meanwhile."""

    descriptor: int
    size: int

    async def pieces(self, first: int, end: int) -> AsyncIterator[bytes]:
        """The bytes of a range."""
        while first < end:
            piece = await self.read(first, end - first)
            first += len(piece)
            yield piece

    async def read(self, offset: int, most: int) -> bytes:
        """At least one byte from an offset."""
        piece = await in_thread(os.pread, self.descriptor, min(PIECE, most), offset)
        if not piece:
            raise LfsObjectMismatch("the LFS object is shorter than recorded")
        return piece


class LfsObjects:
    """The LFS objects of one repository."""

    def __init__(self, repository: Repository, quotas: RepoQuotas, max_object: int = MAX_OBJECT) -> None:
        self._repository = repository
        self._quotas = quotas
        self._folder = repository.path / "lfs"
        self._max = max_object

    def _path(self, oid: str) -> Path:
        if not _OID.fullmatch(oid):
            raise LfsObjectNotFound(oid)
        return self._folder / "objects" / oid[:2] / oid[2:4] / oid

    def size(self, oid: str) -> int | None:
        """The size of an object; None if it does not exist."""
        try:
            return self._path(oid).lstat().st_size
        except FileNotFoundError:
            return None

    @property
    def may_have_any(self) -> bool:
        """Whether the repository may have objects."""
        return (self._folder / "objects").exists()

    async def missing(self, objects: Iterable[LfsObject]) -> list[LfsObject]:
        """The objects that do not exist, or not with this size."""
        wanted = list(objects)
        sizes = await in_thread(lambda: [self.size(each.oid) for each in wanted])
        return [each for each, size in zip(wanted, sizes, strict=True) if size != each.size]

    async def over_limit(self, objects: Iterable[LfsObject]) -> dict[LfsObject, RepoError]:
        """The objects that exceed a limit or the quota, alone or with those before them."""
        quota = await self._quotas.peek(self._repository.id)
        room = quota.room
        free = shutil.disk_usage(self._repository.path).free
        refused: dict[LfsObject, RepoError] = {}
        for wanted in objects:
            size = on_disk(wanted.size)
            if wanted.size > self._max:
                refused[wanted] = TooLarge(f"LFS object too large: {wanted.size} bytes (max {self._max})")
            elif room is not None and size > room:
                refused[wanted] = quota.exceeded()
            elif size > free:
                refused[wanted] = DiskFull()
            else:
                free -= size
                room = None if room is None else room - size
        return refused

    def verify(self, wanted: LfsObject) -> None:
        size = self.size(wanted.oid)
        if size is None:
            raise LfsObjectNotFound(wanted.oid)
        if size != wanted.size:
            raise LfsObjectMismatch(f"LFS object {wanted.oid} has {size} bytes, not {wanted.size}")

    @contextlib.contextmanager
    def open(self, oid: str) -> Iterator[StoredLfsObject]:
        try:
            descriptor = os.open(self._path(oid), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise LfsObjectNotFound(oid) from None
        try:
            yield StoredLfsObject(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    async def write(self, oid: str, body: AsyncIterator[bytes]) -> None:
        """Store an object from a stream; it is visible once it is complete, verified and synced."""
        async with self._quotas.reserving(self._repository.id) as quota:
            await self.write_reserved(quota, oid, body)

    async def write_reserved(self, quota: QuotaReservation, oid: str, body: AsyncIterator[bytes]) -> None:
        """Store an object as part of a larger write."""
        path = self._path(oid)
        descriptor, temporary = await in_thread(self._begin)
        hashed = hashlib.sha256()
        size = 0

        def put(pieces: list[bytes]) -> None:
            for piece in pieces:
                hashed.update(piece)
                rest = memoryview(piece)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]

        try:
            async for pieces in _batches(body):
                more = sum(map(len, pieces))
                size += more
                if size > self._max:
                    raise TooLarge(f"LFS object too large (max {self._max} bytes)")
                await quota.reserve(more)
                await in_thread(put, pieces)
            if hashed.hexdigest() != oid:
                raise LfsObjectMismatch(f"checksum mismatch: received {hashed.hexdigest()}, expected {oid}")
            if await in_thread(self._finish, descriptor, temporary, path):
                quota.lfs += on_disk(size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull from error
            raise
        finally:
            os.close(descriptor)
            temporary.unlink(missing_ok=True)

    def _begin(self) -> tuple[int, Path]:
        folder = self._folder / "incoming"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            self._remove_abandoned(folder)
            temporary = folder / secrets.token_hex(16)
            return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), temporary
        except FileNotFoundError:
            raise RepoNotFound(self._repository.id) from None

    def _remove_abandoned(self, folder: Path) -> None:
        """Remove partial uploads that a crash left behind."""
        for left in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if left.lstat().st_mtime < time.time() - _ABANDONED_AFTER:
                    left.unlink()

    def _finish(self, descriptor: int, temporary: Path, path: Path) -> bool:
        """Publish the object; returns whether it is new."""
        os.fsync(descriptor)
        made = []
        try:
            for folder in reversed([path.parent, *path.parent.parents][:3]):
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                    made.append(folder.parent)
            new = not path.exists()
            temporary.rename(path)
        except FileNotFoundError:
            raise RepoNotFound(self._repository.id) from None
        for folder in (path.parent, *reversed(made)):
            sync_folder(folder)
        return new


async def _batches(body: AsyncIterator[bytes]) -> AsyncIterator[list[bytes]]:
    """Collect pieces into batches, because each write uses a thread."""
    pieces: list[bytes] = []
    size = 0
    async for piece in body:
        pieces.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield pieces
            pieces, size = [], 0
    if pieces:
        yield pieces
