"""What waits or blocks, once for each kind of client. The synchronous one does without asyncio."""

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
    """Call something that works on local files, without holding up the loop."""
    import asyncio

    return await asyncio.to_thread(function, *args, **kwargs)


def sync_call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)
