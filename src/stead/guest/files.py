"""Files inside a guest. Everything is streamed; nothing is held whole unless asked for."""

import asyncio
import base64
import contextlib
import io
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from stead.deadlines import scaled
from stead.errors import GuestError, GuestUnreachable, InvalidRequest
from stead.guest.agent import Agent, Body, parsing, path_query, small
from stead.shares import MemoryReservation, Reserve, unlimited

_TIMEOUT = scaled(900.0)
"""Enough to remove or list a very large tree in an emulated guest; a guest that ends fails a call at once."""

GuestPath = str | bytes | os.PathLike[str]
Kind = Literal["file", "directory", "symlink", "fifo", "socket", "device"]
_LARGEST = (1 << 63) - 1
T = TypeVar("T")


@dataclass(frozen=True)
class FileInfo:
    """What is at a path. Names are text with undecodable bytes kept (os.fsencode gives them back)."""

    name: str
    kind: Kind
    size: int
    mode: int
    uid: int
    gid: int
    user: str
    group: str
    mtime_ns: int
    target: str | None


class GuestFiles:
    """The files of one guest, seen as one Linux user."""

    def __init__(
        self, using: Callable[[], AbstractAsyncContextManager[Agent]], user: str | None = None
    ) -> None:
        """`using` leases the guest for one call."""
        self._using = using
        self._user = user

    async def read(
        self,
        path: GuestPath,
        start: int = 0,
        length: int | None = None,
        *,
        reserve: Reserve = unlimited,
        reserved: int = 0,
    ) -> bytes:
        """A whole file, or `length` bytes of it from `start`; past the end there is nothing to read.

        `reserve` is asked for its memory, of which so many bytes are `reserved` by now.
        """
        # BytesIO gives its bytes away without a copy.
        content, memory = io.BytesIO(), MemoryReservation(reserve, reserved)
        async with contextlib.aclosing(self.stream(path, start, length)) as chunks:
            async for chunk in chunks:
                if length is not None and content.tell() + len(chunk) > length:
                    text = (
                        f"the guest agent sent more of {path!r} than the {length} bytes that were asked for"
                    )
                    raise GuestError("answer_too_large", text)
                await memory.add(len(chunk))
                content.write(chunk)
        return content.getvalue()

    async def stream(
        self, path: GuestPath, start: int = 0, length: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """The bytes of a file in chunks, as they come."""
        if start < 0 or (length is not None and length < 0):
            raise InvalidRequest("offset and length must not be negative")
        if length == 0 or start >= _LARGEST:
            return
        headers = {}
        if start or length is not None:
            last = "" if length is None else min(start + length, _LARGEST) - 1
            headers["Range"] = f"bytes={start}-{last}"
        target = f"/v1/file?path={path_query(path)}"
        try:
            async with (
                self._using() as agent,
                agent.stream("GET", target, headers=headers, user=self._user) as answer,
            ):
                async for chunk in answer.chunks():
                    yield chunk
        except GuestError as error:
            if error.code != "out_of_range":
                raise

    async def write(
        self,
        path: GuestPath,
        content: Body,
        *,
        mode: int | None = None,
        owner: str | None = None,
        group: str | None = None,
        size: int | None = None,
    ) -> int:
        """Replace a file atomically, making its parents; returns the size. A failure leaves the old file.

        `size`, when known for a stream, must be its length.
        """
        target = f"/v1/file?path={path_query(path)}"
        if mode is not None:
            target += f"&mode={mode:04o}"
        if owner is not None:
            target += f"&owner={path_query(owner)}"
        if group is not None:
            target += f"&group={path_query(group)}"
        headers = {}
        if size is not None and not isinstance(content, bytes):
            headers["Content-Length"] = str(size)
            content = _exactly(size, content)
        async with self._using() as agent:
            answer = await agent.call(
                "PUT", target, headers=headers, user=self._user, body=content, timeout=None
            )
        with parsing("PUT /v1/file"):
            return small(answer["size"])

    async def stat(self, path: GuestPath, *, follow: bool = True) -> FileInfo:
        return _info(await self._call("GET", f"/v1/stat?path={path_query(path)}&follow={int(follow)}"))

    async def list(self, path: GuestPath) -> list[FileInfo]:
        async with contextlib.aclosing(self.batches(path, tuple)) as batches:
            return [entry async for batch in batches for entry in batch]

    async def batches(
        self, path: GuestPath, convert: Callable[[Sequence[FileInfo]], T]
    ) -> AsyncGenerator[T, None]:
        """The entries of a folder as they arrive, converted in a thread."""
        target = f"/v1/directory?path={path_query(path)}"
        try:
            async with (
                self._using() as agent,
                asyncio.timeout(_TIMEOUT),
                agent.stream("GET", target, user=self._user, header_timeout=None) as answer,
            ):
                async for batch in answer.batches(
                    "entries", lambda found: convert([_info(entry) for entry in found])
                ):
                    yield batch
        except TimeoutError as error:
            raise GuestUnreachable(f"the guest agent did not list {path!r} within {_TIMEOUT:g} s") from error

    async def make_folder(self, path: GuestPath, *, parents: bool = False, mode: int = 0o755) -> None:
        query = f"path={path_query(path)}&parents={int(parents)}&mode={mode:04o}"
        await self._call("POST", f"/v1/directory?{query}")

    async def remove(self, path: GuestPath, *, recursive: bool = False) -> None:
        await self._call("DELETE", f"/v1/path?path={path_query(path)}&recursive={int(recursive)}")

    async def move(self, source: GuestPath, target: GuestPath, *, overwrite: bool = False) -> None:
        query = f"from={path_query(source)}&to={path_query(target)}&overwrite={int(overwrite)}"
        await self._call("POST", f"/v1/move?{query}")

    async def download_tar(self, path: GuestPath) -> AsyncGenerator[bytes, None]:
        """A folder's contents as a tar stream."""
        target = f"/v1/archive?path={path_query(path)}"
        async with self._using() as agent, agent.stream("GET", target, user=self._user) as answer:
            async for chunk in answer.chunks():
                yield chunk

    async def upload_tar(self, path: GuestPath, archive: Body) -> int:
        """Unpack a tar stream into a folder, made if missing; returns the number of entries."""
        target = f"/v1/archive?path={path_query(path)}"
        async with self._using() as agent:
            answer = await agent.call("PUT", target, user=self._user, body=archive, timeout=None)
        with parsing("PUT /v1/archive"):
            return small(answer["files"])

    async def _call(self, method: str, target: str) -> Any:
        async with self._using() as agent:
            return await agent.call(method, target, user=self._user, timeout=_TIMEOUT)


async def _exactly(size: int, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream of that size; the last chunk is held back until it is known to be the last."""
    seen, held = 0, b""
    async for chunk in content:
        seen += len(chunk)
        if seen > size:
            raise InvalidRequest(f"stream is longer than the announced {size} bytes")
        if chunk:
            yield held
            held = chunk
    if seen < size:
        raise InvalidRequest(f"stream ended after {seen} of {size} bytes")
    yield held


def _info(entry: dict[str, Any]) -> FileInfo:
    with parsing("a request about files"):
        target = entry.get("target_b64")
        kind = entry["type"]
        if kind not in get_args(Kind):
            raise ValueError
        return FileInfo(
            name=os.fsdecode(base64.b64decode(entry["name_b64"])),
            kind=kind,
            size=small(entry["size"]),
            mode=int(str(entry["mode"]), 8),
            uid=small(entry["uid"]),
            gid=small(entry["gid"]),
            user=str(entry.get("user", "")),
            group=str(entry.get("group", "")),
            mtime_ns=small(entry["mtime_ns"]),
            target=None if target is None else os.fsdecode(base64.b64decode(target)),
        )
