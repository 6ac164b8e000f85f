"""Files of read-only disk layers, in a folder that only root can write."""

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from stead.errors import HostError
from stead.files import (
    ABSENT,
    allocated,
    copy_sparse,
    exists,
    open_regular,
    remove_garbage,
    sync_folder,
)
from stead.host import disks, interface
from stead.host.interface import narrowed
from stead.host.merging import merge
from stead.host.qemu import OpenLayer
from stead.host.quarantine import Quarantine
from stead.host.sandbox import Sandbox
from stead.host.templates import LocalTemplate
from stead.logs import get_logger
from stead.tasks import Threads, in_thread

log = get_logger("stead.layers")

_TEMPORARY = ".merging-"


class LayerFiles:
    def __init__(
        self, folder: Path, machines: Path, quarantine: Quarantine, sandbox: Sandbox, uid: int
    ) -> None:
        """Layers are merged in the sandbox, by this user."""
        self._folder = folder
        self._sandbox = sandbox
        self._uid = uid
        self._machines = machines
        self._quarantine = quarantine
        self._merging: set[str] = set()

    def path(self, file: str) -> Path:
        return self._folder / file

    def names(self) -> list[str]:
        return [path.name for path in self._folder.iterdir() if path.name not in self._merging]

    def exists(self, file: str) -> bool:
        return exists(self.path(file))

    def is_temporary(self, file: str) -> bool:
        return file.startswith(_TEMPORARY)

    def allocated(self, file: str) -> int:
        return allocated(self.path(file))

    async def sync(self, file: str) -> None:
        await Threads.COPIES.run(disks.sync_layer, self.path(file))

    async def adopt(self, machine: str, layer: str, file: str) -> bool:
        return await in_thread(_adopt, self._machines / machine / f"{layer}.qcow2", self.path(file))

    async def not_adopted(self, layer: str, file: str) -> list[str]:
        return await in_thread(self._not_adopted, layer, file)

    def _not_adopted(self, layer: str, file: str) -> list[str]:
        if self.exists(file):
            return []
        try:
            folders = list(self._machines.iterdir())
        except ABSENT:
            return []
        except OSError as error:
            raise HostError(f"cannot list {self._machines}: {error.strerror}") from error
        return [folder.name for folder in folders if exists(folder / f"{layer}.qcow2")]

    async def merge(
        self, files: Sequence[str], below: Sequence[str], template: interface.Template, target: str
    ) -> None:
        temporary = self.path(f"{_TEMPORARY}{target}")
        self._merging.add(temporary.name)
        try:
            await self._merge(files, below, template, temporary)
            await in_thread(_rename, temporary, self.path(target))
        except OSError as error:
            raise HostError(f"cannot merge disk layers: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
            self._merging.discard(temporary.name)

    async def _merge(
        self, files: Sequence[str], below: Sequence[str], template: interface.Template, target: Path
    ) -> None:
        with contextlib.ExitStack() as opened:
            chain = await in_thread(self.open, [*files, *below], template, opened)
            await merge(self._sandbox, self._uid, chain[: len(files)], chain[len(files) :], target)

    def open(
        self, files: Sequence[str], template: interface.Template, opened: contextlib.ExitStack
    ) -> list[OpenLayer]:
        """Open frozen layers and the template's below them, for a process that only reads them."""
        layers = [self._open(self.path(file), opened) for file in files]
        return layers + [disks.open_frozen(path, opened) for path in narrowed(template, LocalTemplate).layers]

    def _open(self, path: Path, opened: contextlib.ExitStack) -> OpenLayer:
        try:
            return disks.open_frozen(path, opened)
        except disks.StillWritten:
            # The QEMU that wrote it before is of an older version, or broken: it can change the file at any
            # time. So others get another one.
            log.warning("copying a disk layer that is still open for writing", layer=path.name)
            self._replace_by_copy(path)
            return disks.open_frozen(path, opened)

    def _replace_by_copy(self, path: Path) -> None:
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(4)}-{path.name}")
        self._merging.add(temporary.name)
        try:
            _replace_by_copy(path, temporary)
        except OSError as error:
            raise HostError(f"cannot copy the disk layer {path.name}: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
            self._merging.discard(temporary.name)

    async def remove(self, files: Sequence[str]) -> None:
        await Threads.COPIES.run(remove_garbage, [*map(self.path, files)])

    async def set_aside(self, file: str) -> None:
        await in_thread(self._quarantine.keep, [self.path(file)])


def _adopt(frozen: Path, target: Path) -> bool:
    """Move a file to root's folder. It is hostile: QEMU could write anything into its own folder."""
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


def _replace_by_copy(path: Path, temporary: Path) -> None:
    """Put a copy in the place of a file; processes that have the file open keep it."""
    with contextlib.ExitStack() as opened:
        source = open_regular(path)
        opened.callback(os.close, source)
        copy = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        opened.callback(os.close, copy)
        copy_sparse(source, copy)
        os.fsync(copy)
    _rename(temporary, path)


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync_folder(target.parent)
