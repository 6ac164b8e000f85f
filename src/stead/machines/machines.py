"""Public interface of the engine: create, find, use and delete VMs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from stead.deadlines import scaled
from stead.errors import (
    GuestUnreachable,
    InvalidRequest,
    MachineNotFound,
    ReadyTimeout,
    WrongState,
)
from stead.files import locked, raise_descriptor_limit
from stead.guest.agent import Agent
from stead.guest.execution import ExecRequest, collect
from stead.host import disks
from stead.host.host import Host, require_root
from stead.host.image import Progress
from stead.host.qemu import Platform
from stead.host.quarantine import Quarantine
from stead.host.template_builder import ensure_template
from stead.host.templates import Template, TemplateUnreadable
from stead.logs import get_logger
from stead.machines.checkpointing import Checkpointing
from stead.machines.creation import Creation, Options, Purpose
from stead.machines.events import EventKind, OnEvent, Use
from stead.machines.idle import IdleWatch
from stead.machines.layers import Layers
from stead.machines.lifecycle import STOP_TIMEOUT, Lifecycle, persistence_of, size_of
from stead.machines.machine import UNCHANGED, Machine, MachineInfo, Unchanged, machine_info
from stead.machines.persistence import PERSISTENT, Persistence, SnapshotPersistence
from stead.machines.pool import Pool
from stead.machines.quotas import LimitsOf
from stead.machines.recovery import reconcile
from stead.machines.room import Room
from stead.machines.snapshots import About, SnapshotInfo, Snapshots, check_name
from stead.machines.states import DOWN, UNOWNED, Operation, State, Verdict, decide
from stead.settings import Settings, Size
from stead.store.database import Database
from stead.store.installation_id import open_database_of
from stead.store.layers import LayerStore
from stead.store.machines import MachineRow, MachineStore
from stead.store.snapshots import SnapshotStore
from stead.tasks import finished, in_thread

_HIDDEN = (*UNOWNED, State.DELETING)
_UNLISTED = (*_HIDDEN, State.DELETED)
_LOCK_TIMEOUT = scaled(5.0)
MAX_FORKS = 100
READY_TIMEOUT = scaled(120.0)
Report = Callable[[Progress], None]
T = TypeVar("T")

log = get_logger("stead.machines")


class Machines:
    """All VMs of one installation. One process at a time has it open; VMs outlive that process."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        lifecycle: Lifecycle,
        checkpointing: Checkpointing,
        snapshots: Snapshots,
    ) -> None:
        self.settings = settings
        self.snapshots = snapshots
        self.pool = Pool(lifecycle, settings.pool)
        self._database = database
        self._lifecycle = lifecycle
        self._checkpointing = checkpointing
        self._creation = Creation(lifecycle, checkpointing, self.pool)
        self._idle = IdleWatch(lifecycle, lifecycle.host.network, self._doze_off, settings.idle_check)
        self._room = Room(lifecycle, snapshots)
        self._building: dict[Size, asyncio.Task[Template]] = {}
        self._waking: dict[str, asyncio.Task[None]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[Self]:
        """Open an installation under its lock and recover from a crash of the process before.

        On leaving, VMs keep running; the pool is removed, and without any VM the network is too.
        """
        require_root()
        raise_descriptor_limit()
        if not settings.data.exists():
            settings.data.mkdir(parents=True)
            settings.data.chmod(0o711)
        async with locked(settings.data / "stead.lock", _LOCK_TIMEOUT):
            (settings.runtime / settings.instance).mkdir(parents=True, exist_ok=True, mode=0o711)
            database = await open_database_of(settings.data)
            host = await Host.open(settings)
            quarantine = Quarantine(settings.data)
            layers = Layers(settings.data, LayerStore(database))
            lifecycle = Lifecycle(host, MachineStore(database), layers)
            checkpointing = Checkpointing(lifecycle)
            snapshots = Snapshots(SnapshotStore(database), lifecycle, checkpointing)
            try:
                await reconcile(lifecycle, checkpointing, quarantine)
                await snapshots.recover()
                await layers.collect(quarantine)
                lifecycle.allow_sweeps()
                await in_thread(quarantine.prune)
                machines = cls(settings, database, lifecycle, checkpointing, snapshots)
                try:
                    if (template := await host.find_template(settings.default_size)) is not None:
                        machines.pool.keep(template)
                except TemplateUnreadable as error:
                    log.error("the pool of prepared VMs is not filled", error=str(error))
                machines._idle.start()
                try:
                    yield machines
                finally:
                    await machines._close()
            finally:
                await lifecycle.close()
                empty = not await lifecycle.store.list()
                await host.close()
                if empty:
                    await host.remove_network()
                await database.dispose()

    async def _close(self) -> None:
        await self._idle.close()
        for task in self._building.values():
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)
        await self.pool.close()

    def watch(self, on_event: OnEvent) -> None:
        """Report every VM's lifecycle events to this, those of the recovery at start included."""
        self._lifecycle.listen(on_event)

    def limit(self, limits_of: LimitsOf) -> None:
        """Enforce these limits of accounts from now on."""
        self._lifecycle.quotas.limits_of = limits_of

    @property
    def database(self) -> Database:
        """The database of this installation."""
        return self._database

    async def platform(self) -> Platform:
        """What VMs run on here: accelerator, QEMU version, machine type."""
        return await self._lifecycle.host.platform()

    # Templates

    async def template(
        self, size: Size | None = None, report: Report = lambda _: None, *, account: str | None = None
    ) -> Template:
        """The template of a size, built single-flight when missing; creates from it are fast.

        LimitExceeded before it is built when the account may not have a VM of this size now.
        """
        size = size or self.settings.default_size
        host = self._lifecycle.host
        task = self._building.get(size)
        if task is None:
            if (found := await host.find_template(size)) is not None:
                return self._keep(found)
            task = self._building.get(size)
        if task is None:
            async with self._lifecycle.quotas.admitting(account, size):
                task = self._building.get(size)
        if task is None:
            task = asyncio.create_task(ensure_template(host, size, report))
            self._building[size] = task
            task.add_done_callback(lambda _: self._building.pop(size, None))
        return self._keep(await asyncio.shield(task))

    def _keep(self, template: Template) -> Template:
        if template.size == self.settings.default_size:
            self.pool.keep(template)
        return template

    # Create, fork, snapshot

    async def create(
        self,
        size: Size | None = None,
        *,
        name: str | None = None,
        snapshot: str | None = None,
        persistence: Persistence = PERSISTENT,
        idle_timeout: int | Unchanged | None = UNCHANGED,
        activity_threshold: int = 0,
        recreate: bool = False,
        ready_timeout: float | None = None,
        account: str | None = None,
        purpose: Purpose = "use",
        workdir: str | None = None,
        build: str | None = None,
        request: str | None = None,
        report: Report = lambda _: None,
    ) -> Machine:
        """Create a VM and wait until its guest confirmed its identity; a failure leaves nothing.

        From a snapshot it gets the snapshot's memory and disk; with another size it boots from the disk.
        With `ready_timeout`, wait for its services as well.
        """
        check_name(name)
        own_timeout = self.settings.idle_timeout if isinstance(idle_timeout, Unchanged) else idle_timeout
        options = Options(
            name=name,
            persistence=persistence,
            idle_timeout=own_timeout,
            activity_threshold=activity_threshold,
            recreate=recreate,
            account=account,
            purpose=purpose,
            workdir=workdir,
            build=build,
            request=request,
        )
        await self._room.make(keeping=snapshot)
        if snapshot is None:
            row = await self._creation.from_template(
                await self.template(size, report, account=account), options
            )
        else:
            source = await self.snapshots.ready(snapshot)
            await self.snapshots.touch(snapshot)
            row = await self._creation.from_snapshot(source, size, options)
        machine = Machine(self, row.id)
        if ready_timeout is not None:
            try:
                await self.wait_until_ready(row.id, ready_timeout)
            except BaseException:
                await finished(self._carry_through(self._delete(row.id, "not ready in time", forget=True)))
                raise
        return machine

    async def fork(
        self,
        machine_id: str,
        count: int = 1,
        *,
        persistence: Persistence | None = None,
        name: str | None = None,
    ) -> list[Machine]:
        """New VMs with the current memory, processes and files of this one: all of them, or none.

        One child gets `name`; several get `name-1`, `name-2` and so on.
        """
        if not 1 <= count <= MAX_FORKS:
            raise InvalidRequest(f"cannot fork {count} VMs: must be 1 to {MAX_FORKS}")
        names = _fork_names(name, count)
        await self._room.make(keeping=machine_id)
        return await self._carry_through(self._fork(machine_id, names, persistence))

    async def _fork(
        self, machine_id: str, names: Sequence[str | None], persistence: Persistence | None
    ) -> list[Machine]:
        await self._check_up(machine_id, Operation.FORK, Use.FORK)
        async with self._lifecycle.turns.of(machine_id):
            row, live = await self._running(machine_id, Operation.FORK)
            row, moment = await self._checkpointing.take(row, live)
            try:
                kept = persistence or persistence_of(row)
                children = await self._creation.children(row, moment, names, kept)
            except BaseException:
                moment.close()
                raise
        try:
            rows = await self._creation.bring_up(children, moment, machine_id)
        finally:
            moment.close()
        self._checkpointing.merge_if_long(row)
        return [Machine(self, child.id) for child in rows]

    async def snapshot(
        self,
        machine_id: str,
        *,
        name: str | None = None,
        persistence: SnapshotPersistence = PERSISTENT,
        build: str | None = None,
        template_hash: str | None = None,
        failure: str | None = None,
    ) -> SnapshotInfo:
        """Capture a VM's memory and disk while it keeps running; of a stopped VM, the disk.

        With `failure`, it is the state of a failed build, kept for inspection.
        """
        check_name(name)
        await self._room.make(keeping=machine_id)
        about = About(name, persistence, build, template_hash, failure)
        return await self._carry_through(self._snapshot(machine_id, about))

    async def _snapshot(self, machine_id: str, about: About) -> SnapshotInfo:
        async with self._lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.SNAPSHOT)
            assert row is not None  # noqa: S101  # there is always something to do
            snapshot = await self.snapshots.begin(row, about)
            try:
                taken = await self.snapshots.take(snapshot, row)
            except BaseException:
                await self.snapshots.give_up(snapshot)
                raise
        if taken is not None:
            try:
                await self.snapshots.keep(snapshot, taken)
            except BaseException:
                await self.snapshots.give_up(snapshot)
                raise
        return await self.snapshots.get(snapshot.id)

    # Find

    async def get(self, machine_id: str) -> Machine:
        await self.info(machine_id)
        return Machine(self, machine_id)

    async def list(self, account: str | None = None, *, deleted: bool = False) -> list[MachineInfo]:
        """All VMs, or those of an account, without the ones that builds run in.

        With `deleted`, also deleted VMs with `recreate`.
        """
        hidden = _HIDDEN if deleted else _UNLISTED
        rows = await self._lifecycle.store.list(excluding=hidden, account=account, purpose="use")
        return [machine_info(row) for row in rows]

    async def count(self) -> dict[str, int]:
        """Number of VMs in each state, pool VMs included."""
        return await self._lifecycle.store.count()

    async def made_for(self, request: str) -> MachineInfo | None:
        """The VM that was created for a request, if it exists."""
        row = await self._lifecycle.store.made_for(request)
        return None if row is None or row.state in _UNLISTED else machine_info(row)

    async def hand_over(self, machine_id: str) -> None:
        """Turn the VM of a build into one that its account sees and uses."""
        await self._row(machine_id)
        await self._lifecycle.store.update(machine_id, purpose="use")

    async def info(self, machine_id: str) -> MachineInfo:
        return machine_info(await self._row(machine_id))

    async def rename(self, machine_id: str, name: str | None) -> MachineInfo:
        """Change or remove a VM's name, in any state. Its hostname and id stay."""
        check_name(name)
        await self._row(machine_id)
        row = await self._lifecycle.store.update(machine_id, name=name)
        if row is None:
            raise MachineNotFound(machine_id)
        return machine_info(row)

    async def _row(self, machine_id: str) -> MachineRow:
        row = await self._lifecycle.store.get(machine_id)
        if row is None or row.state in _HIDDEN:
            raise MachineNotFound(machine_id)
        return row

    # Use

    async def agent(self, machine_id: str, use: Use = Use.GUEST) -> Agent:
        """The agent of a VM; a suspended VM is woken and a stopped one started first."""
        live = self._lifecycle.lives.get(machine_id)
        if live is not None and live.running:
            return live.agent
        await self._check_up(machine_id, Operation.USE, use)
        live = self._lifecycle.lives.get(machine_id)
        if live is None or not live.running:
            raise GuestUnreachable(f"VM {machine_id} has just ended")
        return live.agent

    def observer(self, machine_id: str) -> Agent | None:
        """The agent of a running VM for calls that do not keep it awake; None when the VM is not running."""
        live = self._lifecycle.lives.get(machine_id)
        return live.agent.uncounted() if live is not None and live.running else None

    async def _check_up(self, machine_id: str, operation: Operation, use: Use) -> None:
        """Wait for the operation under way, then wake or start the VM if this operation needs it."""
        async with self._lifecycle.turns.of(machine_id):
            row = await self._row(machine_id)
            verdict = decide(operation, State(row.state))
        if verdict is Verdict.WAKE:
            await self._bring_up(machine_id, use)
        elif verdict is not Verdict.GO:
            raise WrongState(machine_id, operation, row.state, row.reason or "")

    async def _bring_up(self, machine_id: str, use: Use) -> None:
        """Wake or start a VM, single-flight: concurrent callers share one attempt and its log line."""
        task = self._waking.get(machine_id)
        if task is None:
            task = self._lifecycle.keep(asyncio.create_task(self._start(machine_id, use)))
            self._waking[machine_id] = task
            task.add_done_callback(lambda _: self._waking.pop(machine_id, None))
        await asyncio.shield(task)

    async def _running(self, machine_id: str, operation: Operation) -> tuple[MachineRow, Any]:
        row = await self._row(machine_id)
        live = self._lifecycle.lives.get(machine_id)
        if row.state != State.RUNNING or live is None or not live.running:
            raise WrongState(machine_id, operation, row.state, row.reason or "")
        return row, live

    async def wait_until_ready(self, machine_id: str, timeout: float = READY_TIMEOUT) -> None:
        """Wait until systemd has started all services, and `Type=notify` services reported ready."""
        request = ExecRequest("systemctl is-system-running --wait", timeout=timeout)
        result = await collect(await self.agent(machine_id), request)
        if result.timed_out:
            raise ReadyTimeout(f"VM {machine_id} was not ready within {timeout:g} s")

    async def wait_for_exit(self, machine_id: str) -> str:
        """Wait until a VM is no longer running; returns why."""
        exiting = asyncio.ensure_future(self._lifecycle.exit(machine_id))
        try:
            await asyncio.sleep(0)
            row = await self._row(machine_id)
            if row.state in DOWN or row.state == State.LOST:
                return row.reason or row.state
            return await exiting
        finally:
            exiting.cancel()
            await asyncio.gather(exiting, return_exceptions=True)

    # Start, stop, resize, delete

    async def start(
        self,
        machine_id: str,
        *,
        idle_timeout: int | Unchanged | None = UNCHANGED,
        activity_threshold: int | Unchanged = UNCHANGED,
        ready_timeout: float | None = None,
    ) -> None:
        """Wake a suspended VM or boot a stopped one."""
        row = await self._row(machine_id)
        changes: dict[str, object] = {}
        if not isinstance(idle_timeout, Unchanged):
            changes["idle_timeout"] = idle_timeout
        if not isinstance(activity_threshold, Unchanged):
            changes["activity_threshold"] = activity_threshold
        Options(**{"idle_timeout": row.idle_timeout} | changes)  # type: ignore[arg-type]  # checks them
        if changes:
            await self._lifecycle.store.update(machine_id, **changes)
        await self._bring_up(machine_id, Use.START)
        if ready_timeout is not None:
            await self.wait_until_ready(machine_id, ready_timeout)

    async def _start(self, machine_id: str, use: Use) -> None:
        await self._room.make(keeping=machine_id)
        async with self._lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.START)
            if row is None:
                return
            async with self._lifecycle.quotas.starting(row, size_of(row)):
                await self._start_in_turn(row, use)

    async def _start_in_turn(self, row: MachineRow, use: Use) -> None:
        async with self._creation.slots.held(row.account):
            if row.state == State.SUSPENDED:
                await self._checkpointing.wake(row, use)
                return
            if row.state == State.STOPPED:
                await self._lifecycle.start(row, use)
                return
        snapshot = None if row.snapshot is None else await self.snapshots.ready(row.snapshot)
        await self._creation.again(row, use, lambda: self.template(size_of(row)), snapshot)
        if snapshot is not None:
            await self.snapshots.touch(snapshot.id)

    async def suspend(self, machine_id: str) -> None:
        """Save a VM's memory and end its process; the next use wakes it."""
        await self._carry_through(self._suspend(machine_id))

    async def _suspend(self, machine_id: str) -> None:
        async with self._lifecycle.turns.of(machine_id):
            if await self._check(machine_id, Operation.SUSPEND) is not None:
                row, live = await self._running(machine_id, Operation.SUSPEND)
                await self._checkpointing.suspend(row, live, None)

    async def _doze_off(self, machine_id: str) -> None:
        """Suspend an idle VM, unless a call to its guest starts meanwhile."""
        async with self._lifecycle.turns.of(machine_id):
            row = await self._lifecycle.store.get(machine_id)
            live = self._lifecycle.lives.get(machine_id)
            if row is None or row.state != State.RUNNING or live is None or not live.running:
                return
            # New calls wait for the VM's lock from here on; those that started are in `in_flight` by then.
            live.running = False
            await asyncio.sleep(0.01)
            if live.agent.in_flight:
                live.running = not live.vm.process.ended
                return
            await self._checkpointing.suspend(row, live, f"idle for {row.idle_timeout} s")

    async def stop(self, machine_id: str, timeout: float = STOP_TIMEOUT) -> None:
        """Shut a VM down; after `timeout` seconds it is killed, and its reason says so."""
        await self._carry_through(self._stop(machine_id, timeout))

    async def _stop(self, machine_id: str, timeout: float) -> None:
        if decide(Operation.STOP, State((await self._row(machine_id)).state)) is Verdict.WAKE:
            await self._bring_up(machine_id, Use.STOP)
        async with self._lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.STOP)
            if row is not None:
                await self._shut_down(row, timeout)

    async def _shut_down(
        self, row: MachineRow, timeout: float, why: str | None = None, *, for_good: bool = True
    ) -> MachineRow | None:
        lifecycle = self._lifecycle
        live = lifecycle.lives.get(row.id)
        await lifecycle.store.update(row.id, state=State.STOPPING, step="shutdown")
        forced = None if live is None else await lifecycle.shut_down(row, live, timeout)
        await lifecycle.step(row, "clean")
        kind = EventKind.STOPPED if forced is None else EventKind.KILLED
        return await lifecycle.record_stopped(row, kind, forced or why, for_good=for_good)

    async def kill(self, machine_id: str) -> None:
        """End a VM at once, like a power cut; its disk stays."""
        await self._carry_through(self._kill(machine_id))

    async def _kill(self, machine_id: str) -> None:
        lifecycle = self._lifecycle
        await self._hurry(machine_id)
        async with lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.KILL)
            if row is not None:
                await lifecycle.store.update(machine_id, state=State.STOPPING, step="clean", checkpoint=None)
                await lifecycle.record_stopped(row, EventKind.KILLED)
                lifecycle.sweep()

    async def _hurry(self, machine_id: str) -> None:
        """Kill a VM that is shutting down instead of waiting for it."""
        row = await self._row(machine_id)
        live = self._lifecycle.lives.get(machine_id)
        if row.state == State.STOPPING and live is not None:
            await live.vm.kill()

    async def resize(
        self,
        machine_id: str,
        *,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        disk_gib: int | None = None,
    ) -> None:
        """Change a VM's size; a running VM is restarted for it."""
        await self._carry_through(self._resize(machine_id, vcpus, memory_mib, disk_gib))

    async def _resize(
        self, machine_id: str, vcpus: int | None, memory_mib: int | None, disk_gib: int | None
    ) -> None:
        row = await self._row(machine_id)
        size = _resized(row, vcpus, memory_mib, disk_gib)
        if size == size_of(row):
            return
        if decide(Operation.RESIZE, State(row.state)) is Verdict.WAKE:
            await self._bring_up(machine_id, Use.RESIZE)
        lifecycle = self._lifecycle
        async with lifecycle.turns.of(machine_id):
            checked = await self._check(machine_id, Operation.RESIZE)
            assert checked is not None  # noqa: S101  # there is always something to do
            size = _resized(checked, vcpus, memory_mib, disk_gib)
            async with lifecycle.quotas.resizing(checked, size):
                was_running = checked.state == State.RUNNING
                if was_running:
                    down = await self._shut_down(checked, STOP_TIMEOUT, Use.RESIZE, for_good=False)
                    checked = down or checked
                await self._set_size(checked, size)
                if was_running:
                    await lifecycle.start(await self._row(machine_id), f"{Use.RESIZE} to {size}")

    async def _set_size(self, row: MachineRow, size: Size) -> None:
        host = self._lifecycle.host
        if row.top is not None and size.disk_gib > row.disk_gib:
            # A crash after this leaves a disk larger than its row says, which is harmless.
            await disks.grow_layer(host.layer(row.id, row.top), size.disk_gib)
        await self._lifecycle.store.update(
            row.id, vcpus=size.vcpus, memory_mib=size.memory_mib, disk_gib=size.disk_gib
        )

    async def delete(self, machine_id: str, *, forget: bool = False) -> None:
        """Delete a VM with its disk and memory.

        One with `recreate` keeps its row, until it is deleted a second time or with `forget`.
        """
        await self._carry_through(self._delete(machine_id, None, forget))

    async def _delete(self, machine_id: str, why: str | None, forget: bool) -> None:
        await self._hurry(machine_id)
        async with self._lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.DELETE)
            if row is not None:
                await self._lifecycle.remove(row, why, forget=forget or row.state == State.DELETED)

    async def _carry_through(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish an operation on a VM even when its caller is cancelled."""
        return await asyncio.shield(self._lifecycle.keep(asyncio.create_task(work)))

    async def _check(self, machine_id: str, operation: Operation) -> MachineRow | None:
        """The row when the operation may start, None when there is nothing to do. Call with the VM's lock."""
        row = await self._row(machine_id)
        verdict = decide(operation, State(row.state))
        if verdict is Verdict.DONE:
            return None
        if verdict is Verdict.GO:
            return row
        raise WrongState(machine_id, operation, row.state, row.reason or "")


def _fork_names(name: str | None, count: int) -> list[str | None]:
    """The name of each child of a fork, checked like the name of any other VM."""
    if name is None or count == 1:
        names = [name] * count
    else:
        names = [f"{name}-{number}" for number in range(1, count + 1)]
    check_name(name)
    check_name(names[-1])
    return names


def _resized(row: MachineRow, vcpus: int | None, memory_mib: int | None, disk_gib: int | None) -> Size:
    wanted = {"vcpus": vcpus, "memory_mib": memory_mib, "disk_gib": disk_gib}
    size = replace(size_of(row), **{name: value for name, value in wanted.items() if value is not None})
    if size.disk_gib < row.disk_gib:
        raise InvalidRequest(f"cannot shrink the disk from {row.disk_gib} to {size.disk_gib} GiB")
    return size
