"""All VMs of one installation: opens the engine, finds VMs, and offers every operation on them."""

import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Sequence

from stead.deadlines import scaled
from stead.errors import MachineNotFound, SteadError
from stead.guest.sessions import Session
from stead.host.interface import Host, Report
from stead.logs import get_logger
from stead.machines.boot import BootOperation
from stead.machines.bring_up import BringUp
from stead.machines.capture import CaptureOperation
from stead.machines.create import CreateOperation
from stead.machines.deletion import DeleteOperation
from stead.machines.disk_eviction import DiskEviction
from stead.machines.disks import Disks
from stead.machines.ended import UnexpectedEnds
from stead.machines.events import Events, Use
from stead.machines.expiry import ExpiryWatch
from stead.machines.fork import ForkOperation
from stead.machines.idle import IdleWatch
from stead.machines.journal import HIDDEN, Journal
from stead.machines.layers import Layers
from stead.machines.lifetimes import FOREVER, Lifetime
from stead.machines.locks import Locks
from stead.machines.machine import Machine, MachineInfo, machine_info
from stead.machines.nics import NicRequest, VpcAddresses
from stead.machines.persistence import PERSISTENT, Persistence, SnapshotPersistence
from stead.machines.pool import Pool
from stead.machines.processes import Processes
from stead.machines.quotas import LimitsOf, Quotas
from stead.machines.records import Properties, Purpose, record_of
from stead.machines.recovery import Reconciliation
from stead.machines.resize import ResizeOperation
from stead.machines.snapshots import SnapshotInfo, SnapshotProperties, SnapshotPurpose, Snapshots
from stead.machines.start import StartOperation
from stead.machines.states import DOWN, Deleted, Operation, State
from stead.machines.stop import STOP_TIMEOUT, StopOperation
from stead.machines.suspend import SuspendOperation
from stead.machines.suspended_terminals import parse_terminals
from stead.machines.templates import Templates
from stead.machines.unchanged import UNCHANGED, Unchanged
from stead.machines.wake import WakeOperation
from stead.names import check_name
from stead.networks.names import PrivateNames
from stead.networks.networks import private_network
from stead.settings import Settings, Size
from stead.store.database import Database
from stead.store.layers import LayerStore
from stead.store.machines import MachineRow, MachineStore
from stead.store.networks import VpcStore
from stead.store.snapshots import SnapshotStore
from stead.tasks import KeyedLimit, TaskSet, finished

log = get_logger("stead.machines")

_UNLISTED = (*HIDDEN, State.DELETED)
_RESTORE_DEADLINE = scaled(10.0)
"""Seconds that a restore counts as one. It takes about one; a guest that does not answer takes minutes."""


class Machines:
    """All VMs of one installation. One process at a time has them open; VMs outlive that process.

    Operations on one VM take its id first; `Machine` is a handle with the same operations.
    """

    def __init__(self, settings: Settings, database: Database, host: Host) -> None:
        self.settings = settings
        self.database = database
        self.host = host
        self._store = MachineStore(database)
        self._waking: set[str] = set()
        tasks = self._tasks = TaskSet()
        layer_store = LayerStore(database)
        self._vpcs = VpcStore(database)
        self.private_names = PrivateNames(self._store)
        # What all operations share
        journal = self.journal = Journal(self._store, host.slots)
        events = self.events = Events()
        locks = self.locks = Locks(journal)
        quotas = self.quotas = Quotas(self._store)
        layers = self.layers = Layers(host, layer_store, tasks)
        processes = self.processes = Processes(host, journal, tasks)
        disks = self.disks = Disks(host, journal, layers, events)
        # More concurrent restores than cores would make all of them slow. Accounts share the places.
        slots = self.slots = KeyedLimit(max(2, os.cpu_count() or 2), release_after=_RESTORE_DEADLINE)
        bring_up = self.bring_up = BringUp(host, journal, processes, disks, events)
        deletion = self._deletion = DeleteOperation(host, journal, processes, layers, events)
        # Operations
        stop = self._stop = StopOperation(
            host, journal, processes, disks, layers, deletion, events, locks, tasks
        )
        boot = BootOperation(journal, disks, bring_up, stop, events)
        wake = self._wake = WakeOperation(host, journal, processes, disks, layers, bring_up, boot, events)
        capture = self.capture = CaptureOperation(host, journal, disks)
        suspend = SuspendOperation(
            host, journal, processes, disks, layers, capture, deletion, events, locks, tasks
        )
        self.snapshots = Snapshots(
            host, SnapshotStore(database), processes, disks, layers, capture, quotas, locks
        )
        self.pool = Pool(host, journal, processes, bring_up, deletion, settings.pool)
        self._templates = Templates(host, quotas, self.pool, layer_store, settings.default_size)
        self._create = CreateOperation(
            host,
            journal,
            processes,
            disks,
            bring_up,
            deletion,
            locks,
            quotas,
            self.pool,
            slots,
            self._templates,
            self.snapshots,
            VpcAddresses(self._vpcs),
        )
        self._eviction = DiskEviction(host, journal, layers, deletion, self.snapshots, locks)
        start = self._start = StartOperation(
            journal, processes, locks, quotas, self._eviction, slots, wake, boot, self._create
        )
        fork = ForkOperation(
            host,
            journal,
            processes,
            layers,
            capture,
            self._create,
            deletion,
            self.pool,
            self._eviction,
            start,
            locks,
            tasks,
            handle=lambda machine_id: Machine(self, machine_id),
        )
        resize = ResizeOperation(host, journal, quotas, start, stop, boot, locks, tasks)
        self.idle = IdleWatch(host, journal, processes, suspend, settings.idle_check)
        self._expiry = ExpiryWatch(self.snapshots)
        self._recovery = Reconciliation(
            host, journal, processes, layers, capture, deletion, stop, wake, locks, tasks
        )
        ends = UnexpectedEnds(journal, processes, deletion, stop, boot, self.pool, locks)
        processes.on_unexpected_end = ends.record
        # Each has its signature and documentation in its own module.
        self.using = start.using
        self.attached = start.attached
        self.attached_again = start.attached_again
        self.reattached = start.reattached
        self.observer = start.observer
        self.ensure_up = start.ensure_up
        self.start = start.start
        self.wait_until_ready = start.wait_until_ready
        self.suspend = suspend.suspend
        self.fork = fork.fork
        self.kill = stop.kill
        self.resize = resize.resize
        self.template = self._templates.ensure
        self.watch = events.listen

    @contextlib.asynccontextmanager
    async def recovered(self) -> AsyncIterator[None]:
        """Recover from a crash; fill the pool, suspend idle VMs and delete what expires inside the block."""
        try:
            await self._open_networks()
            await self._recovery.run()
            await self.snapshots.recover()
            await self.layers.collect(set_aside=True)
            self.layers.allow_sweeps()
            await self.host.prune_quarantine()
            await self._templates.remove_unused()
            await self._templates.fill_pool()
            self.idle.start()
            self._expiry.start()
            try:
                yield
            finally:
                await self._expiry.close()
                await self.idle.close()
                await self._templates.close()
                await self.pool.close()
        finally:
            await self._start.close()
            await self._tasks.close()
            await self.processes.close()

    async def _open_networks(self) -> None:
        networks = [private_network(row) for row in await self._vpcs.all()]
        places = [
            record_of(row).place
            for row in await self._store.list()
            if row.vpc is not None and row.state != State.DELETED
        ]
        await self.host.open_networks(networks, places, self._wake_for_network)

    def _wake_for_network(self, machine_id: str) -> None:
        """Wake a VM that another VM of its VPC sends packets to."""
        if machine_id not in self._waking:
            self._waking.add(machine_id)
            self._tasks.start(self._wake_once(machine_id), f"wake of VM {machine_id} for its VPC")

    async def _wake_once(self, machine_id: str) -> None:
        try:
            await self.ensure_up(machine_id, Use.NETWORK)
        except SteadError as error:
            log.warning("cannot wake a VM for a packet in its VPC", vm=machine_id, error=str(error))
        finally:
            self._waking.discard(machine_id)

    def limit(self, limits_of: LimitsOf) -> None:
        """Enforce these limits of accounts from now on."""
        self.quotas.limits_of = limits_of

    # Create, snapshot, stop, delete

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
        nic: NicRequest | None = None,
        report: Report = lambda _: None,
    ) -> Machine:
        """Create a VM and wait until its guest confirmed its identity; a failure leaves nothing.

        From a snapshot it gets the snapshot's memory and disk; with another size it boots from the disk.
        With `ready_timeout`, wait for its services as well.
        """
        check_name(name)
        own_timeout = self.settings.idle_timeout if isinstance(idle_timeout, Unchanged) else idle_timeout
        properties = Properties(
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
            snapshot=snapshot,
        )
        properties.check()
        await self._eviction.ensure_free(keeping=snapshot)
        if snapshot is None:
            record = await self._create.from_template(size, properties, nic, report)
        else:
            async with self.snapshots.source(snapshot) as source:
                record = await self._create.from_snapshot(source, size, properties, nic)
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
        await self._eviction.ensure_free(keeping=machine_id)
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
        return await self._tasks.run(self.snapshots.create(machine_id, properties))

    async def stop(self, machine_id: str, timeout: float = STOP_TIMEOUT) -> None:
        """Shut a VM down; after `timeout` seconds it is killed, and its reason says so."""
        await self._tasks.run(self._shut_down(machine_id, timeout))

    async def _shut_down(self, machine_id: str, timeout: float) -> None:
        # A suspended VM is woken first, so that its page cache reaches the disk.
        await self.ensure_up(machine_id, Use.STOP, Operation.STOP)
        async with self.locks.unless_done(machine_id, Operation.STOP) as record:
            if record is not None:
                await self._stop.shut_down(record, timeout)

    async def delete(self, machine_id: str, *, forget: bool = False) -> None:
        """Delete a VM with its disk and memory.

        One with `recreate` keeps its row, until it is deleted a second time or with `forget`.
        """
        await self._tasks.run(self._delete(machine_id, None, forget))

    async def _delete(self, machine_id: str, why: str | None, forget: bool) -> None:
        await self._stop.interrupt_shutdown(machine_id)
        async with self.locks.operation(machine_id, Operation.DELETE) as record:
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
        rows = await self._store.list(excluding=hidden, account=account, purpose="use")
        return [machine_info(row) for row in rows]

    async def count(self) -> dict[str, int]:
        """Number of VMs in each state, pool VMs included."""
        return await self._store.count()

    async def named(self, account: str, name: str) -> Sequence[MachineInfo]:
        """The VMs of an account that have this name."""
        return [info for info in await self.list(account) if info.name == name]

    async def made_for(self, request: str) -> Sequence[MachineInfo]:
        """The VMs that were created for a request and exist."""
        rows = await self._store.made_for(request)
        return [machine_info(row) for row in rows if row.state not in _UNLISTED]

    async def info(self, machine_id: str) -> MachineInfo:
        return machine_info(await self._row(machine_id))

    async def console(self, machine_id: str) -> str | None:
        """The end of a VM's serial console since its process was started; None when it has no process."""
        live = self.processes.get(machine_id)
        return None if live is None else await live.vm.console()

    async def suspended_terminals(self, machine_id: str) -> Sequence[Session] | None:
        """The terminals that a suspended VM had; None when they are not known: then ask its guest."""
        return parse_terminals(await self._store.terminals(machine_id))

    async def dial(self, machine_id: str, port: int) -> socket.socket:
        """A TCP connection to a port of a running VM, as a non-blocking socket; OSError if refused."""
        return await self.host.dial((await self.journal.find(machine_id)).place, port)

    async def rename(self, machine_id: str, name: str | None) -> MachineInfo:
        """Change or remove a VM's name, in any state. Its hostname and id stay."""
        check_name(name)
        await self._row(machine_id)
        await self.journal.set_name(machine_id, name)
        return await self.info(machine_id)

    async def hand_over(self, machine_id: str) -> None:
        """Turn the VM of a build into one that its account sees and uses."""
        await self._row(machine_id)
        await self.journal.set_purpose(machine_id, "use")

    async def wait_for_exit(self, machine_id: str) -> str:
        """Wait until a VM is no longer running; returns why."""
        with self.events.exiting(machine_id) as reason:
            row = await self._row(machine_id)
            if row.state in DOWN or row.state == State.LOST:
                return row.reason or row.state
            return await reason

    async def _row(self, machine_id: str) -> MachineRow:
        row = await self._store.get(machine_id)
        if row is None or row.state in HIDDEN:
            raise MachineNotFound(machine_id)
        return row
