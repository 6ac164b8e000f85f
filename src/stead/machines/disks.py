"""Disks of VMs: the writable layer, the read-only ones below it, and what an interrupted switch left."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from stead.errors import StartFailed
from stead.host.interface import Disk, Host, Template
from stead.machines.events import EventKind, Events, status
from stead.machines.journal import Journal
from stead.machines.layers import LayerMissing, Layers
from stead.machines.records import Record
from stead.machines.states import Lost, MachineState, Running, Starting, Stopped, Stopping, Suspended, top_of


@dataclass(eq=False)
class Disks:
    host: Host
    journal: Journal
    layers: Layers
    events: Events

    @contextlib.asynccontextmanager
    async def opened(self, record: Record, top: str, template: Template) -> AsyncIterator[Disk]:
        """A VM's disk; none of its layers is removed inside the block, while a process opens them."""
        async with self.layers.reading():
            yield Disk(top, await self.layers.chain(record.layer), template)

    async def make_top(self, record: Record, top: str) -> None:
        await self.host.disks.make_layer(record.vm_slot, top, record.size.disk_gib)

    def template_of(self, record: Record) -> Template:
        template = self.host.templates.load(record.template)
        if template is None:
            raise StartFailed("the template below its disk is missing")
        return template

    async def freeze(self, record: Record, to: MachineState, terminals: str | None = None) -> Record:
        """Record a VM's next state and its top layer as read-only, and adopt the file for others."""
        frozen = await self.journal.freeze(record, to, terminals)
        if frozen.layer is not None:
            await self.layers.adopt(frozen.layer, record.id)
        return frozen

    async def reconcile_top_layer(self, record: Record) -> Record:
        """Finish an interrupted switch to a new top layer after the process ended.

        Whether it switched or not, an empty layer over the old one is the same disk.
        """
        state = record.state
        if not isinstance(state, Running | Stopping) or state.next_top is None:
            return record
        settled = replace(state, next_top=None)
        if self.host.disks.has_layer(record.id, state.next_top):
            return await self.freeze(record, replace(settled, top=state.next_top))
        return await self.journal.transition(record, settled)

    def left_by_start(self, record: Record) -> str | None:
        """The top layer of a VM whose start ended: one that was only being made is incomplete."""
        state = record.state
        if isinstance(state, Starting) and state.step == "disk":
            self.host.disks.remove_layer(record.id, state.top)
            return None
        return top_of(state)

    async def whole(self, record: Record) -> Template:
        """The template below a VM's disk when every layer exists; else the VM becomes lost.

        An error that does not prove that a layer is missing, such as EMFILE or EIO, only fails the call.
        """
        template = self.host.templates.load(record.template)
        reason = "disk layers are missing"
        top = top_of(record.state)
        if template is not None and (top is None or self.host.disks.has_layer(record.id, top)):
            try:
                await self.layers.chain(record.layer)
                return template
            except LayerMissing as error:
                reason = str(error)
        await self._lose(record, reason)
        raise StartFailed(f"VM {record.id} is lost: {reason}")

    async def _lose(self, record: Record, reason: str) -> None:
        lost = Lost(status(EventKind.LOST, reason))
        match record.state:
            case Stopped(top=top):
                lost = replace(lost, top=top)
            case Suspended(checkpoint=checkpoint):
                lost = replace(lost, checkpoint=checkpoint)
        await self.journal.transition(record, lost)
        self.events.report(EventKind.LOST, record, reason)
        self.events.tell_exit(record.id, lost.reason)
