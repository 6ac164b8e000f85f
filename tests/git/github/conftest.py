"""Repositories here and on a stand-in for GitHub."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from stead.github.apps import Apps
from support.git_client import GitClient
from support.git_hosting import Site, served
from support.github import Github, playing_github
from support.github_scene import LOOPBACK, Scene, playing


@pytest_asyncio.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with playing(tmp_path) as played:
        yield played


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[tuple[Site, Github, GitClient]]:
    """A server, and GitHub, which sends it webhooks."""
    for name in ("stead", "github", "person"):
        (tmp_path / name).mkdir()
    with playing_github(tmp_path / "github") as github:
        async with served(tmp_path / "stead", LOOPBACK) as site:
            github.webhook_url = f"{site.url}/github/webhooks"
            await Apps(site.stage.database).connect(site.stage.ours, github.app)
            yield site, github, GitClient(tmp_path / "person")
