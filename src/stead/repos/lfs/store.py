"""Git LFS object store: content-addressed files beside each repository."""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass

from stead.repos.errors import DiskFull, RepoError, RepoNotFound, TooLarge
from stead.repos.folders import folder_below, names_in
from stead.repos.quotas import QuotaReservation, RepoQuotas
from stead.repos.repository import Repository
from stead.repos.sizes import lfs_object_size
from stead.tasks import Threads

MAX_OBJECT = 5 << 30
MAX_BATCH = 1000
PIECE = 1 << 20
_OID = re.compile(r"[0-9a-f]{64}")
_ABANDONED_AFTER = 24 * 3600.0
_OBJECTS = "lfs", "objects"
_UPLOADS = "lfs", "incoming"


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
        piece = await Threads.OBJECTS.run(os.pread, self.descriptor, min(PIECE, most), offset)
        if not piece:
            raise LfsObjectMismatch("the LFS object is shorter than recorded")
        return piece


class LfsObjects:
    """The LFS objects of one repository."""

    def __init__(self, repository: Repository, quotas: RepoQuotas, max_object: int = MAX_OBJECT) -> None:
        self._repository = repository
        self._quotas = quotas
        self._max = max_object

    def _folder_of(self, oid: str, *, make: bool = False) -> contextlib.AbstractContextManager[int]:
        """The folder of an object, whose name there is its id."""
        if not _OID.fullmatch(oid):
            raise LfsObjectNotFound(oid)
        return folder_below(self._repository.path, *_OBJECTS, oid[:2], oid[2:4], make=make)

    def size(self, oid: str) -> int | None:
        """The size of an object; None if it does not exist."""
        try:
            with self._folder_of(oid) as folder:
                found = os.stat(oid, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    @property
    def may_have_any(self) -> bool:
        """Whether the repository may have objects."""
        try:
            with folder_below(self._repository.path, *_OBJECTS):
                return True
        except FileNotFoundError:
            return False

    async def missing(self, objects: Iterable[LfsObject]) -> list[LfsObject]:
        """The objects that do not exist, or not with this size."""
        wanted = list(objects)
        sizes = await Threads.OBJECTS.run(lambda: [self.size(each.oid) for each in wanted])
        return [each for each, size in zip(wanted, sizes, strict=True) if size != each.size]

    async def over_limit(self, objects: Iterable[LfsObject]) -> dict[LfsObject, RepoError]:
        """The objects that exceed a limit or the quota, alone or with those before them."""
        quota = await self._quotas.peek(self._repository.id)
        room = quota.room
        free = quota.disk_room
        refused: dict[LfsObject, RepoError] = {}
        for wanted in objects:
            size = lfs_object_size(wanted.size)
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
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            with self._folder_of(oid) as folder:
                descriptor = os.open(oid, flags, dir_fd=folder)
        except FileNotFoundError:
            raise LfsObjectNotFound(oid) from None
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise LfsObjectNotFound(oid)
            yield StoredLfsObject(descriptor, found.st_size)
        finally:
            os.close(descriptor)

    async def write(self, oid: str, body: AsyncIterator[bytes]) -> None:
        """Store an object from a stream; it is visible once it is complete, verified and synced."""
        async with self._quotas.reserving(self._repository.id) as quota:
            await self.write_reserved(quota, oid, body)

    async def write_reserved(self, quota: QuotaReservation, oid: str, body: AsyncIterator[bytes]) -> None:
        """Store an object as part of a larger write."""
        if not _OID.fullmatch(oid):
            raise LfsObjectNotFound(oid)
        quota.check_disk()
        descriptor, temporary = await Threads.OBJECTS.run(self._begin)
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
                await Threads.OBJECTS.run(put, pieces)
            if hashed.hexdigest() != oid:
                raise LfsObjectMismatch(f"checksum mismatch: received {hashed.hexdigest()}, expected {oid}")
            counted = lfs_object_size(size)
            await quota.reserve(counted - size)
            if await Threads.OBJECTS.run(self._finish, descriptor, temporary, oid):
                quota.lfs += counted
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFull from error
            raise
        finally:
            os.close(descriptor)
            self._discard(temporary)

    def _begin(self) -> tuple[int, str]:
        """Create a file for an upload; returns its descriptor and name."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        temporary = secrets.token_hex(16)
        try:
            with folder_below(self._repository.path, *_UPLOADS, make=True) as folder:
                _remove_abandoned(folder)
                return os.open(temporary, flags, 0o600, dir_fd=folder), temporary
        except FileNotFoundError:
            raise RepoNotFound(self._repository.id) from None

    def _discard(self, temporary: str) -> None:
        """Remove an upload, unless it was published."""
        with (
            contextlib.suppress(FileNotFoundError),
            folder_below(self._repository.path, *_UPLOADS) as folder,
        ):
            os.unlink(temporary, dir_fd=folder)

    def _finish(self, descriptor: int, temporary: str, oid: str) -> bool:
        """Publish the object; returns whether it is new."""
        os.fsync(descriptor)
        try:
            with (
                folder_below(self._repository.path, *_UPLOADS) as uploads,
                self._folder_of(oid, make=True) as folder,
            ):
                new = oid not in names_in(folder)
                os.rename(temporary, oid, src_dir_fd=uploads, dst_dir_fd=folder)
                os.fsync(folder)
                return new
        except FileNotFoundError:
            raise RepoNotFound(self._repository.id) from None


def _remove_abandoned(folder: int) -> None:
    """Remove partial uploads that a crash left behind."""
    for left in names_in(folder):
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(left, dir_fd=folder, follow_symlinks=False)
            if status.st_mtime < time.time() - _ABANDONED_AFTER:
                os.unlink(left, dir_fd=folder)


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
