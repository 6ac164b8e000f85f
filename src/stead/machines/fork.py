"""Fork: new VMs with the current memory, processes and files of a running one."""

import asyncio
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace

from stead.errors import InvalidRequest
from stead.host.interface import CapturedState
from stead.machines.capture import CaptureOperation
from stead.machines.create import CreateOperation
from stead.machines.deletion import DeleteOperation
from stead.machines.disk_eviction import DiskEviction
from stead.machines.engine import Engine
from stead.machines.events import Use
from stead.machines.locks import wrong_state
from stead.machines.nics import NicRequest
from stead.machines.persistence import EvictionScope, Persistence
from stead.machines.pool import Pool
from stead.machines.records import Record
from stead.machines.start import StartOperation
from stead.machines.states import Operation
from stead.names import check_name
from stead.networks.errors import ForkUnsupported
from stead.tasks import finished

MAX_FORKS = 100
_CHILD_OVERHEAD = 64 << 20
"""Memory of a QEMU process itself and of its guest's first writes."""


@dataclass(eq=False)
class ForkOperation:
    engine: Engine
    _: KW_ONLY
    capture: CaptureOperation
    create: CreateOperation
    deletion: DeleteOperation
    pool: Pool
    eviction: DiskEviction
    start: StartOperation

    async def fork(
        self,
        machine_id: str,
        count: int = 1,
        *,
        persistence: Persistence | None = None,
        name: str | None = None,
        request: str | None = None,
    ) -> list[Record]:
        """New VMs with the current memory, processes and files of this one: all of them, or none.

        One child gets `name`; several get `name-1`, `name-2` and so on.
        """
        if not 1 <= count <= MAX_FORKS:
            raise InvalidRequest(f"cannot fork {count} VMs: must be 1 to {MAX_FORKS}")
        names = _names(name, count)
        # Before anything is woken or evicted for it; a NIC does not change.
        record = await self.engine.journal.find(machine_id)
        own = record.properties
        if own.nic is not None and own.fixed_address:
            raise ForkUnsupported(machine_id, str(own.nic.address))
        await self.engine.quotas.check(record.account, record.size, count)
        await self.eviction.ensure_free(record.account, EvictionScope.ABOVE_SHARE, keeping=machine_id)
        return await self.engine.tasks.run(self._fork(machine_id, names, persistence, request))

    async def _fork(
        self,
        machine_id: str,
        names: Sequence[str | None],
        persistence: Persistence | None,
        request: str | None,
    ) -> list[Record]:
        await self.start.ensure_up(machine_id, Use.FORK, Operation.FORK)
        async with self.engine.locks.operation(machine_id, Operation.FORK) as record:
            live = self.engine.processes.running(machine_id)
            if live is None:
                raise wrong_state(record, Operation.FORK)
            async with self.engine.captures.hold(record.account):
                parent, state = await self.capture.capture(record, live)
            try:
                children = await self._allocate(parent, state, names, persistence, request)
            except BaseException:
                state.close()
                raise
        try:
            await self._bring_up(children, state, f"forked from {machine_id}")
        finally:
            state.close()
        self.engine.layers.merge_in_background(parent.layer, parent.template)
        return children

    async def _allocate(
        self,
        parent: Record,
        state: CapturedState,
        names: Sequence[str | None],
        persistence: Persistence | None,
        request: str | None,
    ) -> list[Record]:
        of = parent.properties
        properties = replace(
            of,
            persistence=persistence or of.persistence,
            request=request,
            recreate=False,
            purpose="use",
            nic=None,
            fixed_address=False,
        )
        # Pages of the template are shared copy-on-write; each child needs its own copy of the others.
        self.engine.host.check_memory(len(names) * (state.memory_bytes + _CHILD_OVERHEAD))
        children: list[Record] = []
        try:
            for name in names:
                own = replace(properties, name=name)
                nic = None if of.nic is None else NicRequest(of.nic.vpc)
                children.append(
                    await self.create.allocate(state.size, parent.template, own, parent.layer, nic)
                )
        except BaseException:
            await self._remove(children)
            raise
        return children

    async def _bring_up(self, children: Sequence[Record], state: CapturedState, why: str) -> None:
        """Bring up the children: all of them, or none."""
        with self.pool.paused_refill():
            work = [self.create.from_state(child, state, why, len(children)) for child in children]
            results = await finished(asyncio.gather(*work, return_exceptions=True))
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            await self._remove([result for result in results if isinstance(result, Record)])
            raise failures[0]

    async def _remove(self, children: Sequence[Record]) -> None:
        for child in children:
            await finished(self.deletion.remove(child, "the fork failed"))


def _names(name: str | None, count: int) -> list[str | None]:
    """The name of each child of a fork, checked like the name of any other VM."""
    if name is None or count == 1:
        names = [name] * count
    else:
        names = [f"{name}-{number}" for number in range(1, count + 1)]
    check_name(name)
    check_name(names[-1])
    return names
