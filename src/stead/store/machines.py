"""Machines as rows."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine

from stead.store.tables import machines


@dataclass(frozen=True)
class MachineRow:
    """One machine as it is recorded. `step` is set while an operation is under way."""

    id: str
    name: str | None
    state: str
    step: str | None
    vcpus: int
    memory_mib: int
    disk_gib: int
    slot: int
    template: str
    hostname: str
    guest_machine_id: str
    pid: int | None = None
    pid_started: int | None = None
    reason: str | None = None
    created_at: int = 0
    updated_at: int = 0


class MachineStore:
    """Reads and writes machine rows; a write is durable when it returns."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def insert(self, row: MachineRow) -> MachineRow:
        now = time.time_ns()
        row = dataclasses.replace(row, created_at=row.created_at or now, updated_at=now)
        async with self._engine.begin() as connection:
            await connection.execute(machines.insert().values(**dataclasses.asdict(row)))
        return row

    async def update(self, machine_id: str, **changes: object) -> MachineRow | None:
        """Change a row and return it; None when there is no such row."""
        statement = (
            machines.update()
            .where(machines.c.id == machine_id)
            .values(**changes, updated_at=time.time_ns())
            .returning(machines)
        )
        async with self._engine.begin() as connection:
            found = (await connection.execute(statement)).one_or_none()
        return None if found is None else MachineRow(**found._mapping)

    async def take(self, from_state: str, template: str, **changes: object) -> MachineRow | None:
        """Change the oldest row of this state and template, so that no one else gets it."""
        oldest = (
            sa.select(machines.c.id)
            .where(machines.c.state == from_state, machines.c.template == template)
            .order_by(machines.c.created_at)
            .limit(1)
            .scalar_subquery()
        )
        statement = (
            machines.update()
            .where(machines.c.id == oldest, machines.c.state == from_state)
            .values(**changes, updated_at=time.time_ns())
            .returning(machines)
        )
        async with self._engine.begin() as connection:
            found = (await connection.execute(statement)).one_or_none()
        return None if found is None else MachineRow(**found._mapping)

    async def delete(self, machine_id: str) -> None:
        async with self._engine.begin() as connection:
            await connection.execute(machines.delete().where(machines.c.id == machine_id))

    async def get(self, machine_id: str) -> MachineRow | None:
        async with self._engine.connect() as connection:
            found = (
                await connection.execute(sa.select(machines).where(machines.c.id == machine_id))
            ).one_or_none()
        return None if found is None else MachineRow(**found._mapping)

    async def list(self, *, excluding: Sequence[str] = ()) -> list[MachineRow]:
        statement = (
            sa.select(machines).where(machines.c.state.not_in(excluding)).order_by(machines.c.created_at)
        )
        async with self._engine.connect() as connection:
            return [MachineRow(**row._mapping) for row in await connection.execute(statement)]

    async def slots(self) -> set[int]:
        async with self._engine.connect() as connection:
            return set((await connection.execute(sa.select(machines.c.slot))).scalars())
