"""Repositories to search in."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stead.repos.repository import Repository
from stead.repos.search.search import Search
from support.git_hosting import RepoHosting, open_hosting
from support.git_search import put


@pytest_asyncio.fixture(scope="module")
async def hosting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RepoHosting]:
    async with open_hosting(tmp_path_factory.mktemp("search")) as hosting:
        yield hosting


@pytest_asyncio.fixture
async def repository(hosting: RepoHosting) -> Repository:
    return await hosting.repository()


@pytest_asyncio.fixture(scope="module")
async def several(hosting: RepoHosting) -> Repository:
    """Files whose names differ for patterns; read only."""
    repository = await hosting.repository()
    every = ["a.ts", "src/b.ts", "src/x/c.ts", "src/x/d.md", "-O", "x y/é.md", "src/*.js"]
    await put(repository, dict.fromkeys(every, "here\n"))
    return repository


@pytest.fixture
def search() -> Search:
    return Search()
