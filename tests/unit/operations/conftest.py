"""The VM engine on a host in memory."""

from collections.abc import AsyncIterator

import pytest_asyncio

from support.engine import installation
from support.fake_server import FakeServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with installation() as server:
        yield server
