"""Builder: turns specs into snapshots and VMs. Each layer is built once and cached as a snapshot."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from stead.builds import repositories, setup
from stead.builds.errors import (
    BaseSnapshotDeleted,
    BuildBudgetExceeded,
    BuildError,
    SetupFailed,
    SnapshotSetupFailed,
)
from stead.builds.layer_services import ReadyWait
from stead.builds.plan import Base, Plan, plan_snapshot
from stead.builds.records import (
    Part,
    Phase,
    RecordedBuild,
    Records,
)
from stead.builds.spec import Layer, layer_hash
from stead.builds.validation import disk_out_of_range
from stead.deadlines import scaled
from stead.errors import MachineNotFound, SnapshotNotFound, SteadError, WrongSnapshotState
from stead.logbook import Logbook
from stead.logs import get_logger
from stead.machines.lifetimes import FOREVER, Lifetime
from stead.machines.machine import Machine
from stead.machines.machines import Machines
from stead.machines.nics import NicRequest
from stead.machines.persistence import PERSISTENT, SnapshotPersistence, Sticky
from stead.machines.records import Properties
from stead.machines.snapshot_journal import SnapshotState
from stead.machines.snapshots import SnapshotInfo
from stead.machines.start import READY_TIMEOUT
from stead.machines.templates import TemplateLines
from stead.names import check_name
from stead.repos.transfer.bundles import Bundles
from stead.settings import Size
from stead.shares import KeyedLimit
from stead.store.builds import BuildStore
from stead.tasks import SingleFlight, TaskSet, finished, or_undo

BUDGET = scaled(30 * 60.0)
"""Seconds that the set-up of one layer may take."""
LINGER = 15.0
"""Seconds that a build continues after its last client has disconnected."""
KEPT_FAILURES = 3
"""Snapshots of VMs whose set-up failed that are kept for each account."""

log = get_logger("stead.builds")


@dataclass(frozen=True)
class SnapshotOrder:
    """A request for a snapshot: it is built unless the account has one with the same content."""

    account: str
    layer: Layer
    name: str | None = None
    persistence: SnapshotPersistence | None = None
    lifetime: Lifetime = FOREVER
    request: str | None = None
    warnings: tuple[str, ...] = ()
    """Lines for the log, about parts of the request that have no effect."""


@dataclass(frozen=True)
class Parent:
    """The parent of a layer or a VM: a snapshot, or the base image in a size.

    `identity` is part of the hash of the layers above; it differs for every snapshot that was built.
    """

    identity: str
    size: Size
    snapshot: SnapshotInfo | None = None

    @property
    def snapshot_id(self) -> str | None:
        return None if self.snapshot is None else self.snapshot.id

    @property
    def build(self) -> str | None:
        return None if self.snapshot is None else self.snapshot.build


@dataclass(frozen=True)
class _Step:
    """A layer to build; number 1 is the innermost. `rebuild`: do not use the cache."""

    number: int
    layer: Layer
    hash: str
    rebuild: bool
    lifetime: Lifetime | None = None
    """Of the snapshot that the request asks for; None for a layer below: one that is cached keeps its own."""


class Builder:
    """Builds for all accounts of one installation."""

    def __init__(
        self,
        machines: Machines,
        store: BuildStore,
        logbook: Logbook,
        bundles: Bundles,
        *,
        places: KeyedLimit | None = None,
        budget: float = BUDGET,
        linger: float = LINGER,
    ) -> None:
        """`places` bounds the set-ups in progress, by account; default: no bound."""
        self._machines = machines
        self._logbook = logbook
        self.records = Records(store, logbook)
        self._bundles = bundles
        self._places = places or KeyedLimit()
        self._budget = budget
        self._layers: SingleFlight[SnapshotInfo] = SingleFlight(linger)
        self._unshared = itertools.count()
        self._closing = TaskSet()

    async def close(self) -> None:
        """Cancel running builds and undo what they started."""
        await self._layers.close()
        await self._closing.join()

    # Snapshots

    async def ensure_snapshot(self, order: SnapshotOrder) -> SnapshotInfo:
        """Return the snapshot of a chain of layers; build only the layers that are not cached."""
        try:
            return await self._ensure_snapshot(order)
        except SetupFailed as error:
            # Requests for VMs may wait for the same layer, and get the same error.
            raise SnapshotSetupFailed(error) from error

    async def _ensure_snapshot(self, order: SnapshotOrder) -> SnapshotInfo:
        check_name(order.name)
        order.lifetime.check(time.time_ns())
        plan = await self._pin(plan_snapshot(order.layer), order.account)
        parent = await self.find_base(plan.base, order.account, order.request)
        steps = _steps(order.account, parent, plan.layers)
        if not steps:
            if parent.snapshot is not None and parent.size == parent.snapshot.size:
                return parent.snapshot
            # The request asks for a snapshot of the base itself.
            empty = Layer(discriminator=order.layer.discriminator, skip_cache=order.layer.skip_cache)
            steps = [_step(order.account, 1, parent.identity, empty, rebuild=False)]
        last = _with_retention(steps[-1], order.persistence or plan.layers[-1].persistence or PERSISTENT)
        steps[-1] = replace(last, lifetime=order.lifetime)
        async with self._open_record(order.account, order.request, order.warnings, steps) as record:
            snapshot = (await self._ensure_layers(parent, steps, record)).snapshot
            assert snapshot is not None  # noqa: S101  # there is at least one step
            if snapshot.name is None and order.name is not None:
                snapshot = await self._machines.snapshots.update(snapshot.id, name=order.name)
            await record.succeed()
        return snapshot

    async def _extend_retention(self, snapshot: SnapshotInfo, step: _Step) -> SnapshotInfo:
        """Extend the retention and lifetime of a snapshot to what a request asks for; never shorten them."""
        snapshots = self._machines.snapshots
        kept, wanted = snapshot.persistence, step.layer.persistence
        if wanted is not None and _outlasts(wanted, kept):
            snapshot = await snapshots.update(snapshot.id, persistence=wanted)
        if step.lifetime is not None and step.lifetime.outlasts(snapshot.expires_at, time.time_ns()):
            snapshot = await snapshots.update(snapshot.id, lifetime=step.lifetime)
        return snapshot

    async def _pin(self, plan: Plan, account: str) -> Plan:
        """The plan with the present content of this server's repositories, which is part of the hash."""
        layers = [await repositories.pin_repositories(layer, account, self._bundles) for layer in plan.layers]
        own = await repositories.pin_repositories(plan.own, account, self._bundles)
        return replace(plan, layers=tuple(layers), own=own)

    async def find_base(self, base: Base, account: str, request: str | None) -> Parent:
        """The snapshot that a plan begins with, or the template for its size, which is built if missing."""
        if base.snapshot is None:
            size = base.size(self._machines.default_size)
            lines = self.template_lines(size, account, request)
            template = await self._machines.template(size, lines, account=account)
            identity = f"template {template.id}"
            if size.disk_gib != template.size.disk_gib:
                # Snapshots of a larger disk are not those of a smaller one.
                identity += f" {size.disk_gib}G"
            return Parent(identity, size)
        snapshot = await self._machines.snapshots.get(base.snapshot, deleted=True)
        if snapshot.account != account:
            raise SnapshotNotFound(base.snapshot)
        snapshot.refuse_expired()
        if snapshot.deleted_at is not None:
            raise BaseSnapshotDeleted(base.snapshot)
        if snapshot.state is SnapshotState.BUILDING:
            raise WrongSnapshotState(snapshot.id, snapshot.state)
        size, own = base.size(snapshot.size), snapshot.size.disk_gib
        if size.disk_gib < own:
            text = f"{size.disk_gib} is less than the {own} GB of snapshot {snapshot.id}: disks cannot shrink"
            raise disk_out_of_range(text, size.disk_gib, own)
        return Parent(f"snapshot {snapshot.id} {size.key}", size, snapshot)

    def template_lines(self, size: Size, account: str, request: str | None) -> TemplateLines:
        """Writes the progress of a template to the log of a request."""

        def write(message: str) -> None:
            line = self._logbook.write(account, message, source="template", request=request)
            self._closing.start(line, f"log line of request {request}")

        return TemplateLines(size, write)

    async def _ensure_layers(self, parent: Parent, steps: Sequence[_Step], record: RecordedBuild) -> Parent:
        """Build or find all steps; the layers below a cached one are not looked at."""
        if not steps:
            return parent
        *below, last = steps
        part = record.layer(last.number)
        found = await self._find_cached(record.account, last)
        if found is not None:
            await self._note_cached(part, found)
        else:
            key = (record.account, last.hash, next(self._unshared) if last.rebuild else None)

            async def work() -> SnapshotInfo:
                if (task := asyncio.current_task()) is not None:
                    record.layer_tasks.append(task)
                # Another request may have finished it since the lookup above.
                if (found := await self._find_cached(record.account, last)) is not None:
                    await self._note_cached(part, found)
                    return found
                return await self._build_layer(await self._ensure_layers(parent, below, record), last, part)

            async def joined(build_id: str) -> None:
                await record.skip(last.number, "waiting", wait=True)
                await record.note(f"waiting for build {build_id}, which builds the same layer")

            found = await self._layers.run(key, work, name=record.id, joined=joined)
        return Parent(last.hash, found.size, await self._extend_retention(found, last))

    async def _find_cached(self, account: str, step: _Step) -> SnapshotInfo | None:
        return None if step.rebuild else await self._machines.snapshots.find(account, step.hash)

    async def _note_cached(self, part: Part, snapshot: SnapshotInfo) -> None:
        await part.skip("cached")
        await part.note(f"layer cached: using snapshot {snapshot.id}")

    async def _build_layer(self, parent: Parent, step: _Step, part: Part) -> SnapshotInfo:
        """Build a layer: create a VM from the parent, set it up and take a snapshot of it."""
        async with self._attempt(part) as attempt:
            await part.start("vm")
            attempt.machine = await self._machines.create(
                Properties(
                    account=part.record.account, purpose="build", build=part.id, snapshot=parent.snapshot_id
                ),
                parent.size,
            )
            await setup.apply(attempt.machine, step.layer, part, ReadyWait(), self._bundles)
            await part.start("snapshot")
            return await or_undo(
                self._machines.snapshot(
                    attempt.machine.id,
                    persistence=step.layer.persistence or Sticky(),
                    template_hash=step.hash,
                    build=part.id,
                    lifetime=step.lifetime or FOREVER,
                ),
                lambda taken: self._machines.snapshots.delete(taken.id),
            )

    # VMs

    async def create_machine(
        self, plan: Plan, properties: Properties, nic: NicRequest | None, warnings: Sequence[str]
    ) -> Machine:
        """Create a running VM by a plan that sets something up; after a failure there is none.

        Layers below the outermost one are built or found in the cache. The outermost layer and the fields
        beside the spec are applied to the VM itself before its account can see it, on every create: they are
        what a client says of this one VM. They are not cached, because commands there may generate what must
        differ between VMs (keys, host names), and a file that differs each time (a token) would leave a
        snapshot of every VM in the account's quota. A client that wants packages, repositories and commands
        cached sends them in a `snapshot` layer, as the CLI does for --apt, --repo and --run.
        """
        properties.check()
        account, request = properties.account or "", properties.request
        plan = await self._pin(plan, account)
        base = await self.find_base(plan.base, account, request)
        steps = _steps(account, base, plan.layers)
        async with self._open_record(account, request, warnings, steps, plan) as record:
            parent = await self._ensure_layers(base, steps, record)
            async with self._attempt(record.vm) as attempt:
                await record.vm.start("vm")
                attempt.machine = machine = await self._machines.create(
                    # While it is set up its account cannot see it, and a restart deletes it.
                    replace(
                        properties,
                        purpose="build" if plan.own.work else "use",
                        build=record.id,
                        snapshot=parent.snapshot_id,
                    ),
                    parent.size,
                    nic=nic,
                    ready_timeout=None if plan.own.work else plan.ready_seconds,
                )
                if plan.own.work:
                    await setup.apply(machine, plan.own, record.vm, _ready_wait(plan), self._bundles)
                    if plan.ready_seconds is not None:
                        await record.vm.start("ready")
                        await self._machines.wait_until_ready(machine.id, plan.ready_seconds)
                await record.succeed()
                if plan.own.work:
                    await finished(self._machines.hand_over(machine.id))
                attempt.machine = None
        return machine

    # Records and attempts

    @contextlib.asynccontextmanager
    async def _open_record(
        self,
        account: str,
        request: str | None,
        warnings: Sequence[str],
        steps: Sequence[_Step],
        plan: Plan | None = None,
    ) -> AsyncIterator[RecordedBuild]:
        """Open the record of a request, and finish it with the request unless it succeeded before.

        When the client disconnects, layers that this request started to build may be finished for others;
        then the record is finished with them.
        """
        labelled = len(steps) > 1 or plan is not None
        cached = [each.number for each in steps if await self._find_cached(account, each) is not None]
        reused = max(cached, default=0)
        planned = [Phase(reused, "cached", labelled)] if reused else []
        for step in steps[reused:]:
            names = ("vm", *setup.planned(step.layer), "snapshot")
            planned += [Phase(step.number, name, labelled) for name in names]
        if plan is not None:
            ready = ("ready",) if plan.own.work and plan.wait_for_ready else ()
            names = ("vm", *setup.planned(plan.own), *ready)
            planned += [Phase(None, name, labelled) for name in names]
        record = await self.records.open(
            account,
            planned,
            labelled=labelled,
            request=request,
            template_hash=steps[-1].hash if steps else None,
        )
        try:
            for warning in warnings:
                await record.note(warning, level="warn")
            yield record
        except SteadError as error:
            await finished(_fail(record, error))
            raise
        except asyncio.CancelledError:
            await finished(self._finish_after_disconnect(record, snapshot=plan is None))
            raise
        except BaseException:
            await finished(record.fail("internal error: see the log of the Stead server"))
            raise

    async def _finish_after_disconnect(self, record: RecordedBuild, *, snapshot: bool) -> None:
        running = [task for task in record.layer_tasks if not task.done()]
        if not running:
            await record.fail("cancelled: the client disconnected")
            return

        async def close() -> None:
            await asyncio.wait(running)
            outermost = record.layer_tasks[0]
            if outermost.cancelled():
                await record.fail("cancelled: the client disconnected")
            elif (error := outermost.exception()) is not None:
                await _fail(record, error)
            elif snapshot:
                await record.succeed()
            else:
                await record.fail("cancelled: the client disconnected before the VM was created")

        self._closing.start(close(), f"finish the record of build {record.id}")

    @contextlib.asynccontextmanager
    async def _attempt(self, part: Part) -> "AsyncIterator[_Attempt]":
        """Wait for a place, then limit the time of a set-up.

        Its VM is deleted at the end unless the attempt gave it away.
        """
        async with self._places.hold(part.record.account), self._bounded_attempt(part) as attempt:
            yield attempt

    @contextlib.asynccontextmanager
    async def _bounded_attempt(self, part: Part) -> "AsyncIterator[_Attempt]":
        attempt = _Attempt()
        try:
            try:
                async with asyncio.timeout(self._budget) as time:
                    yield attempt
            except TimeoutError:
                if time.expired():
                    raise BuildBudgetExceeded(part.step, self._budget) from None
                raise
        except BuildError as error:
            error.build = part.id
            if attempt.machine is not None:
                error.snapshot = await finished(self._snapshot_failed_vm(attempt.machine, part.record, error))
            raise
        finally:
            if attempt.machine is not None:
                with contextlib.suppress(MachineNotFound):
                    await finished(self._machines.delete(attempt.machine.id, forget=True))

    async def _snapshot_failed_vm(
        self, machine: Machine, record: RecordedBuild, error: BuildError
    ) -> str | None:
        """Take a snapshot of a VM whose set-up failed, and delete the account's oldest ones."""
        snapshots = self._machines.snapshots
        try:
            kept = await self._machines.snapshot(
                machine.id, persistence=Sticky(0), build=record.id, failure=str(error)
            )
            found = await snapshots.list(record.account)
            failures = [each for each in found if each.state is SnapshotState.FAILED]
            failures.sort(key=lambda each: each.created_at, reverse=True)
            for old in failures[KEPT_FAILURES:]:
                with contextlib.suppress(SnapshotNotFound):
                    await snapshots.delete(old.id)
        except SteadError as problem:
            log.warning("failed build: no snapshot", build=record.id, error=str(problem))
            return None
        return kept.id


@dataclass
class _Attempt:
    """The VM of a set-up, as long as it has to be deleted at the end."""

    machine: Machine | None = None


async def _fail(record: RecordedBuild, error: BaseException) -> None:
    if isinstance(error, SteadError):
        await record.fail(str(error), error.snapshot if isinstance(error, BuildError) else None)
    else:
        await record.fail("internal error: see the log of the Stead server")


def _steps(account: str, parent: Parent, layers: Sequence[Layer]) -> list[_Step]:
    """Layers with something to do, innermost first. All layers above a rebuilt one are rebuilt too."""
    steps: list[_Step] = []
    identity, rebuild = parent.identity, False
    for layer in layers:
        if layer.work:
            rebuild = rebuild or layer.skip_cache
            steps.append(_step(account, len(steps) + 1, identity, layer, rebuild=rebuild))
            identity = steps[-1].hash
        elif steps and layer.persistence is not None:
            # The snapshot of a layer that changes nothing is that of the layer below.
            steps[-1] = _with_retention(steps[-1], layer.persistence)
    return steps


def _outlasts(wanted: SnapshotPersistence, kept: SnapshotPersistence) -> bool:
    return isinstance(kept, Sticky) and (not isinstance(wanted, Sticky) or wanted.priority > kept.priority)


def _with_retention(step: _Step, persistence: SnapshotPersistence) -> _Step:
    return replace(step, layer=replace(step.layer, persistence=persistence))


def _step(account: str, number: int, parent: str, layer: Layer, *, rebuild: bool) -> _Step:
    return _Step(number, layer, layer_hash(account, parent, layer), rebuild or layer.skip_cache)


def _ready_wait(plan: Plan) -> ReadyWait:
    """Unless the request says otherwise, wait for services, but do not fail when they are late."""
    if plan.wait_for_ready is False:
        return ReadyWait(0, must=False)
    return ReadyWait(plan.ready_timeout or READY_TIMEOUT, must=plan.wait_for_ready is True)
