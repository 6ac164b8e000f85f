"""Sleeping, waiting, locks and work in the background, for the asynchronous and the synchronous client."""

import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
T = TypeVar("T")

_cleaning: "set[asyncio.Future[None]]" = set()
"""The event loop itself does not keep tasks from being collected."""


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


def async_lock() -> "asyncio.Lock":
    import asyncio

    return asyncio.Lock()


def sync_lock() -> threading.Lock:
    return threading.Lock()


def async_event() -> "asyncio.Event":
    import asyncio

    return asyncio.Event()


def sync_event() -> threading.Event:
    return threading.Event()


async def async_wait(event: "asyncio.Event", seconds: float | None = None) -> bool:
    """Wait for an event; False if the time is over before."""
    import asyncio

    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def sync_wait(event: threading.Event, seconds: float | None = None) -> bool:
    return event.wait(seconds)


def async_spawn(function: "Callable[[], Coroutine[Any, Any, None]]") -> object:
    """Run a function in the background. The caller keeps the result, or the task may be collected."""
    import asyncio

    return asyncio.get_running_loop().create_task(function())


def sync_spawn(function: Callable[[], None]) -> object:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


async def async_finish(
    function: "Callable[P, Coroutine[Any, Any, None]]", *args: P.args, **kwargs: P.kwargs
) -> None:
    """Run a clean-up in a task that is being cancelled. It ends also if the task is cancelled again."""
    import asyncio

    cleaning = asyncio.ensure_future(function(*args, **kwargs))
    _cleaning.add(cleaning)
    cleaning.add_done_callback(_cleaning.discard)
    await asyncio.shield(cleaning)


def sync_finish(function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    function(*args, **kwargs)


async def async_notify(callback: Callable[..., object] | None, *args: object) -> None:
    """Call a callback, if there is one; a coroutine function is awaited."""
    import inspect

    if callback is not None:
        result = callback(*args)
        if inspect.isawaitable(result):
            await result


def sync_notify(callback: Callable[..., object] | None, *args: object) -> None:
    if callback is not None:
        callback(*args)
