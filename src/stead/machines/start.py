"""Start and use: a suspended VM is woken, a stopped one booted, a deleted one created again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, field

from stead.deadlines import scaled
from stead.errors import GuestRestarted, GuestUnreachable, ReadyTimeout
from stead.guest.agent import Agent
from stead.guest.execution import SMALL_OUTPUT, ExecRequest, collect
from stead.machines.boot import BootOperation
from stead.machines.create import CreateOperation
from stead.machines.disk_eviction import DiskEviction
from stead.machines.engine import Engine
from stead.machines.events import Origin, Use
from stead.machines.persistence import EvictionScope
from stead.machines.processes import Boot, Eviction, EvictionKind, RunningVm
from stead.machines.records import Record, check_idle
from stead.machines.states import Operation, Stopped, Suspended, Verdict
from stead.machines.unchanged import UNCHANGED, Unchanged
from stead.machines.wake import WakeOperation
from stead.tasks import SingleFlight, work_for

READY_TIMEOUT = scaled(120.0)
_WAKES = 3


@dataclass(frozen=True)
class Attached:
    """A running VM that a client is attached to."""

    agent: Agent
    touch: Callable[[], None]
    """Record activity: the client or the guest has sent something."""
    eviction: "asyncio.Future[Eviction]"
    """Done when the client must leave because the VM is suspended or ends."""
    lease: Callable[[], AbstractContextManager[Agent]]
    """Inside the block, the VM is not suspended for being idle."""
    boot: Boot
    """Its guest: the same one after a suspend."""


@dataclass(eq=False)
class StartOperation:
    engine: Engine
    _: KW_ONLY
    eviction: DiskEviction
    wake: WakeOperation
    boot: BootOperation
    create: CreateOperation
    starts: SingleFlight[None] = field(default_factory=SingleFlight, init=False)

    @contextlib.asynccontextmanager
    async def using(self, machine_id: str, use: Use = Use.GUEST) -> AsyncIterator[Agent]:
        """A lease on a VM's guest: the VM is not suspended for being idle inside the block.

        A suspended VM is woken and a stopped one started first; the log line names `use`.
        """
        live = await self._running(machine_id, use)
        with live.leased() as agent:
            yield agent

    async def attached(self, machine_id: str, use: Use) -> Attached:
        """Wake or start a VM like `using`, without a lease: an attached client does not hold the VM awake.

        The VM counts as used when `touch` is called.
        """
        live = await self._running(machine_id, use)
        live.touch()
        return _attached(live)

    async def attached_again(self, machine_id: str, before: Attached, use: Use) -> Attached:
        """Attach again to the same guest after an eviction; a suspended VM is woken first.

        WrongState when the VM has stopped, GuestRestarted when it has booted again.
        """
        # It may be suspended again at once.
        for _ in range(_WAKES):
            await self.ensure_up(machine_id, use, Operation.WAKE)
            try:
                attached = self.reattached(machine_id, before)
            except GuestRestarted:
                reason = (await self.engine.journal.find(machine_id)).reason
                raise GuestRestarted(machine_id, reason) from None
            if attached is not None:
                return attached
        raise GuestUnreachable(f"VM {machine_id} has just ended")

    def reattached(self, machine_id: str, before: Attached) -> Attached | None:
        """Attach again to the same guest if it is running, without waking it. Raises GuestRestarted."""
        live = self.engine.processes.running(machine_id)
        if live is None:
            return None
        if live.boot is not before.boot:
            raise GuestRestarted(machine_id)
        return _attached(live)

    def observer(self, machine_id: str) -> Agent | None:
        """The agent of a running VM without a lease: the VM may be suspended during a call, which then fails.

        None when the VM is not running.
        """
        live = self.engine.processes.running(machine_id)
        return None if live is None else live.agent

    async def _running(self, machine_id: str, use: Use) -> RunningVm:
        live = self.engine.processes.running(machine_id)
        if live is None:
            await self.ensure_up(machine_id, use)
            live = self.engine.processes.running(machine_id)
        if live is None:
            raise GuestUnreachable(f"VM {machine_id} has just ended")
        self.engine.processes.refuse_held(machine_id)
        return live

    async def ensure_up(self, machine_id: str, use: Use, operation: Operation = Operation.USE) -> None:
        """Wait for the operation under way, then wake or start the VM if this operation needs it."""
        self.engine.processes.refuse_held(machine_id)
        if self.engine.processes.running(machine_id) is not None:
            return
        if await self.engine.locks.verdict(machine_id, operation) is Verdict.WAKE:
            await self._bring_up(machine_id, use)

    async def start(
        self,
        machine_id: str,
        *,
        idle_timeout: int | Unchanged | None = UNCHANGED,
        activity_threshold: int | Unchanged = UNCHANGED,
        ready_timeout: float | None = None,
    ) -> None:
        """Wake or boot a VM. With `ready_timeout`, wait up to that many seconds for its services."""
        properties = (await self.engine.journal.find(machine_id)).properties
        timeout = properties.idle_timeout if isinstance(idle_timeout, Unchanged) else idle_timeout
        threshold = activity_threshold
        if isinstance(threshold, Unchanged):
            threshold = properties.activity_threshold
        check_idle(timeout, threshold)
        if (timeout, threshold) != (properties.idle_timeout, properties.activity_threshold):
            await self.engine.journal.set_idle(machine_id, timeout, threshold)
        await self._bring_up(machine_id, Use.START)
        if ready_timeout is not None:
            await self.wait_until_ready(machine_id, ready_timeout)

    async def wait_until_ready(self, machine_id: str, timeout: float = READY_TIMEOUT) -> None:
        """Wait until systemd has started all services, and `Type=notify` services reported ready."""
        request = ExecRequest("systemctl is-system-running --wait", timeout=timeout)
        async with self.using(machine_id) as agent:
            result = await collect(agent, request, SMALL_OUTPUT)
        if result.timed_out:
            raise ReadyTimeout(f"VM {machine_id} was not ready within {timeout:g} s")

    async def _bring_up(self, machine_id: str, use: Use) -> None:
        """Wake or start a VM, single-flight: concurrent callers share one attempt and its log line."""
        await self.starts.run(
            machine_id, lambda: self._start(machine_id, use), name=f"start of VM {machine_id}"
        )

    async def _start(self, machine_id: str, use: Use) -> None:
        account = (await self.engine.journal.find(machine_id)).account
        work_for(account)
        # What a stranger's request could delete, an attacker would: it may only find the disk full.
        scope = EvictionScope.OWN if use.origin is Origin.OWNER else EvictionScope.NOTHING
        await self.eviction.ensure_free(account, scope, keeping=machine_id)
        async with self.engine.locks.unless_done(machine_id, Operation.START) as record:
            if record is not None:
                async with self.engine.quotas.starting(record, record.size):
                    await self._start_locked(record, use)

    async def _start_locked(self, record: Record, use: Use) -> None:
        if self.engine.processes.get(record.id) is not None:
            # The operation that recorded its end could not kill it.
            asleep = isinstance(record.state, Suspended)
            kind = EvictionKind.SUSPENDED if asleep else EvictionKind.ENDED
            await self.engine.processes.end(record, kind=kind)
        caller = use.origin if use.origin is Origin.STRANGER else None
        match record.state:
            case Suspended() as suspended:
                async with self.engine.slots.hold(record.account, caller):
                    await self.wake.wake(record, suspended, use)
            case Stopped():
                async with self.engine.slots.hold(record.account, caller):
                    await self.boot.boot(record, use)
            case _:
                await self.create.recreate(record, use)

    async def close(self) -> None:
        await self.starts.close()


def _attached(live: RunningVm) -> Attached:
    return Attached(live.agent, live.touch, live.eviction, live.leased, live.boot)
