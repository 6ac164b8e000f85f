"""Repositories here and on a stand-in for GitHub."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from stead.github.apps import Apps
from support.git_client import GitClient
from support.git_hosting import RepoServer, served
from support.github import Github, playing_github
from support.github_link import LOOPBACK, LinkedRepo, playing


@pytest_asyncio.fixture
async def linked_repo(tmp_path: Path) -> AsyncIterator[LinkedRepo]:
    async with playing(tmp_path) as played:
        yield played


@pytest_asyncio.fixture
async def repo_server(tmp_path: Path) -> AsyncIterator[tuple[RepoServer, Github, GitClient]]:
    """A server, and GitHub, which sends it webhooks."""
    for name in ("stead", "github", "person"):
        (tmp_path / name).mkdir()
    with playing_github(tmp_path / "github") as github:
        async with served(tmp_path / "stead", LOOPBACK) as repo_server:
            github.webhook_url = f"{repo_server.url}/github/webhooks"
            await Apps(repo_server.hosting.database).connect(repo_server.hosting.ours, github.app)
            yield repo_server, github, GitClient(tmp_path / "person")
