"""A client of the tests' server for a module."""

from collections.abc import AsyncIterator

import agents
import pytest_asyncio

from stead.agents.openai import SteadSandboxClient
from support.installations import Server

agents.set_tracing_disabled(True)


@pytest_asyncio.fixture(scope="module")
async def client(server: Server) -> AsyncIterator[SteadSandboxClient]:
    async with SteadSandboxClient(api_key=server.key, base_url=server.url) as client:
        yield client
