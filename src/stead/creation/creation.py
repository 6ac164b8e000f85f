"""Creation: the one place where VMs are created for clients, with all that they ask for, or not at all."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

from stead.builds.builder import Builder, SnapshotOrder
from stead.builds.git_access import GitAccess
from stead.builds.plan import Plan
from stead.creation.results import BuiltSnapshot, CreatedVm
from stead.domains.domains import Domains, Target
from stead.errors import MachineNotFound
from stead.logbook import Logbook
from stead.machines import Machine, Machines, Properties, State
from stead.machines.nics import NicRequest
from stead.machines.persistence import Persistence
from stead.machines.unchanged import Unchanged
from stead.networks.networks import Networks
from stead.settings import Settings
from stead.shares import KeyedLimit, share_of
from stead.tasks import finished


@dataclass(frozen=True)
class VmOrder:
    """A VM that a client asks for.

    `plan` says what it is made of; its idle time-out and working directory are added to `properties`.
    """

    plan: Plan
    properties: Properties
    nic: NicRequest | None = None
    targets: tuple[Target, ...] = ()
    """Host names to map to it."""
    git_access: str | None = None
    """The repository that git in it may fetch from and push to."""
    warnings: tuple[str, ...] = ()
    """Lines for the log, about parts of the request that have no effect."""

    @property
    def account(self) -> str:
        return self.properties.account or ""


@dataclass(frozen=True, eq=False)
class Creation:
    """Creates VMs and snapshots for clients."""

    settings: Settings
    machines: Machines
    builder: Builder
    domains: Domains
    networks: Networks
    git_access: GitAccess
    logbook: Logbook
    places: KeyedLimit = field(default_factory=KeyedLimit)
    """Creates and forks in progress, by account. The builder counts what it builds by itself."""

    async def create(self, order: VmOrder) -> CreatedVm:
        """Create a running VM with its NIC, its Git access and its domains.

        A failure or a cancellation undoes every step, so that nothing is left.
        """
        # What cannot succeed is refused before anything is made for it.
        if order.nic is not None:
            await self.networks.check_nic(order.account, order.nic.vpc, order.nic.address)
        if order.targets:
            await self.domains.check(order.account, order.targets)
        if order.git_access is not None:
            await self.git_access.check(order.account, order.git_access)
        plan, idle = order.plan, order.plan.idle_timeout
        idle = self.settings.idle_timeout if isinstance(idle, Unchanged) else idle
        properties = replace(order.properties, idle_timeout=idle, workdir=plan.workdir)
        # A build takes minutes: it has places of its own, and none of those of plain creates.
        place: AbstractAsyncContextManager[None] = (
            contextlib.nullcontext() if plan.is_built else self.places.hold(order.account)
        )
        async with place, contextlib.AsyncExitStack() as undo:
            if plan.is_built:
                warnings = (*order.warnings, *plan.warnings)
                machine = await self.builder.create_machine(plan, properties, order.nic, warnings)
            else:
                size = plan.base.size(self.settings.default_size)
                if plan.base.snapshot is not None:
                    base = await self.builder.find_base(plan.base, order.account, properties.request)
                    size = base.size
                    properties = replace(properties, snapshot=base.snapshot_id, build=base.build)
                machine = await self.machines.create(
                    properties,
                    size,
                    nic=order.nic,
                    ready_timeout=plan.ready_seconds,
                    report=self.builder.template_lines(size, order.account, properties.request),
                )
            undo.push_async_callback(self.delete, machine.id)
            if plan.is_built:
                snapshot = (await machine.info()).snapshot
            else:
                snapshot = properties.snapshot
                for warning in (*order.warnings, *plan.warnings):
                    await self._warn(order, warning, machine.id)
            if order.git_access is not None:
                await self.git_access.give(order.account, machine, order.git_access)
            names: tuple[str, ...] = ()
            if order.targets:
                mapped = await self.domains.map_all(order.account, machine.id, order.targets)
                names = tuple(mapping.domain for mapping in mapped)
            undo.pop_all()
        return CreatedVm(machine.id, snapshot, names)

    async def _warn(self, order: VmOrder, warning: str, machine_id: str) -> None:
        await self.logbook.write(
            order.account,
            warning,
            level="warn",
            source="build",
            machine=machine_id,
            request=order.properties.request,
        )

    async def delete(self, machine_id: str) -> None:
        """Undo a create: its client never hears of the VM."""
        with contextlib.suppress(MachineNotFound):
            await finished(self.machines.delete(machine_id, forget=True))

    async def create_snapshot(self, order: SnapshotOrder) -> BuiltSnapshot:
        """The snapshot of a spec; a cancelled create leaves what was built, for the next request."""
        return BuiltSnapshot((await self.builder.ensure_snapshot(order)).id)

    async def fork(
        self,
        account: str,
        machine_id: str,
        count: int,
        *,
        persistence: Persistence | None = None,
        name: str | None = None,
        request: str | None = None,
    ) -> list[Machine]:
        """Fork a VM. Each child takes a place like a create, as far as the account's share has them."""
        wanted = min(max(1, count), share_of(self.settings.max_creations))
        async with self.places.hold(account, amount=wanted):
            return await self.machines.fork(
                machine_id, count, persistence=persistence, name=name, request=request
            )

    # What exists

    async def named(self, account: str, name: str) -> Sequence[CreatedVm]:
        """The VMs of an account that have this name."""
        found = await self.machines.named(account, name)
        return [CreatedVm(info.id, info.snapshot, self._names(info.id), created=False) for info in found]

    async def made_for(self, request: str, *, running: bool = False) -> CreatedVm | None:
        """The VM that a request had created when the server was interrupted; with `running`, if it runs."""
        for info in await self.machines.made_for(request):
            if info.purpose == "use" and (info.state is State.RUNNING or not running):
                return CreatedVm(info.id, info.snapshot, self._names(info.id))
        return None

    def _names(self, machine_id: str) -> tuple[str, ...]:
        return tuple(mapping.domain for mapping in self.domains.of_machine(machine_id))
