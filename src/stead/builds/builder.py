"""Specs become snapshots and machines: every layer is built once, whoever asks for it."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from stead.builds import repositories, setup
from stead.builds.errors import BuildBudgetExceeded, BuildError, InvalidSpec, SnapshotDeleted
from stead.builds.flights import Flights
from stead.builds.layer_services import Waiting
from stead.builds.plan import Base, Plan, plan_machine, plan_snapshot
from stead.builds.records import BuildInfo, Logbook, PhaseInfo, Record, Records, Report
from stead.builds.spec import Layer, layer_hash
from stead.errors import MachineNotFound, SnapshotNotFound, SteadError, WrongSnapshotState
from stead.host.image import Progress
from stead.logs import get_logger
from stead.machines.machine import Machine
from stead.machines.machines import READY_TIMEOUT, Machines
from stead.machines.persistence import PERSISTENT, Persistence, SnapshotPersistence, Sticky
from stead.machines.snapshots import SnapshotInfo, SnapshotState, check_name
from stead.repos.bundles import Bundles
from stead.settings import Size
from stead.store.builds import BuildStore
from stead.tasks import finished, or_undo

BUDGET = 30 * 60.0
"""Seconds that the set-up of one layer may take."""
LINGER = 15.0
"""Seconds that a build goes on for after the last who waited for it has gone."""
KEPT_FAILURES = 3
"""Machines whose set-up failed of which a snapshot is kept, for each account."""

log = get_logger("stead.builds")


@dataclass(frozen=True)
class SnapshotOrder:
    """A snapshot to be there: built, unless the account has one with the same content."""

    account: str
    layer: Layer
    name: str | None = None
    persistence: SnapshotPersistence = PERSISTENT
    request: str | None = None


@dataclass(frozen=True)
class MachineOrder:
    """A machine to be made. `top` is what the request says beside `spec` or `template`."""

    account: str
    spec: Layer | None = None
    template: Layer | None = None
    top: Layer = field(default_factory=Layer)
    name: str | None = None
    persistence: Persistence = PERSISTENT
    activity_threshold: int = 0
    recreate: bool = False
    request: str | None = None


@dataclass(frozen=True)
class _Ground:
    """What a layer or a machine is made on: a snapshot, or the base image in a size.

    `identity` tells it from any other, also from one that was made anew under the same name.
    """

    identity: str
    size: Size
    snapshot: SnapshotInfo | None = None

    @property
    def build(self) -> str | None:
        return None if self.snapshot is None else self.snapshot.build


@dataclass(frozen=True)
class _Step:
    """A layer to be built; `anew` when its snapshot must be a new one."""

    layer: Layer
    hash: str
    anew: bool


@dataclass(frozen=True)
class _Asked:
    """Who asks, and who wants to hear how it goes."""

    account: str
    request: str | None
    report: Report


def _ignore(_: str) -> None:
    pass


class Builder:
    """Builds for all accounts of one installation."""

    def __init__(
        self,
        machines: Machines,
        store: BuildStore,
        logbook: Logbook,
        bundles: Bundles,
        *,
        budget: float = BUDGET,
        linger: float = LINGER,
    ) -> None:
        self._machines = machines
        self._logbook = logbook
        self._records = Records(store, logbook)
        self._bundles = bundles
        self._budget = budget
        self._flights: Flights[SnapshotInfo] = Flights(linger)
        self._alone = itertools.count()

    async def recover(self) -> None:
        """After a restart: builds that had not ended have failed; their machines are gone already."""
        await self._records.recover()

    async def close(self) -> None:
        """End builds that are under way; nothing is left of them."""
        await self._flights.close()

    async def build(self, account: str, build_id: str) -> BuildInfo:
        return await self._records.get(account, build_id)

    async def phases(self, account: str, build_id: str) -> list[PhaseInfo]:
        """The phases that a build has begun, in order."""
        return await self._records.phases(account, build_id)

    # Snapshots

    async def ensure_snapshot(self, order: SnapshotOrder, report: Report = _ignore) -> SnapshotInfo:
        """The snapshot of a chain of layers; what is there is not built again."""
        check_name(order.name)
        plan = await self._fixed(plan_snapshot(order.layer), order.account)
        asked = _Asked(order.account, order.request, report)
        ground = await self._ground(plan.base, asked)
        steps = _steps(order.account, ground, plan.layers)
        if not steps:
            if ground.snapshot is not None and ground.size == ground.snapshot.size:
                return ground.snapshot
            # Nothing is done to the base, but a snapshot of it is asked for.
            empty = Layer(discriminator=order.layer.discriminator, skip_cache=order.layer.skip_cache)
            steps = [_step(order.account, ground.identity, empty, anew=False)]
        snapshot = (await self._built(ground, steps, asked)).snapshot
        assert snapshot is not None  # noqa: S101  # there is at least one step
        return await self._claim(snapshot, order)

    async def _claim(self, snapshot: SnapshotInfo, order: SnapshotOrder) -> SnapshotInfo:
        """What was built is kept as long as its owner wants, and has the first name that it was given."""
        kept, wanted = snapshot.persistence, order.persistence
        if isinstance(kept, Sticky) and (not isinstance(wanted, Sticky) or wanted.priority > kept.priority):
            snapshot = await self._machines.snapshots.set_persistence(snapshot.id, wanted)
        if snapshot.name is None and order.name is not None:
            snapshot = await self._machines.snapshots.rename(snapshot.id, order.name)
        return snapshot

    async def _fixed(self, plan: Plan, account: str) -> Plan:
        """The plan with what repositories of this Stead have in them now: that is what a hash is over."""
        layers = [await repositories.fixed(layer, account, self._bundles) for layer in plan.layers]
        own = await repositories.fixed(plan.own, account, self._bundles)
        return replace(plan, layers=tuple(layers), own=own)

    async def _ground(self, base: Base, asked: _Asked) -> _Ground:
        if base.snapshot is None:
            size = base.size(self._machines.settings.default_size)
            template = await self._machines.template(size, _TemplateProgress(asked.report))
            return _Ground(f"template {template.id}", size)
        snapshot = await self._machines.snapshots.get(base.snapshot, deleted=True)
        if snapshot.account != asked.account:
            raise SnapshotNotFound(base.snapshot)
        if snapshot.deleted_at is not None:
            raise SnapshotDeleted(base.snapshot)
        if snapshot.state is SnapshotState.BUILDING:
            raise WrongSnapshotState(snapshot.id, snapshot.state)
        size, own = base.size(snapshot.size), snapshot.size.disk_gib
        if size.disk_gib < own:
            text = f"the disk of snapshot {snapshot.id} has {own} GB and cannot shrink to {size.disk_gib}"
            facts = {"got": size.disk_gib * 1024, "min": own * 1024, "max": Size.MAX_DISK_GIB * 1024}
            raise InvalidSpec("create_vm_rootfs_out_of_range", text, **facts)
        return _Ground(f"snapshot {snapshot.id} {size}", size, snapshot)

    async def _built(self, ground: _Ground, steps: Sequence[_Step], asked: _Asked) -> _Ground:
        """The ground with all steps done; what is under a snapshot that is there is not looked at."""
        if not steps:
            return ground
        *below, last = steps
        snapshots = self._machines.snapshots
        found = None if last.anew else await snapshots.find(asked.account, last.hash)
        if found is None:
            key = (asked.account, last.hash, next(self._alone) if last.anew else None)

            async def work(listeners: list[Report]) -> SnapshotInfo:
                def tell(message: str) -> None:
                    for listener in tuple(listeners):
                        listener(message)

                # Another may have been done with it since it was looked for.
                if not last.anew and (found := await snapshots.find(asked.account, last.hash)) is not None:
                    return found
                parent = await self._built(ground, below, _Asked(asked.account, asked.request, tell))
                return await self._build(parent, last, asked, listeners)

            found = await self._flights.join(key, work, asked.report)
        else:
            await self._note(asked, f"snapshot {found.id} has this already")
        return _Ground(last.hash, found.size, found)

    async def _build(
        self, ground: _Ground, step: _Step, asked: _Asked, listeners: list[Report]
    ) -> SnapshotInfo:
        """A new snapshot: a machine on the ground, set up and frozen. A failure leaves what it was."""
        planned = ("machine", *setup.planned(step.layer), "snapshot")
        record = await self._records.open(
            asked.account, planned, request=asked.request, template_hash=step.hash, listeners=listeners
        )
        async with self._attempt(record, asked.account) as attempt:
            await record.begin("machine")
            attempt.machine = await self._machines.create(
                ground.size,
                snapshot=None if ground.snapshot is None else ground.snapshot.id,
                account=asked.account,
                purpose="build",
                idle_timeout=None,
                build=record.id,
            )
            await setup.apply(attempt.machine, step.layer, record, Waiting(), self._bundles)
            await record.begin("snapshot")
            snapshot = await or_undo(
                self._machines.snapshot(
                    attempt.machine.id, persistence=Sticky(), template_hash=step.hash, build=record.id
                ),
                lambda taken: self._machines.snapshots.delete(taken.id),
            )
            await record.succeed()
        return snapshot

    # Machines

    async def create_machine(self, order: MachineOrder, report: Report = _ignore) -> Machine:
        """A running machine of which everything is true that was asked for; a failure leaves none.

        Layers below are built or found; what the outermost layer and the request itself say is done to the
        machine before anyone can see it.
        """
        check_name(order.name)
        plan = await self._fixed(plan_machine(order.spec, order.template, order.top), order.account)
        asked = _Asked(order.account, order.request, report)
        base = await self._ground(plan.base, asked)
        ground = await self._built(base, _steps(order.account, base, plan.layers), asked)
        if not plan.own.work:
            return await self._create(ground, plan, order)
        planned = ("machine", *setup.planned(plan.own))
        record = await self._records.open(order.account, planned, request=order.request, listeners=(report,))
        async with self._attempt(record, order.account) as attempt:
            await record.begin("machine")
            attempt.machine = machine = await self._create(ground, plan, order, record)
            await setup.apply(machine, plan.own, record, _waiting(plan), self._bundles)
            if plan.wait_for_ready:
                await self._machines.wait_until_ready(machine.id, plan.ready_timeout or READY_TIMEOUT)
            await record.succeed()
            await finished(self._machines.hand_over(machine.id))
            attempt.machine = None
        return machine

    async def _create(
        self, ground: _Ground, plan: Plan, order: MachineOrder, record: Record | None = None
    ) -> Machine:
        """With a record it is not its account's yet, and goes if Stead is killed before it is."""
        ready = plan.wait_for_ready and record is None
        return await self._machines.create(
            ground.size,
            snapshot=None if ground.snapshot is None else ground.snapshot.id,
            name=order.name,
            persistence=order.persistence,
            idle_timeout=plan.idle_timeout,
            activity_threshold=order.activity_threshold,
            recreate=order.recreate,
            ready_timeout=(plan.ready_timeout or READY_TIMEOUT) if ready else None,
            account=order.account,
            purpose="use" if record is None else "build",
            workdir=plan.workdir,
            build=ground.build if record is None else record.id,
            request=order.request,
        )

    # Attempts

    @contextlib.asynccontextmanager
    async def _attempt(self, record: Record, account: str) -> "AsyncIterator[_Attempt]":
        """Within its time, and on record to its end; its machine goes with it, unless it was given away."""
        attempt = _Attempt()
        try:
            try:
                async with asyncio.timeout(self._budget) as time:
                    yield attempt
            except TimeoutError:
                if time.expired():
                    raise BuildBudgetExceeded(record.phase, self._budget) from None
                raise
        except SteadError as error:
            await finished(self._failed(attempt, record, account, error))
            raise
        except asyncio.CancelledError:
            await finished(record.fail("nobody waited for it any more"))
            raise
        except BaseException:
            await finished(record.fail("something went wrong inside Stead"))
            raise
        finally:
            if attempt.machine is not None:
                with contextlib.suppress(MachineNotFound):
                    await finished(self._machines.delete(attempt.machine.id, forget=True))

    async def _failed(self, attempt: "_Attempt", record: Record, account: str, error: SteadError) -> None:
        snapshot = None
        if isinstance(error, BuildError):
            if attempt.machine is not None:
                snapshot = await self._keep_failed(attempt.machine, record, account, error)
            error.snapshot, error.build = snapshot, record.id
        await record.fail(str(error), snapshot)

    async def _keep_failed(
        self, machine: Machine, record: Record, account: str, error: BuildError
    ) -> str | None:
        """A snapshot of what there was when a set-up failed; of several, the newest few are kept."""
        snapshots = self._machines.snapshots
        try:
            kept = await self._machines.snapshot(
                machine.id, persistence=Sticky(0), build=record.id, failure=str(error)
            )
            failures = [each for each in await snapshots.list(account) if each.state is SnapshotState.FAILED]
            failures.sort(key=lambda each: each.created_at, reverse=True)
            for old in failures[KEPT_FAILURES:]:
                with contextlib.suppress(SnapshotNotFound):
                    await snapshots.delete(old.id)
        except SteadError as problem:
            log.warning("a failed machine could not be kept", build=record.id, error=str(problem))
            return None
        return kept.id

    async def _note(self, asked: _Asked, message: str) -> None:
        asked.report(message)
        await self._logbook.write(asked.account, message, source="build", request=asked.request)


@dataclass
class _Attempt:
    """What exists of something that is being made."""

    machine: Machine | None = None


def _steps(account: str, ground: _Ground, layers: Sequence[Layer]) -> list[_Step]:
    """Layers with something to do, innermost first. What is built anew has all above it built anew."""
    steps: list[_Step] = []
    identity, anew = ground.identity, False
    for layer in layers:
        if layer.work:
            anew = anew or layer.skip_cache
            steps.append(_step(account, identity, layer, anew=anew))
            identity = steps[-1].hash
    return steps


def _step(account: str, parent: str, layer: Layer, *, anew: bool) -> _Step:
    return _Step(layer, layer_hash(account, parent, layer), anew or layer.skip_cache)


def _waiting(plan: Plan) -> Waiting:
    """Without being told, services are waited for, but that they are late is no failure."""
    if plan.wait_for_ready is False:
        return Waiting(0, must=False)
    return Waiting(plan.ready_timeout or READY_TIMEOUT, must=plan.wait_for_ready is True)


@dataclass
class _TemplateProgress:
    """The base image and its templates tell of many small steps; of each kind one is passed on."""

    report: Report
    last: str = ""

    def __call__(self, progress: Progress) -> None:
        if progress.phase != self.last:
            self.last = progress.phase
            self.report(f"{progress.phase}: {progress.detail}" if progress.detail else progress.phase)
