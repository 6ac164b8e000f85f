"""An empty repository."""

import pytest_asyncio

from stead.repos.repository import Repository
from support.git_hosting import Stage


@pytest_asyncio.fixture
async def repository(stage: Stage) -> Repository:
    return await stage.repository()
