"""Sleeping and blocking calls, for the asynchronous and the synchronous client."""

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def async_sleep(seconds: float) -> None:
    import asyncio

    await asyncio.sleep(seconds)


def sync_sleep(seconds: float) -> None:
    time.sleep(seconds)


async def async_call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that accesses local files in a thread: it would block the event loop."""
    import asyncio

    return await asyncio.to_thread(function, *args, **kwargs)


def sync_call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)
