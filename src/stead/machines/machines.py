"""All VMs of one installation: opens the engine, finds VMs, and offers every operation on them."""

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from stead.errors import MachineNotFound, SteadError
from stead.guest.agent import Agent
from stead.guest.sessions import Session
from stead.host.interface import Host, Report, Template
from stead.logs import get_logger
from stead.machines.boot import BootOperation
from stead.machines.bring_up import BringUp
from stead.machines.capture import CaptureOperation
from stead.machines.create import CreateOperation
from stead.machines.deletion import DeleteOperation
from stead.machines.disk_eviction import DiskEviction
from stead.machines.disk_usage import DiskUsage
from stead.machines.disk_watch import DiskWatch
from stead.machines.ended import UnexpectedEnds
from stead.machines.engine import open_engine
from stead.machines.events import OnEvent, Use
from stead.machines.expiry import ExpiryWatch
from stead.machines.fork import ForkOperation
from stead.machines.idle import IdleWatch
from stead.machines.journal import HIDDEN
from stead.machines.lifetimes import FOREVER, Lifetime
from stead.machines.machine import Machine, MachineInfo, machine_info
from stead.machines.nics import NicRequest, VpcAddresses
from stead.machines.persistence import PERSISTENT, EvictionScope, Persistence, SnapshotPersistence
from stead.machines.pool import Pool
from stead.machines.quotas import HostBounds, LimitsOf
from stead.machines.records import Properties, record_of
from stead.machines.recovery import Reconciliation
from stead.machines.resize import ResizeOperation
from stead.machines.snapshots import SnapshotInfo, SnapshotProperties, SnapshotPurpose, Snapshots
from stead.machines.start import READY_TIMEOUT, Attached, StartOperation
from stead.machines.states import DOWN, Deleted, Operation, State
from stead.machines.stop import STOP_TIMEOUT, StopOperation
from stead.machines.suspend import SuspendOperation
from stead.machines.suspended_terminals import parse_terminals
from stead.machines.templates import Templates
from stead.machines.unchanged import UNCHANGED, Unchanged
from stead.machines.wake import WakeOperation
from stead.names import check_name
from stead.networks.networks import private_network
from stead.settings import Settings, Size
from stead.store.layers import LayerStore
from stead.store.machines import MachineRow, MachineStore
from stead.store.networks import VpcStore
from stead.store.repos import RepoStore
from stead.store.snapshots import SnapshotStore
from stead.tasks import finished

log = get_logger("stead.machines")

_UNLISTED = (*HIDDEN, State.DELETED)
_LEAST_DISKS = 10
"""VMs of the default size that even a host with a small disk may promise."""


class Machines:
    """All VMs of one installation. One process at a time has them open; VMs outlive that process.

    Operations on one VM take its id first; `Machine` is a handle with the same operations.
    """

    def __init__(self, settings: Settings, host: Host, store: MachineStore) -> None:
        """`store` must be the only one of the installation: it counts the changes of all VMs."""
        self._settings = settings
        self._store = store
        self._vpcs = VpcStore(store.database)
        self._waking: set[str] = set()
        layer_rows = LayerStore(store.database)
        engine = self._engine = open_engine(host, store, layer_rows)
        engine.quotas.host = _bounds_of(host, settings)
        bring_up = BringUp(engine)
        capture = CaptureOperation(engine)
        deletion = self._deletion = DeleteOperation(engine)
        stop = self._stop = StopOperation(engine, deletion=deletion)
        boot = BootOperation(engine, bring_up=bring_up, stop=stop)
        wake = WakeOperation(engine, bring_up=bring_up, boot=boot)
        suspend = self._suspend = SuspendOperation(engine, capture=capture, deletion=deletion)
        snapshot_rows = SnapshotStore(store.database)
        snapshots = self._snapshots = Snapshots(engine, store=snapshot_rows, capture=capture)
        repos = RepoStore(store.database)
        usage = DiskUsage(host, store, snapshot_rows, layer_rows, repos)
        eviction = self._eviction = DiskEviction(engine, deletion=deletion, snapshots=snapshots, usage=usage)
        pool = self._pool = Pool(
            engine,
            bring_up=bring_up,
            deletion=deletion,
            target=settings.pool,
            size=settings.default_size,
        )
        templates = self._templates = Templates(
            engine, pool=pool, layer_rows=layer_rows, default_size=settings.default_size
        )
        create = self._create = CreateOperation(
            engine,
            bring_up=bring_up,
            deletion=deletion,
            pool=pool,
            templates=templates,
            snapshots=snapshots,
            addresses=VpcAddresses(self._vpcs),
        )
        start = self._start = StartOperation(engine, eviction=eviction, wake=wake, boot=boot, create=create)
        self._fork = ForkOperation(
            engine,
            capture=capture,
            create=create,
            deletion=deletion,
            pool=pool,
            eviction=eviction,
            start=start,
        )
        self._resize = ResizeOperation(engine, start=start, stop=stop, boot=boot)
        self._idle = IdleWatch(engine, suspend=suspend, interval=settings.idle_check)
        self._disk_watch = DiskWatch(engine, usage=usage, eviction=eviction)
        self._expiry = ExpiryWatch(snapshots)
        self._recovery = Reconciliation(engine, capture=capture, deletion=deletion, stop=stop, wake=wake)
        ends = UnexpectedEnds(engine, deletion=deletion, stop=stop, boot=boot, pool=pool)
        engine.processes.on_unexpected_end = ends.record

    @property
    def snapshots(self) -> Snapshots:
        """The snapshots of VMs."""
        return self._snapshots

    @property
    def default_size(self) -> Size:
        """The size of a VM that is created without one."""
        return self._settings.default_size

    @contextlib.asynccontextmanager
    async def recovered(self) -> AsyncIterator[None]:
        """Recover from a crash; fill the pool, suspend idle VMs and delete what expires inside the block."""
        try:
            await self._open_networks()
            await self._recovery.run()
            await self._snapshots.recover()
            await self._engine.layers.collect(set_aside=True)
            self._engine.layers.allow_sweeps()
            self._disk_watch.start()
            await self._engine.host.prune_quarantine()
            await self._templates.remove_unused()
            await self._templates.fill_pool()
            self._idle.start()
            self._expiry.start()
            try:
                yield
            finally:
                await self._expiry.close()
                await self._idle.close()
                await self._templates.close()
                await self._pool.close()
        finally:
            await self._disk_watch.close()
            await self._start.close()
            await self._engine.tasks.close()
            await self._engine.processes.close()

    async def _open_networks(self) -> None:
        networks = [private_network(row) for row in await self._vpcs.all()]
        vm_slots = [
            record_of(row).vm_slot
            for row in await self._store.list()
            if row.vpc is not None and row.state != State.DELETED
        ]
        await self._engine.host.vpcs.open(networks, vm_slots, self._wake_for_network)

    def _wake_for_network(self, machine_id: str) -> None:
        """Wake a VM that another VM of its VPC sends packets to."""
        if machine_id not in self._waking:
            self._waking.add(machine_id)
            self._engine.tasks.start(self._wake_once(machine_id), f"wake of VM {machine_id} for its VPC")

    async def _wake_once(self, machine_id: str) -> None:
        try:
            await self.ensure_up(machine_id, Use.NETWORK)
        except SteadError as error:
            log.warning("cannot wake a VM for a packet in its VPC", vm=machine_id, error=str(error))
        finally:
            self._waking.discard(machine_id)

    def limit(self, limits_of: LimitsOf) -> None:
        """Enforce these limits of accounts from now on."""
        self._engine.quotas.limits_of = limits_of

    def watch(self, on_event: OnEvent) -> None:
        """Report every lifecycle event to this, first those of the recovery at start."""
        self._engine.events.listen(on_event)

    # Create, snapshot, fork, resize

    async def template(
        self, size: Size | None = None, report: Report = lambda _: None, *, account: str | None = None
    ) -> Template:
        """The template for VMs of a size, built single-flight when missing; creates from it are fast.

        `report` gets the steps of a build, also of one that another caller has started.
        LimitExceeded before it is built when the account may not have a VM of this size now.
        """
        return await self._templates.ensure(size, report, account=account)

    async def create(
        self,
        properties: Properties | None = None,
        size: Size | None = None,
        *,
        nic: NicRequest | None = None,
        ready_timeout: float | None = None,
        report: Report = lambda _: None,
    ) -> Machine:
        """Create a VM and wait until its guest confirmed its identity; a failure leaves nothing.

        From `properties.snapshot` it gets that snapshot's memory and disk; with another size it boots from
        the disk. Without `properties` it has the idle time-out of the settings. With `ready_timeout`, wait
        for its services as well. `report` gets the steps of a template that must be built for it.
        """
        properties = properties or Properties(idle_timeout=self._settings.idle_timeout)
        properties.check()
        wanted = size if properties.snapshot is not None else size or self._settings.default_size

        async def check() -> None:
            if wanted is not None:
                await self._engine.quotas.check(properties.account, wanted)

        await self._eviction.ensure_free(
            properties.account, EvictionScope.ABOVE_SHARE, keeping=properties.snapshot, check=check
        )
        if properties.snapshot is None:
            size = size or self._settings.default_size
            record = await self._create.from_template(properties, size, nic, report)
        else:
            async with self._snapshots.source(properties.snapshot) as source:
                record = await self._create.from_snapshot(properties, source, size, nic)
        if ready_timeout is not None:
            try:
                await self.wait_until_ready(record.id, ready_timeout)
            except BaseException:
                await finished(self._delete(record.id, "not ready in time", forget=True))
                raise
        return Machine(self, record.id)

    async def snapshot(
        self,
        machine_id: str,
        name: str | None = None,
        *,
        persistence: SnapshotPersistence = PERSISTENT,
        build: str | None = None,
        template_hash: str | None = None,
        failure: str | None = None,
        lifetime: Lifetime = FOREVER,
        purpose: SnapshotPurpose = "use",
        snapshot_id: str | None = None,
    ) -> SnapshotInfo:
        """Capture a VM's memory and disk while it keeps running; of a stopped VM, the disk.

        With `failure`, it is the state of a failed build, kept for inspection.
        """
        check_name(name)
        lifetime.check(time.time_ns())
        account = (await self._engine.journal.find(machine_id)).account
        await self._eviction.ensure_free(
            account,
            EvictionScope.ABOVE_SHARE,
            keeping=machine_id,
            check=lambda: self._snapshots.check_limit(account),
        )
        properties = SnapshotProperties(
            name,
            persistence,
            build=build,
            template_hash=template_hash,
            failure=failure,
            lifetime=lifetime,
            purpose=purpose,
            id=snapshot_id,
        )
        return await self._engine.tasks.run(self._snapshots.create(machine_id, properties))

    async def fork(
        self,
        machine_id: str,
        count: int = 1,
        *,
        persistence: Persistence | None = None,
        name: str | None = None,
        request: str | None = None,
    ) -> list[Machine]:
        """New VMs with the current memory, processes and files of this one: all of them, or none.

        One child gets `name`; several get `name-1`, `name-2` and so on.
        """
        children = await self._fork.fork(
            machine_id, count, persistence=persistence, name=name, request=request
        )
        return [Machine(self, child.id) for child in children]

    async def resize(
        self,
        machine_id: str,
        *,
        vcpus: int | None = None,
        memory_mib: int | None = None,
        disk_gib: int | None = None,
    ) -> None:
        """Change a VM's size; a running VM is restarted for it. Disks cannot shrink."""
        await self._resize.resize(machine_id, vcpus=vcpus, memory_mib=memory_mib, disk_gib=disk_gib)

    # Start and use

    async def start(
        self,
        machine_id: str,
        *,
        idle_timeout: int | Unchanged | None = UNCHANGED,
        activity_threshold: int | Unchanged = UNCHANGED,
        ready_timeout: float | None = None,
    ) -> None:
        """Wake or boot a VM. With `ready_timeout`, wait up to that many seconds for its services."""
        await self._start.start(
            machine_id,
            idle_timeout=idle_timeout,
            activity_threshold=activity_threshold,
            ready_timeout=ready_timeout,
        )

    async def ensure_up(self, machine_id: str, use: Use, operation: Operation = Operation.USE) -> None:
        """Wait for the operation under way, then wake or start the VM if this operation needs it."""
        await self._start.ensure_up(machine_id, use, operation)

    async def wait_until_ready(self, machine_id: str, timeout: float = READY_TIMEOUT) -> None:
        """Wait until systemd has started all services, and `Type=notify` services reported ready."""
        await self._start.wait_until_ready(machine_id, timeout)

    def using(self, machine_id: str, use: Use = Use.GUEST) -> AbstractAsyncContextManager[Agent]:
        """A lease on a VM's guest: the VM is not suspended for being idle inside the block.

        A suspended VM is woken and a stopped one started first; the log line names `use`.
        """
        return self._start.using(machine_id, use)

    async def attached(self, machine_id: str, use: Use) -> Attached:
        """Wake or start a VM like `using`, without a lease: an attached client does not hold the VM awake.

        The VM counts as used when `touch` is called.
        """
        return await self._start.attached(machine_id, use)

    async def attached_again(self, machine_id: str, before: Attached, use: Use) -> Attached:
        """Attach again to the same guest after an eviction; a suspended VM is woken first.

        WrongState when the VM has stopped, GuestRestarted when it has booted again.
        """
        return await self._start.attached_again(machine_id, before, use)

    def reattached(self, machine_id: str, before: Attached) -> Attached | None:
        """Attach again to the same guest if it is running, without waking it. Raises GuestRestarted."""
        return self._start.reattached(machine_id, before)

    def observer(self, machine_id: str) -> Agent | None:
        """The agent of a running VM without a lease: the VM may be suspended during a call, which then fails.

        None when the VM is not running.
        """
        return self._start.observer(machine_id)

    # Suspend, stop, delete

    async def suspend(self, machine_id: str) -> None:
        """Save a VM's memory and end its process; the next use wakes it."""
        await self._suspend.suspend(machine_id)

    async def kill(self, machine_id: str) -> None:
        """End a VM at once, like a power cut; its disk stays."""
        await self._stop.kill(machine_id)

    async def stop(self, machine_id: str, timeout: float = STOP_TIMEOUT) -> None:
        """Shut a VM down; after `timeout` seconds it is killed, and its reason says so."""
        await self._engine.tasks.run(self._shut_down(machine_id, timeout))

    async def _shut_down(self, machine_id: str, timeout: float) -> None:
        # A suspended VM is woken first, so that its page cache reaches the disk.
        await self.ensure_up(machine_id, Use.STOP, Operation.STOP)
        async with self._engine.locks.unless_done(machine_id, Operation.STOP) as record:
            if record is not None:
                await self._stop.shut_down(record, timeout)

    async def delete(self, machine_id: str, *, forget: bool = False) -> None:
        """Delete a VM with its disk and memory.

        One with `recreate` keeps its row, until it is deleted a second time or with `forget`.
        """
        await self._engine.tasks.run(self._delete(machine_id, None, forget))

    async def _delete(self, machine_id: str, why: str | None, forget: bool) -> None:
        await self._stop.interrupt_shutdown(machine_id)
        async with self._engine.locks.operation(machine_id, Operation.DELETE) as record:
            again = isinstance(record.state, Deleted)
            await self._deletion.remove(record, why, forget=forget or again)

    # Find and describe

    async def get(self, machine_id: str) -> Machine:
        await self.info(machine_id)
        return Machine(self, machine_id)

    async def list(self, account: str | None = None, *, deleted: bool = False) -> list[MachineInfo]:
        """All VMs, or those of an account, without the ones that builds run in.

        With `deleted`, also deleted VMs with `recreate`.
        """
        hidden = HIDDEN if deleted else _UNLISTED
        return await self._store.of_account(account, self._described, excluding=hidden)

    def _described(self, row: MachineRow) -> MachineInfo:
        info, live = machine_info(row), self._engine.processes.running(row.id)
        if live is None or live.held is None:
            return info
        return replace(info, reason=f"paused: {live.held}")

    async def count(self) -> dict[str, int]:
        """Number of VMs in each state, pool VMs included."""
        return await self._store.count()

    async def named(self, account: str, name: str) -> Sequence[MachineInfo]:
        """The VMs of an account that have this name."""
        return await self._store.of_account(account, self._described, excluding=_UNLISTED, name=name)

    async def made_for(self, request: str) -> Sequence[MachineInfo]:
        """The VMs that were created for a request and exist."""
        rows = await self._store.made_for(request)
        return [self._described(row) for row in rows if row.state not in _UNLISTED]

    async def info(self, machine_id: str) -> MachineInfo:
        return self._described(await self._row(machine_id))

    async def console(self, machine_id: str) -> str | None:
        """The end of a VM's serial console since its process was started; None when it has no process."""
        live = self._engine.processes.get(machine_id)
        return None if live is None else await live.vm.console()

    async def suspended_terminals(self, machine_id: str) -> Sequence[Session] | None:
        """The terminals that a suspended VM had; None when they are not known: then ask its guest."""
        return parse_terminals(await self._store.terminals(machine_id))

    async def dial(self, machine_id: str, port: int) -> socket.socket:
        """A TCP connection to a port of a running VM, as a non-blocking socket; OSError if refused."""
        return await self._engine.host.dial((await self._engine.journal.find(machine_id)).vm_slot, port)

    async def rename(self, machine_id: str, name: str | None) -> MachineInfo:
        """Change or remove a VM's name, in any state. Its hostname and id stay."""
        check_name(name)
        await self._row(machine_id)
        await self._engine.journal.set_name(machine_id, name)
        return await self.info(machine_id)

    async def hand_over(self, machine_id: str) -> None:
        """Turn the VM of a build into one that its account sees and uses."""
        await self._row(machine_id)
        await self._engine.journal.set_purpose(machine_id, "use")

    async def wait_for_exit(self, machine_id: str) -> str:
        """Wait until a VM is no longer running; returns why."""
        with self._engine.events.exiting(machine_id) as reason:
            row = await self._row(machine_id)
            if row.state in DOWN or row.state == State.LOST:
                return row.reason or row.state
            return await reason

    async def _row(self, machine_id: str) -> MachineRow:
        row = await self._store.get(machine_id)
        if row is None or row.state in HIDDEN:
            raise MachineNotFound(machine_id)
        return row


def _bounds_of(host: Host, settings: Settings) -> HostBounds:
    resources, default = host.resources, settings.default_size
    disk = int(resources.disk_gib * settings.disk_overcommit)
    largest = max(resources.largest_vm_mib, default.memory_mib)
    memory = int(resources.memory_mib * settings.memory_overcommit)
    return HostBounds(
        memory_mib=largest,
        disk_gib=max(disk, _LEAST_DISKS * default.disk_gib),
        total_memory_mib=max(memory, largest, 2 * default.memory_mib),
        explained=f" ({settings.disk_overcommit:g} times its disk, STEAD_DISK_OVERCOMMIT)",
        memory_explained=f" ({settings.memory_overcommit:g} times its memory, STEAD_MEMORY_OVERCOMMIT)",
    )
