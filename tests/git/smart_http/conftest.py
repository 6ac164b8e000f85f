"""A site with repositories."""

import shutil
from collections.abc import AsyncIterator

import httpx2
import pytest
import pytest_asyncio

from support.git_client import GitClient
from support.git_hosting import Site, served
from support.smart_http import gits_in, templates


@pytest_asyncio.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with served(tmp_path_factory.mktemp("hosting")) as site:
        yield site


@pytest_asyncio.fixture
async def host(site: Site) -> AsyncIterator[Site]:
    """The server; after each test its repositories pass fsck and no git process is left."""
    yield site
    await site.stage.check()
    for info in (await site.stage.repos.list(site.stage.ours, limit=1000)).items:
        await site.stage.repos.delete(info.id)
    assert gits_in(site) == []


@pytest_asyncio.fixture
async def http(host: Site) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=host.url, timeout=30) as client:
        yield client


@pytest_asyncio.fixture(scope="module", autouse=True)
async def _histories(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[None]:
    """Template work trees with this many commits, which tests copy."""
    home = tmp_path_factory.mktemp("histories")
    git = GitClient(home)
    work = await git.work_tree("work")
    for number in range(1, 7):
        templates[number] = home / str(number)
        shutil.copytree(work, templates[number])
        await git.commit(work, {f"file{number}": f"{number}\n" * 100})
    yield
    templates.clear()
