"""Accounts on a real database file."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from stead.identity.accounts import Account
from support.accounts import Installation, opened
from support.databases import put_database


@pytest_asyncio.fixture
async def here(tmp_path: Path) -> AsyncIterator[Installation]:
    async with opened(await put_database(tmp_path / "stead.db")) as installation:
        yield installation


@pytest_asyncio.fixture
async def there(here: Installation) -> AsyncIterator[Installation]:
    """The same installation, opened a second time as another process would."""
    async with opened(here.path) as installation:
        installation.machines = here.machines
        yield installation


@pytest_asyncio.fixture
async def ours(here: Installation) -> Account:
    return await here.accounts.create("ours")


@pytest_asyncio.fixture
async def theirs(here: Installation) -> Account:
    return await here.accounts.create("theirs")
