"""Pool of restored, warmed and paused VMs: a create only confers an identity on one."""

import asyncio
import contextlib
import time
from collections.abc import Iterator

from stead.deadlines import scaled
from stead.host.templates import Template
from stead.logs import get_logger
from stead.machines.lifecycle import Lifecycle
from stead.machines.live import Live
from stead.machines.states import State
from stead.settings import Size
from stead.store.machines import MachineRow
from stead.tasks import finished, or_undo

_PAUSE_AFTER_FAILURE = 5.0
_QUIET = 0.5
"""Seconds before the pool refills: the first command of a new VM does not compete for the CPU."""

_LONGEST_WAIT = scaled(10.0)
"""Seconds that one create keeps the pool from refilling."""

log = get_logger("stead.pool")


class Pool:
    """Keeps `target` prepared VMs of one template; does not refill while a create is under way."""

    def __init__(self, lifecycle: Lifecycle, target: int) -> None:
        self._lifecycle = lifecycle
        self._target = target
        self._template: Template | None = None
        self._wanted = asyncio.Event()
        self._changed = asyncio.Condition()
        self._busy = 0
        self._full = False
        self._worker: asyncio.Task[None] | None = None
        lifecycle.on_unowned_end = self._wanted.set

    def keep(self, template: Template) -> None:
        """Keep VMs of this template ready from now on."""
        if self._target == 0 or self._template == template:
            return
        self._template = template
        self._full = False
        self._wanted.set()
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())

    @contextlib.contextmanager
    def giving_way(self) -> Iterator[None]:
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

    async def take(self, template: Template, **facts: object) -> tuple[MachineRow, Live] | None:
        """Take a prepared VM out of the pool, now in state creating; None when the pool is empty."""
        store = self._lifecycle.store
        while True:
            row = await store.take(
                State.PREPARED,
                template.id,
                state=State.CREATING,
                step="identify",
                created_at=time.time_ns(),
                **facts,
            )
            self._full = False
            if row is None:
                return None
            live = self._lifecycle.lives.get(row.id)
            if live is not None and not live.vm.process.ended:
                return row, live
            await self._lifecycle.remove(row)

    async def prepared(self) -> list[MachineRow]:
        rows = await self._lifecycle.store.list()
        return [row for row in rows if row.state == State.PREPARED]

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
            for row in await self.prepared():
                if row.template == template.id:
                    ready += 1
                else:
                    await finished(self._lifecycle.remove(row))
            async with self._changed:
                self._full = ready >= self._target
                self._changed.notify_all()
            if self._full:
                return
            await self._prepare(template)

    async def _prepare(self, template: Template) -> None:
        lifecycle = self._lifecycle
        lifecycle.host.check_capacity()
        size: Size = template.size
        allocation = lifecycle.allocate(State.PREPARING, size, template.id)
        row = await or_undo(allocation, lifecycle.remove)
        try:
            live = await lifecycle.restore(row, template)
            await lifecycle.warm(row, live)
            await lifecycle.store.update(row.id, state=State.PREPARED, step=None)
        except BaseException:
            await finished(lifecycle.remove(row))
            raise

    async def close(self) -> None:
        """Stop refilling and delete the VMs in the pool."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None
        for row in await self.prepared():
            await self._lifecycle.remove(row)
