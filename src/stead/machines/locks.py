"""One lock per VM: which operation may start in the state that it finds."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager

from stead.errors import WrongState
from stead.machines.journal import Journal
from stead.machines.records import Record
from stead.machines.states import Operation, Verdict, decide
from stead.shares import KeyedLock, Release


class Locks:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._locks = KeyedLock()

    def hold(self, machine_id: str) -> AbstractAsyncContextManager[None]:
        return self._locks.hold(machine_id)

    def try_hold(self, machine_id: str) -> Release | None:
        """The same without waiting: None when an operation has the lock."""
        return self._locks.try_acquire(machine_id)

    @contextlib.asynccontextmanager
    async def operation(self, machine_id: str, operation: Operation) -> AsyncIterator[Record]:
        """Hold the lock of a VM for an operation; WrongState when the operation cannot start."""
        async with self.unless_done(machine_id, operation) as record:
            if record is None:
                raise wrong_state(await self._journal.find(machine_id), operation)
            yield record

    @contextlib.asynccontextmanager
    async def unless_done(self, machine_id: str, operation: Operation) -> AsyncIterator[Record | None]:
        """The same; yields None when the VM is already in the state that the operation leads to."""
        async with self.hold(machine_id):
            record = await self._journal.find(machine_id)
            verdict = decide(operation, record.state.name)
            if verdict not in (Verdict.GO, Verdict.DONE):
                raise wrong_state(record, operation)
            yield record if verdict is Verdict.GO else None

    async def verdict(self, machine_id: str, operation: Operation) -> Verdict:
        """What an operation has to do, once the one under way has ended; WrongState if it cannot start."""
        async with self.hold(machine_id):
            record = await self._journal.find(machine_id)
        verdict = decide(operation, record.state.name)
        if verdict is Verdict.REFUSE:
            raise wrong_state(record, operation)
        return verdict


def wrong_state(record: Record, operation: Operation) -> WrongState:
    return WrongState(record.id, operation, record.state.name, record.reason or "")
