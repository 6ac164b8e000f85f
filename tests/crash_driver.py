"""A Stead that is killed while it works: `crash_driver.py DATA CACHE OPERATION`.

Doing the operation once shows how often it writes. Then it is done again for every write, each time on a
machine of its own, and held just before or just after that write. When all are held the process kills itself.
For what is on disk and what runs, being held somewhere is being killed there, and one recovery meets it all.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stead.host.agent import Agent
from stead.machines import Machine, Machines
from stead.machines.lifecycle import Lifecycle
from stead.settings import Settings, Size
from stead.store.machines import MachineRow, MachineStore

_WRITES = ("insert", "update", "take", "delete")
_HOLD_LIMIT = 120.0


@dataclass
class Hold:
    """Counts the writes of one operation and stops it at one of them until it is released; at 0, at none."""

    number: int = 0
    before: bool = False
    seen: int = 0
    machine: str | None = None
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def stop(self) -> None:
        _holds.append(self)
        self.reached.set()
        await self.released.wait()


_holds: list["Hold"] = []
"""Keeps what is held from being collected as garbage."""
_current: ContextVar[Hold | None] = ContextVar("hold", default=None)


@contextlib.contextmanager
def held_writes() -> Iterator[None]:
    """Let operations that run under a Hold be stopped at their durable writes."""
    originals = {name: getattr(MachineStore, name) for name in _WRITES}

    def wrapped(write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any, **changes: Any) -> Any:
            hold = _current.get()
            if hold is None:
                return await write(*arguments, **changes)
            hold.seen += 1
            here = hold.seen == hold.number
            if here and hold.before:
                await hold.stop()
            result = await write(*arguments, **changes)
            if isinstance(result, MachineRow):
                hold.machine = result.id
            if here:
                await hold.stop()
            return result

        return call

    for name, write in originals.items():
        setattr(MachineStore, name, wrapped(write))
    try:
        yield
    finally:
        for name, write in originals.items():
            setattr(MachineStore, name, write)


async def run_held(hold: Hold, operation: Callable[[], Awaitable[object]]) -> None:
    """Do an operation under a hold; what it starts on its way is held too."""
    _current.set(hold)
    await operation()


@dataclass(frozen=True)
class Case:
    """Where one machine's operation was when the process was killed."""

    number: int
    before: bool
    machine: str | None


@dataclass(frozen=True)
class Report:
    writes: int
    survivor: str | None
    """The machine of the first, whole run of the operation."""
    cases: list[Case]
    facts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Report":
        read = json.loads(text)
        return cls(**read | {"cases": [Case(**case) for case in read["cases"]]})


class Driver:
    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.lifecycle: Lifecycle = machines._lifecycle
        # Operations that are held keep what they hold: none of it may be in the way of the others.
        self.machines._restores = asyncio.Semaphore(1000)
        self.lifecycle._slots = contextlib.nullcontext()  # type: ignore[assignment]

    async def existing(self) -> Machine:
        machine = await self.machines.create()
        result = await machine.exec("echo kept > /root/data && sync")
        assert result.ok, result
        return machine

    async def prepare(self) -> None:
        await self.machines.pool._prepare(await self.machines.template())

    async def ready(self, operation: str) -> tuple[str | None, Callable[[], Awaitable[object]]]:
        """Everything that comes before the operation, and the operation itself."""
        match operation:
            case "create":
                return None, self.machines.create
            case "create_from_pool":
                await self.prepare()
                return None, self.machines.create
            case "prepare":
                return None, self.prepare
        machine = await self.existing()
        if operation == "start":
            await machine.kill()
            return machine.id, lambda: _without_waiting_for_the_boot(machine.start)
        return machine.id, getattr(machine, operation)

    async def crash_everywhere(self, operation: str) -> Report:
        hold = Hold()
        machine, work = await self.ready(operation)
        await asyncio.create_task(run_held(hold, work))
        survivor = machine or hold.machine
        writes = hold.seen
        # All are made ready first: what one operation does must not disturb another's beginning.
        held = [Hold(number, before) for number in range(1, writes + 1) for before in (True, False)]
        works = []
        for hold in held:
            hold.machine, work = await self.ready(operation)
            works.append(work)
        for hold, work in zip(held, works, strict=True):
            task = asyncio.create_task(run_held(hold, work))
            task.add_done_callback(_must_not_end)
            async with asyncio.timeout(_HOLD_LIMIT):
                await hold.reached.wait()
            if operation == "start" and (live := self.lifecycle.lives.get(str(hold.machine))):
                # Boots that nobody will wait for need not take the processor from the others.
                await live.vm.pause()
        return Report(writes, survivor, [Case(hold.number, hold.before, hold.machine) for hold in held])

    async def crash_while_running(self) -> Report:
        machine = await self.machines.create()
        started = await machine.exec("setsid sleep 1000 >/dev/null 2>&1 & echo $!")
        boot = await machine.exec("cat /proc/sys/kernel/random/boot_id")
        facts = {"background": started.stdout.decode().strip(), "boot": boot.stdout.decode().strip()}
        return Report(0, machine.id, [], facts)


def _must_not_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        print("an operation ended instead of being held", task, file=sys.stderr, flush=True)
        os._exit(3)


@contextlib.asynccontextmanager
async def opened(data: Path, cache: Path) -> AsyncIterator[Driver]:
    settings = Settings(data=data, cache=cache, default_size=Size(2, 512, 20), pool=0)
    async with Machines.open(settings) as machines:
        await machines.template()
        yield Driver(machines)


async def _without_waiting_for_the_boot(start: Callable[[], Awaitable[None]]) -> None:
    """All steps of a start, one after the other, while the guest still boots."""
    call, identify = Agent.call, Lifecycle.identify

    async def answered(self: Agent, method: str, target: str, **options: Any) -> Any:
        return {} if target == "/v1/health" else await call(self, method, target, **options)

    async def confirmed(*_: object, **__: object) -> None:
        return None

    Agent.call, Lifecycle.identify = answered, confirmed  # type: ignore[method-assign]
    try:
        await start()
    finally:
        Agent.call, Lifecycle.identify = call, identify  # type: ignore[method-assign]


async def main(data: str, cache: str, operation: str) -> None:
    async with opened(Path(data), Path(cache)) as driver:
        with held_writes():
            if operation == "run":
                report = await driver.crash_while_running()
            else:
                report = await driver.crash_everywhere(operation)
            print(json.dumps(asdict(report)), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
