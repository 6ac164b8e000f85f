"""Turns the entries of a manifest into one tar archive, instead of several requests for each file."""

import io
import os
import stat
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agents.sandbox import ExecResult
from agents.sandbox.entries import BaseEntry, Dir, File, LocalDir, LocalFile
from agents.sandbox.materialization import MaterializedFile
from agents.sandbox.session import SandboxSessionState
from agents.sandbox.session.manifest_application import ManifestApplier

_IN_MEMORY = 8 << 20
_CHUNK = 256 << 10
_ARCHIVED = (Dir, File, LocalFile, LocalDir)


@dataclass
class _Node:
    folder: bool
    mode: int
    start: int = 0
    size: int = 0


class WorkspaceArchive:
    """Stands in for a session while entries are applied: records what they write.

    The entries check and read local files themselves, as they do for any session. Entries of other types than
    files and folders are `deferred`: they need the VM.
    """

    def __init__(
        self, state: SandboxSessionState, *, entry_limit: int | None, file_limit: int | None
    ) -> None:
        self.state = state
        self.deferred: list[tuple[Path, BaseEntry]] = []
        self.groups: list[tuple[str, str]] = []
        """Groups and the paths whose group they become."""
        self._max_manifest_entry_concurrency = entry_limit
        self._max_local_dir_file_concurrency = file_limit
        self._root = PurePosixPath(state.manifest.root)
        self._nodes: dict[PurePosixPath, _Node] = {}
        self._contents = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115

    def close(self) -> None:
        self._contents.close()

    @property
    def empty(self) -> bool:
        """There is nothing in it but the workspace root."""
        return not self._nodes.keys() - {PurePosixPath()}

    async def add(self, entry: BaseEntry, place: Path, base_dir: Path) -> list[MaterializedFile]:
        """Record one entry below the workspace root."""
        if type(entry) not in _ARCHIVED:
            self.deferred.append((place, entry))
            return []
        session: Any = self
        return await entry.apply(session, place, base_dir)

    # What entries call

    async def _apply_entry_batch(
        self, entries: Sequence[tuple[Path, BaseEntry]], *, base_dir: Path
    ) -> list[MaterializedFile]:
        applier = ManifestApplier(
            mkdir=lambda path: self.mkdir(path, parents=True),
            exec_checked_nonzero=self._exec_checked_nonzero,
            apply_entry=self.add,
            max_entry_concurrency=self._max_manifest_entry_concurrency,
        )
        return await applier._apply_entry_batch(entries, base_dir=base_dir)

    async def mkdir(self, path: Path | str, *, parents: bool = False, user: object = None) -> None:
        self._nodes.setdefault(self._inside(path), _Node(folder=True, mode=0o755))

    async def write(self, path: Path | str, data: io.IOBase, *, user: object = None) -> None:
        start = self._contents.seek(0, os.SEEK_END)
        reader: Any = data
        while chunk := reader.read(_CHUNK):
            self._contents.write(chunk)
        node = _Node(folder=False, mode=_file_mode(data), start=start, size=self._contents.tell() - start)
        self._nodes[self._inside(path)] = node

    async def _exec_checked_nonzero(self, *command: str | Path) -> ExecResult:
        """Entries set the group and the permissions of what they wrote with these commands."""
        program, value, place = (str(part) for part in command)
        if program == "chmod":
            self._nodes[self._inside(place)].mode = int(value, 8)
        elif program == "chgrp":
            self.groups.append((value, place))
        else:
            raise NotImplementedError(f"cannot archive an entry that runs {program}")
        return ExecResult(stdout=b"", stderr=b"", exit_code=0)

    def _inside(self, path: Path | str) -> PurePosixPath:
        return PurePosixPath(str(path)).relative_to(self._root)

    async def chunks(self) -> AsyncGenerator[bytes]:
        """The archive, with paths relative to the workspace root."""
        for path, node in sorted(self._nodes.items()):
            if path == PurePosixPath():
                continue
            info = tarfile.TarInfo(path.as_posix())
            info.mode = node.mode
            info.type = tarfile.DIRTYPE if node.folder else tarfile.REGTYPE
            info.size = node.size
            yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            for start in range(0, node.size, _CHUNK):
                self._contents.seek(node.start + start)
                yield self._contents.read(min(_CHUNK, node.size - start))
            if padding := -node.size % tarfile.BLOCKSIZE:
                yield bytes(padding)
        yield bytes(2 * tarfile.BLOCKSIZE)


def _file_mode(data: io.IOBase) -> int:
    """Executable if the local file is; entries with permissions of their own set them afterwards."""
    try:
        mode = os.fstat(data.fileno()).st_mode
    except (OSError, AttributeError):
        return 0o644
    return 0o755 if mode & stat.S_IXUSR else 0o644
