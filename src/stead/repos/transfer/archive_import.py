"""Imports: the entries of an archive become one commit, streamed to `git fast-import`."""

import asyncio
import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator

from stead.disk_marks import writable
from stead.repos.errors import DiskFull, InvalidPath, TooLarge
from stead.repos.fast_import import Author, quoted, signed
from stead.repos.git import Finished, GitFailed, check_room
from stead.repos.names import check_path
from stead.repos.repository import Repository
from stead.repos.transfer.archives import LINK, ArchiveInvalid, ArchiveMember, ReadingPause, printable
from stead.tasks import Threads, cancel_and_wait

_MAX_NAMES = 24 << 20
"""Total characters of names and link targets, which are held in memory until the end."""
_MAX_DEPTH = 256
_MAX_STEPS = 20_000_000
_MAX_HOPS = 40
_BATCH = 256 << 10
_PIECES = 4096
_PAUSE_STEPS = 100_000
"""Steps through links after which the check pauses."""


class ArchiveTree:
    """Converts archive entries to blobs, and then to the file list of one commit."""

    def __init__(self, folder: str = "") -> None:
        """With `folder`, only entries below that folder are imported, without its prefix."""
        self.folder = folder
        self._files: dict[str, tuple[str, int]] = {}
        self._links: dict[str, str] = {}
        self._marks = 0
        self._names = 0
        self.folder_found = not folder

    def blobs(self, found: Iterable[ArchiveMember | ReadingPause]) -> Iterator[bytes]:
        """The fast-import commands for the contents, in pieces of any size; an empty one is a pause."""
        for member in found:
            if isinstance(member, ReadingPause):
                yield b""
                continue
            self._count(member.name)
            path = self._inside(_place(member.name))
            if path is None:
                continue
            if member.mode is None or path:
                self.folder_found = True
            if member.mode is None or not path:
                continue
            # The last entry of a name wins.
            self._files.pop(path, None)
            self._links.pop(path, None)
            if member.copy_of is not None:
                self._copy(path, member.copy_of)
                continue
            self._marks += 1
            self._files[path] = member.mode, self._marks
            yield b"blob\nmark :%d\ndata %d\n" % (self._marks, member.size)
            if member.mode == LINK:
                target = b"".join(member.content())
                self._count(target)
                self._links[path] = target.decode("utf-8", "surrogateescape")
                yield target
            else:
                yield from member.content()
            yield b"\n"

    def lines(self) -> Iterator[bytes]:
        """The fast-import commands for the commit's files, after a check of all paths and links.

        An empty piece is a pause.
        """
        # Sort / before all other characters, so that a folder is followed by its entries.
        ordered = sorted(self._files, key=lambda path: path.replace("/", "\0"))
        for path, after in itertools.pairwise(ordered):
            if after.startswith(f"{path}/"):
                raise InvalidPath(after, f"{path} is a file or a link in the same archive")
        yield from _check_links(self._links)
        for path, (mode, mark) in self._files.items():
            yield b"M %s :%d %s\n" % (mode.encode(), mark, quoted(path))

    def _count(self, name: str | bytes) -> None:
        self._names += len(name)
        if self._names > _MAX_NAMES:
            raise TooLarge("the file names in the archive are too long in total")

    def _copy(self, path: str, name: str) -> None:
        source = self._inside(_place(name))
        if source is None or source not in self._files:
            raise ArchiveInvalid(f"the hard link {path!r} does not point to an earlier file")
        self._files[path] = self._files[source]
        if source in self._links:
            self._links[path] = self._links[source]

    def _inside(self, path: str | None) -> str | None:
        """A path relative to the imported folder; None if it is outside."""
        if path is None or not self.folder:
            return path
        if path == self.folder:
            return ""
        return path.removeprefix(f"{self.folder}/") if path.startswith(f"{self.folder}/") else None


def _place(name: str) -> str | None:
    """The normalised path of an entry; None for the root and for anything in a .git folder."""
    if name.startswith("/"):
        raise InvalidPath(printable(name), "absolute path")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".git" in parts:
        return None
    if len(parts) > _MAX_DEPTH:
        raise InvalidPath(printable(name), f"more than {_MAX_DEPTH} folders deep")
    return check_path("/".join(parts))


def _check_links(links: dict[str, str]) -> Iterator[bytes]:
    """Refuse symbolic links that point outside the repository, directly or through other links."""
    steps = paused_at = 0
    for path, target in links.items():
        here = path.split("/")[:-1]
        ahead = _parts(path, target)
        hops = 0
        if steps - paused_at > _PAUSE_STEPS:
            paused_at = steps
            yield b""
        while ahead:
            steps += 4 + len(here)
            if steps > _MAX_STEPS:
                raise TooLarge("too many steps to resolve the archive's symbolic links")
            part = ahead.pop()
            if part == "..":
                if not here:
                    raise InvalidPath(path, "the symbolic link points outside the repository")
                here.pop()
                continue
            here.append(part)
            next_target = links.get("/".join(here))
            if next_target is not None:
                hops += 1
                if hops > _MAX_HOPS:
                    break
                here.pop()
                ahead += _parts(path, next_target)


def _parts(path: str, target: str) -> list[str]:
    if target.startswith("/") or "\\" in target:
        raise InvalidPath(path, "the symbolic link points outside the repository")
    return [part for part in reversed(target.split("/")) if part not in ("", ".")]


def one_commit(branch: str, message: str, author: Author, lines: Iterable[bytes]) -> Iterator[bytes]:
    yield f"commit refs/heads/{branch}\n".encode()
    yield signed(message, author)
    yield from lines
    yield b"\ndone\n"


async def run_fast_import(repository: Repository, script: Iterator[bytes]) -> None:
    """Run fast-import with a script, which is generated while it is written."""
    batches = _batches(script)
    async with repository.running("fast-import", "--quiet", "--done") as process:
        stderr = asyncio.create_task(process.errors())
        try:
            with contextlib.suppress(ConnectionError):
                while (batch := await Threads.PARSING.run(next, batches, None)) is not None:
                    if not writable(repository.path):
                        raise DiskFull
                    process.stdin.write(batch)
                    await process.stdin.drain()
            await process.close_input()
            status = await process.wait()
            if status != 0:
                finished = Finished(status, b"", await stderr)
                check_room(finished, repository.path)
                raise GitFailed("fast-import", finished)
        finally:
            await cancel_and_wait(stderr)
            await Threads.PARSING.run(batches.close)


def _batches(pieces: Iterator[bytes]) -> Generator[bytes, None, None]:
    """Join pieces; a pause ends a batch, which may be empty."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if not piece or size >= _BATCH or len(waiting) >= _PIECES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
