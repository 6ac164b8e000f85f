"""Builds and their phases as rows."""

import dataclasses
import time
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.rows import Rows, made
from stead.store.tables import build_phases, builds


@dataclass(frozen=True)
class BuildRow:
    """One build as it is recorded; `planned_phases` is a JSON list of names."""

    id: str
    account: str
    state: str
    planned_phases: str
    request: str | None = None
    template_hash: str | None = None
    failure: str | None = None
    started_at: int = 0
    finished_at: int | None = None
    updated_at: int = 0


@dataclass(frozen=True)
class PhaseRow:
    """A phase that a build has begun. Only the snapshot of what failed in it is ever added."""

    id: str
    build: str
    position: int
    name: str
    snapshot: str | None = None
    started_at: int = 0


class BuildStore(Rows[BuildRow]):
    table = builds
    row = BuildRow

    async def insert(self, row: BuildRow) -> BuildRow:
        now = time.time_ns()
        return await super().insert(dataclasses.replace(row, started_at=now, updated_at=now))

    async def update(self, row_id: str, **changes: object) -> BuildRow | None:
        return await super().update(row_id, **changes, updated_at=time.time_ns())

    async def finish(self, build_id: str, state: str, failure: str | None = None) -> BuildRow | None:
        return await self.update(build_id, state=state, failure=failure, finished_at=time.time_ns())

    async def begin_phase(self, row: PhaseRow) -> PhaseRow:
        now = time.time_ns()
        row = dataclasses.replace(row, started_at=now)
        await self.database.execute(
            build_phases.insert().values(**dataclasses.asdict(row)),
            builds.update().where(builds.c.id == row.build).values(updated_at=now),
        )
        return row

    async def pin(self, phase_id: str, snapshot: str) -> None:
        """Note the snapshot of what was there when a phase failed."""
        statement = build_phases.update().where(build_phases.c.id == phase_id).values(snapshot=snapshot)
        await self.database.execute(statement)

    async def phases(self, build_id: str) -> list[PhaseRow]:
        statement = sa.select(build_phases).where(build_phases.c.build == build_id)
        statement = statement.order_by(build_phases.c.position)
        return await self.database.read(lambda connection: made(PhaseRow, connection.execute(statement)))

    async def fail_unfinished(self, reason: str) -> int:
        """After a crash: nobody works on these any more; says how many there were."""
        now = time.time_ns()
        statement = (
            builds.update()
            .where(builds.c.state.in_(("pending", "running")))
            .values(state="failed", failure=reason, finished_at=now, updated_at=now)
        )
        return await self.database.execute(statement)

    async def prune(self, before: int) -> None:
        """Forget builds that ended before a time."""
        old = sa.select(builds.c.id).where(builds.c.finished_at < before)
        await self.database.execute(
            build_phases.delete().where(build_phases.c.build.in_(old)),
            builds.delete().where(builds.c.finished_at < before),
        )
