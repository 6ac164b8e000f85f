"""Background requests that are cancelled by their clients."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from stead.builds.background import BackgroundRequests, RequestCancelled
from stead.store.database import open_database
from stead.store.requests import RequestStore
from stead.tasks import or_undo


def failed(error: Exception) -> tuple[int, dict[str, Any]]:
    return 400, {"error": type(error).__name__}


@pytest_asyncio.fixture
async def background(tmp_path: Path) -> AsyncIterator[BackgroundRequests]:
    database = await open_database(tmp_path / "stead.db")
    requests = BackgroundRequests(RequestStore(database))
    yield requests
    await requests.close()
    await database.dispose()


async def stored(background: BackgroundRequests, request: str) -> tuple[int | None, str | None]:
    async with asyncio.timeout(60):
        while True:
            row = await background.get("me", request)
            assert row is not None
            if row.status is not None:
                return row.status, row.answer
            await asyncio.sleep(0.01)


async def test_a_cancelled_request_is_undone_and_keeps_an_error(background: BackgroundRequests) -> None:
    undone: list[dict[str, Any]] = []
    made = asyncio.Event()

    async def make() -> dict[str, Any]:
        await made.wait()
        return {"id": "it"}

    async def undo(answer: dict[str, Any]) -> None:
        undone.append(answer)

    assert await background.run("me", "ri-1", 0, or_undo(make(), undo), failed) is None
    assert await background.cancel("other", "ri-1") is None
    assert not undone
    row = await background.cancel("me", "ri-1")
    assert row is not None and row.status is None
    # The client does not wait for what has begun; that ends, and is undone.
    made.set()
    assert await stored(background, "ri-1") == (400, f'{{"error": "{RequestCancelled.__name__}"}}')
    assert undone == [{"id": "it"}]


async def test_a_finished_request_answers_a_cancel_with_its_result(background: BackgroundRequests) -> None:
    ready = asyncio.Event()

    async def make() -> dict[str, Any]:
        await ready.wait()
        return {"id": "it"}

    assert await background.run("me", "ri-1", 0, make(), failed) is None
    ready.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # Its result may not be stored yet.
    row = await background.cancel("me", "ri-1")
    assert row is not None and (row.status, row.answer) == (200, '{"id": "it"}')
    assert await background.cancel("me", "ri-2") is None
