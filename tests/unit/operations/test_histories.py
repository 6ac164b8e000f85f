"""Random histories of VMs with errors, ends of processes, callers that leave and crashes."""

import asyncio
import contextlib
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stead.errors import HostError, SteadError, WrongState
from stead.machines import Machine
from stead.machines.records import Properties
from stead.machines.states import Suspended
from support.engine import SETTINGS, audit, disk_of, restart, run
from support.fake_host import ServerCrashed
from support.fake_server import FakeServer
from support.fake_world import World
from support.internals import inside

T = TypeVar("T")


@dataclass
class Expected:
    """What a VM holds; `program` is None when its memory may be lost."""

    file: str | None = None
    program: str | None = None
    writing: str | None = None
    """What was being written to the file when the write was interrupted."""
    deleted: bool = False
    """Perhaps: a delete was interrupted."""


FAULTS = st.none() | st.tuples(st.sampled_from(["error", "crash", "death", "leave"]), st.integers(0, 20))
Fault = tuple[str, int] | None
WHICH = st.integers(0, 3)


class Histories(RuleBasedStateMachine):
    """Random operations with errors, ends of processes, callers that leave and crashes of the server."""

    def __init__(self) -> None:
        super().__init__()
        self.exits = contextlib.ExitStack()
        folder = self.exits.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        self.runner = self.exits.enter_context(asyncio.Runner())
        self.expected: dict[str, Expected] = {}
        self.snapshots: dict[str, Expected] = {}
        self.number = 0
        self.faulty = False
        self.world = World()
        self.server = FakeServer(self.world, SETTINGS.replace(data=Path(folder)))
        self.run(self.begin())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    async def begin(self) -> None:
        await self.world.__aenter__()
        await self.server.start()

    def teardown(self) -> None:
        with self.exits:
            self.run(self.end())

    async def end(self) -> None:
        try:
            await self.restart()
        finally:
            await self.server.crash()
            await self.world.__aexit__()

    # Faults

    async def attempt(
        self, work: Coroutine[Any, Any, T], fault: Fault, machine: str | None = None
    ) -> T | None:
        """The result of an operation; None when the fault made it fail."""
        task = asyncio.ensure_future(work)
        if fault is not None:
            kind, calls = fault
            self.faulty = True
            match kind:
                case "error":
                    self.server.host.fail(None, HostError("injected"), skip=calls)
                case "crash":
                    self.server.host.crash_after(calls + 1)
                case "leave":
                    self.server.host.fail(None, lambda: task.cancel(), skip=calls)
                case "death":
                    self.server.host.fail(None, lambda: self.kill_process(machine), skip=calls)
        try:
            result = await task
        except (SteadError, ServerCrashed, asyncio.CancelledError):
            if fault is None and not self.faulty:
                raise
            result = None
        with contextlib.suppress(ServerCrashed):
            await self.server.watched()
        if self.server.host.dead:
            await self.restart()
            return None
        self.server.host.forget_faults()
        return result

    def kill_process(self, machine: str | None) -> None:
        for process in self.world.processes.values():
            if machine in (None, process.vm_slot.machine):
                self.lose_memory(process.vm_slot.machine)
                process.end()

    def lose_memory(self, machine: str) -> None:
        if machine in self.expected:
            self.expected[machine].program = None

    async def restart(self, *, crash: bool = True) -> None:
        await restart(self.server, crash=crash)
        self.faulty = False
        records = {record.id: record for record in await inside(self.server.machines).journal.list()}
        for machine, expected in list(self.expected.items()):
            if expected.deleted and machine not in records:
                del self.expected[machine]
            else:
                expected.deleted = False
        for machine in records.keys() - self.expected.keys():
            # Its caller did not learn of it, as with a crash right after it was made.
            disk = await disk_of(self.server, records[machine])
            self.expected[machine] = Expected(disk.get("file"))
        known = {info.id for info in await self.server.machines.snapshots.list()}
        assert self.snapshots.keys() <= known
        for snapshot in known - self.snapshots.keys():
            await self.server.machines.snapshots.delete(snapshot)
        await self.server.quiet()

    def pick(self, which: int) -> tuple[Machine, Expected]:
        machine = list(self.expected)[which % len(self.expected)]
        return Machine(self.server.machines, machine), self.expected[machine]

    # Operations. What is drawn never depends on the state: which call comes first is not the same every time.

    @rule(fault=FAULTS)
    def create(self, fault: Fault) -> None:
        if len(self.expected) < 4:
            created = self.run(self.attempt(self.server.machines.create(), fault))
            if created is not None:
                self.expected[created.id] = Expected()

    @rule(which=WHICH, fault=FAULTS)
    def create_from_snapshot(self, which: int, fault: Fault) -> None:
        if self.snapshots and len(self.expected) < 4:
            snapshot = list(self.snapshots)[which % len(self.snapshots)]
            created = self.run(
                self.attempt(self.server.machines.create(Properties(snapshot=snapshot)), fault)
            )
            if created is not None:
                self.expected[created.id] = replace(self.snapshots[snapshot])

    @rule(which=WHICH, fault=FAULTS)
    def use(self, which: int, fault: Fault) -> None:
        """Also wakes and boots it."""
        if not self.expected:
            return
        machine, expected = self.pick(which)

        async def write() -> None:
            if expected.program is not None:
                assert await run(machine, "recall program") == expected.program
            assert await run(machine, "read file") == (expected.file or "")
            self.number += 1
            expected.writing, expected.program = str(self.number), None
            await run(machine, f"write file {self.number}")
            expected.file = str(self.number)
            await run(machine, f"remember program {self.number}")
            expected.program = str(self.number)

        self.run(self.attempt(write(), fault, machine.id))

    @rule(which=WHICH, fault=FAULTS, operation=st.sampled_from(["stop", "kill", "resize", "suspend", "fork"]))
    def change(self, which: int, fault: Fault, operation: str) -> None:
        if not self.expected:
            return
        machine, expected = self.pick(which)
        match operation:
            case "stop" | "kill":
                self.lose_memory(machine.id)
                work: Coroutine[Any, Any, Any] = machine.stop() if operation == "stop" else machine.kill()
            case "resize":
                self.lose_memory(machine.id)
                work = machine.resize(vcpus=2 << which % 2)
            case "suspend":
                work = self.suspend(machine)
            case _:
                work = machine.fork()
        result = self.run(self.attempt(work, fault, machine.id))
        if operation == "fork" and result:
            self.expected[result[0].id] = replace(expected)

    async def suspend(self, machine: Machine) -> None:
        with contextlib.suppress(WrongState):
            await machine.suspend()

    @rule(which=WHICH, fault=FAULTS)
    def snapshot(self, which: int, fault: Fault) -> None:
        if not self.expected:
            return
        machine, expected = self.pick(which)
        before = replace(expected)
        snapshot = self.run(self.attempt(machine.snapshot(), fault, machine.id))
        if snapshot is not None:
            memory = before.program if snapshot.has_memory else None
            self.snapshots[snapshot.id] = replace(before, program=memory)

    @rule(which=WHICH)
    def delete_snapshot(self, which: int) -> None:
        if self.snapshots:
            snapshot = list(self.snapshots)[which % len(self.snapshots)]
            del self.snapshots[snapshot]
            self.run(self.attempt(self.server.machines.snapshots.delete(snapshot), None))

    @rule(which=WHICH, fault=FAULTS)
    def delete(self, which: int, fault: Fault) -> None:
        if self.expected:
            machine, expected = self.pick(which)
            expected.deleted = True
            self.run(self.delete_and_forget(machine, fault))

    async def delete_and_forget(self, machine: Machine, fault: Fault) -> None:
        await self.attempt(machine.delete(), fault, machine.id)
        if self.faulty:
            await self.restart(crash=False)
        elif await inside(self.server.machines).journal.get(machine.id) is None:
            self.expected.pop(machine.id, None)

    @rule(crash=st.booleans())
    def restart_server(self, crash: bool) -> None:
        self.run(self.restart(crash=crash))

    @invariant()
    def nothing_is_lost(self) -> None:
        self.run(self.check())

    async def check(self) -> None:
        assert self.world.violations == []
        if not self.faulty:
            await audit(self.server)
        for machine, expected in self.expected.items():
            record = await inside(self.server.machines).journal.get(machine)
            assert record is not None
            if not expected.deleted:
                found = (await disk_of(self.server, record)).get("file")
                assert found in (expected.file, expected.writing)
                expected.file, expected.writing = found, None
            if isinstance(record.state, Suspended) and expected.program is not None:
                saved = self.world.saved[record.state.checkpoint]
                assert saved.memory["program"] == expected.program


BOUNDED = settings(
    max_examples=10,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking would take minutes: which call comes first is not the same every time.
    phases=[Phase.reuse, Phase.generate],
)
Histories.TestCase.settings = BOUNDED
TestHistories = Histories.TestCase


@pytest.mark.slow
class TestManyHistories(Histories.TestCase):  # type: ignore[misc, valid-type]  # made by Hypothesis
    settings = settings(BOUNDED, max_examples=300, stateful_step_count=40)
