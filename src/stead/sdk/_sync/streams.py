# Made by scripts/unasync from _async/streams.py.
"""Events as they come."""

from collections.abc import Generator
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Stream(Generic[T]):
    """An iterator over events. Close it, or use it in a `with` statement, when you stop before its end."""

    def __init__(self, events: Generator[T]) -> None:
        self._events = events

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        return next(self._events)

    def close(self) -> None:
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
