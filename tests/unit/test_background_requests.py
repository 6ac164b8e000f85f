"""Background requests that are cancelled by their clients."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from stead.creation.background import BackgroundRequests, RequestCancelled, Result
from stead.creation.results import CreatedVm, RequestFailure
from stead.store.database import open_database
from stead.store.requests import RequestStore
from stead.tasks import or_undo


def failed(error: Exception) -> RequestFailure:
    return RequestFailure(type(error).__name__, str(error), 400, {"retryable": False})


@pytest_asyncio.fixture
async def background(tmp_path: Path) -> AsyncIterator[BackgroundRequests]:
    database = await open_database(tmp_path / "stead.db")
    requests = BackgroundRequests(RequestStore(database))
    yield requests
    await requests.close()
    await database.dispose()


async def stored(background: BackgroundRequests, request: str) -> Result:
    async with asyncio.timeout(60):
        while True:
            found = await background.get("me", request)
            assert found is not None
            if found.result is not None:
                return found.result
            await asyncio.sleep(0.01)


async def test_a_cancelled_request_is_undone_and_keeps_an_error(background: BackgroundRequests) -> None:
    undone: list[CreatedVm] = []
    made = asyncio.Event()

    async def make() -> CreatedVm:
        await made.wait()
        return CreatedVm("it")

    async def undo(made: CreatedVm) -> None:
        undone.append(made)

    assert await background.run("me", "ri-1", 0, or_undo(make(), undo), failed) is None
    assert await background.cancel("other", "ri-1") is None
    assert not undone
    cancelled = await background.cancel("me", "ri-1")
    assert cancelled is not None and cancelled.result is None
    # The client does not wait for what has begun; that ends, and is undone.
    made.set()
    assert await stored(background, "ri-1") == failed(RequestCancelled())
    assert undone == [CreatedVm("it")]


async def test_a_finished_request_answers_a_cancel_with_its_result(background: BackgroundRequests) -> None:
    ready = asyncio.Event()

    async def make() -> CreatedVm:
        await ready.wait()
        return CreatedVm("it")

    assert await background.run("me", "ri-1", 0, make(), failed) is None
    ready.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # Its result may not be stored yet.
    found = await background.cancel("me", "ri-1")
    assert found is not None and found.result == CreatedVm("it")
    assert await background.cancel("me", "ri-2") is None
