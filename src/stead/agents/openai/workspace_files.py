"""The files of a workspace. Each operation is one call: the VM checks the path and executes it."""

import io
import secrets
from collections.abc import AsyncGenerator, Callable
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal

from agents.sandbox import ExecResult, User
from agents.sandbox.errors import (
    ExecNonZeroError,
    InvalidManifestPathError,
    SandboxError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceWriteTypeError,
)
from agents.sandbox.files import EntryKind, FileEntry
from agents.sandbox.types import Permissions
from agents.sandbox.workspace_paths import WorkspacePathPolicy, coerce_posix_path, posix_path_as_path

from stead.agents.openai.errors import transport_error
from stead.agents.openai.guest import Finished, repeated, run
from stead.agents.openai.path_script import Refusal, path_command
from stead.sdk import AsyncVm, SteadException

AnyPath = Path | str
AnyUser = str | User | None

_INLINE = 4 << 20
"""Bytes up to which a file is written in the call that checks its path; larger ones need a second call."""
_CHUNK = 256 << 10
_KINDS = {"d": EntryKind.DIRECTORY, "f": EntryKind.FILE, "l": EntryKind.SYMLINK}


class WorkspaceFiles:
    """Files of a VM below the workspace root and the granted paths; links that lead out are refused."""

    def __init__(self, vm: Callable[[], AsyncVm], policy: Callable[[], WorkspacePathPolicy]) -> None:
        self._vm = vm
        self._policy = policy
        self._seen: tuple[PurePosixPath, str | None] | None = None

    def forget(self) -> None:
        """Something else happened: a folder that was just seen may be gone."""
        self._seen = None

    async def check(self, path: AnyPath, *, for_write: bool) -> Path:
        """Check a path in the VM; returns it normalised, with its symbolic links."""
        place = self._normalised(path, for_write=for_write)
        end = await self._run("check", place, "1" if for_write else "")
        self._raise_refusal(end, path, place)
        self._raise_exit(end, "check", place)
        return posix_path_as_path(place)

    async def read(self, path: AnyPath, user: AnyUser = None) -> bytes:
        place = self._normalised(path)
        content = self._content(await self._run("read", place, user=user), path, place)
        self._seen = (place.parent, _name(user))
        return content

    async def read_range(self, path: AnyPath, offset: int, length: int, user: AnyUser = None) -> bytes:
        """At most `length` bytes from `offset` on."""
        if offset < 0 or length < 0:
            raise ValueError(f"offset and length must not be negative, got {offset} and {length}")
        place = self._normalised(path)
        end = await self._run("range", place, f"{offset + 1}:{length}", user=user)
        return self._content(end, path, place)

    async def write(self, path: AnyPath, data: io.IOBase, user: AnyUser = None) -> None:
        """Create or replace a file atomically, with missing folders. Its owner and permissions are kept."""
        await self._write("write", path, data, user)

    async def create(self, path: AnyPath, data: io.IOBase, user: AnyUser = None) -> None:
        """Create a file, complete or not at all; `FileExistsError` if there is something at the path."""
        await self._write("create", path, data, user)

    async def mkdir(self, path: AnyPath, *, parents: bool, user: AnyUser = None) -> None:
        place = self._normalised(path, for_write=True)
        seen, self._seen = self._seen, None
        # An editor reads a file, makes its folder, and writes it: the folder was there a moment ago, and
        # writing makes it again if it is missing.
        if parents and seen == (place, _name(user)):
            return
        await self._change("mkdir", path, place, "1" if parents else "", user)

    async def remove(self, path: AnyPath, *, recursive: bool, user: AnyUser = None) -> None:
        if recursive:
            self._policy().validate_recursive_remove(path)
        place = self._normalised(path, for_write=True)
        await self._change("rm", path, place, "1" if recursive else "", user)

    async def move(self, source: AnyPath, target: AnyPath, user: AnyUser = None) -> None:
        place, other = self._normalised(source, for_write=True), self._normalised(target, for_write=True)
        await self._change("mv", source, place, other.as_posix(), user, other=other)

    async def same(self, left: AnyPath, right: AnyPath, *, follow: bool, user: AnyUser = None) -> bool:
        """Whether two paths are the same file; without `follow`, never if one is a symbolic link."""
        place, other = self._normalised(left), self._normalised(right)
        end = await self._run("same" if follow else "same-entry", place, other.as_posix(), user=user)
        if end.exit_code > 1:
            self._raise_refusal(end, left, place, other)
            self._raise_exit(end, "same_file", place)
        if end.stdout:
            self._seen = (other.parent, _name(user))
        return end.exit_code == 0

    async def list(self, path: AnyPath, user: AnyUser = None) -> list[FileEntry]:
        place = self._normalised(path)
        end = await self._run("ls", place, user=user)
        self._raise_refusal(end, path, place)
        self._raise_exit(end, "ls", place)
        lines = end.stdout.decode(errors="surrogateescape").split("\0")[:-1]
        found = [_entry(place, line) for line in lines]
        return sorted(found, key=lambda entry: entry.path)

    def _normalised(self, path: AnyPath, *, for_write: bool = False) -> PurePosixPath:
        return self._policy().normalize_sandbox_path(path, for_write=for_write)

    async def _run(
        self,
        operation: str,
        path: PurePosixPath,
        argument: str = "",
        *,
        user: AnyUser = None,
        stdin: bytes | None = None,
        harmless: bool = True,
    ) -> Finished:
        self._seen = None
        policy = self._policy()
        command = path_command(
            operation, path, argument, root=policy.sandbox_root(), grants=policy.extra_path_grant_rules()
        )
        try:
            return await run(self._vm(), command, stdin=stdin, user=_name(user), harmless=harmless)
        except SteadException as error:
            raise transport_error((operation, path.as_posix()), error) from error

    async def _change(
        self,
        operation: str,
        path: AnyPath,
        place: PurePosixPath,
        argument: str,
        user: AnyUser,
        other: PurePosixPath | None = None,
    ) -> None:
        # The repetition of a removal or a move, after a lost answer, would report a missing file.
        harmless = operation == "mkdir" and argument == "1"
        end = await self._run(operation, place, argument, user=user, harmless=harmless)
        self._raise_refusal(end, path, place, other)
        self._raise_exit(end, operation, place)

    async def _write(self, operation: str, path: AnyPath, data: io.IOBase, user: AnyUser) -> None:
        place = self._normalised(path, for_write=True)
        content = _read(data, _INLINE + 1, place)
        try:
            if len(content) <= _INLINE or operation == "create":
                content += _read(data, -1, place)
                end = await self._run(
                    operation,
                    place,
                    secrets.token_hex(8),
                    user=user,
                    stdin=content,
                    harmless=operation == "write",
                )
                self._raise_write(end, path, place)
                return
            end = await self._run("prepare", place, user=user)
            self._raise_write(end, path, place)
            await self._stream(end.stdout.decode(errors="surrogateescape"), content, data, place, user)
        except SandboxError as error:
            if isinstance(error, InvalidManifestPathError | WorkspaceArchiveWriteError):
                raise
            raise WorkspaceArchiveWriteError(path=place_path(place), cause=error) from error

    async def _stream(
        self, real: str, content: bytes, data: io.IOBase, place: PurePosixPath, user: AnyUser
    ) -> None:
        """Write a large file through the file API; only data that can be read again is sent again."""
        name = _name(user)
        files = self._vm().fs if name is None else self._vm().user(name).fs
        start = data.tell() if data.seekable() else None

        async def once() -> None:
            if start is not None:
                data.seek(start)
            await files.write(real, _chunks(content, data, place))

        try:
            await repeated(once, harmless=start is not None)
        except SteadException as error:
            raise transport_error(("write", real), error) from error

    def _content(self, end: Finished, path: AnyPath, place: PurePosixPath) -> bytes:
        self._raise_refusal(end, path, place)
        if end.exit_code == Refusal.NOT_FOUND:
            raise WorkspaceReadNotFoundError(path=place_path(path))
        if end.exit_code:
            text = end.stderr.decode(errors="replace").strip()
            raise WorkspaceArchiveReadError(path=place_path(path), context={"reason": text}, retryable=False)
        return end.stdout

    def _raise_write(self, end: Finished, path: AnyPath, place: PurePosixPath) -> None:
        if end.exit_code == Refusal.EXISTS:
            raise FileExistsError(f"{place} exists")
        self._raise_refusal(end, path, place)
        if end.exit_code:
            text = end.stderr.decode(errors="replace").strip()
            raise WorkspaceArchiveWriteError(
                path=place_path(place), context={"reason": text}, retryable=False
            )

    def _raise_refusal(
        self, end: Finished, path: AnyPath, place: PurePosixPath, other: PurePosixPath | None = None
    ) -> None:
        said = end.stderr.decode(errors="replace").strip()
        match end.exit_code:
            case Refusal.ESCAPE:
                raise self._escape(path, place, said)
            case Refusal.ESCAPE_OF_TARGET if other is not None:
                raise self._escape(other.as_posix(), other, said)
            case Refusal.READ_ONLY:
                context = {"reason": "read_only_extra_path_grant", "resolved_path": said}
                raise WorkspaceArchiveWriteError(path=place_path(place), context=context, retryable=False)
            case Refusal.BAD_GRANT:
                raise ValueError(said)

    def _escape(self, path: AnyPath, place: PurePosixPath, resolved: str) -> InvalidManifestPathError:
        """The error for a path that leaves the workspace through a symbolic link, as the model named it."""
        root, context = self._policy().sandbox_root(), {"resolved_path": resolved}
        if place.is_relative_to(root):
            return InvalidManifestPathError(
                rel=place.relative_to(root).as_posix(), reason="escape_root", context=context
            )
        absolute = coerce_posix_path(path).is_absolute()
        reason: Literal["absolute", "escape_root"] = "absolute" if absolute else "escape_root"
        return InvalidManifestPathError(rel=str(path), reason=reason, context=context)

    def _raise_exit(self, end: Finished, operation: str, place: PurePosixPath) -> None:
        if end.exit_code == 0:
            return
        result = ExecResult(stdout=end.stdout, stderr=end.stderr, exit_code=end.exit_code)
        raise ExecNonZeroError(result, command=(operation, place.as_posix()))


def place_path(path: PurePath | str) -> Path:
    return posix_path_as_path(coerce_posix_path(path))


def _name(user: AnyUser) -> str | None:
    return user.name if isinstance(user, User) else user or None


def _read(data: Any, size: int, place: PurePosixPath) -> bytes:
    content = data.read(size)
    if isinstance(content, str):
        return content.encode()
    if not isinstance(content, bytes | bytearray):
        raise WorkspaceWriteTypeError(path=place_path(place), actual_type=type(content).__name__)
    return bytes(content)


async def _chunks(first: bytes, data: io.IOBase, place: PurePosixPath) -> AsyncGenerator[bytes]:
    yield first
    while chunk := _read(data, _CHUNK, place):
        yield chunk


def _entry(folder: PurePosixPath, line: str) -> FileEntry:
    kind, mode, owner, group, size, name = line.split("\t", 5)
    permissions = Permissions.from_mode(int(mode, 8))
    permissions.directory = kind == "d"
    return FileEntry(
        path=(folder / name).as_posix(),
        permissions=permissions,
        owner=owner,
        group=group,
        size=int(size),
        kind=_KINDS.get(kind, EntryKind.OTHER),
    )
