"""Deletion of a VM: process, files, groups and row."""

from dataclasses import dataclass

from stead.machines.engine import Engine
from stead.machines.events import REQUESTED, EventKind, status
from stead.machines.records import Record
from stead.machines.states import Deleted, Deleting


@dataclass(eq=False)
class DeleteOperation:
    engine: Engine

    async def remove(self, record: Record, why: str | None = None, *, forget: bool = True) -> None:
        """Delete a VM, whatever step it is at; `why` is None on request. Call with its lock held.

        Without `forget`, a VM with `recreate` keeps its row.
        """
        recorded = await self.engine.journal.get(record.id)
        if recorded is None:
            return
        ended = status(EventKind.DELETED, why)
        deleting = recorded
        if not isinstance(recorded.state, Deleting):
            deleting = await self.engine.journal.transition(recorded, Deleting("end", recorded.run))
        await self.engine.processes.end(deleting, ended)
        deleting = await self.engine.journal.transition(deleting, Deleting("clean"))
        await self.engine.host.nics.end_connections(record.vm_slot)
        await self.engine.host.discard(record.id)
        kept = recorded.properties.recreate and not forget
        if kept:
            await self.engine.journal.transition(deleting, Deleted(ended))
        else:
            await self.engine.journal.forget(deleting)
        self.engine.events.tell_exit(record.id, ended)
        self.engine.events.report(EventKind.DELETED, recorded, why or REQUESTED, removed=not kept)
        self.engine.layers.sweep()
