"""Builds and their phases as rows."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from stead.store.rows import Rows, build_rows, table_of


@dataclass(frozen=True)
class BuildRow:
    """One build; `planned_phases` is a JSON list of names."""

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
    """A phase that a build has started; `snapshot` is the VM as it was when this phase failed."""

    id: str
    build: str
    position: int
    name: str
    snapshot: str | None = None
    started_at: int = 0
    finished_at: int | None = None
    state: str = "running"


builds = table_of("builds", BuildRow)
build_phases = table_of("build_phases", PhaseRow)


class BuildStore(Rows[BuildRow]):
    table = builds
    row = BuildRow
    stamps = ("started_at", "updated_at")

    async def page(
        self, account: str, state: str | None, limit: int, offset: int
    ) -> tuple[list[BuildRow], int]:
        """Some builds of an account, newest first, and how many there are in all."""
        statement = sa.select(builds).where(builds.c.account == account)
        if state is not None:
            statement = statement.where(builds.c.state == state)
        statement = statement.order_by(builds.c.started_at.desc(), builds.c.id.desc())
        return await self._page(statement, limit, offset)

    async def running_phases(self, build_ids: Sequence[str]) -> dict[str, str]:
        """The name of the phase that each of these builds is in."""
        statement = sa.select(build_phases.c.build, build_phases.c.name).where(
            build_phases.c.build.in_(build_ids), build_phases.c.state == "running"
        )
        with self.database.look_up() as connection:
            return {row.build: row.name for row in connection.execute(statement)}

    async def start_phases(self, rows: Sequence[PhaseRow], planned: str) -> bool:
        """Finish the running phase of a build and add these; all but the last of them are finished already.

        Changes nothing and returns False when the build is not running.
        """
        now = time.time_ns()
        build = rows[0].build
        values = [dataclasses.asdict(dataclasses.replace(row, started_at=now)) for row in rows]
        for value in values[:-1]:
            value.update(state="succeeded", finished_at=now)
        return await self._change_running(
            build,
            {"planned_phases": planned, "updated_at": now},
            _finish_phase(build, now, state="succeeded"),
            build_phases.insert().values(values),
        )

    async def finish(
        self, build_id: str, state: str, failure: str | None = None, *, snapshot: str | None = None
    ) -> bool:
        """Finish a running build and its running phase, which ends in the same state.

        Changes nothing and returns False when the build is not running.
        """
        now = time.time_ns()
        end = {"state": state, "failure": failure, "finished_at": now, "updated_at": now}
        return await self._change_running(
            build_id, end, _finish_phase(build_id, now, state=state, snapshot=snapshot)
        )

    async def _change_running(
        self, build_id: str, changes: Mapping[str, object], *phases: sa.Executable
    ) -> bool:
        """Change a build and its phases in one transaction, if it is running."""
        running = builds.c.id == build_id, builds.c.state == "running"
        change = builds.update().where(*running).values(**changes)

        def work(connection: sa.Connection) -> bool:
            if connection.execute(change).rowcount == 0:
                return False
            for statement in phases:
                connection.execute(statement)
            return True

        return await self.database.write(work)

    async def phases(self, build_id: str) -> list[PhaseRow]:
        statement = sa.select(build_phases).where(build_phases.c.build == build_id)
        statement = statement.order_by(build_phases.c.position)
        return await self.database.read(
            lambda connection: build_rows(PhaseRow, connection.execute(statement))
        )

    async def fail_unfinished(self, reason: str) -> int:
        """After a crash: fail every build that had not finished, and return how many there were."""
        now = time.time_ns()
        end = {"state": "failed", "finished_at": now}
        return await self.database.execute(
            build_phases.update().where(build_phases.c.state == "running").values(**end),
            builds.update()
            .where(builds.c.state.in_(("pending", "running")))
            .values(**end, failure=reason, updated_at=now),
        )

    async def prune(self, before: int) -> None:
        """Delete builds that finished before a time."""
        old = sa.select(builds.c.id).where(builds.c.finished_at < before)
        await self.database.execute(
            build_phases.delete().where(build_phases.c.build.in_(old)),
            builds.delete().where(builds.c.finished_at < before),
        )


def _finish_phase(build: str, now: int, **values: object) -> sa.Update:
    running = (build_phases.c.build == build) & (build_phases.c.state == "running")
    return build_phases.update().where(running).values(finished_at=now, **values)
