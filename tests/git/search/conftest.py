"""Repositories to search in."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stead.repos.repository import Repository
from stead.repos.search.search import Search
from support.git_hosting import Stage, staged
from support.git_search import put


@pytest_asyncio.fixture(scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with staged(tmp_path_factory.mktemp("search")) as stage:
        yield stage


@pytest_asyncio.fixture
async def repository(stage: Stage) -> Repository:
    return await stage.repository()


@pytest_asyncio.fixture(scope="module")
async def several(stage: Stage) -> Repository:
    """Files whose names differ for patterns; read only."""
    repository = await stage.repository()
    every = ["a.ts", "src/b.ts", "src/x/c.ts", "src/x/d.md", "-O", "x y/é.md", "src/*.js"]
    await put(repository, dict.fromkeys(every, "here\n"))
    return repository


@pytest.fixture
def search() -> Search:
    return Search()
