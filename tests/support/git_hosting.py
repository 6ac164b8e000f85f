"""Repositories without VMs: a database, accounts and real git; and the API server in front of them."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stead import landlock
from stead.api.server import running
from stead.host.commands import run
from stead.identity.accounts import Accounts
from stead.identity.identities import Identities
from stead.installation import open_without_vms
from stead.installation_parts import Installation
from stead.repos.access import Level, RepoAccess
from stead.repos.confinement import Confinement
from stead.repos.places import RepoPlaces
from stead.repos.repos import RepoInfo, Repos
from stead.repos.repository import Repository
from stead.repos.ssrf import Network
from stead.repos.transfer.serving import PackServer
from stead.repos.writer import RepoWriter
from stead.settings import Settings
from stead.store.database import Database
from stead.store.installation_id import open_database_of
from stead.store.sealing import SealingKeys
from support.databases import put_database


class Recorder(list[str]):
    """The repositories whose refs changed."""

    async def refs_changed(self, repo_id: str) -> None:
        self.append(repo_id)


@dataclass
class RepoHosting:
    """An installation with repositories of two accounts."""

    installation: Installation
    folder: Path
    database: Database
    repos: Repos
    writer: RepoWriter
    access: RepoAccess
    accounts: Accounts
    identities: Identities
    ours: str
    theirs: str

    async def repository(self, **options: object) -> Repository:
        """A new repository of the first account."""
        info = await self.repos.create(self.ours, **options)  # type: ignore[arg-type]  # as create takes them
        return self.repos.repository(info.id)

    async def check(self) -> None:
        """Every repository passes fsck and has no leftovers."""
        await self.repos.quotas.flush()
        await self.repos.housekeeping.join()
        folder = self.folder / "repos"
        for repository in folder.glob("??/*.git"):
            fsck = ("git", "-c", "safe.directory=*", "fsck", "--strict", "--no-dangling")
            await run(*fsck, cwd=repository, timeout=60)
            assert [*repository.rglob("*.lock"), *(repository / "objects").rglob("tmp_*")] == []
        assert list((folder / "new").iterdir()) == []


@contextlib.asynccontextmanager
async def open_hosting(
    folder: Path, uids: range | None = None, *, landlocked: bool = True, **changes: Any
) -> AsyncIterator[RepoHosting]:
    """With `uids`, git runs as one of these users for each account and, `landlocked`, without other files."""
    version = landlock.version() if landlocked else 0
    confined = None if uids is None else Confinement(uids, landlock=version)
    await put_database(folder / "stead.db")
    settings = Settings(data=folder, **changes)
    database = await open_database_of(folder, SealingKeys(settings.sealing_key_files))
    try:
        async with open_without_vms(settings, database, confined) as opened:
            hosting = RepoHosting(
                installation=opened,
                folder=folder,
                database=database,
                repos=opened.repos,
                writer=opened.writer,
                access=opened.access,
                accounts=opened.accounts,
                identities=opened.identities,
                ours=await _account(opened.accounts, "ours"),
                theirs=await _account(opened.accounts, "theirs"),
            )
            yield hosting
            await hosting.check()
    finally:
        await database.dispose()


async def _account(accounts: Accounts, name: str) -> str:
    found = [account.id for account in await accounts.list() if account.name == name]
    return found[0] if found else (await accounts.create(name)).id


@dataclass(frozen=True)
class RepoServer:
    """A server, with a key for each of two accounts."""

    url: str
    hosting: RepoHosting
    key: str
    their_key: str

    async def repo(self, *, public: bool = False) -> RepoInfo:
        return await self.hosting.repos.create(self.hosting.ours, public=public)

    def path(self, repo: RepoInfo) -> Path:
        return self.hosting.repos.repository(repo.id).path

    def remote(self, repo: RepoInfo, secret: str | None = None) -> str:
        """The clone URL, with the first account's key by default."""
        secret = self.key if secret is None else secret
        login = f"x-access-token:{secret}@" if secret else ""
        return self.url.replace("http://", f"http://{login}") + f"/{repo.id}"

    async def token(self, repo: RepoInfo | None = None, level: Level = "read") -> str:
        """The token of a new identity, with a permission on a repository."""
        hosting = self.hosting
        identity = await hosting.identities.create(hosting.ours)
        if repo is not None:
            await hosting.access.grant(hosting.ours, identity.id, repo.id, level)
        _, token = await hosting.identities.create_token(hosting.ours, identity.id)
        return token


@contextlib.asynccontextmanager
async def served(
    folder: Path, dialled: Sequence[Network] = (), places: RepoPlaces | None = None, **limits: Any
) -> AsyncIterator[RepoServer]:
    """Serve the API without VMs until the end of the block; `limits` are those of clones and pushes."""
    async with open_hosting(folder, git_url="http://stead.test", dial_private=tuple(dialled)) as hosting:
        hosting.repos.places = places or hosting.repos.places
        serving = PackServer(hosting.repos, hosting.writer, **limits)
        installation = dataclasses.replace(hosting.installation, serving=serving)
        async with running(Settings(listen="127.0.0.1:0"), installation) as url:
            _, key = await hosting.accounts.create_key(hosting.ours)
            _, their_key = await hosting.accounts.create_key(hosting.theirs)
            yield RepoServer(url, hosting, key, their_key)
