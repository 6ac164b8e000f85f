"""A repository here, one at the GitHub stand-in, and their sync."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from stead.github.links import Link, Links
from stead.repos.committing import Change, commit
from stead.repos.repository import Repository
from stead.repos.ssrf import SsrfGuard
from support.git_client import GitClient
from support.git_hosting import Recorder, RepoHosting, open_hosting
from support.github import Github, playing_github

LIMIT = 30.0
NAME = "octo/web"
LOOPBACK = [IPv4Network("127.0.0.0/8")]


@dataclass
class LinkedRepo:
    """A repository here, one at GitHub with the same name, and a user with a clone of it."""

    hosting: RepoHosting
    github: Github
    links: Links
    repository: Repository
    person: GitClient
    followed: list[str]

    async def enable(self) -> Link:
        await self.links.enable(self.hosting.ours, self.repository.id, NAME)
        return await self.sync()

    async def sync(self) -> Link:
        async with asyncio.timeout(LIMIT):
            return await self.links.sync(self.repository.id)

    async def here(self) -> dict[str, str]:
        refs = await self.repository.refs()
        branches = {f"refs/heads/{each.name}": each.sha for each in refs.branches}
        return branches | {f"refs/tags/{each.name}": each.sha for each in refs.tags}

    @property
    def there(self) -> dict[str, str]:
        return self.github.refs(NAME)

    async def commit(self, path: str, content: str = "here\n", branch: str = "main") -> str:
        """Commit through the API."""
        change = Change(path, content.encode())
        return (await commit(self.repository, [change], f"write {path}", branch=branch)).sha

    async def delete(self, ref: str) -> None:
        await self.repository.git.run(self.repository.path, "update-ref", "-d", ref)

    async def clone(self) -> Path:
        folder = self.person.home / "clone"
        await self.person("clone", "-q", self.github.url(NAME), str(folder))
        return folder

    async def push(self, folder: Path, *refspecs: str, force: bool = False) -> None:
        options = ["--force"] if force else []
        await self.person("push", "-q", *options, "origin", *refspecs, cwd=folder)

    async def same(self) -> bool:
        return await self.here() == self.there


@contextlib.asynccontextmanager
async def playing(folder: Path, **options: Any) -> AsyncIterator[LinkedRepo]:
    for name in ("stead", "github", "person"):
        (folder / name).mkdir()
    followed = Recorder()
    with playing_github(folder / "github") as github:
        async with open_hosting(folder / "stead") as hosting:
            quick: dict[str, Any] = {"sync_every": 3600.0, "retry": [3600.0]} | options
            links = Links(hosting.database, hosting.repos, hosting.writer, SsrfGuard(LOOPBACK), **quick)
            hosting.writer.subscribe(followed)
            hosting.writer.subscribe(links)
            github.create(NAME)
            await links.apps.connect(hosting.ours, github.app)
            async with links.running():
                repository = await hosting.repository()
                person = GitClient(folder / "person")
                yield LinkedRepo(hosting, github, links, repository, person, followed)
