"""The public face of the engine: create machines, find them, use them."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Self

from sqlalchemy.ext.asyncio import AsyncEngine

from stead.errors import (
    GuestUnreachable,
    InvalidRequest,
    MachineNotFound,
    StartFailed,
    SteadError,
    WrongState,
)
from stead.host.agent import Agent
from stead.host.files import locked
from stead.host.host import Host, require_root
from stead.host.image import Progress
from stead.host.qemu import Platform
from stead.host.template_builder import ensure_template
from stead.host.templates import Template
from stead.machines.lifecycle import STOP_TIMEOUT, Lifecycle
from stead.machines.live import Live
from stead.machines.machine import Machine, MachineInfo, machine_info
from stead.machines.pool import Pool
from stead.machines.recovery import reconcile
from stead.machines.states import UNOWNED, Operation, State, Verdict, decide
from stead.settings import Settings, Size
from stead.store.database import open_database
from stead.store.machines import MachineRow, MachineStore
from stead.tasks import finished, or_undo

_HIDDEN = (*UNOWNED, State.DELETING)
_MAX_NAME = 200
_LOCK_TIMEOUT = 5.0
Report = Callable[[Progress], None]


class Machines:
    """All machines of one installation. One process at a time has it open; machines outlive that process."""

    def __init__(self, settings: Settings, database: AsyncEngine, lifecycle: Lifecycle) -> None:
        self.settings = settings
        self._database = database
        self._lifecycle = lifecycle
        self.pool = Pool(lifecycle, settings.pool)
        # More restores at once than the host has cores only makes all of them late.
        self._restores = asyncio.Semaphore(max(2, os.cpu_count() or 2))
        self._building: dict[Size, asyncio.Task[Template]] = {}

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[Self]:
        """Open an installation: recover from whatever happened before, then hand out machines.

        On leaving, machines go on; the pool goes, and with the last machine the network goes too.
        """
        require_root()
        settings.data.mkdir(parents=True, exist_ok=True, mode=0o711)
        (settings.runtime / settings.instance).mkdir(parents=True, exist_ok=True, mode=0o711)
        async with locked(settings.data / "stead.lock", _LOCK_TIMEOUT):
            database = await open_database(settings.data / "stead.db")
            host = await Host.open(settings)
            lifecycle = Lifecycle(host, MachineStore(database))
            try:
                await reconcile(lifecycle)
                machines = cls(settings, database, lifecycle)
                if (template := await host.find_template(settings.default_size)) is not None:
                    machines.pool.keep(template)
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
        for task in self._building.values():
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)
        await self.pool.close()

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

    # Machines

    async def create(
        self, size: Size | None = None, *, name: str | None = None, report: Report = lambda _: None
    ) -> Machine:
        """A new running machine that has confirmed its identity; a failure leaves nothing."""
        if name is not None and (not name.strip() or len(name) > _MAX_NAME):
            raise InvalidRequest(f"a name has 1 to {_MAX_NAME} characters")
        self._lifecycle.host.check_capacity()
        template = await self.template(size, report)
        lifecycle = self._lifecycle
        with self.pool.giving_way():
            taken = await or_undo(self.pool.take(template, name), self._give_up)
            if taken is not None:
                row, live = taken
                await self._finish_create(row, self._resume(row, live))
            else:
                allocation = lifecycle.allocate(State.CREATING, template.size, template, name)
                row = await or_undo(allocation, lifecycle.remove)
                await self._finish_create(row, self._restore(row, template))
        return Machine(self, row.id)

    async def _give_up(self, taken: tuple[MachineRow, Live] | None) -> None:
        if taken is not None:
            await self._lifecycle.remove(taken[0])

    async def _resume(self, row: MachineRow, live: Live) -> Live:
        async with self._restores:
            await live.vm.resume()
            await self._lifecycle.identify(row, live, new_keys=True)
        return live

    async def _restore(self, row: MachineRow, template: Template) -> Live:
        async with self._restores:
            live = await self._lifecycle.restore(row, template)
            await self._lifecycle.step(row, "identify")
            await self._lifecycle.identify(row, live, new_keys=True)
        return live

    async def _finish_create(self, row: MachineRow, work: Awaitable[Live]) -> None:
        async with self._lifecycle.turns.of(row.id):
            try:
                live = await work
                await self._lifecycle.record_running(row, live)
            except BaseException as error:
                await finished(self._lifecycle.remove(row))
                if isinstance(error, SteadError) and not isinstance(error, StartFailed):
                    raise StartFailed(f"no machine could be created: {error}") from error
                if isinstance(error, OSError):
                    raise StartFailed(f"no machine could be created: {error.strerror}") from error
                raise

    async def get(self, machine_id: str) -> Machine:
        await self.info(machine_id)
        return Machine(self, machine_id)

    async def list(self) -> list[MachineInfo]:
        rows = await self._lifecycle.store.list(excluding=_HIDDEN)
        return [machine_info(row) for row in rows]

    async def info(self, machine_id: str) -> MachineInfo:
        return machine_info(await self._row(machine_id))

    async def _row(self, machine_id: str) -> MachineRow:
        row = await self._lifecycle.store.get(machine_id)
        if row is None or row.state in _HIDDEN:
            raise MachineNotFound(machine_id)
        return row

    async def agent(self, machine_id: str) -> Agent:
        """The agent of a running machine, waiting while the machine is on its way to running."""
        live = self._lifecycle.lives.get(machine_id)
        if live is not None and live.running:
            return live.agent
        async with self._lifecycle.turns.of(machine_id):
            row = await self._row(machine_id)
            live = self._lifecycle.lives.get(machine_id)
            if live is not None and live.running:
                return live.agent
            if row.state == State.RUNNING:
                # Its QEMU has ended and the row is about to say so.
                raise GuestUnreachable(f"machine {machine_id} has just ended")
            raise WrongState(machine_id, Operation.EXEC, row.state, row.reason or "")

    async def start(self, machine_id: str) -> None:
        """Boot a stopped machine from its disk."""
        await self._carry_through(self._start(machine_id))

    async def _start(self, machine_id: str) -> None:
        async with self._lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.START)
            if row is not None:
                self._lifecycle.host.check_capacity()
                await self._lifecycle.start(row)

    async def stop(self, machine_id: str, timeout: float = STOP_TIMEOUT) -> None:
        """Shut a machine down cleanly; after `timeout` seconds it is ended by force, and says so."""
        await self._carry_through(self._stop(machine_id, timeout))

    async def _stop(self, machine_id: str, timeout: float) -> None:
        lifecycle = self._lifecycle
        async with lifecycle.turns.of(machine_id):
            row = await self._check(machine_id, Operation.STOP)
            live = lifecycle.lives.get(machine_id)
            if row is None:
                return
            await lifecycle.store.update(row.id, state=State.STOPPING, step="shutdown")
            forced = None if live is None else await lifecycle.shut_down(row, live, timeout)
            await lifecycle.step(row, "clean")
            await lifecycle.record_stopped(row, forced or "stopped")

    async def kill(self, machine_id: str) -> None:
        """End a machine at once, as if its plug were pulled; its disk is kept."""
        await self._carry_through(self._kill(machine_id))

    async def _kill(self, machine_id: str) -> None:
        lifecycle = self._lifecycle
        row = await self._row(machine_id)
        live = lifecycle.lives.get(machine_id)
        if row.state == State.STOPPING and live is not None:
            await live.vm.kill()
        async with lifecycle.turns.of(machine_id):
            checked = await self._check(machine_id, Operation.KILL)
            if checked is not None:
                await lifecycle.store.update(machine_id, state=State.STOPPING, step="clean")
                await lifecycle.record_stopped(checked, "killed")

    async def delete(self, machine_id: str) -> None:
        """Remove a machine and everything it had."""
        await self._carry_through(self._delete(machine_id))

    async def _delete(self, machine_id: str) -> None:
        lifecycle = self._lifecycle
        row = await self._row(machine_id)
        live = lifecycle.lives.get(machine_id)
        if row.state == State.STOPPING and live is not None:
            await live.vm.kill()
        async with lifecycle.turns.of(machine_id):
            checked = await self._check(machine_id, Operation.DELETE)
            if checked is not None:
                await lifecycle.remove(checked)

    async def _carry_through(self, work: Coroutine[Any, Any, None]) -> None:
        """What has begun on a machine is brought to its end even if its caller does not wait for it."""
        await asyncio.shield(self._lifecycle.keep(asyncio.create_task(work)))

    async def _check(self, machine_id: str, operation: Operation) -> MachineRow | None:
        """The row, when the operation may begin; None when there is nothing to do. Call in its turn."""
        row = await self._row(machine_id)
        verdict = decide(operation, State(row.state))
        if verdict is Verdict.DONE:
            return None
        if verdict is Verdict.GO:
            return row
        raise WrongState(machine_id, operation, row.state, row.reason or "")
