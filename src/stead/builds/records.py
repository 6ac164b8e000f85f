"""What is recorded of a build while it goes on: its phases, its log, its end."""

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from stead.builds.errors import BuildNotFound
from stead.machines.lifecycle import new_id
from stead.store.builds import BuildRow, BuildStore, PhaseRow
from stead.tasks import or_undo

_KEPT = 90 * 24 * 3600 * 10**9

Report = Callable[[str], None]
BuildState = Literal["pending", "running", "succeeded", "failed"]


class Logbook(Protocol):
    """Where the lines of a build go."""

    async def write(
        self,
        account: str,
        message: str,
        *,
        level: str = "info",
        source: str | None = None,
        machine: str | None = None,
        service: str | None = None,
        request: str | None = None,
        build: str | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class BuildInfo:
    """What is recorded of a build."""

    id: str
    account: str
    request: str | None
    state: BuildState
    template_hash: str | None
    failure: str | None
    planned_phases: tuple[str, ...]
    started_at: float
    finished_at: float | None
    updated_at: float


@dataclass(frozen=True)
class PhaseInfo:
    """A phase that a build has begun; `snapshot` is what was there when it failed."""

    id: str
    build: str
    name: str
    snapshot: str | None
    started_at: float


def build_info(row: BuildRow) -> BuildInfo:
    state: BuildState = next(state for state in get_args(BuildState) if state == row.state)
    return BuildInfo(
        id=row.id,
        account=row.account,
        request=row.request,
        state=state,
        template_hash=row.template_hash,
        failure=row.failure,
        planned_phases=tuple(json.loads(row.planned_phases)),
        started_at=row.started_at / 1e9,
        finished_at=None if row.finished_at is None else row.finished_at / 1e9,
        updated_at=row.updated_at / 1e9,
    )


class Record:
    """One build under way."""

    def __init__(
        self, store: BuildStore, logbook: Logbook, row: BuildRow, listeners: Collection[Report]
    ) -> None:
        self._store = store
        self._logbook = logbook
        self._row = row
        self._listeners = listeners
        self._begun: list[PhaseRow] = []

    @property
    def id(self) -> str:
        return self._row.id

    @property
    def phase(self) -> str:
        """Where it is now."""
        return self._begun[-1].name if self._begun else "begin"

    async def begin(self, phase: str) -> None:
        row = PhaseRow(f"bph-{new_id()}", self.id, len(self._begun), phase)
        self._begun.append(await self._store.begin_phase(row))
        await self.note(f"phase {phase}")

    async def note(self, message: str, *, level: str = "info", service: str | None = None) -> None:
        """A line for whoever follows the build."""
        for listener in tuple(self._listeners):
            listener(message)
        await self._logbook.write(
            self._row.account,
            message,
            level=level,
            source="build",
            service=service,
            request=self._row.request,
            build=self.id,
        )

    async def succeed(self) -> None:
        await self._store.finish(self.id, "succeeded")
        await self.note("done")

    async def fail(self, reason: str, snapshot: str | None = None) -> None:
        """It has failed in the phase that it is in; `snapshot` is what was there then."""
        if snapshot is not None and self._begun:
            await self._store.pin(self._begun[-1].id, snapshot)
        await self._store.finish(self.id, "failed", reason)
        await self.note(f"failed: {reason}", level="error")


class Records:
    """All builds of an installation, as their accounts see them."""

    def __init__(self, store: BuildStore, logbook: Logbook) -> None:
        self._store = store
        self._logbook = logbook

    async def open(
        self,
        account: str,
        planned: tuple[str, ...],
        *,
        request: str | None = None,
        template_hash: str | None = None,
        listeners: Collection[Report] = (),
    ) -> Record:
        """A new build with the phases that it will go through; `listeners` are told of every line."""
        row = BuildRow(f"bld-{new_id()}", account, "running", json.dumps(planned), request, template_hash)
        row = await or_undo(self._store.insert(row), self._forget)
        return Record(self._store, self._logbook, row, listeners)

    async def _forget(self, row: BuildRow) -> None:
        await self._store.delete(row.id)

    async def get(self, account: str, build_id: str) -> BuildInfo:
        row = await self._store.get(build_id)
        if row is None or row.account != account:
            raise BuildNotFound(build_id)
        return build_info(row)

    async def phases(self, account: str, build_id: str) -> list[PhaseInfo]:
        """The phases that a build has begun, in order."""
        await self.get(account, build_id)
        return [
            PhaseInfo(row.id, row.build, row.name, row.snapshot, row.started_at / 1e9)
            for row in await self._store.phases(build_id)
        ]

    async def recover(self) -> None:
        """After a restart: nobody works on what had not ended; what ended long ago is forgotten."""
        await self._store.fail_unfinished("Stead was restarted while it was built")
        await self._store.prune(time.time_ns() - _KEPT)
