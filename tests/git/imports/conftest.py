"""A server with repositories and archives to import."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from stead.repos.transfer.imports import Imports
from support.git_hosting import RepoHosting, open_hosting
from support.git_imports import LOCAL, Importing, add
from support.git_repos import git
from support.git_server import GitServer, serving


@pytest_asyncio.fixture(scope="module")
async def hosting(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RepoHosting]:
    """Shared by all tests; at the end every repository must pass fsck."""
    async with open_hosting(tmp_path_factory.mktemp("stage")) as hosting:
        yield hosting


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GitServer]:
    with serving(tmp_path_factory.mktemp("elsewhere")) as server:
        yield server


@pytest.fixture
def server(elsewhere: GitServer, tmp_path: Path) -> GitServer:
    """The shared server, reset and empty."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.forget(folder)
    return elsewhere


@pytest.fixture
def importing(hosting: RepoHosting, server: GitServer) -> Importing:
    return Importing(hosting, server, Imports(LOCAL, timeout=30))


@pytest.fixture
def origin(server: GitServer) -> Path:
    """`trunk` with three commits, `feature/x` with another one on the second, and a tag on each branch."""
    place = server.init("origin.git", "trunk")
    add(place, "trunk", "one", "two")
    add(place, "feature/x", "side", start="refs/heads/trunk^0")
    add(place, "trunk", "dir/three")
    tag = "-c", "user.name=T", "-c", "user.email=t@u", "tag", "-m", "first"
    git(place, *tag, "v1", "trunk~1")
    git(place, "tag", "side-tag", "feature/x")
    return place
