"""Work that many wait for and that is done once."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from stead.builds.errors import SetupFailed
from stead.builds.records import Report
from stead.tasks import finished

T = TypeVar("T")


@dataclass(eq=False)
class _Flight(Generic[T]):
    task: "asyncio.Task[T]"
    listeners: list[Report] = field(default_factory=list)
    """One for each who waits."""


class Flights(Generic[T]):
    """Work by key. Whoever comes while it is under way gets its result, or its failure.

    When the last who waits has gone, it goes on for `linger` seconds: a client whose connection broke asks
    again soon. Then it is cancelled.
    """

    def __init__(self, linger: float) -> None:
        self._linger = linger
        self._flights: dict[Hashable, _Flight[T]] = {}
        self._ending: set[asyncio.Task[T]] = set()

    async def join(
        self, key: Hashable, work: Callable[[list[Report]], Coroutine[Any, Any, T]], report: Report
    ) -> T:
        """The result of work under way for this key, or begun now."""
        flight = self._flights.get(key)
        if flight is None:
            listeners: list[Report] = []
            flight = _Flight(asyncio.create_task(work(listeners)), listeners)
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.listeners.append(report)
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if flight.task.cancelled() and current is not None and not current.cancelling():
                raise SetupFailed("build", "Stead is being stopped") from None
            raise
        finally:
            flight.listeners.remove(report)
            if not flight.listeners and not flight.task.done():
                await self._leave(key, flight)

    async def _leave(self, key: Hashable, flight: _Flight[T]) -> None:
        if self._linger > 0:
            asyncio.get_running_loop().call_later(self._linger, self._abandon, key, flight)
            return
        self._abandon(key, flight)
        await finished(asyncio.wait({flight.task}))

    def _abandon(self, key: Hashable, flight: _Flight[T]) -> None:
        if flight.listeners or flight.task.done():
            return
        # Whoever comes from now on begins anew.
        if self._flights.get(key) is flight:
            del self._flights[key]
        self._ending.add(flight.task)
        flight.task.cancel()

    def _landed(self, key: Hashable, task: "asyncio.Task[T]") -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        self._ending.discard(task)
        if not task.cancelled():
            # Those who waited have the error; when nobody does any more, it is not one that was forgotten.
            task.exception()

    async def close(self) -> None:
        """End all work and wait for its undoing."""
        tasks = {flight.task for flight in self._flights.values()} | self._ending
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
