"""Files in a VM."""

import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, BinaryIO

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.streams import AsyncStream
from stead.sdk.answers import decode_error
from stead.sdk.archives import CHUNK, pack, unpack
from stead.sdk.arguments import check_encoding, checks_arguments, encode_text, local_path
from stead.sdk.blocking import async_call
from stead.sdk.errors import FileNotFound
from stead.sdk.events import FileEvents
from stead.sdk.models import DirEntry, FileEvent, FileStat
from stead.sdk.parsing import parse, parse_list
from stead.sdk.requests import LIFECYCLE_TIMEOUT, UNSET, Request, Unset, request

_BYTES = {"Accept": "application/octet-stream", "Accept-Encoding": "identity"}

LocalPath = str | os.PathLike[str]
GuestPath = str | os.PathLike[str]
"""An absolute path in the VM."""


@checks_arguments
class AsyncFiles:
    """The files of a VM, read and written as root or as the Linux user of the handle."""

    def __init__(self, connection: AsyncConnection, vm_id: str, user: str | None) -> None:
        self._connection = connection
        self._vm_id = vm_id
        self._user = user

    async def read(self, path: GuestPath) -> bytes:
        """Read a whole file."""
        response = await self._connection.send(self._on("GET", "files", path, headers=_BYTES))
        if not response.is_success:
            raise decode_error(response)
        return response.content

    async def read_text(self, path: GuestPath, encoding: str = "utf-8") -> str:
        """Read a whole file as text."""
        return (await self.read(path)).decode(check_encoding(encoding))

    def read_chunks(self, path: GuestPath) -> AsyncStream[bytes]:
        """Read a large file in chunks, as they arrive."""
        call = self._on("GET", "files", path, headers=_BYTES)
        return AsyncStream(self._connection.stream(call))

    async def write(
        self, path: GuestPath, data: bytes | AsyncIterable[bytes], *, mode: int | None = None
    ) -> None:
        """Create or replace a file and its parent folders; `mode` is its permissions, for example 0o644.

        The replacement is atomic: readers see the old file until the new one is complete. Data from an
        iterator is streamed; if the connection breaks, the client cannot repeat the request.
        """
        if isinstance(data, bytes | bytearray | memoryview):
            content = bytes(data)
            await self._put(path, mode, lambda: _once(content), len(content))
        else:
            await self._put(path, mode, lambda: data, None, idempotent=False)

    async def write_text(
        self, path: GuestPath, text: str, encoding: str = "utf-8", *, mode: int | None = None
    ) -> None:
        """Create or replace a file with text."""
        await self.write(path, encode_text(text, encoding), mode=mode)

    async def read_dir(self, path: GuestPath) -> list[DirEntry]:
        """List a folder. Raises `NotADirectoryError` if the path is a file."""
        answer = await self._connection.call(self._on("GET", "files", path))
        if isinstance(answer, dict) and "files" not in answer and "content" in answer:
            raise NotADirectoryError(f"{os.fspath(path)} in the VM is not a folder")
        return parse_list(DirEntry, answer, "files")

    async def stat(self, path: GuestPath, *, follow: bool = True) -> FileStat:
        """Type, size, permissions and owner of a path. Symbolic links are followed if `follow` is True."""
        call = self._on("GET", "stat", path, query={"follow": follow})
        return parse(FileStat, await self._connection.call(call))

    async def exists(self, path: GuestPath) -> bool:
        """Whether a path exists. Errors other than "not found" are raised."""
        try:
            await self.stat(path)
        except FileNotFound:
            return False
        return True

    async def mkdir(self, path: GuestPath, *, parents: bool = False) -> None:
        """Create a folder; with `parents`, its parents too, and an existing folder is no error."""
        query = {"parents": parents}
        await self._connection.call(self._on("POST", "directories", path, query=query, idempotent=parents))

    async def remove(self, path: GuestPath, *, recursive: bool = False) -> None:
        """Delete a file, an empty folder, or with `recursive` a folder and its contents."""
        query = {"recursive": recursive}
        await self._connection.call(self._on("DELETE", "files", path, query=query, timeout=LIFECYCLE_TIMEOUT))

    async def move(self, source: GuestPath, target: GuestPath, *, overwrite: bool = False) -> None:
        """Move or rename a file or a folder. An existing target is an error unless `overwrite` is set."""
        body = {"from": os.fspath(source), "to": os.fspath(target)}
        call = request(
            "POST",
            "/v1/vms/{}/move",
            self._vm_id,
            json={**body, "overwrite": True} if overwrite else body,
            user=self._user,
            timeout=LIFECYCLE_TIMEOUT,
        )
        await self._connection.call(call)

    def watch(self) -> AsyncStream[FileEvent]:
        """Yield changes to files as they happen, until the stream is closed."""
        return AsyncStream(self._watch())

    async def _watch(self) -> AsyncGenerator[FileEvent]:
        call = request("POST", "/v1/vms/{}/watch-files", self._vm_id, user=self._user, timeout=None)
        events = FileEvents()
        async with aclosing(self._connection.stream(call)) as chunks:
            async for chunk in chunks:
                for event in events.feed(chunk):
                    yield event
            for event in events.end():
                yield event

    async def upload(self, local: LocalPath, remote: GuestPath) -> None:
        """Copy a local file or folder to a path in the VM.

        The contents of a folder are merged into the remote folder. Uploaded files belong to the Linux user
        of the handle.
        """
        source = local_path(local)
        if await async_call(source.is_dir):
            await self._put_archive(remote, lambda: _in_turn(pack(source)))
            return
        found = await async_call(source.stat)
        name = os.fspath(remote)
        target = name + source.name if name.endswith("/") else name
        await self._put(target, found.st_mode & 0o777, lambda: _file_chunks(source), found.st_size)

    async def upload_archive(self, data: bytes | AsyncIterable[bytes], remote: GuestPath) -> None:
        """Extract a tar archive into a folder in the VM, created if missing.

        Entries whose names lead out of the folder are an error. Data from an iterator is streamed; if the
        connection breaks, the client cannot repeat the request.
        """
        if isinstance(data, bytes | bytearray | memoryview):
            content = bytes(data)
            await self._put_archive(remote, lambda: _once(content))
        else:
            await self._put_archive(remote, lambda: data, idempotent=False)

    async def download(self, remote: GuestPath, local: LocalPath) -> list[str]:
        """Copy a file or folder from the VM to a local path; returns the names of skipped entries.

        If `local` is an existing folder, a file is written into it. A VM is not trusted: symbolic links that
        point out of the folder, devices and pipes are skipped.
        """
        target = local_path(local)
        found = await self.stat(remote)
        if found.is_directory:
            return await self._get_archive(remote, target)
        if await async_call(target.is_dir):
            target = target / Path(remote).name
        await self._get_file(remote, target, 0o644 if found.mode is None else found.mode & 0o755 | 0o600)
        return []

    async def _put(
        self,
        path: GuestPath,
        mode: int | None,
        body: Callable[[], AsyncIterable[bytes]],
        size: int | None,
        *,
        idempotent: bool = True,
    ) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        if size is not None:
            headers["Content-Length"] = str(size)
        query = {"mode": None if mode is None else f"{mode:04o}"}
        call = self._on(
            "PUT",
            "files",
            path,
            query=query,
            headers=headers,
            timeout=LIFECYCLE_TIMEOUT,
            idempotent=idempotent,
        )
        await self._connection.call(call, body)

    async def _put_archive(
        self, remote: GuestPath, body: Callable[[], AsyncIterable[bytes]], *, idempotent: bool = True
    ) -> None:
        headers = {"Content-Type": "application/x-tar"}
        call = self._on(
            "PUT", "archives", remote, headers=headers, timeout=LIFECYCLE_TIMEOUT, idempotent=idempotent
        )
        await self._connection.call(call, body)

    async def _get_archive(self, remote: GuestPath, target: Path) -> list[str]:
        headers = {"Accept": "application/x-tar", "Accept-Encoding": "identity"}
        call = self._on("GET", "archives", remote, headers=headers)
        with tempfile.TemporaryFile() as archive:
            await self._save(call, archive)
            archive.seek(0)
            return await async_call(unpack, archive, target)

    async def _get_file(self, remote: GuestPath, target: Path, mode: int) -> None:
        """Write a temporary file, then rename it: an interrupted download keeps the old file."""
        call = self._on("GET", "files", remote, headers=_BYTES)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        part = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                await self._save(call, file)
            part.chmod(mode)
            await async_call(part.replace, target)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()

    async def _save(self, call: Request, file: BinaryIO) -> None:
        async with aclosing(self._connection.stream(call)) as chunks:
            async for chunk in chunks:
                await async_call(file.write, chunk)

    def _on(
        self,
        method: str,
        what: str,
        path: GuestPath,
        *,
        query: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        timeout: float | Unset | None = UNSET,
        idempotent: bool | None = None,
    ) -> Request:
        return request(
            method,
            f"/v1/vms/{{}}/{what}/{{}}",
            self._vm_id,
            os.fspath(path),
            query=query,
            user=self._user,
            headers=headers,
            timeout=timeout,
            idempotent=idempotent,
        )


async def _once(content: bytes) -> AsyncGenerator[bytes]:
    yield content


async def _file_chunks(path: Path) -> AsyncGenerator[bytes]:
    with await async_call(path.open, "rb") as file:
        while chunk := await async_call(file.read, CHUNK):
            yield chunk


async def _in_turn(chunks: Iterator[bytes]) -> AsyncGenerator[bytes]:
    while (chunk := await async_call(next, chunks, None)) is not None:
        yield chunk
