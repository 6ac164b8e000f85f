"""Files, folders, archives and Git objects of a repository."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import BinaryIO, overload

from stead.sdk._async.repo_part import AsyncRepoPart
from stead.sdk.arguments import check_encoding, checks_arguments, local_path
from stead.sdk.blocking import async_call
from stead.sdk.git_models import Blob, RepoFile, RepoFolder, Tree, parse_contents
from stead.sdk.parsing import parse
from stead.sdk.requests import LIFECYCLE_TIMEOUT, Request

LocalPath = str | os.PathLike[str]
RepoPath = str | os.PathLike[str]
"""A path relative to the root of a repository."""


@checks_arguments
class AsyncContents(AsyncRepoPart):
    """The files of a revision. `rev` is a branch, a tag or a commit; the default branch if None."""

    async def get(
        self, path: RepoPath = "", rev: str | None = None, *, recursive: bool = False
    ) -> RepoFile | RepoFolder:
        """A file with its content, or a folder with its entries; `recursive` adds those of subfolders."""
        return await self._get(path, {"rev": rev, "recursive": recursive})

    async def _get(self, path: RepoPath, query: Mapping[str, str | bool | None]) -> RepoFile | RepoFolder:
        place = os.fspath(path).strip("/")
        if place in ("", "."):
            return parse_contents(await self._call("GET", "/contents/", query=query))
        return parse_contents(await self._call("GET", "/contents/{}", place, query=query))

    async def read_bytes(self, path: RepoPath, rev: str | None = None) -> bytes:
        """Read a file. Raises `IsADirectoryError` if the path is a folder."""
        found = await self._get(path, {"rev": rev})
        if isinstance(found, RepoFolder):
            raise IsADirectoryError(f"{os.fspath(path)} in the repository is a folder")
        return found.content

    async def read_text(self, path: RepoPath, rev: str | None = None, *, encoding: str = "utf-8") -> str:
        """Read a file as text."""
        return (await self.read_bytes(path, rev)).decode(check_encoding(encoding))

    @overload
    async def download_tarball(self, rev: str | None = None, *, to: None = None) -> bytes: ...
    @overload
    async def download_tarball(self, rev: str | None = None, *, to: LocalPath) -> Path: ...
    async def download_tarball(self, rev: str | None = None, *, to: LocalPath | None = None) -> bytes | Path:
        """Download a revision as a tar archive: returns its bytes, or writes the file `to`."""
        return await self._download("/tarball", rev, to)

    @overload
    async def download_zip(self, rev: str | None = None, *, to: None = None) -> bytes: ...
    @overload
    async def download_zip(self, rev: str | None = None, *, to: LocalPath) -> Path: ...
    async def download_zip(self, rev: str | None = None, *, to: LocalPath | None = None) -> bytes | Path:
        """Download a revision as a zip archive: returns its bytes, or writes the file `to`."""
        return await self._download("/zip", rev, to)

    async def _download(self, path: str, rev: str | None, to: LocalPath | None) -> bytes | Path:
        headers = {"Accept-Encoding": "identity"}
        call = self._on("GET", path, query={"rev": rev}, headers=headers, timeout=LIFECYCLE_TIMEOUT)
        if to is not None:
            return await self._save(call, local_path(to))
        async with aclosing(self._connection.stream(call)) as chunks:
            return b"".join([chunk async for chunk in chunks])

    async def _save(self, call: Request, target: Path) -> Path:
        """Write a temporary file, then rename it: an interrupted download keeps the old file."""
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        part = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                await self._write(call, file)
            part.chmod(0o644)
            await async_call(part.replace, target)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
        return target

    async def _write(self, call: Request, file: BinaryIO) -> None:
        async with aclosing(self._connection.stream(call)) as chunks:
            async for chunk in chunks:
                await async_call(file.write, chunk)


@checks_arguments
class AsyncBlobs(AsyncRepoPart):
    """Git blobs: contents of files, by object id."""

    async def get(self, sha: str) -> Blob:
        """The blob with this object id."""
        return parse(Blob, await self._call("GET", "/git/blobs/{}", sha))


@checks_arguments
class AsyncTrees(AsyncRepoPart):
    """Git trees: folders, by object id."""

    async def get(self, sha: str) -> Tree:
        """The tree with this object id."""
        return parse(Tree, await self._call("GET", "/git/trees/{}", sha))
