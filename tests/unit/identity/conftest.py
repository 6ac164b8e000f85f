"""Accounts on a real database file."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from stead.identity.accounts import Account
from stead.store.database import open_database
from support.accounts import Installation, opened


@pytest_asyncio.fixture(scope="session")
async def empty(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A migrated empty database, copied for each test: a migration takes longer than most tests."""
    path = tmp_path_factory.mktemp("empty") / "stead.db"
    await (await open_database(path)).dispose()
    return path.read_bytes()


@pytest_asyncio.fixture
async def here(tmp_path: Path, empty: bytes) -> AsyncIterator[Installation]:
    (tmp_path / "stead.db").write_bytes(empty)
    async with opened(tmp_path / "stead.db") as installation:
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
