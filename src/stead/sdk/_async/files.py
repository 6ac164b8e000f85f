"""Files in a machine."""

import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, BinaryIO

from stead.sdk._async.connection import AsyncConnection
from stead.sdk._async.streams import AsyncStream
from stead.sdk.answers import error_of
from stead.sdk.archives import CHUNK, pack, unpack
from stead.sdk.blocking import async_call
from stead.sdk.errors import FileNotFound
from stead.sdk.events import FileEvents
from stead.sdk.models import DirEntry, FileEvent, FileStat
from stead.sdk.parsing import parse, parse_list
from stead.sdk.requests import LIFECYCLE_TIMEOUT, UNSET, Request, Unset, request

_BYTES = {"Accept": "application/octet-stream", "Accept-Encoding": "identity"}

LocalPath = str | os.PathLike[str]
GuestPath = str | os.PathLike[str]
"""A path in the machine; absolute."""


class AsyncFiles:
    """The files of a machine, seen as root or as the Linux user of the handle. Large files are streamed."""

    def __init__(self, connection: AsyncConnection, vm_id: str, user: str | None) -> None:
        self._connection = connection
        self._vm_id = vm_id
        self._user = user

    async def read(self, path: GuestPath) -> bytes:
        """A whole file."""
        response = await self._connection.send(self._on("GET", "files", path, headers=_BYTES))
        if not response.is_success:
            raise error_of(response)
        return response.content

    async def read_text(self, path: GuestPath, encoding: str = "utf-8") -> str:
        """A whole file as text."""
        return (await self.read(path)).decode(encoding)

    def read_chunks(self, path: GuestPath) -> AsyncStream[bytes]:
        """The bytes of a file as they come."""
        call = self._on("GET", "files", path, headers=_BYTES)
        return AsyncStream(self._connection.stream(call))

    async def write(
        self, path: GuestPath, data: bytes | AsyncIterable[bytes], *, mode: int | None = None
    ) -> None:
        """Replace a file, making its parents; `mode` is its permissions.

        The old file stays until the new one is complete. An iterator is sent as it yields; should the
        connection break, it cannot be sent again.
        """
        if isinstance(data, bytes | bytearray | memoryview):
            content = bytes(data)
            await self._put(path, mode, lambda: _once(content), len(content))
        else:
            await self._put(path, mode, lambda: data, None, idempotent=False)

    async def write_text(
        self, path: GuestPath, text: str, encoding: str = "utf-8", *, mode: int | None = None
    ) -> None:
        """Replace a file by text."""
        await self.write(path, text.encode(encoding), mode=mode)

    async def read_dir(self, path: GuestPath) -> list[DirEntry]:
        """What is in a folder. `NotADirectoryError` if it is a file."""
        answer = await self._connection.call(self._on("GET", "files", path))
        if isinstance(answer, dict) and "files" not in answer and "content" in answer:
            raise NotADirectoryError(f"{os.fspath(path)} in the machine is not a folder")
        return parse_list(DirEntry, answer, "files")

    async def stat(self, path: GuestPath, *, follow: bool = True) -> FileStat:
        """What is at a path, or where a link there leads to unless `follow` is false."""
        call = self._on("GET", "stat", path, query={"follow": follow})
        return parse(FileStat, await self._connection.call(call))

    async def exists(self, path: GuestPath) -> bool:
        try:
            await self.stat(path)
        except FileNotFound:
            return False
        return True

    async def mkdir(self, path: GuestPath, *, parents: bool = False) -> None:
        """Make a folder; with `parents`, also those above it, and it may be there already."""
        query = {"parents": parents}
        await self._connection.call(self._on("POST", "directories", path, query=query, idempotent=parents))

    async def remove(self, path: GuestPath, *, recursive: bool = False) -> None:
        """Remove a file, an empty folder, or with `recursive` a folder with all that is in it."""
        query = {"recursive": recursive}
        await self._connection.call(self._on("DELETE", "files", path, query=query, timeout=LIFECYCLE_TIMEOUT))

    async def move(self, source: GuestPath, target: GuestPath) -> None:
        """Move or rename a file or a folder, as `mv -T` does; an existing target file is replaced."""
        call = request(
            "POST",
            "/v1/vms/{}/move",
            self._vm_id,
            json={"from": os.fspath(source), "to": os.fspath(target)},
            user=self._user,
            timeout=LIFECYCLE_TIMEOUT,
        )
        await self._connection.call(call)

    def watch(self) -> AsyncStream[FileEvent]:
        """Changes to files as they happen, without end."""
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
        """Copy a local file or folder into the machine, to that path.

        A folder's contents are added to those of the remote folder; everything in it will belong to the
        handle's user.
        """
        source = Path(local)
        if await async_call(source.is_dir):
            await self._put_archive(remote, source)
            return
        found = await async_call(source.stat)
        name = os.fspath(remote)
        target = name + source.name if name.endswith("/") else name
        await self._put(target, found.st_mode & 0o777, lambda: _file_chunks(source), found.st_size)

    async def download(self, remote: GuestPath, local: LocalPath) -> list[str]:
        """Copy a file or folder of the machine to a local path; returns the names that were left out.

        A file goes into `local` if that is a folder. Of a folder, links that lead out of it, devices and
        pipes are left out: what comes from a machine cannot touch anything else here.
        """
        target = Path(local)
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

    async def _put_archive(self, remote: GuestPath, source: Path) -> None:
        headers = {"Content-Type": "application/x-tar"}
        call = self._on("PUT", "archives", remote, headers=headers, timeout=LIFECYCLE_TIMEOUT)
        await self._connection.call(call, lambda: _in_turn(pack(source)))

    async def _get_archive(self, remote: GuestPath, target: Path) -> list[str]:
        headers = {"Accept": "application/x-tar", "Accept-Encoding": "identity"}
        call = self._on("GET", "archives", remote, headers=headers)
        with tempfile.TemporaryFile() as archive:
            await self._save(call, archive)
            archive.seek(0)
            return await async_call(unpack, archive, target)

    async def _get_file(self, remote: GuestPath, target: Path, mode: int) -> None:
        """Beside the target first: a download that breaks off leaves the old file."""
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
