"""Opens what is inside repositories, without following links.

Git's users own these folders and the server is root: who breaks git could put links to other files there.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from stead.files import open_regular
from stead.repos.errors import RepoDamaged

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_A_FOLDER = (errno.ELOOP, errno.ENOTDIR)


@contextlib.contextmanager
def folder_below(path: Path, *names: str, make: bool = False) -> Iterator[int]:
    """The descriptor of the folder `names` inside a repository, for functions that take a `dir_fd`.

    Missing folders are created with `make`. Raises FileNotFoundError, and RepoDamaged for a link or a file.
    """
    descriptor = os.open(path, _FOLDER)
    try:
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=descriptor)
                    # The entry must be as durable as what is written into the folder.
                    os.fsync(descriptor)
            below = _open_folder(path, name, descriptor)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(path: Path, name: str, above: int) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except OSError as error:
        if error.errno in _NOT_A_FOLDER:
            raise RepoDamaged(f"{name} in {path.name} is not a folder") from error
        raise


def names_in(folder: int) -> list[str]:
    """The names in an open folder."""
    return os.listdir(folder)  # pathlib takes no descriptors


def read_regular(path: Path, most: int) -> bytes:
    """A regular file directly in a repository. Raises FileNotFoundError, and RepoDamaged for another file."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise FileNotFoundError(error.errno, error.strerror, str(path)) from error
        raise RepoDamaged(f"{path.name} in {path.parent.name} is not a regular file") from error
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise RepoDamaged(f"{path.name} in {path.parent.name} is too large (max {most} bytes)")
    return data
