# Made by scripts/unasync from _async/repo_contents.py.
"""Files, folders and objects of a repository, and archives of it."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import BinaryIO, overload

from stead.sdk._sync.repo_part import RepoPart
from stead.sdk.blocking import sync_call
from stead.sdk.git_models import Blob, RepoFile, RepoFolder, Tree, contents_of
from stead.sdk.parsing import parse
from stead.sdk.requests import LIFECYCLE_TIMEOUT, Request

LocalPath = str | os.PathLike[str]
RepoPath = str | os.PathLike[str]
"""A path from the root of a repository."""


class Contents(RepoPart):
    """What a revision holds. `rev` is a branch, a tag or a commit; without it, the default branch."""

    def get(
        self, path: RepoPath = "", rev: str | None = None, *, recursive: bool = False
    ) -> RepoFile | RepoFolder:
        """A file with its content, or a folder with its entries; with `recursive`, all folders below too."""
        return self._get(path, {"rev": rev, "recursive": recursive})

    def _get(self, path: RepoPath, query: Mapping[str, str | bool | None]) -> RepoFile | RepoFolder:
        place = os.fspath(path).strip("/")
        if place in ("", "."):
            return contents_of(self._call("GET", "/contents/", query=query))
        return contents_of(self._call("GET", "/contents/{}", place, query=query))

    def read_bytes(self, path: RepoPath, rev: str | None = None) -> bytes:
        """What is in a file. `IsADirectoryError` if it is a folder."""
        found = self._get(path, {"rev": rev})
        if isinstance(found, RepoFolder):
            raise IsADirectoryError(f"{os.fspath(path)} in the repository is a folder")
        return found.content

    def read_text(self, path: RepoPath, rev: str | None = None, *, encoding: str = "utf-8") -> str:
        """What is in a file, as text."""
        return (self.read_bytes(path, rev)).decode(encoding)

    @overload
    def download_tarball(self, rev: str | None = None, *, to: None = None) -> bytes: ...
    @overload
    def download_tarball(self, rev: str | None = None, *, to: LocalPath) -> Path: ...
    def download_tarball(self, rev: str | None = None, *, to: LocalPath | None = None) -> bytes | Path:
        """A revision as a tar archive: its bytes, or written to the file `to` as they come."""
        return self._download("/tarball", rev, to)

    @overload
    def download_zip(self, rev: str | None = None, *, to: None = None) -> bytes: ...
    @overload
    def download_zip(self, rev: str | None = None, *, to: LocalPath) -> Path: ...
    def download_zip(self, rev: str | None = None, *, to: LocalPath | None = None) -> bytes | Path:
        """A revision as a zip archive: its bytes, or written to the file `to` as they come."""
        return self._download("/zip", rev, to)

    def _download(self, path: str, rev: str | None, to: LocalPath | None) -> bytes | Path:
        headers = {"Accept-Encoding": "identity"}
        call = self._on("GET", path, query={"rev": rev}, headers=headers, timeout=LIFECYCLE_TIMEOUT)
        if to is not None:
            return self._save(call, Path(to))
        with closing(self._connection.stream(call)) as chunks:
            return b"".join(list(chunks))

    def _save(self, call: Request, target: Path) -> Path:
        """Beside the target first: a download that breaks off leaves the old file."""
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        part = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                self._write(call, file)
            part.chmod(0o644)
            sync_call(part.replace, target)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()
        return target

    def _write(self, call: Request, file: BinaryIO) -> None:
        with closing(self._connection.stream(call)) as chunks:
            for chunk in chunks:
                sync_call(file.write, chunk)


class Blobs(RepoPart):
    """Contents of files, by their ids."""

    def get(self, sha: str) -> Blob:
        return Blob.of(self._call("GET", "/git/blobs/{}", sha))


class Trees(RepoPart):
    """Folders, by their ids."""

    def get(self, sha: str) -> Tree:
        return parse(Tree, self._call("GET", "/git/trees/{}", sha))
