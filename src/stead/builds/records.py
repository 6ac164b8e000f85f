"""Build records: one for each request, with its phases, its log lines and its outcome."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from stead.builds.errors import BuildNotFound
from stead.logbook import Logbook
from stead.machines.records import new_id
from stead.store.builds import BuildRow, BuildStore, PhaseRow
from stead.tasks import or_undo

_RETENTION = 90 * 24 * 3600 * 10**9
_PRUNE_EVERY = 3600.0

BuildState = Literal["pending", "running", "succeeded", "failed"]
PhaseState = Literal["running", "succeeded", "failed"]


@dataclass(frozen=True)
class BuildInfo:
    """A build; `current_phase` is None unless it is running."""

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
    current_phase: str | None = None


@dataclass(frozen=True)
class PhaseInfo:
    """A phase that a build has started; `snapshot` is the VM as it was when the phase failed."""

    id: str
    build: str
    name: str
    snapshot: str | None
    started_at: float
    finished_at: float | None = None
    state: PhaseState = "running"


def build_info(row: BuildRow, phase: str | None = None) -> BuildInfo:
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
        finished_at=_seconds(row.finished_at),
        updated_at=row.updated_at / 1e9,
        current_phase=phase,
    )


def phase_info(row: PhaseRow) -> PhaseInfo:
    state: PhaseState = next(state for state in get_args(PhaseState) if state == row.state)
    finished = _seconds(row.finished_at)
    return PhaseInfo(row.id, row.build, row.name, row.snapshot, row.started_at / 1e9, finished, state)


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


@dataclass(frozen=True)
class Phase:
    """A step of one part of a build: of the layer with this number (1 is the innermost), or of the VM itself.

    A layer that is not built by this request has one phase: `cached` when the account has a snapshot of it,
    `waiting` when another request builds it at the moment.
    """

    layer: int | None
    step: str
    labelled: bool = True

    @property
    def name(self) -> str:
        return f"layer {self.layer}: {self.step}" if self.layer is not None and self.labelled else self.step


class RecordedBuild:
    """The record of one request while it is built."""

    def __init__(
        self, store: BuildStore, logbook: Logbook, row: BuildRow, planned: Sequence[Phase], labelled: bool
    ) -> None:
        self._store = store
        self._logbook = logbook
        self._row = row
        self._planned = list(planned)
        self._labelled = labelled
        self._started: list[Phase] = []
        self._unwritten: list[PhaseRow] = []
        self.layer_tasks: list[asyncio.Task[Any]] = []
        """Single-flight builds of layers that this request started; outermost first."""

    @property
    def id(self) -> str:
        return self._row.id

    @property
    def account(self) -> str:
        return self._row.account

    def layer(self, number: int) -> "Part":
        return Part(self, number)

    @property
    def vm(self) -> "Part":
        return Part(self, None)

    @property
    def step(self) -> str:
        return self._started[-1].step if self._started else "start"

    async def start(self, layer: int | None, step: str) -> None:
        """Finish the phase before, and start this one."""
        phase = Phase(layer, step, self._labelled)
        if phase in self._planned:
            self._planned.remove(phase)
        rows = [*self._unwritten, self._append(phase)]
        self._unwritten = []
        if await self._store.start_phases(rows, self._names()):
            await self.note(f"phase started: {phase.name}")

    async def skip(self, layer: int, step: str, *, wait: bool) -> None:
        """Have one phase instead of all those planned for a layer and the layers below it.

        A phase that waits is written at once; one that takes no time is written with the next one.
        """
        self._planned = [each for each in self._planned if each.layer is None or each.layer > layer]
        if wait:
            await self.start(layer, step)
        else:
            self._unwritten.append(self._append(Phase(layer, step, self._labelled)))

    def _append(self, phase: Phase) -> PhaseRow:
        row = PhaseRow(f"bph-{new_id()}", self.id, len(self._started), phase.name)
        self._started.append(phase)
        return row

    def _names(self) -> str:
        return json.dumps([phase.name for phase in (*self._started, *self._planned)])

    async def note(self, message: str, *, level: str = "info", service: str | None = None) -> None:
        """Write a log line of this build."""
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
        """Finish the build. Its first end stays: nothing follows `succeeded` and `failed`."""
        await self._flush()
        if await self._store.finish(self.id, "succeeded"):
            await self.note("build succeeded")

    async def fail(self, reason: str, snapshot: str | None = None) -> None:
        """Fail the build in its running phase, unless it has ended.

        `snapshot` is the VM as it was at that time.
        """
        await self._flush()
        if await self._store.finish(self.id, "failed", reason, snapshot=snapshot):
            await self.note(f"build failed: {reason}", level="error")

    async def _flush(self) -> None:
        if self._unwritten:
            rows, self._unwritten = self._unwritten, []
            await self._store.start_phases(rows, self._names())


@dataclass(frozen=True)
class Part:
    """The part of a record that belongs to one layer, or to the VM itself."""

    record: RecordedBuild
    number: int | None

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def step(self) -> str:
        """The step that runs now, for error messages."""
        return self.record.step

    async def start(self, step: str) -> None:
        await self.record.start(self.number, step)

    async def skip(self, step: str) -> None:
        """Have one phase, which takes no time, instead of those planned for this layer and those below."""
        if self.number is not None:
            await self.record.skip(self.number, step, wait=False)

    async def note(self, message: str, *, level: str = "info", service: str | None = None) -> None:
        await self.record.note(message, level=level, service=service)


class Records:
    """All builds of an installation; an account sees its own."""

    def __init__(self, store: BuildStore, logbook: Logbook) -> None:
        self._store = store
        self._logbook = logbook
        self._pruned = time.monotonic()

    async def open(
        self,
        account: str,
        planned: Sequence[Phase],
        *,
        labelled: bool = True,
        request: str | None = None,
        template_hash: str | None = None,
    ) -> RecordedBuild:
        """Start a build with these phases; layers are numbered in their names if `labelled`."""
        if time.monotonic() - self._pruned > _PRUNE_EVERY:
            self._pruned = time.monotonic()
            await self._store.prune(time.time_ns() - _RETENTION)
        names = json.dumps([phase.name for phase in planned])
        row = BuildRow(f"bld-{new_id()}", account, "running", names, request, template_hash)
        row = await or_undo(self._store.insert(row), self._delete)
        return RecordedBuild(self._store, self._logbook, row, planned, labelled)

    async def _delete(self, row: BuildRow) -> None:
        await self._store.delete(row.id)

    async def get(self, account: str, build_id: str) -> BuildInfo:
        row = await self._store.get(build_id)
        if row is None or row.account != account:
            raise BuildNotFound(build_id)
        return build_info(row, (await self._store.running_phases([build_id])).get(build_id))

    async def list(
        self, account: str, state: BuildState | None = None, limit: int = 100, offset: int = 0
    ) -> tuple[list[BuildInfo], int]:
        """Some builds of an account, newest first, and how many there are in all."""
        rows, total = await self._store.page(account, state, limit, offset)
        phases = await self._store.running_phases([row.id for row in rows])
        return [build_info(row, phases.get(row.id)) for row in rows], total

    async def phases(self, account: str, build_id: str) -> Sequence[PhaseInfo]:
        """The phases that a build has started, in order."""
        await self.get(account, build_id)
        return [phase_info(row) for row in await self._store.phases(build_id)]

    async def recover(self) -> None:
        """After a restart: fail what had not finished, and delete what is past its retention time."""
        await self._store.fail_unfinished("the Stead server stopped during the build")
        await self._store.prune(time.time_ns() - _RETENTION)
