"""Git transfer service: runs upload-pack and receive-pack for git clients, with limits and back-pressure."""

import asyncio
import contextlib
import fcntl
import re
import shutil
import signal
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from enum import StrEnum
from pathlib import Path

from stead.logs import get_logger
from stead.repos.errors import DiskFull, RepoError, RepoNotFound, TooLarge
from stead.repos.folders import folder_below, names_in
from stead.repos.git import Finished, GitFailed, GitProcess
from stead.repos.places import Work
from stead.repos.quotas import QuotaExceeded, SupersededRef
from stead.repos.repos import Repos
from stead.repos.repository import ZERO_SHA, Repository
from stead.repos.writer import RepoWriter, Write
from stead.tasks import Threads, cancel_and_wait, finished

MAX_COMMANDS = 10_000
"""Maximum refs per push."""
MAX_PUSH = 4 << 30
"""Maximum bytes per push."""
MAX_NEGOTIATION = 256 << 20
"""Maximum bytes of a fetch negotiation."""
TIMEOUT = 3600.0
PIECE = 256 << 10
_COMMANDS_ROOM = 64 << 20
_COMPLETION = 64 << 20
"""Bytes of existing objects that git may append to a thin pack."""
_PIPE = 1 << 20
_GRACE = 1.0
_FINISH_GRACE = 60.0
"""Seconds for receive-pack to finish after the client left: if killed, it could leave locks."""
_PUSHABLE = ("heads", "tags", "notes", "pull", "changes", "merge-requests")
_OWN = "refs/stead"
_INCOMING = "tmp_objdir-incoming-"
_PROTOCOL_PART = r"[a-z][a-z0-9-]{0,63}(?:=[A-Za-z0-9._/-]{0,64})?"
_PROTOCOL = re.compile(rf"{_PROTOCOL_PART}(?::{_PROTOCOL_PART}){{0,7}}")
_COMMAND = re.compile(rb"([0-9a-f]{40}) ([0-9a-f]{40}) ")

log = get_logger("stead.repos")

Read = Callable[[], Awaitable[bytes]]
"""Returns the next piece of a response; empty at its end."""
Body = AsyncGenerator[bytes, None]


class GitService(StrEnum):
    UPLOAD_PACK = "git-upload-pack"
    """Clone and fetch."""
    RECEIVE_PACK = "git-receive-pack"
    """Push."""

    @property
    def command(self) -> str:
        return self.removeprefix("git-")


class InvalidStream(RepoError):
    """The request is not valid git protocol."""


class TooManyCommands(RepoError):
    def __init__(self, most: int) -> None:
        super().__init__(f"too many refs in one push (max {most}): push in several steps")


class TooSlow(RepoError):
    """The client stalled, or the whole transfer took too long."""


def is_protocol(value: str) -> bool:
    """Whether the Git-Protocol header is valid: `version=2` and future keys."""
    return _PROTOCOL.fullmatch(value) is not None


def packet(data: bytes) -> bytes:
    """A pkt-line: the length in four hexadecimal digits, then the data."""
    return b"%04x" % (len(data) + 4) + data


class PushCommands:
    """Parses the command list at the start of a push: one pkt-line per ref, then a flush packet."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._head = b""
        self._left = 0
        self._line = b""
        self._abilities = b""
        self.count = 0
        self.complete = False
        self.created = 0
        """Number of refs to create."""
        self.superseded: list[SupersededRef] = []

    def feed(self, data: bytes) -> int:
        """Consume a piece; returns the number of bytes after the end of the list."""
        position = 0
        while position < len(data) and not self.complete:
            if self._left:
                taken = data[position : position + self._left]
                self._line += taken
                self._left -= len(taken)
                position += len(taken)
                if not self._left:
                    self._end_line(self._line)
                continue
            wanted = 4 - len(self._head)
            self._head += data[position : position + wanted]
            position += wanted
            if len(self._head) == 4:
                self._begin_line(self._head)
                self._head = b""
        return max(0, len(data) - position)

    def _begin_line(self, head: bytes) -> None:
        if not re.fullmatch(rb"[0-9a-fA-F]{4}", head):
            raise InvalidStream("invalid push: no list of refs")
        size = int(head, 16)
        if size == 0:
            self.complete = True
            return
        if size <= 4:
            raise InvalidStream("invalid push: pkt-line without a length")
        self._left = size - 4
        self._line = b""
        self.count += 1
        if self.count > self._most:
            raise TooManyCommands(self._most)

    def _end_line(self, line: bytes) -> None:
        """Old id, new id and ref name; in the first line also the client's capabilities."""
        command, _, abilities = line.partition(b"\0")
        self._abilities = self._abilities or abilities
        if (found := _COMMAND.match(command)) is None:
            return
        old, new = found[1].decode(), found[2].decode()
        if old == ZERO_SHA:
            self.created += new != ZERO_SHA
        elif old != new:
            self.superseded.append((old, None if new == ZERO_SHA else new))

    def refusal(self, why: str) -> bytes:
        """A report-status response that makes the client print the reason."""
        if b"side-band-64k" in self._abilities:
            return packet(b"\x03" + why.encode() + b"\n") + b"0000"
        return packet(b"ERR " + why.encode() + b"\n")


class IncomingPush:
    """A push, checked against limits while it is received."""

    def __init__(self, commands: PushCommands, write: Write, path: Path) -> None:
        self.commands = commands
        self.refs_changed = write.refs_changed
        self._quota = write.quota
        self._path = path

    async def check(self, piece: bytes) -> None:
        """Refuse data over the quota before git receives it. A push that only deletes refs has none."""
        begun = self.commands.complete
        of_pack = self.commands.feed(piece)
        if self.commands.complete and not begun:
            await self._quota.reserve_refs(self.commands.created)
            self._quota.superseded += self.commands.superseded
        await self._quota.reserve(of_pack)

    @property
    def has_commands(self) -> bool:
        """Whether the command list is complete and not empty."""
        return self.commands.complete and self.commands.count > 0


class PackTransfer:
    """One git process that serves one client."""

    def __init__(
        self,
        process: GitProcess,
        push: IncomingPush | None,
        most: int,
        body: Body | None,
    ) -> None:
        self._process = process
        self._push = push
        self._most = most
        self._notified = False
        self._last = b""
        self._refused = False
        self._errors = asyncio.create_task(process.errors())
        self._feeding = asyncio.create_task(self._feed(body))

    async def _feed(self, body: Body | None) -> None:
        """Forward the request body to git with back-pressure; on failure, stop git."""
        process = self._process
        try:
            if body is not None:
                async with contextlib.aclosing(body):
                    await self._forward(body)
            process.stdin.close()
        except (BrokenPipeError, ConnectionResetError):
            # Git stopped reading; its response has the reason.
            process.stdin.close()
        except Exception:
            self._abort()
            raise

    async def _forward(self, body: Body) -> None:
        size = 0
        async for piece in body:
            size += len(piece)
            if size > self._most:
                raise TooLarge(f"request body too large (max {self._most >> 20} MiB)")
            if self._push is not None:
                await self._push.check(piece)
            self._process.stdin.write(piece)
            await self._process.stdin.drain()

    async def read(self) -> bytes:
        """The next piece of git's response; empty at its end. Raises if it is incomplete."""
        if self._refused:
            return b""
        piece = await self._process.stdout.read(PIECE)
        failure = self._feeding.exception() if self._feeding.done() else None
        if isinstance(failure, TooManyCommands | QuotaExceeded | DiskFull) and self._push is not None:
            self._refused = True
            return self._push.commands.refusal(str(failure))
        if failure is not None:
            raise failure
        if piece:
            self._last = piece
            return piece
        status = await self._process.wait()
        stderr = await self._errors
        await self._notify()
        if status and not _is_error(self._last):
            raise GitFailed("transfer", Finished(status, b"", stderr))
        if status:
            log.info("git rejected request", status=status, stderr=stderr.strip()[-500:])
        return b""

    async def _notify(self) -> None:
        """Notify the observers once, as soon as refs may have changed."""
        if not self._notified and self._push is not None and self._push.has_commands:
            self._notified = True
            await self._push.refs_changed()

    async def end(self) -> None:
        """Stop git. A push that was received completely runs to its end."""
        whole = self._push is not None and self._feeding.done() and self._feeding.exception() is None
        await cancel_and_wait(self._feeding)
        self._abort()
        if not await self._wait_for_exit(_FINISH_GRACE if whole else _GRACE):
            self._process.signal(signal.SIGTERM)
            await self._wait_for_exit(_GRACE)
        await self._process.end()
        await cancel_and_wait(self._errors)
        await self._notify()

    def _abort(self) -> None:
        """Stop git: receive-pack discards an incomplete push and exits."""
        pipe = self._process.stdin.transport
        if self._push is None:
            self._process.signal(signal.SIGTERM)
        elif not pipe.is_closing() or pipe.get_write_buffer_size():
            pipe.abort()

    async def _wait_for_exit(self, limit: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._process.wait()
        return not self._process.alive


def _is_error(last: bytes) -> bool:
    """Whether a response ends with an error message for the client."""
    position = last.rfind(b"ERR ")
    return position >= 4 and last[position - 4 : position] == b"%04x" % (len(last) - position + 4)


class PackServer:
    """Serves repositories to git clients, with limits."""

    def __init__(
        self,
        repos: Repos,
        writer: RepoWriter,
        *,
        max_push: int = MAX_PUSH,
        max_commands: int = MAX_COMMANDS,
        timeout: float = TIMEOUT,
    ) -> None:
        self._git = repos.git
        self._writer = writer
        self._max_push = max_push
        self._max_commands = max_commands
        self._timeout = timeout
        self._pushing: Counter[str] = Counter()
        self._capabilities: bytes | None = None

    @contextlib.asynccontextmanager
    async def advertise(
        self, repository: Repository, service: GitService, protocol: str | None
    ) -> AsyncIterator[Read]:
        """The ref advertisement: git's capabilities and the refs."""
        newest = "version=2" in (protocol or "").split(":")
        fixed = newest and service is GitService.UPLOAD_PACK
        first = b"" if newest else packet(f"# service={service}\n".encode()) + b"0000"
        if fixed and self._capabilities is not None:
            _check_exists(repository)
            yield _reader_of(self._capabilities)
            return
        arguments = service.command, "--stateless-rpc", "--http-backend-info-refs"
        async with self._transfer(repository, service, arguments, protocol, None) as transfer:
            if not fixed:
                yield _reader_after(first, transfer.read)
                return
            # The protocol v2 advertisement has no refs: it is the same for all repositories, so cache it.
            pieces = [piece async for piece in _until_end(transfer.read)]
        self._capabilities = b"".join(pieces)
        yield _reader_of(self._capabilities)

    @contextlib.asynccontextmanager
    async def answer(
        self, repository: Repository, service: GitService, protocol: str | None, body: Body
    ) -> AsyncIterator[Read]:
        """Git's response to a request; the git process ends with the block.

        Errors are raised while the response is read. A push that git rejects is a normal response.
        """
        arguments = service.command, "--stateless-rpc"
        async with self._transfer(repository, service, arguments, protocol, body) as transfer:
            yield transfer.read

    @contextlib.asynccontextmanager
    async def _transfer(
        self,
        repository: Repository,
        service: GitService,
        arguments: tuple[str, ...],
        protocol: str | None,
        body: Body | None,
    ) -> AsyncIterator[PackTransfer]:
        env = {} if protocol is None else {"GIT_PROTOCOL": protocol}
        most, push, room = MAX_NEGOTIATION, None, None
        async with repository.holding(Work.TRANSFER), contextlib.AsyncExitStack() as stack:
            _check_exists(repository)
            if service is GitService.RECEIVE_PACK and body is not None:
                await stack.enter_async_context(self._pushing_in(repository))
                write = await stack.enter_async_context(self._writer.writing(repository.id))
                most, room = self._max_push + _COMMANDS_ROOM, write.quota.room
                push = IncomingPush(PushCommands(self._max_commands), write, repository.path)
            settings = self._settings(service, room)
            # Git completes a small thin pack with copies of existing objects.
            largest = None if room is None else room + _COMPLETION
            process = await self._git.start(
                repository.path, *settings, *arguments, str(repository.path), env=env, file=largest
            )
            _enlarge_pipes(process)
            transfer = PackTransfer(process, push, most, body)
            limit = asyncio.timeout(self._timeout)
            try:
                async with limit:
                    yield transfer
            except TimeoutError:
                if not limit.expired():
                    raise
                raise TooSlow(f"git transfer timed out after {self._timeout:g} s") from None
            finally:
                await finished(transfer.end())

    @contextlib.asynccontextmanager
    async def _pushing_in(self, repository: Repository) -> AsyncIterator[None]:
        """Context of a push. Removes quarantine folders that earlier pushes left behind."""
        await self._remove_quarantines(repository)
        self._pushing[repository.id] += 1
        try:
            yield
        finally:
            self._pushing[repository.id] -= 1
            await finished(self._remove_quarantines(repository))

    async def _remove_quarantines(self, repository: Repository) -> None:
        if self._pushing[repository.id]:
            return
        del self._pushing[repository.id]
        with contextlib.suppress(FileNotFoundError), folder_below(repository.path, "objects") as objects:
            for left in [name for name in names_in(objects) if name.startswith(_INCOMING)]:
                await Threads.TREES.run(shutil.rmtree, left, ignore_errors=True, dir_fd=objects)

    def _settings(self, service: GitService, room: int | None) -> tuple[str, ...]:
        if service is GitService.UPLOAD_PACK:
            # Readers may fetch any object by id, as in protocol v2.
            settings = [
                f"transfer.hideRefs={_OWN}",
                "uploadpack.allowAnySHA1InWant=true",
            ]
        else:
            hidden = ["refs", *(f"!refs/{name}" for name in _PUSHABLE)]
            # 0 means unlimited to git.
            most = self._max_push if room is None else max(1, min(self._max_push, room))
            settings = [
                f"receive.maxInputSize={most}",
                *(f"receive.hideRefs={name}" for name in hidden),
            ]
        return tuple(part for setting in settings for part in ("-c", setting))


def _check_exists(repository: Repository) -> None:
    if not repository.path.is_dir():
        raise RepoNotFound(repository.id)


def _reader_of(text: bytes) -> Read:
    return _reader_after(text, _nothing)


async def _nothing() -> bytes:
    return b""


def _reader_after(first: bytes, read: Read) -> Read:
    """A reader that returns `first` and then continues with `read`."""
    waiting = [first] if first else []

    async def both() -> bytes:
        return waiting.pop() if waiting else await read()

    return both


async def _until_end(read: Read) -> AsyncIterator[bytes]:
    while piece := await read():
        yield piece


def _enlarge_pipes(process: GitProcess) -> None:
    """Enlarge the pipes, for fewer wake-ups; optional, and git may have exited already."""
    for end in (process.stdin.transport, process.stdout._transport):  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, ValueError):
            fcntl.fcntl(end.get_extra_info("pipe"), fcntl.F_SETPIPE_SZ, _PIPE)
