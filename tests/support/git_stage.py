"""Repositories without VMs: a database, accounts and real git."""

import contextlib
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stead.api.parts import Installation
from stead.identity.accounts import Accounts
from stead.identity.identities import Identities
from stead.installation import open_without_vms
from stead.repos.access import RepoAccess
from stead.repos.repos import Repos
from stead.repos.repository import Repository
from stead.repos.writer import RepoWriter
from stead.settings import Settings
from stead.store.database import Database
from stead.store.installation_id import open_database_of


class Recorder(list[str]):
    """The repositories whose refs changed."""

    async def refs_changed(self, repo_id: str) -> None:
        self.append(repo_id)


@dataclass
class Stage:
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


@contextlib.asynccontextmanager
async def staged(folder: Path, uid: int | None = None, **changes: Any) -> AsyncIterator[Stage]:
    database = await open_database_of(folder)
    try:
        async with open_without_vms(Settings(data=folder, **changes), database, uid) as opened:
            yield Stage(
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
            check_all(folder / "repos")
    finally:
        await database.dispose()


async def _account(accounts: Accounts, name: str) -> str:
    found = [account.id for account in await accounts.list() if account.name == name]
    return found[0] if found else (await accounts.create(name)).id


def check_all(folder: Path) -> None:
    """Every repository passes fsck and has no leftovers."""
    for repository in folder.glob("??/*.git"):
        checked = subprocess.run(
            ["git", "-c", "safe.directory=*", "fsck", "--strict", "--no-dangling"],
            cwd=repository,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert checked.returncode == 0, checked.stderr
    assert list((folder / "new").iterdir()) == []
