"""A builder with real VMs."""

import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stead.builds.builder import Builder
from stead.builds.git_access import GitAccess
from stead.creation.creation import Creation
from stead.domains.domains import Domains
from stead.domains.names import Names
from stead.identity.accounts import Accounts
from stead.identity.identities import Identities
from stead.machines import Machines
from stead.networks.networks import Networks
from stead.repos.access import RepoAccess
from stead.repos.repos import Repos
from stead.repos.transfer.bundles import Bundles
from stead.shares import KeyedLimit
from stead.store.builds import BuildStore
from stead.store.machines import MachineStore
from stead.store.networks import VpcStore
from support.builds import Lines, unlimited
from support.internals import inside


@pytest.fixture(scope="module")
def lines() -> Lines:
    return Lines()


@pytest_asyncio.fixture(scope="module")
async def repos(machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Repos]:
    async with Repos.open(inside(machines).database, tmp_path_factory.mktemp("repos"), unlimited) as repos:
        yield repos


@pytest.fixture(scope="module")
def bundles(machines: Machines, repos: Repos) -> Bundles:
    return Bundles(
        repos, RepoAccess(inside(machines).database, repos), "https://git.example.org", "https://git.vms.org"
    )


@pytest_asyncio.fixture(scope="module")
async def builder(machines: Machines, lines: Lines, bundles: Bundles) -> AsyncIterator[Builder]:
    builder = Builder(machines, BuildStore(inside(machines).database), lines, bundles, linger=0)
    yield builder
    await builder.close()


@pytest_asyncio.fixture(scope="module")
async def creation(machines: Machines, builder: Builder, repos: Repos, lines: Lines) -> Creation:
    database, settings = inside(machines).database, inside(machines).settings

    async def owns(account: str, machine_id: str) -> bool:
        return (await machines.info(machine_id)).belongs_to(account)

    identities = Identities(database, owns)
    return Creation(
        settings,
        machines,
        builder,
        await Domains.open(database, Names.of(settings.zones), owns, unlimited),
        Networks(VpcStore(database), MachineStore(database), ()),
        GitAccess(identities, repos, RepoAccess(database, repos), settings.git_names),
        lines,
        KeyedLimit(),
    )


@pytest_asyncio.fixture
async def account(machines: Machines) -> AsyncIterator[str]:
    """An account whose VMs and snapshots are deleted after the test."""
    account = (await Accounts(inside(machines).database).create(str(uuid.uuid4()))).id
    yield account
    for info in await machines.list(account):
        await machines.delete(info.id, forget=True)
    for snapshot in await machines.snapshots.list(account):
        await machines.snapshots.delete(snapshot.id)
