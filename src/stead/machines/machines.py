"""The public face of the engine: create machines, find them, use them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from stead.errors import (
    GuestUnreachable,
    InvalidRequest,
    MachineNotFound,
    ReadyTimeout,
    WrongState,
)
from stead.host import disks
from stead.host.agent import Agent
from stead.host.execution import ExecRequest, collect
from stead.host.files import locked
from stead.host.host import Host, require_root
from stead.host.image import Progress
from stead.host.qemu import Platform
from stead.host.template_builder import ensure_template
from stead.host.templates import Template
from stead.machines.checkpointing import Checkpointing
from stead.machines.creation import Creation, Options, Purpose
from stead.machines.idle import IdleWatch
from stead.machines.layers import Layers
from stead.machines.lifecycle import STOP_TIMEOUT, Lifecycle, OnChange, persistence_of, size_of
from stead.machines.machine import UNCHANGED, Machine, MachineInfo, Unchanged, machine_info
from stead.machines.persistence import PERSISTENT, Persistence, SnapshotPersistence
from stead.machines.pool import Pool
from stead.machines.quotas import LimitsOf
from stead.machines.recovery import reconcile
from stead.machines.room import Room
from stead.machines.snapshots import About, SnapshotInfo, Snapshots, check_name
from stead.machines.states import DOWN, UNOWNED, Operation, State, Verdict, decide
from stead.settings import Settings, Size
from stead.store.database import Database, open_database
from stead.store.layers import LayerStore
from stead.store.machines import MachineRow, MachineStore
from stead.store.snapshots import SnapshotStore
from stead.tasks import finished

_HIDDEN = (*UNOWNED, State.DELETING)
_UNLISTED = (*_HIDDEN, State.DELETED)
_LOCK_TIMEOUT = 5.0
MAX_FORKS = 100
READY_TIMEOUT = 120.0
Report = Callable[[Progress], None]
T = TypeVar("T")


class Machines:
    """All machines of one installation. One process at a time has it open; machines outlive that process."""

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
        """Open an installation: recover from whatever happened before, then hand out machines.

        On leaving, machines go on; the pool goes, and with the last machine the network goes too.
        """
        require_root()
        if not settings.data.exists():
            settings.data.mkdir(parents=True)
            settings.data.chmod(0o711)
        async with locked(settings.data / "stead.lock", _LOCK_TIMEOUT):
            (settings.runtime / settings.instance).mkdir(parents=True, exist_ok=True, mode=0o711)
            database = await open_database(settings.data / "stead.db")
            host = await Host.open(settings)
            layers = Layers(settings.data, LayerStore(database))
            lifecycle = Lifecycle(host, MachineStore(database), layers)
            checkpointing = Checkpointing(lifecycle)
            snapshots = Snapshots(SnapshotStore(database), lifecycle, checkpointing)
            try:
                await reconcile(lifecycle, checkpointing)
                await snapshots.recover()
                await layers.collect()
                machines = cls(settings, database, lifecycle, checkpointing, snapshots)
                if (template := await host.find_template(settings.default_size)) is not None:
                    machines.pool.keep(template)
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

    def watch(self, on_change: OnChange) -> None:
        """From now on tell this of what happens to machines."""
        self._lifecycle.on_change = on_change

    def limit(self, limits_of: LimitsOf) -> None:
        """From now on accounts may have no more than this says."""
        self._lifecycle.quotas.limits_of = limits_of

    @property
    def database(self) -> Database:
        """Where everything about this installation is recorded."""
        return self._database

    async def platform(self) -> Platform:
        """What machines run on here: accelerator, QEMU, machine type."""
        return await self._lifecycle.host.platform()

    # Templates

    async def template(self, size: Size | None = None, report: Report = lambda _: None) -> Template:
        """The template of a size, made once however many ask; from then on creates are quick."""
        size = size or self.settings.default_size
        host = self._lifecycle.host
        task = self._building.get(size)
        if task is None:
            if (found := await host.find_template(size)) is not None:
                return self._keep(found)
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

    # Making machines

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
        """A new running machine that has confirmed its identity; a failure leaves nothing.

        From a snapshot it has the snapshot's memory and disk; of another size than the snapshot's it boots
        from the disk. With `ready_timeout`, its services are waited for as well.
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
            row = await self._creation.from_template(await self.template(size, report), options)
        else:
            source = await self.snapshots.ready(snapshot)
            await self.snapshots.touch(snapshot)
            row = await self._creation.from_snapshot(source, size, options)
        machine = Machine(self, row.id)
        if ready_timeout is not None:
            try:
                await self.wait_until_ready(row.id, ready_timeout)
            except BaseException:
                await finished(self.delete(row.id, forget=True))
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
        await self._check_up(machine_id, Operation.FORK)
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
            rows = await self._creation.bring_up(children, moment)
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
        """Keep a machine's memory and disk as they are now; it goes on. Of a stopped one, the disk.

        With `failure`, it is the remains of a build that went wrong, kept to be looked at.
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

    # Finding machines

    async def get(self, machine_id: str) -> Machine:
        await self.info(machine_id)
        return Machine(self, machine_id)

    async def list(self, account: str | None = None, *, deleted: bool = False) -> list[MachineInfo]:
        """All machines, or those of an account; not those in which something is being built.

        With `deleted`, also names under which a machine can be made anew.
        """
        hidden = _HIDDEN if deleted else _UNLISTED
        rows = await self._lifecycle.store.list(excluding=hidden, account=account, purpose="use")
        return [machine_info(row) for row in rows]

    async def count(self) -> dict[str, int]:
        """How many machines there are in each state, those that belong to nobody yet too."""
        return await self._lifecycle.store.count()

    async def made_for(self, request: str) -> MachineInfo | None:
        """The machine that was created for a request, if it is there."""
        row = await self._lifecycle.store.made_for(request)
        return None if row is None or row.state in _UNLISTED else machine_info(row)

    async def hand_over(self, machine_id: str) -> None:
        """What was being built is its account's to see and use from now on."""
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

    # Using machines

    async def agent(self, machine_id: str) -> Agent:
        """The agent of a machine; a machine that sleeps or is stopped is brought up first."""
        live = self._lifecycle.lives.get(machine_id)
        if live is not None and live.running:
            return live.agent
        await self._check_up(machine_id, Operation.USE)
        live = self._lifecycle.lives.get(machine_id)
        if live is None or not live.running:
            raise GuestUnreachable(f"machine {machine_id} has just ended")
        return live.agent

    def observer(self, machine_id: str) -> Agent | None:
        """The agent of a running VM for calls that do not keep it awake; None when the VM is not running."""
        live = self._lifecycle.lives.get(machine_id)
        return live.agent.uncounted() if live is not None and live.running else None

    async def _check_up(self, machine_id: str, operation: Operation) -> None:
        """Wait for what is under way, and bring the machine up if the operation needs it."""
        async with self._lifecycle.turns.of(machine_id):
            row = await self._row(machine_id)
            verdict = decide(operation, State(row.state))
        if verdict is Verdict.WAKE:
            await self._bring_up(machine_id)
        elif verdict is not Verdict.GO:
            raise WrongState(machine_id, operation, row.state, row.reason or "")

    async def _bring_up(self, machine_id: str) -> None:
        """Bring a machine up, once, however many ask for it at the same time."""
        task = self._waking.get(machine_id)
        if task is None:
            task = self._lifecycle.keep(asyncio.create_task(self._start(machine_id)))
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
        """Wait until the guest's services have started: those that notify have said that they are ready."""
        request = ExecRequest("systemctl is-system-running --wait", timeout=timeout)
        result = await collect(await self.agent(machine_id), request)
        if result.timed_out:
            raise ReadyTimeout(f"machine {machine_id} was not ready within {timeout:g} s")

    async def wait_for_exit(self, machine_id: str) -> str:
        """Wait until a machine is no longer running; says why."""
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

    # Up and down

    async def start(
        self,
        machine_id: str,
        *,
        idle_timeout: int | Unchanged | None = UNCHANGED,
        activity_threshold: int | Unchanged = UNCHANGED,
        ready_timeout: float | None = None,
    ) -> None:
        """Wake a suspended machine or boot a stopped one."""
        row = await self._row(machine_id)
        changes: dict[str, object] = {}
        if not isinstance(idle_timeout, Unchanged):
            changes["idle_timeout"] = idle_timeout
        if not isinstance(activity_threshold, Unchanged):
            changes["activity_threshold"] = activity_threshold
        Options(**{"idle_timeout": row.idle_timeout} | changes)  # type: ignore[arg-type]  # checks them
        if changes:
            await self._lifecycle.store.update(machine_id, **changes)
        await self._bring_up(machine_id)
        if ready_timeout is not None:
            await self.wait_until_ready(machine_id, ready_timeout)

    async def _start(self, machine_id: str) -> None:
        await self._room.make(keeping=machine_id)
        async with self._lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.START)
            if row is None:
                return
            async with self._lifecycle.quotas.starting(row, size_of(row)):
                await self._start_in_turn(row)

    async def _start_in_turn(self, row: MachineRow) -> None:
        async with self._creation.restores:
            if row.state == State.SUSPENDED:
                await self._checkpointing.wake(row)
                return
            if row.state == State.STOPPED:
                await self._lifecycle.start(row)
                return
        snapshot = None if row.snapshot is None else await self.snapshots.ready(row.snapshot)
        await self._creation.again(row, lambda: self.template(size_of(row)), snapshot)
        if snapshot is not None:
            await self.snapshots.touch(snapshot.id)

    async def suspend(self, machine_id: str) -> None:
        """Keep a machine's memory and disk and end its process; the next use wakes it."""
        await self._carry_through(self._suspend(machine_id))

    async def _suspend(self, machine_id: str) -> None:
        async with self._lifecycle.turns.of(machine_id):
            if await self._check(machine_id, Operation.SUSPEND) is not None:
                row, live = await self._running(machine_id, Operation.SUSPEND)
                await self._checkpointing.suspend(row, live, "suspended")

    async def _doze_off(self, machine_id: str) -> None:
        """Suspend a machine that is idle, unless someone begins to use it at this very moment."""
        async with self._lifecycle.turns.of(machine_id):
            row = await self._lifecycle.store.get(machine_id)
            live = self._lifecycle.lives.get(machine_id)
            if row is None or row.state != State.RUNNING or live is None or not live.running:
                return
            # From now on whoever wants it waits for its turn; calls that had begun are counted by then.
            live.running = False
            await asyncio.sleep(0.01)
            if live.agent.in_flight:
                live.running = not live.vm.process.ended
                return
            await self._checkpointing.suspend(row, live, "suspended: it was idle")

    async def stop(self, machine_id: str, timeout: float = STOP_TIMEOUT) -> None:
        """Shut a machine down cleanly; after `timeout` seconds it is ended by force, and says so."""
        await self._carry_through(self._stop(machine_id, timeout))

    async def _stop(self, machine_id: str, timeout: float) -> None:
        if decide(Operation.STOP, State((await self._row(machine_id)).state)) is Verdict.WAKE:
            await self._bring_up(machine_id)
        async with self._lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.STOP)
            if row is not None:
                await self._shut_down(row, timeout, for_good=True)

    async def _shut_down(self, row: MachineRow, timeout: float, *, for_good: bool) -> MachineRow | None:
        lifecycle = self._lifecycle
        live = lifecycle.lives.get(row.id)
        await lifecycle.store.update(row.id, state=State.STOPPING, step="shutdown")
        forced = None if live is None else await lifecycle.shut_down(row, live, timeout)
        await lifecycle.step(row, "clean")
        return await lifecycle.record_stopped(row, forced or "stopped", for_good=for_good)

    async def kill(self, machine_id: str) -> None:
        """End a machine at once, as if its plug were pulled; its disk is kept."""
        await self._carry_through(self._kill(machine_id))

    async def _kill(self, machine_id: str) -> None:
        lifecycle = self._lifecycle
        await self._hurry(machine_id)
        async with lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.KILL)
            if row is not None:
                await lifecycle.store.update(machine_id, state=State.STOPPING, step="clean", checkpoint=None)
                await lifecycle.record_stopped(row, "killed")
                lifecycle.sweep()

    async def _hurry(self, machine_id: str) -> None:
        """A machine that is shutting down need not be waited for: it is to end anyway."""
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
        """Change what a machine has; one that runs is stopped for it and started again."""
        await self._carry_through(self._resize(machine_id, vcpus, memory_mib, disk_gib))

    async def _resize(
        self, machine_id: str, vcpus: int | None, memory_mib: int | None, disk_gib: int | None
    ) -> None:
        row = await self._row(machine_id)
        size = _resized(row, vcpus, memory_mib, disk_gib)
        if size == size_of(row):
            return
        if decide(Operation.RESIZE, State(row.state)) is Verdict.WAKE:
            await self._bring_up(machine_id)
        lifecycle = self._lifecycle
        async with lifecycle.turns.of(machine_id):
            checked = await self._check(machine_id, Operation.RESIZE)
            assert checked is not None  # noqa: S101  # there is always something to do
            size = _resized(checked, vcpus, memory_mib, disk_gib)
            await lifecycle.quotas.check_resize(checked, size)
            was_running = checked.state == State.RUNNING
            if was_running:
                checked = await self._shut_down(checked, STOP_TIMEOUT, for_good=False) or checked
            await self._set_size(checked, size)
            if was_running:
                await lifecycle.start(await self._row(machine_id))

    async def _set_size(self, row: MachineRow, size: Size) -> None:
        host = self._lifecycle.host
        if row.top is not None and size.disk_gib > row.disk_gib:
            # Should this be where it ends, the disk is larger than the row says, and nothing minds.
            await disks.grow_layer(host.layer(row.id, row.top), size.disk_gib)
        await self._lifecycle.store.update(
            row.id, vcpus=size.vcpus, memory_mib=size.memory_mib, disk_gib=size.disk_gib
        )

    async def delete(self, machine_id: str, *, forget: bool = False) -> None:
        """Remove a machine and everything it had.

        One that may be made anew keeps its name, until it is deleted a second time or forgotten at once.
        """
        await self._carry_through(self._delete(machine_id, forget))

    async def _delete(self, machine_id: str, forget: bool) -> None:
        await self._hurry(machine_id)
        async with self._lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.DELETE)
            if row is not None:
                await self._lifecycle.remove(row, forget=forget or row.state == State.DELETED)

    async def _carry_through(self, work: Coroutine[Any, Any, T]) -> T:
        """What has begun on a machine is brought to its end even if its caller does not wait for it."""
        return await asyncio.shield(self._lifecycle.keep(asyncio.create_task(work)))

    async def _check(self, machine_id: str, operation: Operation) -> MachineRow | None:
        """The row, when the operation may begin; None when there is nothing to do. Call in its turn."""
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
        raise InvalidRequest(f"a disk of {row.disk_gib} GiB cannot shrink to {size.disk_gib}")
    return size
