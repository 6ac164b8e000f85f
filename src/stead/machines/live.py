"""VMs that have a process, and one lock per VM."""

import asyncio
from dataclasses import dataclass, field

from stead.guest.agent import Agent
from stead.host.vm import Vm


@dataclass
class Live:
    """The process of a VM and the connections to it."""

    vm: Vm
    agent: Agent
    running: bool = False
    """Recorded as running: calls to the guest need no query of the store."""
    ending: bool = False
    """An operation ends it and records that end; the watcher does not."""
    watcher: asyncio.Task[None] | None = field(default=None, repr=False)

    async def release(self) -> None:
        """Disconnect from the process without ending it."""
        self.ending = True
        if self.watcher is not None and self.watcher is not asyncio.current_task():
            self.watcher.cancel()
            await asyncio.gather(self.watcher, return_exceptions=True)
        await self.agent.close()
        await self.vm.release()


class Turns:
    """One asyncio lock per VM, removed when no task holds or awaits it."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    def of(self, machine_id: str) -> "_Turn":
        return _Turn(self._locks, machine_id)


class _Turn:
    def __init__(self, locks: dict[str, tuple[asyncio.Lock, int]], machine_id: str) -> None:
        self._locks = locks
        self._id = machine_id

    async def __aenter__(self) -> None:
        lock, waiting = self._locks.get(self._id, (None, 0))
        lock = lock or asyncio.Lock()
        self._locks[self._id] = lock, waiting + 1
        try:
            await lock.acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._locks[self._id][0].release()
        self._leave()

    def _leave(self) -> None:
        lock, waiting = self._locks[self._id]
        if waiting == 1:
            del self._locks[self._id]
        else:
            self._locks[self._id] = lock, waiting - 1
