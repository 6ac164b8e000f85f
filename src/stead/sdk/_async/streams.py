"""Iterators over events."""

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class AsyncStream(Generic[T]):
    """An iterator over events. Close it, or use it in a `with` statement, if you stop before its end."""

    def __init__(self, events: AsyncGenerator[T]) -> None:
        self._events = events

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        return await anext(self._events)

    async def aclose(self) -> None:
        """Close the stream and its connection."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
