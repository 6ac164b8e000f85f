"""Waiting in tests: for a condition, never for a while."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

from stead.deadlines import scaled

T = TypeVar("T")


@overload
async def until(condition: Callable[[], Awaitable[T]], limit: float) -> T: ...
@overload
async def until(condition: Callable[[], T], limit: float) -> T: ...
async def until(condition: Callable[[], Any], limit: float) -> Any:
    """The first true answer of `condition`; TimeoutError when there is none within `limit` seconds."""
    async with asyncio.timeout(scaled(limit)):
        while True:
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
            if answer:
                return answer
            await asyncio.sleep(0.02)


async def turns(count: int = 10) -> None:
    """Let all tasks run that can."""
    for _ in range(count):
        await asyncio.sleep(0)
