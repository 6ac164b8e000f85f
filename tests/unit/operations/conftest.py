"""The VM engine on a host in memory."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stead.machines.events import MachineEvent
from support.engine import installation
from support.fake_server import FakeServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with installation() as server:
        yield server


@pytest.fixture
def events(server: FakeServer) -> list[MachineEvent]:
    """The lifecycle events of VMs during a test."""
    seen: list[MachineEvent] = []
    server.machines.watch(seen.append)
    return seen
