"""Work that must not be left half done when whoever waits for it is cancelled."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from stead.errors import SteadError

P = ParamSpec("P")
T = TypeVar("T")


async def finished(work: Awaitable[T]) -> T:
    """The result of work that goes on to its end, and is waited for, even when the caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            # The caller is gone: an error of the work is nobody's any more.
            task.exception()
        raise


async def in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run a function in a thread, which cannot be cancelled: so its end is always waited for.

    Whoever undoes the work after a cancellation can be sure that nothing of it comes later.
    """
    return await finished(asyncio.to_thread(function, *arguments, **options))


async def or_undo(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]]) -> T:
    """A caller that is cancelled while something becomes its own never learns of it: then it is undone."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(SteadError):
            await undo(await asyncio.shield(task))
        raise
