"""An empty repository."""

import pytest_asyncio

from stead.repos.repository import Repository
from support.git_hosting import RepoHosting


@pytest_asyncio.fixture
async def repository(hosting: RepoHosting) -> Repository:
    return await hosting.repository()
