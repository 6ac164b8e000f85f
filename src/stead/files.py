"""Files on the host: atomic writes and locks between processes."""

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from stead.errors import HostError
from stead.logs import get_logger

log = get_logger("stead.files")

_MAX_DESCRIPTORS = 1 << 20
"""Limit of the limit: some programs that Stead runs close every descriptor that they might have."""
_CHUNK = 8 << 20
_MAX_DEPTH = 1000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def write_atomically(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file so that a crash at any moment leaves the old content or the new one.

    It has this mode whatever the umask is.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make what a file holds durable; a link is not followed."""
    descriptor = open_regular(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, access: int = os.O_RDONLY) -> int:
    """Open a file that an untrusted process may have replaced: no link is followed, and no FIFO blocks."""
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def copy_sparse(source: int, target: int) -> None:
    """Copy the data of a file into an empty one; holes stay holes. Raises OSError."""
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    for start, end in _extents(source, size):
        for offset in range(start, end, _CHUNK):
            os.pwrite(target, os.pread(source, min(_CHUNK, end - offset), offset), offset)


def _extents(descriptor: int, size: int) -> list[tuple[int, int]]:
    """The parts of a sparse file that hold data."""
    extents = []
    offset = 0
    while offset < size:
        try:
            start = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        offset = os.lseek(descriptor, start, os.SEEK_HOLE)
        extents.append((start, offset))
    return extents


def sync_folder(path: Path) -> None:
    """Make renames and removals inside a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(path: Path) -> None:
    """Remove a folder and all that is in it; it may be gone already, or another file in its place."""
    with contextlib.suppress(FileNotFoundError):
        try:
            if stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise HostError(f"cannot remove {path}: {error.strerror}") from error


def remove_garbage(paths: Iterable[Path]) -> None:
    """Remove files and folders. A failure is logged, and the others are removed nevertheless."""
    for path in paths:
        try:
            remove_folder(path)
        except HostError as error:
            log.error("cannot remove garbage", path=str(path), error=str(error))


def allocated(path: Path) -> int:
    """Bytes that a file occupies on the host's disk."""
    return path.stat().st_blocks * 512


ABSENT = (FileNotFoundError, NotADirectoryError)
"""The errors that prove that a file does not exist. All others (EMFILE, ENOMEM, EIO) may pass."""


def exists(path: Path) -> bool:
    """Whether a file exists; HostError when the host cannot tell. `Path.exists` may take that for a no."""
    try:
        path.stat()
    except ABSENT:
        return False
    except OSError as error:
        raise HostError(f"cannot read {path}: {error.strerror}") from error
    return True


def give_to(uid: int, *paths: Path) -> None:
    """Make a user and its group the owner of files; no link is followed."""
    for path in paths:
        try:
            if path.lstat().st_uid != uid:
                os.lchown(path, uid, uid)
        except OSError as error:
            raise HostError(f"cannot change the owner of {path}: {error.strerror}") from error


def give_tree_to(uid: int, folder: Path) -> None:
    """Make a user the owner of a folder and all that is in it; the folder itself comes last.

    Its owner may change it meanwhile. So folders are opened below open ones, no link is followed, and a file
    of another user that has more than one name is refused: a hard link would give it away.
    """
    opened: list[_OpenFolder] = []
    try:
        opened.append(_OpenFolder(folder))
        owner = os.fstat(opened[0].descriptor).st_uid
        while opened:
            if not opened[-1].names:
                opened.pop().close()
                continue
            name = opened[-1].names.pop()
            with contextlib.suppress(FileNotFoundError):
                if _give_below(opened[-1].descriptor, name, uid, owner):
                    if len(opened) > _MAX_DEPTH:
                        raise OSError(errno.ELOOP, f"more than {_MAX_DEPTH} folders inside each other", name)
                    opened.append(_OpenFolder(name, opened[-1].descriptor))
    except OSError as error:
        what = f"{error.filename} in {folder}"
        raise HostError(f"cannot change the owner of {what}: {error.strerror}") from error
    finally:
        for each in opened:
            each.close()
    give_to(uid, folder)


class _OpenFolder:
    """An open folder, and the names in it that are still to be visited."""

    def __init__(self, name: str | Path, parent: int | None = None) -> None:
        self.descriptor = os.open(name, _FOLDER, dir_fd=parent)
        try:
            self.names = os.listdir(self.descriptor)  # noqa: PTH208  # it has no path
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self.descriptor)


def _give_below(folder: int, name: str, uid: int, before: int) -> bool:
    """Give a file in an open folder to a user; returns whether it is a folder."""
    descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        facts = os.fstat(descriptor)
        is_folder = stat.S_ISDIR(facts.st_mode)
        if facts.st_uid != uid:
            if facts.st_nlink > 1 and facts.st_uid != before and not is_folder:
                raise OSError(errno.EMLINK, "it is of another user and has more than one name", name)
            # Through the descriptor: the file that was examined, whatever has its name now.
            os.chown(f"/proc/self/fd/{descriptor}", uid, uid)
    finally:
        os.close(descriptor)
    return is_folder


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one: every VM and every call needs several."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def nearest_existing(path: Path) -> Path:
    """The folder itself, or its nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def try_lock(path: Path) -> int | None:
    """Take a lock that ends with this process; None when another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


class LockTimeout(HostError):
    """Another process has held a lock for too long."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__(f"another process has held {path} for more than {timeout:g} s")
        self.path = path


@contextlib.asynccontextmanager
async def locked(path: Path, timeout: float) -> AsyncIterator[None]:
    """Hold a lock between processes, waiting while another process has it."""
    deadline = asyncio.get_running_loop().time() + timeout
    while (descriptor := try_lock(path)) is None:
        if asyncio.get_running_loop().time() > deadline:
            raise LockTimeout(path, timeout)
        await asyncio.sleep(0.1)
    try:
        yield
    finally:
        os.close(descriptor)
