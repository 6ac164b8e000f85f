"""The journal of VMs: the only writer of their rows. It refuses what the state machine does not allow."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from stead.errors import CapacityExceeded, MachineNotFound
from stead.guest.identity import new_machine_id
from stead.logs import get_logger
from stead.machines.records import Properties, Record, new_id, record_of
from stead.machines.states import (
    Creating,
    Deleted,
    Deleting,
    IllegalTransition,
    MachineState,
    Preparing,
    Running,
    State,
    Stopped,
    Suspended,
    check_transition,
    to_columns,
    top_of,
)
from stead.settings import Size
from stead.store.machines import LayerRow, MachineRow, MachineStore

log = get_logger("stead.machines")

HIDDEN = (State.PREPARING, State.PREPARED, State.DELETING)
"""States of VMs that do not exist for callers."""
_QUARANTINE = 30.0
"""Seconds before a freed slot, which is an address, goes to another VM."""


class Journal:
    """Reads VMs as typed records and writes every change of their state."""

    def __init__(self, store: MachineStore, slots: range) -> None:
        self._store = store
        self._slots = slots
        self._next_slot = 0
        self._freed: dict[int, float] = {}
        """When slots were freed, for `_QUARANTINE` seconds."""
        self._allocating = asyncio.Lock()

    # Reading

    async def get(self, machine_id: str) -> Record | None:
        row = await self._store.get(machine_id)
        return None if row is None else record_of(row)

    async def find(self, machine_id: str) -> Record:
        """A VM that callers may know; MachineNotFound for any other."""
        record = await self.get(machine_id)
        if record is None or record.state.name in HIDDEN:
            raise MachineNotFound(machine_id)
        return record

    async def rows(self) -> Sequence[MachineRow]:
        """All VMs, for checks that run every few seconds: a thousand records take 10 ms longer."""
        return await self._store.all()

    # Writing

    async def allocate(
        self,
        kind: type[Creating] | type[Preparing],
        size: Size,
        template: str,
        properties: Properties,
        layer: str | None = None,
    ) -> Record:
        """Insert a VM with a free slot, which is its address."""
        async with self._allocating:
            taken = {*await self._store.slots(), *self._quarantined()}
            # Round robin: an address is not used again right away.
            order = itertools.chain(self._slots[self._next_slot :], self._slots[: self._next_slot])
            slot = next((slot for slot in order if slot not in taken), None)
            if slot is None:
                raise CapacityExceeded("no free VM address on this host; delete a VM first")
            self._next_slot = (slot + 1) % len(self._slots)
            machine_id = new_id()
            state = kind(step="allocate", top=new_id())
            check_transition(None, state)
            record = Record(
                id=machine_id,
                slot=slot,
                size=size,
                template=template,
                hostname=machine_id,
                guest_machine_id=new_machine_id(),
                layer=layer,
                properties=properties,
                state=state,
            )
            await self._store.insert(record.to_row())
            return record

    async def transition(self, before: Record, to: MachineState) -> Record:
        """Record the next state of a VM; durable when it returns."""
        return await self._write(before, to, {})

    async def claim(self, prepared: Record, to: Creating, properties: Properties, size: Size) -> Record:
        """Record that a create takes a VM out of the pool: it gets the properties and size of the new VM."""
        changes = properties.to_columns() | asdict(size) | {"created_at": time.time_ns()}
        return replace(await self._write(prepared, to, changes), properties=properties, size=size)

    async def freeze(self, before: Record, to: MachineState, terminals: str | None = None) -> Record:
        """Record the next state of a VM whose top layer has become read-only, in one transaction.

        `terminals` are those of a VM that is suspended by it.
        """
        top = top_of(before.state)
        if top is None:
            raise IllegalTransition(f"no disk layer to freeze: {before.state} -> {to}")
        layer = LayerRow(top, before.layer, before.template, f"{top}.qcow2")
        return await self._write(before, to, {"layer": top}, layer, terminals)

    async def recreate(self, before: Record, template: str, layer: str | None) -> Record:
        """Record that a deleted VM is created again under its id, on this disk."""
        to = Creating(step="allocate", top=new_id(), recreated=True)
        return await self._write(before, to, {"template": template, "layer": layer})

    async def forget(self, before: Record) -> None:
        """Delete the row of a VM of which nothing else is left."""
        if not isinstance(before.state, Deleting):
            raise IllegalTransition(f"{before.state} -> no row")
        await self._store.delete(before.id)
        self._freed[before.slot] = time.monotonic()

    def _quarantined(self) -> list[int]:
        """Slots that were freed moments ago: connections to their last VMs may still be open."""
        oldest = time.monotonic() - _QUARANTINE
        self._freed = {slot: freed for slot, freed in self._freed.items() if freed > oldest}
        return list(self._freed)

    async def _write(
        self,
        before: Record,
        to: MachineState,
        changes: dict[str, Any],
        frozen: LayerRow | None = None,
        terminals: str | None = None,
    ) -> Record:
        check_transition(before.state, to)
        if isinstance(to, Running | Suspended | Stopped):
            changes["active_at"] = time.time_ns()
        if isinstance(to, Deleted):
            changes["layer"] = None
        columns = to_columns(before.state)
        expected = {name: columns[name] for name in ("state", "step", "top", "checkpoint")}
        row = await self._store.transition(before.id, expected, to_columns(to) | changes, frozen, terminals)
        if row is None:
            if await self._store.get(before.id) is None:
                raise MachineNotFound(before.id)
            raise IllegalTransition(f"VM {before.id} is not {before.state} any more, so not {to}")
        return replace(before, state=to, layer=row.layer, template=row.template, active_at=row.active_at)

    async def repair(self) -> Sequence[Record]:
        """All VMs, after rows that fit no state were corrected. Only for recovery: nothing else may run."""
        for row in await self._store.list():
            right = to_columns(record_of(row).state)
            if any(getattr(row, name) != value for name, value in right.items()):
                log.error("correcting a row that fits no state", vm=row.id, state=row.state, step=row.step)
                await self._store.update(row.id, **right)
        return await self.list()

    # Properties

    async def set_name(self, machine_id: str, name: str | None) -> None:
        await self._set(machine_id, name=name)

    async def set_idle(self, machine_id: str, timeout: int | None, threshold: int) -> None:
        await self._set(machine_id, idle_timeout=timeout, activity_threshold=threshold)

    async def set_purpose(self, machine_id: str, purpose: str) -> None:
        await self._set(machine_id, purpose=purpose)

    async def set_size(self, before: Record, size: Size) -> Record:
        await self._set(before.id, **asdict(size))
        return replace(before, size=size)

    async def record_traffic(self, machine_ids: Sequence[str]) -> None:
        """Record that these VMs have just had network traffic."""
        await self._store.record_traffic(machine_ids, time.time_ns())

    async def _set(self, machine_id: str, **changes: object) -> None:
        if await self._store.update(machine_id, **changes) is None:
            raise MachineNotFound(machine_id)

    async def list(self, *states: State) -> list[Record]:
        """All VMs, or those in some states, oldest first."""
        return [record_of(row) for row in await self._store.list(states=states)]
