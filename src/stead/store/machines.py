"""Rows of VMs."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import sqlalchemy as sa

from stead.errors import AddressTaken, HostError, InvalidRequest
from stead.store.database import Database
from stead.store.rows import Rows, build_rows, table_of
from stead.store.snapshots import snapshots

T = TypeVar("T")


@dataclass(frozen=True)
class MachineRow:
    """One VM as recorded. `step` is set while an operation is under way."""

    id: str
    name: str | None
    state: str
    step: str | None
    vcpus: int
    memory_mib: int
    disk_gib: int
    slot: int
    template: str
    hostname: str
    guest_machine_id: str
    pid: int | None = None
    pid_started: int | None = None
    reason: str | None = None
    recreated: bool = False
    """Being created under the id of a deleted VM."""
    created_at: int = 0
    updated_at: int = 0
    top: str | None = None
    """The disk layer that the VM writes; None while all of its disk is read-only."""
    next_top: str | None = None
    """The layer that will replace `top`; recorded before QEMU switches."""
    layer: str | None = None
    """The read-only layer below `top`; None when that is the template's disk."""
    checkpoint: str | None = None
    """The saved memory of a suspended VM."""
    memory_base: str | None = None
    """The template whose memory the process maps copy-on-write; None when it was booted."""
    snapshot: str | None = None
    """The snapshot that it was created from."""
    idle_timeout: int | None = None
    activity_threshold: int = 0
    persistence: str = "persistent"
    priority: int | None = None
    delete_event: str | None = None
    recreate: bool = False
    active_at: int = 0
    """When it last started or ended, in nanoseconds: the least recently used is evicted first."""
    traffic_at: int | None = None
    """When its data NIC last had traffic, in nanoseconds; None when it has had none."""
    account: str | None = None
    """The owner; None for pool VMs and for programs that use the engine without accounts."""
    purpose: str = "use"
    """`build` for a VM that a build runs in: its account does not see it."""
    workdir: str | None = None
    """Default working directory of commands."""
    build: str | None = None
    """The build of the snapshot that it was created from."""
    request: str | None = None
    """The request that it was created for."""
    vpc: str | None = None
    """The VPC that its NIC is in; None for the NIC of a VM without one."""
    vpc_address: str | None = None
    vpc_fixed: bool = False
    """Whether its owner chose the address."""


@dataclass(frozen=True)
class MemberRow:
    """What others of its VPC may know of a VM."""

    id: str
    name: str | None
    address: str


@dataclass(frozen=True)
class Usage:
    """What an account uses: VMs, their disks by size with its snapshots, the memory of VMs that are up."""

    machines: int
    up: int
    disk_gib: int
    memory_mib: int


@dataclass(frozen=True)
class Transitioned:
    """What a VM's row says after a transition that its writer may not know: a merge changes the layer."""

    layer: str | None
    template: str
    active_at: int


@dataclass(frozen=True)
class LayerRow:
    """A read-only disk layer. Its content never changes; `file` and `parent` do in a merge."""

    id: str
    parent: str | None
    template: str
    file: str
    created_at: int = 0


@dataclass(frozen=True)
class SuspendedTerminalsRow:
    """The terminals of a VM as JSON, recorded at its last suspend. Stale while the VM runs."""

    id: str
    """The VM's."""
    terminals: str


machines = table_of("machines", MachineRow)
layers = table_of("layers", LayerRow)
suspended_terminals = table_of("suspended_terminals", SuspendedTerminalsRow)
_GONE = ("deleting", "deleted")
_RESERVED_DISK = sa.select(sa.func.coalesce(sa.func.sum(machines.c.disk_gib), 0)).where(
    machines.c.state != "deleted"
)
_RESERVED_MEMORY = sa.select(sa.func.coalesce(sa.func.sum(machines.c.memory_mib), 0))
_SNAPSHOTS = sa.select(sa.func.coalesce(sa.func.sum(snapshots.c.size_bytes), 0))
"""Bytes of snapshots as captured: unlike a VM's disk they never grow. A deleted one has no size."""


class MachineStore(Rows[MachineRow]):
    table = machines
    row = MachineRow
    stamps = ("created_at", "updated_at", "active_at")

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.version = 0
        """Grows after each change of a VM, but for its traffic."""

    async def insert(self, row: MachineRow) -> MachineRow:
        try:
            with self._changing():
                return await super().insert(row)
        except sa.exc.IntegrityError as error:
            self._explain_conflict(row.vpc, row.vpc_address)
            raise HostError("the disk layer below the new VM was removed") from error

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            yield
        finally:
            # Also after a failure: a cancelled caller's write is done.
            self.version += 1

    def _explain_conflict(self, vpc: str | None, address: str | None) -> None:
        """Raise the error of a row that cannot be in its VPC, if that is what is wrong."""
        if vpc is None or address is None:
            return
        with self.database.look_up() as connection:
            same = machines.c.vpc == vpc, machines.c.vpc_address == address
            if connection.execute(sa.select(machines.c.id).where(*same)).first() is not None:
                raise AddressTaken(vpc, address)
            there = sa.select(sa.literal(1)).select_from(sa.table("vpcs", sa.column("id")))
            if connection.execute(there.where(sa.column("id") == vpc)).first() is None:
                raise InvalidRequest(f"VPC {vpc} was deleted")

    async def update(self, row_id: str, **changes: object) -> MachineRow | None:
        with self._changing():
            return await super().update(row_id, **changes, updated_at=time.time_ns())

    async def delete(self, row_id: str) -> None:
        with self._changing():
            await super().delete(row_id)

    async def record_traffic(self, machine_ids: Sequence[str], at: int) -> None:
        """Record the time of the last network traffic of several VMs in one transaction."""
        if machine_ids:
            changed = machines.update().where(machines.c.id.in_(machine_ids)).values(traffic_at=at)
            await self.database.execute(changed)

    async def transition(
        self,
        machine_id: str,
        expected: Mapping[str, object],
        changes: Mapping[str, object],
        frozen: LayerRow | None = None,
        terminals: str | None = None,
    ) -> Transitioned | None:
        """Change a VM's state if its row is as expected, in one transaction; None when there is no such row.

        With `frozen`, insert that layer and replace what is known of its terminals in suspended state.
        """
        now = time.time_ns()
        same = [machines.c[name].is_not_distinct_from(value) for name, value in expected.items()]
        here = machines.c.id == machine_id, *same
        kept = [machines.c[each.name] for each in dataclasses.fields(Transitioned)]
        changed = machines.update().where(*here).values(**changes, updated_at=now).returning(*kept)

        def change(connection: sa.Connection) -> Transitioned | None:
            row = connection.execute(changed).one_or_none()
            return None if row is None else Transitioned(*row)

        if frozen is None:
            try:
                with self._changing():
                    return await self.database.write(change)
            except sa.exc.IntegrityError:
                self._explain_conflict(*_claimed(changes))
                raise
        layer = layers.insert().values(**dataclasses.asdict(dataclasses.replace(frozen, created_at=now)))

        def freeze(connection: sa.Connection) -> Transitioned | None:
            if connection.execute(sa.select(machines.c.id).where(*here)).first() is None:
                return None
            connection.execute(layer)
            connection.execute(suspended_terminals.delete().where(suspended_terminals.c.id == machine_id))
            if terminals is not None:
                connection.execute(suspended_terminals.insert().values(id=machine_id, terminals=terminals))
            return change(connection)

        with self._changing():
            return await self.database.write(freeze)

    async def all(self) -> list[MachineRow]:
        """All VMs, oldest first; many are read in a thread."""
        return await self._select_many(
            "all", sa.select(machines).order_by(machines.c.created_at), lambda row: row
        )

    async def of_account(
        self,
        account: str | None,
        convert: Callable[[MachineRow], T],
        *,
        excluding: Sequence[str] = (),
        name: str | None = None,
    ) -> list[T]:
        """What the VMs of an account, or of all, are converted to, oldest first; without those of builds."""
        statement = sa.select(machines).where(machines.c.purpose == "use")
        statement = statement.where(machines.c.state.not_in(excluding))
        if account is not None:
            statement = statement.where(machines.c.account == account)
        if name is not None:
            statement = statement.where(machines.c.name == name)
        key = "of", account, name is None
        return await self._select_many(key, statement.order_by(machines.c.created_at), convert)

    async def list(
        self,
        *,
        states: Sequence[str] = (),
        excluding: Sequence[str] = (),
        account: str | None = None,
        purpose: str | None = None,
    ) -> list[MachineRow]:
        """VMs, oldest first: in any of these states (all, without any), apart from some."""
        statement = sa.select(machines).where(machines.c.state.not_in(excluding))
        if states:
            statement = statement.where(machines.c.state.in_(states))
        if account is not None:
            statement = statement.where(machines.c.account == account)
        if purpose is not None:
            statement = statement.where(machines.c.purpose == purpose)
        return await self._select(statement.order_by(machines.c.created_at))

    async def usage(self, account: str, *, not_up: Sequence[str], excluding: Sequence[str] = ()) -> Usage:
        """What an account has, apart from some VMs; those in a `not_up` state take no memory."""
        up = machines.c.state.not_in(not_up)
        statement = sa.select(
            sa.func.count(),
            sa.func.coalesce(sa.func.sum(sa.case((up, 1), else_=0)), 0),
            sa.func.coalesce(sa.func.sum(machines.c.disk_gib), 0),
            sa.func.coalesce(sa.func.sum(sa.case((up, machines.c.memory_mib), else_=0)), 0),
        ).where(machines.c.account == account, machines.c.state != "deleted")
        if excluding:
            statement = statement.where(machines.c.id.not_in(excluding))
        captured = _SNAPSHOTS.where(snapshots.c.account == account)

        def read(connection: sa.Connection) -> Usage:
            usage = Usage(*connection.execute(statement).one())
            more = int(connection.execute(captured).scalar_one()) >> 30
            return dataclasses.replace(usage, disk_gib=usage.disk_gib + more)

        return await self.database.read(read)

    def reserved_disk(self, *, excluding: Sequence[str] = ()) -> int:
        """The disks of all VMs, apart from some, and snapshots in GiB.

        It takes 0.1 ms for a thousand, less than for a thread.
        """
        statement = _RESERVED_DISK
        if excluding:
            statement = statement.where(machines.c.id.not_in(excluding))
        with self.database.look_up() as connection:
            captured = int(connection.execute(_SNAPSHOTS).scalar_one()) >> 30
            return int(connection.execute(statement).scalar_one()) + captured

    def reserved_memory(self, *, not_up: Sequence[str], excluding: Sequence[str] = ()) -> int:
        """Memory in MiB of all VMs that are not in a `not_up` state, apart from some."""
        statement = _RESERVED_MEMORY.where(machines.c.state.not_in(not_up))
        if excluding:
            statement = statement.where(machines.c.id.not_in(excluding))
        with self.database.look_up() as connection:
            return int(connection.execute(statement).scalar_one())

    async def count(self) -> dict[str, int]:
        statement = sa.select(machines.c.state, sa.func.count().label("number")).group_by(machines.c.state)
        return await self.database.read(
            lambda connection: {row.state: row.number for row in connection.execute(statement)}
        )

    async def made_for(self, request: str) -> Sequence[MachineRow]:
        return await self._select(sa.select(machines).where(machines.c.request == request))

    async def terminals(self, machine_id: str) -> str | None:
        """The terminals that a suspended VM had, as JSON; None when they are not known."""
        statement = sa.select(suspended_terminals.c.terminals).where(suspended_terminals.c.id == machine_id)
        return await self.database.read(lambda connection: connection.execute(statement).scalar())

    def vpc_of_slot(self, slot: int) -> str | None:
        """The VPC of the VM in a slot."""
        statement = sa.select(machines.c.vpc).where(machines.c.slot == slot)
        with self.database.look_up() as connection:
            return connection.execute(statement).scalar()

    def members_of(self, vpc: str) -> Sequence[MemberRow]:
        """The VMs in a VPC that exist, oldest first."""
        statement = (
            sa.select(machines.c.id, machines.c.name, machines.c.vpc_address.label("address"))
            .where(machines.c.vpc == vpc, machines.c.state.not_in(_GONE))
            .order_by(machines.c.created_at, machines.c.id)
        )
        with self.database.look_up() as connection:
            return build_rows(MemberRow, connection.execute(statement))

    async def slots(self) -> set[int]:
        statement = sa.select(machines.c.slot)
        return await self.database.read(lambda connection: set(connection.execute(statement).scalars()))


def _claimed(changes: Mapping[str, object]) -> tuple[str | None, str | None]:
    """The VPC and address that a change claims."""
    vpc, address = changes.get("vpc"), changes.get("vpc_address")
    return (vpc, address) if isinstance(vpc, str) and isinstance(address, str) else (None, None)
