# Made by scripts/unasync from _async/files.py.
"""Files in a machine."""

import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, BinaryIO

from stead.sdk._sync.connection import Connection
from stead.sdk._sync.streams import Stream
from stead.sdk.answers import error_of
from stead.sdk.archives import CHUNK, pack, unpack
from stead.sdk.blocking import sync_call
from stead.sdk.errors import FileNotFound
from stead.sdk.events import FileEvents
from stead.sdk.models import DirEntry, FileEvent, FileStat
from stead.sdk.parsing import parse, parse_list
from stead.sdk.requests import LIFECYCLE_TIMEOUT, UNSET, Request, Unset, request

_BYTES = {"Accept": "application/octet-stream", "Accept-Encoding": "identity"}

LocalPath = str | os.PathLike[str]
GuestPath = str | os.PathLike[str]
"""A path in the machine; absolute."""


class Files:
    """The files of a machine, seen as root or as the Linux user of the handle. Large files are streamed."""

    def __init__(self, connection: Connection, vm_id: str, user: str | None) -> None:
        self._connection = connection
        self._vm_id = vm_id
        self._user = user

    def read(self, path: GuestPath) -> bytes:
        """A whole file."""
        response = self._connection.send(self._on("GET", "files", path, headers=_BYTES))
        if not response.is_success:
            raise error_of(response)
        return response.content

    def read_text(self, path: GuestPath, encoding: str = "utf-8") -> str:
        """A whole file as text."""
        return (self.read(path)).decode(encoding)

    def read_chunks(self, path: GuestPath) -> Stream[bytes]:
        """The bytes of a file as they come."""
        call = self._on("GET", "files", path, headers=_BYTES)
        return Stream(self._connection.stream(call))

    def write(self, path: GuestPath, data: bytes | Iterable[bytes], *, mode: int | None = None) -> None:
        """Replace a file, making its parents; `mode` is its permissions.

        The old file stays until the new one is complete. An iterator is sent as it yields; should the
        connection break, it cannot be sent again.
        """
        if isinstance(data, bytes | bytearray | memoryview):
            content = bytes(data)
            self._put(path, mode, lambda: _once(content), len(content))
        else:
            self._put(path, mode, lambda: data, None, idempotent=False)

    def write_text(
        self, path: GuestPath, text: str, encoding: str = "utf-8", *, mode: int | None = None
    ) -> None:
        """Replace a file by text."""
        self.write(path, text.encode(encoding), mode=mode)

    def read_dir(self, path: GuestPath) -> list[DirEntry]:
        """What is in a folder. `NotADirectoryError` if it is a file."""
        answer = self._connection.call(self._on("GET", "files", path))
        if isinstance(answer, dict) and "files" not in answer and "content" in answer:
            raise NotADirectoryError(f"{os.fspath(path)} in the machine is not a folder")
        return parse_list(DirEntry, answer, "files")

    def stat(self, path: GuestPath, *, follow: bool = True) -> FileStat:
        """What is at a path, or where a link there leads to unless `follow` is false."""
        call = self._on("GET", "stat", path, query={"follow": follow})
        return parse(FileStat, self._connection.call(call))

    def exists(self, path: GuestPath) -> bool:
        try:
            self.stat(path)
        except FileNotFound:
            return False
        return True

    def mkdir(self, path: GuestPath, *, parents: bool = False) -> None:
        """Make a folder; with `parents`, also those above it, and it may be there already."""
        query = {"parents": parents}
        self._connection.call(self._on("POST", "directories", path, query=query, idempotent=parents))

    def remove(self, path: GuestPath, *, recursive: bool = False) -> None:
        """Remove a file, an empty folder, or with `recursive` a folder with all that is in it."""
        query = {"recursive": recursive}
        self._connection.call(self._on("DELETE", "files", path, query=query, timeout=LIFECYCLE_TIMEOUT))

    def move(self, source: GuestPath, target: GuestPath) -> None:
        """Move or rename a file or a folder, as `mv -T` does; an existing target file is replaced."""
        call = request(
            "POST",
            "/v1/vms/{}/move",
            self._vm_id,
            json={"from": os.fspath(source), "to": os.fspath(target)},
            user=self._user,
            timeout=LIFECYCLE_TIMEOUT,
        )
        self._connection.call(call)

    def watch(self) -> Stream[FileEvent]:
        """Changes to files as they happen, without end."""
        return Stream(self._watch())

    def _watch(self) -> Generator[FileEvent]:
        call = request("POST", "/v1/vms/{}/watch-files", self._vm_id, user=self._user, timeout=None)
        events = FileEvents()
        with closing(self._connection.stream(call)) as chunks:
            for chunk in chunks:
                for event in events.feed(chunk):
                    yield event
            for event in events.end():
                yield event

    def upload(self, local: LocalPath, remote: GuestPath) -> None:
        """Copy a local file or folder into the machine, to that path.

        A folder's contents are added to those of the remote folder; everything in it will belong to the
        handle's user.
        """
        source = Path(local)
        if sync_call(source.is_dir):
            self._put_archive(remote, source)
            return
        found = sync_call(source.stat)
        name = os.fspath(remote)
        target = name + source.name if name.endswith("/") else name
        self._put(target, found.st_mode & 0o777, lambda: _file_chunks(source), found.st_size)

    def download(self, remote: GuestPath, local: LocalPath) -> list[str]:
        """Copy a file or folder of the machine to a local path; returns the names that were left out.

        A file goes into `local` if that is a folder. Of a folder, links that lead out of it, devices and
        pipes are left out: what comes from a machine cannot touch anything else here.
        """
        target = Path(local)
        found = self.stat(remote)
        if found.is_directory:
            return self._get_archive(remote, target)
        if sync_call(target.is_dir):
            target = target / Path(remote).name
        self._get_file(remote, target, 0o644 if found.mode is None else found.mode & 0o755 | 0o600)
        return []

    def _put(
        self,
        path: GuestPath,
        mode: int | None,
        body: Callable[[], Iterable[bytes]],
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
        self._connection.call(call, body)

    def _put_archive(self, remote: GuestPath, source: Path) -> None:
        headers = {"Content-Type": "application/x-tar"}
        call = self._on("PUT", "archives", remote, headers=headers, timeout=LIFECYCLE_TIMEOUT)
        self._connection.call(call, lambda: _in_turn(pack(source)))

    def _get_archive(self, remote: GuestPath, target: Path) -> list[str]:
        headers = {"Accept": "application/x-tar", "Accept-Encoding": "identity"}
        call = self._on("GET", "archives", remote, headers=headers)
        with tempfile.TemporaryFile() as archive:
            self._save(call, archive)
            archive.seek(0)
            return sync_call(unpack, archive, target)

    def _get_file(self, remote: GuestPath, target: Path, mode: int) -> None:
        """Beside the target first: a download that breaks off leaves the old file."""
        call = self._on("GET", "files", remote, headers=_BYTES)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        part = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                self._save(call, file)
            part.chmod(mode)
            sync_call(part.replace, target)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()

    def _save(self, call: Request, file: BinaryIO) -> None:
        with closing(self._connection.stream(call)) as chunks:
            for chunk in chunks:
                sync_call(file.write, chunk)

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


def _once(content: bytes) -> Generator[bytes]:
    yield content


def _file_chunks(path: Path) -> Generator[bytes]:
    with sync_call(path.open, "rb") as file:
        while chunk := sync_call(file.read, CHUNK):
            yield chunk


def _in_turn(chunks: Iterator[bytes]) -> Generator[bytes]:
    while (chunk := sync_call(next, chunks, None)) is not None:
        yield chunk
