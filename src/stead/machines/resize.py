"""Resize: a VM gets another size; a running one is restarted for it."""

from dataclasses import KW_ONLY, dataclass, replace

from stead.errors import InvalidRequest
from stead.machines.boot import BootOperation
from stead.machines.engine import Engine
from stead.machines.events import Use
from stead.machines.locks import wrong_state
from stead.machines.records import Record
from stead.machines.start import StartOperation
from stead.machines.states import Operation, Running, Stopped
from stead.machines.stop import STOP_TIMEOUT, StopOperation
from stead.settings import Size


@dataclass(eq=False)
class ResizeOperation:
    engine: Engine
    _: KW_ONLY
    start: StartOperation
    stop: StopOperation
    boot: BootOperation

    async def resize(
        self,
        machine_id: str,
        *,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        disk_gib: int | None = None,
    ) -> None:
        """Change a VM's size; a running VM is restarted for it."""
        wanted = {"vcpus": vcpus, "memory_mib": memory_mib, "disk_gib": disk_gib}
        changes = {name: value for name, value in wanted.items() if value is not None}
        await self.engine.tasks.run(self._resize(machine_id, changes))

    async def _resize(self, machine_id: str, changes: dict[str, int]) -> None:
        record = await self.engine.journal.find(machine_id)
        if (size := _resized(record, changes)) == record.size:
            return
        # Before it is woken for nothing; checked again when it counts.
        await self.engine.quotas.check_resize(record, size)
        await self.start.ensure_up(machine_id, Use.RESIZE, Operation.RESIZE)
        async with self.engine.locks.operation(machine_id, Operation.RESIZE) as record:
            size = _resized(record, changes)
            async with self.engine.quotas.resizing(record, size):
                if not isinstance(record.state, Running):
                    await self._set_size(record, size)
                    return
                # Before the shutdown: a VM for which there is no slot keeps running.
                async with self.engine.slots.hold(record.account):
                    stopped = await self.stop.shut_down(record, STOP_TIMEOUT, Use.RESIZE, for_good=False)
                    if stopped is None:
                        raise wrong_state(record, Operation.RESIZE)
                    stopped = await self._set_size(stopped, size)
                    await self.boot.boot(stopped, f"{Use.RESIZE} to {size}")

    async def _set_size(self, record: Record, size: Size) -> Record:
        top = record.state.top if isinstance(record.state, Stopped) else None
        if top is not None and size.disk_gib > record.size.disk_gib:
            # A crash after this leaves a disk larger than its row says, which is harmless.
            await self.engine.host.disks.grow_layer(record.vm_slot, top, size.disk_gib)
        return await self.engine.journal.set_size(record, size)


def _resized(record: Record, changes: dict[str, int]) -> Size:
    size = replace(record.size, **changes)
    if size.disk_gib < record.size.disk_gib:
        raise InvalidRequest(f"cannot shrink the disk from {record.size.disk_gib} to {size.disk_gib} GiB")
    return size
