"""Single-flight: requests for the same layer share one build of it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stead.builds.errors import SetupFailed
from stead.builds.records import Record
from stead.tasks import finished

T = TypeVar("T")


@dataclass(eq=False)
class _Flight(Generic[T]):
    task: "asyncio.Task[T]"
    owner: Record
    """The record of the request that started it."""
    waiters: int = 0


class Flights(Generic[T]):
    """Single-flight by key: a request that joins a running flight gets its result, or its error.

    When the last waiting request has disconnected, the flight runs for another `linger` seconds, so that a
    client that reconnects and repeats its request finds it; then it is cancelled.
    """

    def __init__(self, linger: float) -> None:
        self._linger = linger
        self._flights: dict[Hashable, _Flight[T]] = {}
        self._ending: set[asyncio.Task[T]] = set()

    async def join(
        self,
        key: Hashable,
        record: Record,
        work: Callable[[], Coroutine[Any, Any, T]],
        joined: Callable[[Record], Awaitable[None]],
    ) -> T:
        """Wait for the flight with this key, and start it with `work` unless it is running.

        `joined` is called before waiting for a flight that another request started, with its record.
        """
        flight = self._flights.get(key)
        started = flight is None
        if flight is None:
            flight = _Flight(asyncio.create_task(work()), record)
            record.flights.append(flight.task)
            self._flights[key] = flight
            flight.task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiters += 1
        try:
            if not started:
                await joined(flight.owner)
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if flight.task.cancelled() and current is not None and not current.cancelling():
                raise SetupFailed("build", "the Stead server is stopping; try again") from None
            raise
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.task.done():
                await self._leave(key, flight)

    async def _leave(self, key: Hashable, flight: _Flight[T]) -> None:
        if self._linger > 0:
            asyncio.get_running_loop().call_later(self._linger, self._abandon, key, flight)
            return
        self._abandon(key, flight)
        await finished(asyncio.wait({flight.task}))

    def _abandon(self, key: Hashable, flight: _Flight[T]) -> None:
        if flight.waiters or flight.task.done():
            return
        # A request that comes from now on starts a new flight.
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
            # Retrieve the exception so asyncio does not log it as never retrieved.
            task.exception()

    async def close(self) -> None:
        """Cancel all flights and wait until they have undone what they started."""
        tasks = {flight.task for flight in self._flights.values()} | self._ending
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
