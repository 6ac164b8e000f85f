"""Deletion of a VM: process, files, groups and row."""

from dataclasses import dataclass

from stead.host.interface import Host
from stead.machines.events import REQUESTED, EventKind, Events, status
from stead.machines.journal import Journal
from stead.machines.layers import Layers
from stead.machines.processes import Processes
from stead.machines.records import Record
from stead.machines.states import Deleted, Deleting


@dataclass(eq=False)
class DeleteOperation:
    host: Host
    journal: Journal
    processes: Processes
    layers: Layers
    events: Events

    async def remove(self, record: Record, why: str | None = None, *, forget: bool = True) -> None:
        """Delete a VM, whatever step it is at; `why` is None on request. Call with its lock held.

        Without `forget`, a VM with `recreate` keeps its row.
        """
        recorded = await self.journal.get(record.id)
        if recorded is None:
            return
        ended = status(EventKind.DELETED, why)
        deleting = recorded
        if not isinstance(recorded.state, Deleting):
            deleting = await self.journal.transition(recorded, Deleting("end", recorded.run))
        await self.processes.end(deleting, ended)
        deleting = await self.journal.transition(deleting, Deleting("clean"))
        await self.host.forget_connections(record.place)
        await self.host.discard(record.id)
        kept = recorded.properties.recreate and not forget
        if kept:
            await self.journal.transition(deleting, Deleted(ended))
        else:
            await self.journal.forget(deleting)
        self.events.tell_exit(record.id, ended)
        self.events.report(EventKind.DELETED, recorded, why or REQUESTED, removed=not kept)
        self.layers.sweep()
