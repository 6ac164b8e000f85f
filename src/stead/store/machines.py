"""Rows of VMs."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from stead.errors import HostError
from stead.store.rows import Rows, table_of


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


@dataclass(frozen=True)
class Usage:
    """What an account uses: all its VMs and disks, and the memory of the VMs that are up."""

    machines: int
    up: int
    disk_gib: int
    memory_mib: int


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
    """The terminals that a VM had when it was suspended, as JSON. Of a VM that runs it means nothing."""

    id: str
    """The VM's."""
    terminals: str


machines = table_of("machines", MachineRow)
layers = table_of("layers", LayerRow)
suspended_terminals = table_of("suspended_terminals", SuspendedTerminalsRow)


class MachineStore(Rows[MachineRow]):
    table = machines
    row = MachineRow
    stamps = ("created_at", "updated_at", "active_at")

    async def insert(self, row: MachineRow) -> MachineRow:
        try:
            return await super().insert(row)
        except sa.exc.IntegrityError as error:
            raise HostError("the disk layer below the new VM was removed") from error

    async def update(self, row_id: str, **changes: object) -> MachineRow | None:
        return await super().update(row_id, **changes, updated_at=time.time_ns())

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
    ) -> MachineRow | None:
        """Change a VM's state if its row is as expected, in one transaction; None when there is no such row.

        With `frozen`, insert that layer and replace what is known of its terminals in suspended state.
        """
        now = time.time_ns()
        same = [machines.c[name].is_not_distinct_from(value) for name, value in expected.items()]
        here = machines.c.id == machine_id, *same
        changed = machines.update().where(*here).values(**changes, updated_at=now)
        if frozen is None:
            return await self._update_returning(changed)
        layer = layers.insert().values(**dataclasses.asdict(dataclasses.replace(frozen, created_at=now)))

        def freeze(connection: sa.Connection) -> MachineRow | None:
            if connection.execute(sa.select(machines.c.id).where(*here)).first() is None:
                return None
            connection.execute(layer)
            connection.execute(suspended_terminals.delete().where(suspended_terminals.c.id == machine_id))
            if terminals is not None:
                connection.execute(suspended_terminals.insert().values(id=machine_id, terminals=terminals))
            return self._one(connection.execute(changed.returning(machines)))

        return await self.database.write(freeze)

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
        return await self.database.read(lambda connection: Usage(*connection.execute(statement).one()))

    async def count(self) -> dict[str, int]:
        statement = sa.select(machines.c.state, sa.func.count().label("number")).group_by(machines.c.state)
        return await self.database.read(
            lambda connection: {row.state: row.number for row in connection.execute(statement)}
        )

    async def made_for(self, request: str) -> MachineRow | None:
        found = await self._select(sa.select(machines).where(machines.c.request == request).limit(1))
        return next(iter(found), None)

    async def terminals(self, machine_id: str) -> str | None:
        """The terminals that a suspended VM had, as JSON; None when they are not known."""
        statement = sa.select(suspended_terminals.c.terminals).where(suspended_terminals.c.id == machine_id)
        return await self.database.read(lambda connection: connection.execute(statement).scalar())

    async def slots(self) -> set[int]:
        statement = sa.select(machines.c.slot)
        return await self.database.read(lambda connection: set(connection.execute(statement).scalars()))
