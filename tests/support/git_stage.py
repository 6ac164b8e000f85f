"""Repositories without VMs: a database, accounts and real git."""

import contextlib
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from stead.identity.accounts import Accounts
from stead.identity.callers import Callers
from stead.identity.identities import Identities
from stead.limits import Limits
from stead.repos.access import RepoAccess
from stead.repos.repos import Repos
from stead.repos.repository import Repository
from stead.repos.search.search import Search
from stead.repos.writer import RepoWriter
from stead.store.database import Database, open_database


class Recorder(list[str]):
    """The repositories whose refs changed."""

    async def refs_changed(self, repo_id: str) -> None:
        self.append(repo_id)


@dataclass
class Stage:
    """An installation with repositories of two accounts."""

    folder: Path
    database: Database
    repos: Repos
    writer: RepoWriter
    access: RepoAccess
    accounts: Accounts
    callers: Callers
    identities: Identities
    ours: str
    theirs: str

    async def repository(self, **options: object) -> Repository:
        """A new repository of the first account."""
        info = await self.repos.create(self.ours, **options)  # type: ignore[arg-type]  # as create takes them
        return self.repos.repository(info.id)


async def _owns_no_machine(_: str, __: str) -> bool:
    return False


@contextlib.asynccontextmanager
async def staged(folder: Path, uid: int | None = None) -> AsyncIterator[Stage]:
    database = await open_database(folder / "stead.db")
    accounts = Accounts(database)
    callers = Callers(database)

    async def limits_of(account: str) -> Limits:
        return (await accounts.get(account)).limits

    try:
        async with Repos.open(database, folder / "repos", limits_of, uid) as repos:
            yield Stage(
                folder=folder,
                database=database,
                repos=repos,
                writer=RepoWriter(repos, Search()),
                access=RepoAccess(database, repos),
                accounts=accounts,
                callers=callers,
                identities=Identities(database, _owns_no_machine),
                ours=(await _account(accounts, "ours")),
                theirs=(await _account(accounts, "theirs")),
            )
            check_all(folder / "repos")
    finally:
        await callers.close()
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
