"""A site with repositories."""

import shutil
from collections.abc import AsyncIterator

import httpx2
import pytest
import pytest_asyncio

from support.git_client import GitClient
from support.git_hosting import RepoServer, served
from support.smart_http import gits_in, templates


@pytest_asyncio.fixture(scope="module")
async def repo_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RepoServer]:
    async with served(tmp_path_factory.mktemp("hosting")) as repo_server:
        yield repo_server


@pytest_asyncio.fixture
async def host(repo_server: RepoServer) -> AsyncIterator[RepoServer]:
    """The server; after each test its repositories pass fsck and no git process is left."""
    yield repo_server
    await repo_server.hosting.check()
    for info in (await repo_server.hosting.repos.list(repo_server.hosting.ours, limit=1000)).items:
        await repo_server.hosting.repos.delete(info.id)
    assert gits_in(repo_server) == []


@pytest_asyncio.fixture
async def http(host: RepoServer) -> AsyncIterator[httpx2.AsyncClient]:
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
