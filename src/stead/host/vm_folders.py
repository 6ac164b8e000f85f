"""The folders of VMs, which their QEMUs are confined to, with the disk layers that they write."""

import os
from pathlib import Path

from stead.errors import HostError
from stead.files import exists
from stead.host import disks
from stead.host.interface import VmSlot
from stead.host.network import Network
from stead.host.vm import VmFiles
from stead.settings import Settings
from stead.tasks import in_thread


class VmFolders:
    """The folder of each VM, with the layers that it writes."""

    def __init__(self, settings: Settings, network: Network) -> None:
        self._settings = settings
        self._network = network
        self._empty_layers = disks.EmptyLayers()

    def files(self, machine: str) -> VmFiles:
        runtime = self._settings.runtime / self._settings.instance
        return VmFiles(self._settings.data / "machines" / machine, runtime / machine)

    def layer(self, machine: str, layer: str) -> Path:
        return self.files(machine).folder / f"{layer}.qcow2"

    async def make_folder(self, vm_slot: VmSlot) -> None:
        await self._network.forget_connections(vm_slot.number)
        folder, uid = self.files(vm_slot.machine).folder, self._settings.uid(vm_slot.number)
        try:
            folder.mkdir(parents=True, mode=0o711)
            folder.chmod(0o700)
            os.chown(folder, uid, uid)
        except OSError as error:
            raise HostError(f"cannot create {folder}: {error.strerror}") from error

    async def make_layer(self, vm_slot: VmSlot, layer: str, size_gib: int) -> None:
        """An empty disk layer in the VM's folder."""
        uid = self._settings.uid(vm_slot.number)
        await self._empty_layers.make(self.layer(vm_slot.machine, layer), size_gib, uid)

    async def grow_layer(self, machine: str, layer: str, size_gib: int) -> None:
        await disks.grow_layer(self.layer(machine, layer), size_gib)

    def has_layer(self, machine: str, layer: str) -> bool:
        return exists(self.layer(machine, layer))

    def remove_layer(self, machine: str, layer: str) -> None:
        self.layer(machine, layer).unlink(missing_ok=True)

    async def sync_layer(self, machine: str, layer: str) -> None:
        await in_thread(disks.sync_layer, self.layer(machine, layer))
