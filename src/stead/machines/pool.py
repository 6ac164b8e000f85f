"""Pool of restored, warmed and paused VMs: a create only confers an identity on one."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address

from stead.deadlines import scaled
from stead.errors import MachineNotFound, StartFailed
from stead.guest.execution import SMALL_OUTPUT, ExecRequest, collect
from stead.guest.identity import GuestIdentity, confer, new_machine_id
from stead.host.interface import Template
from stead.logs import get_logger
from stead.machines.bring_up import CONFIRM_TIMEOUT, BringUp, coming_up
from stead.machines.deletion import DeleteOperation
from stead.machines.engine import Engine
from stead.machines.processes import RunningVm
from stead.machines.records import Properties, Record
from stead.machines.states import Creating, IllegalTransition, Prepared, Preparing, State
from stead.settings import Size
from stead.tasks import finished, or_undo

_PAUSE_AFTER_FAILURE = 5.0
_QUIET = 0.5
"""Seconds before the pool refills: the first command of a new VM does not compete for the CPU."""

_LONGEST_WAIT = scaled(10.0)
"""Seconds that one create keeps the pool from refilling."""

CANCELLED = "the creation was cancelled"
_PLACEHOLDER = "prepared"
_UNUSED = IPv4Address("100.64.0.1")
"""A reserved address at the start of the range, which no VM has."""

log = get_logger("stead.pool")


@dataclass(frozen=True)
class Claimed:
    """A VM that a create has taken out of the pool."""

    record: Record
    live: RunningVm
    known_gib: int
    """The disk that its guest knows, which may be smaller than the recorded one."""


class Pool:
    """Keeps `target` prepared VMs of one size; does not refill while a create is under way."""

    def __init__(
        self, engine: Engine, *, bring_up: BringUp, deletion: DeleteOperation, target: int, size: Size
    ) -> None:
        self._engine = engine
        self._bring_up = bring_up
        self._deletion = deletion
        self._target = target
        self._size = size
        self._template: Template | None = None
        self._wanted = asyncio.Event()
        self._changed = asyncio.Condition()
        self._busy = 0
        self._full = False
        self._worker: asyncio.Task[None] | None = None

    def keep(self, template: Template) -> None:
        """Keep VMs of the pool's size ready from now on, restored from this template."""
        if self._target == 0 or self._template == template:
            return
        self._template = template
        self._full = False
        self._wanted.set()
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())

    @contextlib.contextmanager
    def paused_refill(self) -> Iterator[None]:
        """Do not refill inside this block, in which a caller waits for a VM: not for long.

        A guest that never answers must not keep the pool empty for everybody.
        """
        loop = asyncio.get_running_loop()
        over = False

        def end() -> None:
            nonlocal over
            if over:
                return
            over = True
            self._busy -= 1
            if self._busy == 0:
                loop.call_later(_QUIET, self._wanted.set)

        self._busy += 1
        timer = loop.call_later(_LONGEST_WAIT, end)
        try:
            yield
        finally:
            timer.cancel()
            end()

    async def claim(self, template: Template, size: Size, properties: Properties) -> Claimed | None:
        """Take the oldest prepared VM of a template out of the pool; None when there is none.

        It has this size in its row then, and its disk is the caller's to grow; a VM with a larger disk is not
        taken. It is in state creating; a cancelled caller leaves none.
        """
        for prepared in await self.prepared():
            if prepared.template != template.id or not isinstance(prepared.state, Prepared):
                continue
            if prepared.size.disk_gib > size.disk_gib:
                continue
            creating = Creating("identify", prepared.state.top, prepared.state.run)
            write = self._engine.journal.claim(prepared, creating, properties, size)
            try:
                record = await or_undo(write, lambda claimed: self._deletion.remove(claimed, CANCELLED))
            except (IllegalTransition, MachineNotFound):
                continue  # another create has taken it meanwhile, or its process ended
            self._full = False
            live = self._engine.processes.get(record.id)
            if live is not None and not live.vm.ended:
                return Claimed(record, live, prepared.size.disk_gib)
            await self._deletion.remove(record)
        self._full = False
        return None

    def refill(self) -> None:
        """A prepared VM is gone."""
        self._wanted.set()

    async def prepared(self) -> list[Record]:
        return await self._engine.journal.list(State.PREPARED)

    async def filled(self, timeout: float) -> bool:
        """Wait until the pool is full; False when it is not in time, as on a full host."""
        if self._target == 0:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: self._full)
        return self._full

    async def _work(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._fill()
            except Exception as error:
                # Any failure is retried: an empty pool only makes creates slower.
                log.warning("cannot prepare a VM for the pool", error=repr(error))
                await asyncio.sleep(_PAUSE_AFTER_FAILURE)
                self._wanted.set()

    async def _fill(self) -> None:
        while self._template is not None and self._busy == 0:
            template = self._template
            ready = 0
            for record in await self.prepared():
                if record.template == template.id and record.size == self._size:
                    ready += 1
                else:
                    await finished(self._deletion.remove(record))
            async with self._changed:
                self._full = ready >= self._target
                self._changed.notify_all()
            if self._full:
                return
            await self._prepare(template)

    async def _prepare(self, template: Template) -> None:
        self._engine.host.check_capacity()
        allocation = self._engine.journal.allocate(Preparing, self._size, template.id, Properties())
        record = await or_undo(allocation, self._deletion.remove)
        try:
            up, live = await self._bring_up.restore(record, template)
            await self._warm(up, live, template.size.disk_gib)
        except BaseException:
            await finished(self._deletion.remove(record))
            raise

    async def _warm(self, record: Record, live: RunningVm, known_gib: int) -> None:
        """Run what the first user of the VM will need, so that its code is translated, then pause it.

        The identity is a placeholder: a create confers the real one. It is conferred twice because a clone's
        first one finds what its template prepared, and takes another path in the guest than those after it.
        The second one changes the address, as that of a VM in a VPC will.
        """
        record = await self._bring_up.step(record, "warm")
        for address in (_UNUSED, record.address):
            identity = GuestIdentity(record.id, _PLACEHOLDER, new_machine_id(), address)
            await confer(live.agent, identity, timeout=CONFIRM_TIMEOUT)
            await collect(live.agent, ExecRequest("true", timeout=CONFIRM_TIMEOUT), SMALL_OUTPUT)
        await self._bring_up.grow_disk(record, live, known_gib)
        await live.vm.pause()
        state = coming_up(record)
        if state.run is None:
            raise StartFailed(f"VM {record.id} has no process")
        await self._engine.journal.transition(record, Prepared(state.top, state.run))

    async def close(self) -> None:
        """Stop refilling and delete the VMs in the pool."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None
        for record in await self.prepared():
            await self._deletion.remove(record)
