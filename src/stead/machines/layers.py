"""Read-only disk layers and saved memory: adopted, merged when a chain is long, garbage-collected."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from stead.errors import HostError
from stead.host.interface import Host, Template
from stead.logs import get_logger
from stead.machines.chains import how_many_to_merge, needed
from stead.store.layers import LayerStore
from stead.store.machines import LayerRow
from stead.tasks import TaskSet, finished, in_thread

MAX_CHAIN = 8

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

    def __init__(self, host: Host, store: LayerStore, tasks: TaskSet) -> None:
        self._host = host
        self._store = store
        self._tasks = tasks
        self._collecting = asyncio.Lock()
        self._merging = asyncio.Lock()
        self._merged: set[str] = set()
        """The file of the merge under way: it has no row yet."""
        self._readers: set[asyncio.Event] = set()
        self._building: set[str] = set()
        self._stuck: set[str] = set()
        """Files without rows that could not be set aside at start-up; they stay until the next."""
        self._sweeping = False
        self._sweep_again = False
        self._sweeps_allowed = False

    # Reading

    async def chain(self, layer_id: str | None) -> list[str]:
        """The files of a layer and of all layers below it, newest first."""
        if layer_id is None:
            return []
        try:
            return await self._chain(layer_id)
        except LayerMissing:
            # A crash or an error may have come between freezing a layer and adopting its file.
            failed = await self.finish_adoptions()
        try:
            return await self._chain(layer_id)
        except LayerMissing as error:
            if error.layer in failed:
                raise failed[error.layer] from error
            raise

    async def _chain(self, layer_id: str) -> list[str]:
        rows = await self._store.lineage(layer_id)
        if not rows:
            raise LayerMissing(layer_id)
        return self._files(rows)

    async def size(self, layer_id: str | None, checkpoint_id: str | None) -> int:
        """Disk space in bytes of saved memory and of a layer with all layers below it."""
        async with self.reading():
            return await in_thread(self._disk_space, await self.chain(layer_id), checkpoint_id)

    def _disk_space(self, files: Sequence[str], checkpoint: str | None) -> int:
        try:
            saved = 0 if checkpoint is None else self._host.checkpoints.allocated(checkpoint)
            return saved + sum(map(self._host.layers.allocated, files))
        except OSError as error:
            raise HostError(f"cannot measure {error.filename}: {error.strerror}") from error

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

    @contextlib.contextmanager
    def building(self, checkpoint_id: str) -> Iterator[None]:
        """Inside the block, a checkpoint without a row is not garbage."""
        self._building.add(checkpoint_id)
        try:
            yield
        finally:
            self._building.discard(checkpoint_id)

    # Adopting

    async def adopt(self, layer_id: str, machine: str) -> None:
        """Move the file of a frozen layer out of its VM's folder; idempotent."""
        row = await self._store.get(layer_id)
        if row is None or not await self._host.layers.adopt(machine, layer_id, row.file):
            raise LayerMissing(layer_id)

    async def finish_adoptions(self) -> dict[str, HostError]:
        """Adopt layers that are recorded as frozen and still lie in their VM's folder.

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
        for machine in await self._host.layers.not_adopted(row.id, row.file):
            try:
                await self.adopt(row.id, machine)
                return
            except HostError as error:
                failure = error
        if failure is not None:
            raise failure

    # Garbage collection

    def sweep(self) -> None:
        """Collect garbage in the background; calls during a run lead to one more."""
        self._sweep_again = True
        if self._sweeps_allowed and not self._sweeping:
            self._sweeping = True
            self._tasks.start(self._sweep(), "garbage collection of layers")

    def allow_sweeps(self) -> None:
        """Called when recovery has set files without rows aside: before that, a sweep would remove them."""
        self._sweeps_allowed = True
        if self._sweep_again:
            self.sweep()

    async def _sweep(self) -> None:
        try:
            while self._sweep_again:
                self._sweep_again = False
                await self.collect()
        finally:
            self._sweeping = False

    async def collect(self, *, set_aside: bool = False) -> Collected:
        """Remove files and rows without references. Waits for readers: never call it inside `reading`.

        With `set_aside`, as at start-up, only files whose rows are removed here are garbage for sure. Files
        without rows go to the quarantine: the database may be older than they are.
        """
        host = self._host
        async with self._collecting:
            rows = {row.id: row.file for row in await self._store.list()}
            layers = await self._forget_layers()
            # List files before rows: a file whose row is inserted meanwhile is then not taken for garbage.
            files, checkpoints = host.layers.names(), host.checkpoints.ids()
            building, merged = set(self._building), set(self._merged)
            known_files = merged | {row.file for row in await self._store.list()}
            known_checkpoints = building | await self._store.checkpoints()
        files = sorted({*files} - known_files - self._stuck)
        checkpoints = sorted({*checkpoints} - known_checkpoints - self._stuck)
        # Readers that start from here on cannot get any of these files.
        for reader in list(self._readers):
            await reader.wait()
        collected = Collected(layers, frozenset(files), frozenset(checkpoints))
        if set_aside:
            forgotten = {rows[layer] for layer in layers}
            unknown = [file for file in files if file not in forgotten and not host.layers.is_temporary(file)]
            await self._set_aside(unknown, checkpoints)
            files, checkpoints = [file for file in files if file not in unknown], []
        await host.layers.remove(files)
        await host.checkpoints.remove(checkpoints)
        return collected

    async def _set_aside(self, files: Sequence[str], checkpoints: Sequence[str]) -> None:
        for name in (*files, *checkpoints):
            try:
                if name in files:
                    await self._host.layers.set_aside(name)
                else:
                    await self._host.checkpoints.set_aside(name)
            except HostError as error:
                log.error("cannot set a file without a row aside", file=name, error=str(error))
                self._stuck.add(name)

    async def _forget_layers(self) -> frozenset[str]:
        parents = {row.id: row.parent for row in await self._store.list()}
        doomed = parents.keys() - needed(parents, await self._store.referenced())
        # A new reference since the query makes the removal fail; the next collection tries again.
        return frozenset(doomed) if doomed and await self._store.remove(doomed) else frozenset()

    # Merging

    def merge_in_background(self, layer_id: str | None, template_id: str) -> None:
        """Merge a long chain of layers in the background: each layer makes a disk slower to open."""
        template = self._host.templates.load(template_id)
        if layer_id is not None and template is not None:
            self._tasks.start(self._merge_and_sweep(layer_id, template), "merge of disk layers")

    async def _merge_and_sweep(self, layer_id: str, template: Template) -> None:
        if await self.merge_if_long(layer_id, template):
            self.sweep()

    async def merge_if_long(self, layer_id: str, template: Template) -> bool:
        """Merge the newest layers of a chain on a template that is too long; returns whether it did.

        The layer keeps its id and content. The merged layers below it stay for other references.
        """
        async with self._merging:
            rows = await self._store.lineage(layer_id)
            files = self._files(rows) if rows else []
            count = how_many_to_merge([self._host.layers.allocated(file) for file in files], MAX_CHAIN)
            if count == 0:
                return False
            merged = f"{secrets.token_hex(10)}.qcow2"
            self._merged = {merged}
            try:
                await self._host.layers.merge(files[:count], files[count:], template, merged)
                # An error leaves the merged file: the row may refer to it already.
                if await finished(self._store.rebase(layer_id, merged, rows[count - 1].parent)):
                    return True
                await self._host.layers.remove([merged])
                return False
            except HostError:
                if await self._store.get(layer_id) is None:
                    # The layer was garbage-collected during the merge.
                    return False
                raise
            finally:
                self._merged = set()

    def _files(self, rows: Sequence[LayerRow]) -> list[str]:
        for row in rows:
            if not self._host.layers.exists(row.file):
                raise LayerMissing(row.id)
        return [row.file for row in rows]
