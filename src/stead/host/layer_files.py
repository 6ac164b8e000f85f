"""Files of read-only disk layers, in a folder that only root can write."""

import os
from collections.abc import Sequence
from pathlib import Path

from stead.errors import HostError
from stead.files import ABSENT, allocated, exists, open_regular, remove_garbage, sync_folder
from stead.host import disks, interface
from stead.host.interface import narrowed
from stead.host.merging import merge
from stead.host.quarantine import Quarantine
from stead.host.templates import LocalTemplate
from stead.tasks import in_thread

_TEMPORARY = ".merging-"


class LayerFiles:
    def __init__(self, folder: Path, machines: Path, quarantine: Quarantine) -> None:
        self._folder = folder
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
        await in_thread(disks.sync_layer, self.path(file))

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
        bottom = narrowed(template, LocalTemplate).layers
        temporary = self.path(f"{_TEMPORARY}{target}")
        self._merging.add(temporary.name)
        try:
            temporary.touch(mode=0o600)
            await merge([*map(self.path, files)], (*map(self.path, below), *bottom), temporary)
            await in_thread(_rename, temporary, self.path(target))
        except OSError as error:
            raise HostError(f"cannot merge disk layers: {error.strerror}") from error
        finally:
            temporary.unlink(missing_ok=True)
            self._merging.discard(temporary.name)

    async def remove(self, files: Sequence[str]) -> None:
        await in_thread(remove_garbage, [*map(self.path, files)])

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


def _rename(source: Path, target: Path) -> None:
    source.rename(target)
    sync_folder(target.parent)
