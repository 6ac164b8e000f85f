"""The folders of VMs, which only root can enter, with the disk layers that their QEMUs write."""

from pathlib import Path

from stead.errors import HostError
from stead.files import allocated, exists
from stead.host import disks
from stead.host.disk_process import grow
from stead.host.interface import VmSlot
from stead.host.network import Network
from stead.host.sandbox import Sandbox
from stead.host.vm import VmFiles
from stead.settings import Settings
from stead.tasks import Threads, in_thread


class VmFolders:
    """The folder of each VM, with the layers that it writes."""

    def __init__(self, settings: Settings, network: Network, sandbox: Sandbox) -> None:
        self._settings = settings
        self._network = network
        self._sandbox = sandbox

    def files(self, machine: str) -> VmFiles:
        runtime = self._settings.runtime / self._settings.instance
        return VmFiles(self._settings.data / "machines" / machine, runtime / machine)

    def layer(self, machine: str, layer: str) -> Path:
        return self.files(machine).layer(layer)

    async def make_folder(self, vm_slot: VmSlot) -> None:
        await self._network.forget_connections(vm_slot.number)
        folder = self.files(vm_slot.machine).folder
        try:
            folder.mkdir(parents=True, mode=0o711)
            folder.chmod(0o700)
        except OSError as error:
            raise HostError(f"cannot create {folder}: {error.strerror}") from error

    async def make_layer(self, vm_slot: VmSlot, layer: str, size_gib: int) -> None:
        """An empty disk layer in the VM's folder."""
        await in_thread(disks.make_layer, self.layer(vm_slot.machine, layer), size_gib << 30)

    async def grow_layer(self, vm_slot: VmSlot, layer: str, size_gib: int) -> None:
        """Grow a layer that no QEMU has open."""
        uid = self._settings.uid(vm_slot.number)
        await grow(self._sandbox, uid, self.layer(vm_slot.machine, layer), size_gib << 30)

    def has_layer(self, machine: str, layer: str) -> bool:
        return exists(self.layer(machine, layer))

    def remove_layer(self, machine: str, layer: str) -> None:
        self.layer(machine, layer).unlink(missing_ok=True)

    def allocated(self, machine: str) -> int:
        try:
            return sum(allocated(path) for path in self.files(machine).folder.iterdir())
        except FileNotFoundError:
            return 0

    async def sync_layer(self, machine: str, layer: str) -> None:
        await Threads.COPIES.run(disks.sync_layer, self.layer(machine, layer))
