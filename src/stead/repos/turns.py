"""Concurrency limits with a bounded wait."""

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator

from stead.repos.errors import RepoBusy


class Turns:
    """Limits concurrency per name and in total; callers wait for a slot up to a timeout."""

    def __init__(self, most: int, each: int, patience: float, busy: str) -> None:
        """`busy` is the error message when the wait times out."""
        self._all = asyncio.Semaphore(most)
        self._each = each
        self._patience = patience
        self._busy = busy
        self._names: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        own = self._names.get(name)
        if own is None:
            own = self._names[name] = asyncio.Semaphore(self._each)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._patience):
                    await stack.enter_async_context(own)
                    await stack.enter_async_context(self._all)
            except TimeoutError:
                raise RepoBusy(f"{self._busy}: retry later") from None
            yield
