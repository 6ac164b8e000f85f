"""Read-only disk layers and saved memory: adopted, merged when a chain is long, garbage-collected."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stead.errors import HostError
from stead.files import ABSENT, exists, open_regular, remove_folder, sync_folder
from stead.host.merging import allocated, merge
from stead.host.quarantine import Quarantine
from stead.logs import get_logger
from stead.machines.chains import how_many_to_merge, needed
from stead.store.layers import LayerStore
from stead.store.machines import LayerRow
from stead.tasks import finished, in_thread

MAX_CHAIN = 8
_TEMPORARY = ".merging-"

log = get_logger("stead.layers")


class LayerMissing(HostError):
    """The file of a layer is proven not to exist."""

    def __init__(self, layer: str) -> None:
        super().__init__("a disk layer is missing")
        self.layer = layer


@dataclass(frozen=True)
class Collected:
    """Result of a garbage collection: layers by id, their files by name, checkpoints by id."""

    layers: frozenset[str] = frozenset()
    files: frozenset[str] = frozenset()
    checkpoints: frozenset[str] = frozenset()


class Layers:
    """Files of read-only layers and checkpoints, consistent with the rows that refer to them.

    A layer's row is inserted before its file exists, and every row is deleted before its file: after any
    crash, a file without a row is garbage, unless it is being built.
    """

    def __init__(self, data: Path, store: LayerStore) -> None:
        self._store = store
        self._layers = data / "layers"
        self._checkpoints = data / "checkpoints"
        self._machines = data / "machines"
        for folder in (self._layers, self._checkpoints):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._collecting = asyncio.Lock()
        self._merging = asyncio.Lock()
        self._merged: set[str] = set()
        """Files of the merge under way: they have no row yet."""
        self._readers: set[asyncio.Event] = set()
        self._building: set[str] = set()
        self._stuck: set[Path] = set()
        """Files without rows that could not be set aside at start-up; they stay until the next."""

    # Reading

    def checkpoint_folder(self, checkpoint_id: str) -> Path:
        return self._checkpoints / checkpoint_id

    async def chain(self, layer_id: str | None) -> list[Path]:
        """The files of a layer and of all layers below it, newest first."""
        if layer_id is None:
            return []
        rows = await self._store.lineage(layer_id)
        if not rows:
            raise LayerMissing(layer_id)
        return self._files(rows)

    async def size(self, layer_id: str | None, checkpoint_id: str | None) -> int:
        """Disk space in bytes of saved memory and of a layer with all layers below it."""
        async with self.reading():
            files = await self.chain(layer_id)
            folder = None if checkpoint_id is None else self.checkpoint_folder(checkpoint_id)
            return await in_thread(_disk_space, files, folder)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Inside the block, no file that `chain` returned and no existing checkpoint is removed."""
        end = asyncio.Event()
        self._readers.add(end)
        try:
            yield
        finally:
            self._readers.remove(end)
            end.set()

    # Adopting

    async def adopt(self, layer_id: str, frozen: Path) -> None:
        """Move the file of a frozen layer out of its VM's folder; idempotent."""
        row = await self._store.get(layer_id)
        if row is None:
            raise LayerMissing(layer_id)
        if not await in_thread(_take, frozen, self._layers / row.file):
            raise LayerMissing(layer_id)

    async def finish_adoptions(self) -> dict[str, HostError]:
        """After a crash: adopt layers that are recorded as frozen and still lie in their VM's folder.

        Returns the layers for which that failed.
        """
        failed: dict[str, HostError] = {}
        for row in await self._store.list():
            try:
                await self._finish_adoption(row)
            except HostError as error:
                log.warning("cannot adopt a disk layer", layer=row.id, error=str(error))
                failed[row.id] = error
        return failed

    async def _finish_adoption(self, row: LayerRow) -> None:
        failure: HostError | None = None
        for frozen in await in_thread(self._not_adopted, row):
            try:
                await self.adopt(row.id, frozen)
                return
            except HostError as error:
                failure = error
        if failure is not None:
            raise failure

    def _not_adopted(self, row: LayerRow) -> list[Path]:
        """Files in the folders of VMs that a layer may be, when it is not at its place."""
        if exists(self._layers / row.file):
            return []
        try:
            folders = list(self._machines.iterdir())
        except ABSENT:
            return []
        except OSError as error:
            raise HostError(f"cannot list {self._machines}: {error.strerror}") from error
        return [path for folder in folders if exists(path := folder / f"{row.id}.qcow2")]

    @contextlib.contextmanager
    def building(self, checkpoint_id: str) -> Iterator[None]:
        """Inside the block, a checkpoint without a row is not garbage."""
        self._building.add(checkpoint_id)
        try:
            yield
        finally:
            self._building.discard(checkpoint_id)

    # Garbage collection

    async def collect(self, quarantine: Quarantine | None = None) -> Collected:
        """Remove files and rows without references. Waits for readers: never call it inside `reading`.

        With a quarantine, as at start-up, only files whose rows are removed here are garbage for sure. Files
        without rows are set aside: the database may be older than they are.
        """
        async with self._collecting:
            rows = {row.id: row.file for row in await self._store.list()}
            layers = await self._forget_layers()
            # List files before rows: a file whose row is inserted meanwhile is then not taken for garbage.
            files, checkpoints = self._list(self._layers), self._list(self._checkpoints)
            building, merged = set(self._building), set(self._merged)
            known_files = merged | {row.file for row in await self._store.list()}
            known_checkpoints = building | await self._store.checkpoints()
        files = [path for path in files if path.name not in known_files]
        checkpoints = [path for path in checkpoints if path.name not in known_checkpoints]
        # Readers that start from here on cannot get any of these files.
        for reader in list(self._readers):
            await reader.wait()
        collected = Collected(layers, _names(files), _names(checkpoints))
        if quarantine is not None:
            forgotten = {rows[layer] for layer in layers}
            unknown = [path for path in files if path.name not in forgotten and not _is_temporary(path)]
            for path in (*unknown, *checkpoints):
                try:
                    await in_thread(quarantine.keep, [path])
                except HostError as error:
                    log.error("cannot set a file without a row aside", path=str(path), error=str(error))
                    self._stuck.add(path)
            files, checkpoints = [path for path in files if path not in unknown], []
        await in_thread(_remove, (*files, *checkpoints))
        return collected

    def _list(self, folder: Path) -> list[Path]:
        return [path for path in folder.iterdir() if path not in self._stuck]

    async def _forget_layers(self) -> frozenset[str]:
        parents = {row.id: row.parent for row in await self._store.list()}
        doomed = parents.keys() - needed(parents, await self._store.referenced())
        # A new reference since the query makes the removal fail; the next collection tries again.
        return frozenset(doomed) if doomed and await self._store.remove(doomed) else frozenset()

    # Merging

    async def merge_if_long(self, layer_id: str, bottom: tuple[Path, ...]) -> bool:
        """Merge the newest layers of a chain on `bottom` that is too long; returns whether it did.

        The layer keeps its id and content. The merged layers below it stay for other references.
        """
        async with self._merging:
            rows = await self._store.lineage(layer_id)
            files = self._files(rows) if rows else []
            count = how_many_to_merge([allocated(file) for file in files], MAX_CHAIN)
            if count == 0:
                return False
            merged = self._layers / f"{secrets.token_hex(10)}.qcow2"
            temporary = merged.with_name(f"{_TEMPORARY}{merged.name}")
            self._merged = {temporary.name, merged.name}
            try:
                temporary.touch(mode=0o600)
                await merge(files[:count], (*files[count:], *bottom), temporary)
                return await finished(self._replace(layer_id, temporary, merged, rows[count - 1].parent))
            except HostError:
                if await self._store.get(layer_id) is None:
                    # The layer was garbage-collected during the merge.
                    return False
                raise
            except OSError as error:
                raise HostError(f"cannot merge disk layers: {error.strerror}") from error
            finally:
                temporary.unlink(missing_ok=True)
                self._merged = set()

    async def _replace(self, layer_id: str, temporary: Path, merged: Path, parent: str | None) -> bool:
        """Switch a layer to its merged file. An error leaves the file: the row may refer to it already."""
        await in_thread(_rename, temporary, merged)
        if await self._store.rebase(layer_id, merged.name, parent):
            return True
        merged.unlink()
        return False

    def _files(self, rows: Sequence[LayerRow]) -> list[Path]:
        files = [self._layers / row.file for row in rows]
        for row, file in zip(rows, files, strict=True):
            if not exists(file):
                raise LayerMissing(row.id)
        return files


def _disk_space(files: Sequence[Path], folder: Path | None) -> int:
    try:
        saved = [] if folder is None else list(folder.iterdir())
        return sum(allocated(path) for path in (*files, *saved))
    except OSError as error:
        raise HostError(f"cannot measure {error.filename}: {error.strerror}") from error


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(_TEMPORARY)


def _names(paths: Iterable[Path]) -> frozenset[str]:
    return frozenset(path.name for path in paths)


def _take(frozen: Path, target: Path) -> bool:
    """Move a file to root's folder. It is hostile: QEMU could write anything into its own folder.

    False when it is neither there nor here.
    """
    try:
        descriptor = open_regular(frozen)
    except ABSENT:
        if not exists(target):
            return False
    except OSError as error:
        raise HostError(f"cannot adopt the disk layer {frozen}: {error.strerror}") from error
    else:
        try:
            _move(frozen, descriptor, target)
        except OSError as error:
            raise HostError(f"cannot adopt the disk layer {frozen}: {error.strerror}") from error
        finally:
            os.close(descriptor)
    try:
        for folder in (target.parent, frozen.parent):
            if folder.is_dir():
                sync_folder(folder)
    except OSError as error:
        raise HostError(f"cannot sync the disk layer {target}: {error.strerror}") from error
    return True


def _move(frozen: Path, descriptor: int, target: Path) -> None:
    facts = os.fstat(descriptor)
    os.fchown(descriptor, 0, 0)
    os.fchmod(descriptor, 0o600)
    frozen.rename(target)
    if not os.path.samestat(facts, target.lstat()):
        target.unlink()
        raise HostError(f"cannot adopt the disk layer {frozen}: it was replaced by another file")


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync_folder(target.parent)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            remove_folder(path)
        except HostError as error:
            # The next collection tries again; the others are removed nevertheless.
            log.error("cannot remove garbage", path=str(path), error=str(error))
