"""Disk layers with their rows."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from stead.store.database import open_database
from support.databases import put_database
from support.layers_on_disk import LayersOnDisk


@pytest_asyncio.fixture
async def on_disk(tmp_path: Path) -> AsyncIterator[LayersOnDisk]:
    database = await open_database(await put_database(tmp_path / "stead.db"))
    yield LayersOnDisk(tmp_path, database)
    await database.dispose()
