"""A Stead that is killed while it works: `python -m support.crash_driver DATA CACHE OPERATION`.

Doing the operation once shows how often it writes to its database or gives an order to a QEMU or its guest.
Then it is done again for each of these points, every time on a machine of its own, and held just before or
just after it. When all are held the process kills itself. For what is on disk and what runs, being held
somewhere is being killed there, and one recovery meets it all.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stead.deadlines import scaled
from stead.guest.agent import Agent
from stead.host.interface import narrowed
from stead.host.vm import QemuVm
from stead.installation import open_machines
from stead.machines import Machine, Machines, bring_up
from stead.store.layers import LayerStore
from stead.store.machines import LayerRow, MachineRow, MachineStore, Transitioned
from stead.store.snapshots import SnapshotStore
from support.installations import small_installation
from support.internals import inside

_WRITES: dict[type, tuple[str, ...]] = {
    MachineStore: ("insert", "update", "transition", "delete"),
    SnapshotStore: ("insert", "update", "delete"),
    LayerStore: ("insert", "update", "delete", "remove"),
}
_ORDERS = frozenset(
    {
        *("stop", "cont", "xen-save-devices-state", "migrate-incoming"),
        *("blockdev-add", "blockdev-snapshot", "blockdev-del", "block_resize"),
        "/v1/shutdown",
    }
)
_HOLD_LIMIT = scaled(120.0)


@dataclass
class Hold:
    """Counts the points of one operation and stops it at one of them until it is released; at 0, at none."""

    number: int = 0
    before: bool = False
    orders: bool = True
    """Whether what a QEMU or its guest is told counts, or only what is written."""
    seen: int = 0
    point: str = ""
    machine: str | None = None
    children: list[str] = field(default_factory=list)
    """Other machines that the operation made."""
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def stop(self) -> None:
        _holds.append(self)
        self.reached.set()
        await self.released.wait()

    def note(self, machine: str) -> None:
        self.machine = self.machine or machine
        if machine not in (self.machine, *self.children):
            self.children.append(machine)


_holds: list["Hold"] = []
"""Keeps what is held from being collected as garbage."""
_current: ContextVar[Hold | None] = ContextVar("hold", default=None)
Call = Callable[..., Awaitable[Any]]


def _held(call: Call, name: str | None = None) -> Call:
    """A store's write, or without a name the giving of an order, as a point to be held at."""

    async def at_point(*arguments: Any, **options: Any) -> Any:
        hold = _current.get()
        point = name or str(arguments[-1])
        if any(isinstance(argument, LayerRow) for argument in (*arguments, *options.values())):
            point = "freeze"  # of a disk layer, with the transition
        if hold is None or (name is None and not (hold.orders and point in _ORDERS)):
            return await call(*arguments, **options)
        hold.seen += 1
        here = hold.seen == hold.number
        if here:
            hold.point = point
        if here and hold.before:
            await hold.stop()
        result = await call(*arguments, **options)
        if isinstance(result, MachineRow):
            hold.note(result.id)
        elif isinstance(result, Transitioned):
            hold.note(arguments[1])
        if here:
            await hold.stop()
        return result

    return at_point


@contextlib.contextmanager
def held_points() -> Iterator[None]:
    """Let operations that run under a Hold be stopped at their durable writes and their orders."""
    with contextlib.ExitStack() as undoing:

        def put(owner: type, name: str, call: Call) -> None:
            undo = (
                (setattr, owner, name, getattr(owner, name))
                if name in vars(owner)
                else (delattr, owner, name)
            )
            undoing.callback(*undo)
            setattr(owner, name, call)

        for store, names in _WRITES.items():
            for name in names:
                put(store, name, _held(getattr(store, name), name))
        put(QemuVm, "execute", _held(QemuVm.execute))
        put(Agent, "call", _held(Agent.call))
        yield


async def run_held(hold: Hold, operation: Callable[[], Awaitable[object]]) -> None:
    """Do an operation under a hold; what it starts on its way is held too."""
    _current.set(hold)
    await operation()


@dataclass(frozen=True)
class Case:
    """Where one machine's operation was when the process was killed."""

    number: int
    before: bool
    point: str
    machine: str | None
    children: list[str]


@dataclass(frozen=True)
class Report:
    points: int
    cases: list[Case]
    """The first is that of the whole operation."""
    facts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Report":
        read = json.loads(text)
        return cls(**read | {"cases": [Case(**case) for case in read["cases"]]})

    def whole(self, case: Case) -> bool:
        """Everything that the operation records was recorded."""
        return case.number == self.points and not case.before


class Driver:
    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        # Operations that are held keep what they hold: none of it may be in the way of the others.
        here = inside(machines)
        for limit in (here.slots, here.slots.unfinished, here.captures):
            limit._total = limit._per_key = 1000
        here.slots._release_after = None
        here.journal._allocating = contextlib.nullcontext()  # type: ignore[assignment]
        here.quotas._lock = contextlib.nullcontext()  # type: ignore[assignment]
        here.layers._collecting = contextlib.nullcontext()  # type: ignore[assignment]
        # What is removed in the background would be now in one operation, now in another.
        here.layers.sweep = lambda: None  # type: ignore[method-assign]
        Agent.call = self._shut_down_at_once(Agent.call)  # type: ignore[method-assign,assignment]

    def _shut_down_at_once(self, call: Call) -> Call:
        """Guests need not take seconds to shut down, but for the one that does so when the crash comes."""

        async def told(agent: Agent, method: str, target: str, **options: Any) -> Any:
            hold = _current.get()
            if target != "/v1/shutdown" or hold is None or hold.point == target:
                return await call(agent, method, target, **options)
            lives = inside(self.machines).processes._lives.values()
            (live,) = (each for each in lives if each.agent is agent)
            await narrowed(live.vm, QemuVm).quit()
            return {}

        return told

    async def existing(self) -> Machine:
        """A machine with something on disk, something in memory, and something that runs."""
        machine = await self.machines.create()
        fill = "echo kept > /root/data; sync; echo memory > /run/data; sleep 100000 & echo $! > /run/pid"
        result = await machine.exec(f"{{ {fill}; }} > /dev/null 2>&1")
        assert result.ok, result
        return machine

    async def prepare(self) -> None:
        await inside(self.machines).pool._prepare(await self.machines.template())

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
        match operation:
            case "start":
                await machine.kill()
                return machine.id, lambda: _without_waiting_for_the_boot(machine.start)
            case "start_on_a_new_layer":
                await machine.kill()
                await machine.snapshot()
                return machine.id, lambda: _without_waiting_for_the_boot(machine.start)
            case "wake":
                await machine.suspend()
                return machine.id, machine.start
            case "snapshot_stopped":
                await machine.kill()
                return machine.id, machine.snapshot
            case "delete_suspended":
                await machine.suspend()
                return machine.id, lambda: self._delete_and_collect(machine)
            case "resize":
                await machine.kill()
                return machine.id, lambda: machine.resize(disk_gib=21)
        return machine.id, getattr(machine, operation)

    async def _delete_and_collect(self, machine: Machine) -> None:
        await machine.delete()
        await inside(self.machines).layers.collect()

    async def crash_everywhere(self, operation: str) -> Report:
        # The orders of a fork are those of a snapshot and of waking up, and so many machines have no room.
        orders = operation != "fork"
        whole = Hold(orders=orders)
        whole.machine, work = await self.ready(operation)
        await asyncio.create_task(run_held(whole, work))
        whole.number = whole.seen
        await self._quiet(operation, whole)
        # All are made ready first: what one operation does must not disturb another's beginning.
        numbers = range(1, whole.seen + 1)
        held = [Hold(number, before, orders) for number in numbers for before in (True, False)]
        works = []
        for hold in held:
            hold.machine, work = await self.ready(operation)
            works.append(work)
        for hold, work in zip(held, works, strict=True):
            task = asyncio.create_task(run_held(hold, work))
            task.add_done_callback(_must_not_end)
            async with asyncio.timeout(_HOLD_LIMIT):
                await hold.reached.wait()
            await self._quiet(operation, hold)
        return Report(whole.number, [_case(hold) for hold in (whole, *held)])

    async def _quiet(self, operation: str, hold: Hold) -> None:
        """Boots that nobody will wait for need not take the processor from the others."""
        if operation.startswith("start") and (live := inside(self.machines).processes.get(str(hold.machine))):
            await live.vm.pause()

    async def crash_while_running(self) -> Report:
        machine = await self.existing()
        boot = await machine.exec("cat /proc/sys/kernel/random/boot_id")
        return Report(0, [Case(0, False, "", machine.id, [])], {"boot": boot.stdout.decode().strip()})


def _case(hold: Hold) -> Case:
    return Case(hold.number, hold.before, hold.point, hold.machine, hold.children)


def _must_not_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        print("an operation ended instead of being held", task, file=sys.stderr, flush=True)
        os._exit(3)


@contextlib.asynccontextmanager
async def opened(data: Path, cache: Path) -> AsyncIterator[Driver]:
    async with open_machines(small_installation(data, cache)) as machines:
        await machines.template()
        yield Driver(machines)


async def _without_waiting_for_the_boot(start: Callable[[], Awaitable[None]]) -> None:
    """All steps of a start, one after the other, while the guest still boots."""
    call, imported = Agent.call, vars(bring_up)

    async def answered(self: Agent, method: str, target: str, **options: Any) -> Any:
        return {} if target == "/v1/health" else await call(self, method, target, **options)

    async def confirmed(*_: object, **__: object) -> None:
        return None

    confer = imported["confer"]
    Agent.call, imported["confer"] = answered, confirmed  # type: ignore[method-assign]
    try:
        await start()
    finally:
        Agent.call, imported["confer"] = call, confer  # type: ignore[method-assign]


async def main(data: str, cache: str, operation: str) -> None:
    async with opened(Path(data), Path(cache)) as driver:
        with held_points():
            try:
                if operation == "run":
                    report = await driver.crash_while_running()
                else:
                    report = await driver.crash_everywhere(operation)
            except BaseException:
                # Before the installation closes, which ends the held operations with other errors.
                traceback.print_exc()
                os._exit(4)
            print(json.dumps(asdict(report)), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
