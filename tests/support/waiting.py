"""Waiting in tests: for a condition, never for a while."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from stead.deadlines import scaled

T = TypeVar("T")


async def until(condition: Callable[[], Awaitable[T]], limit: float) -> T:
    """The first true answer of `condition`; TimeoutError when there is none within `limit` seconds."""
    async with asyncio.timeout(scaled(limit)):
        while not (answer := await condition()):  # noqa: ASYNC110  # most of what is waited for has no event
            await asyncio.sleep(0.02)
        return answer
