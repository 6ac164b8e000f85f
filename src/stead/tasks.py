"""Cancellation: work that finishes or is undone when its caller is cancelled."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from stead.errors import SteadError

P = ParamSpec("P")
T = TypeVar("T")


async def finished(work: Awaitable[T]) -> T:
    """Await work to its end even when the caller is cancelled; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            # Retrieve the exception so asyncio does not log it as never retrieved.
            task.exception()
        raise


async def in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run a function in a thread and always wait for its end: threads cannot be cancelled.

    A caller that undoes the work after a cancellation can rely on the thread having ended.
    """
    return await finished(asyncio.to_thread(function, *arguments, **options))


async def or_undo(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]]) -> T:
    """Await work that creates something; a cancelled caller never gets the result, so it is undone."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(SteadError):
            await undo(await asyncio.shield(task))
        raise
