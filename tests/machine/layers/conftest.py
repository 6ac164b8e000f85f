"""Disk layers with their rows."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from stead.store.database import open_database
from support.databases import put_database
from support.layer_stage import Stage


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    database = await open_database(await put_database(tmp_path / "stead.db"))
    yield Stage(tmp_path, database)
    await database.dispose()
