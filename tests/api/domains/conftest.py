"""A site with VMs in memory; TXT records are those of `support.domain_calls.RECORDS`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stead.domains.verification import Verifier
from support.domain_calls import RECORDS, Caller, calling, lookup
from support.fake_site import FakeSite, fake_site


@pytest_asyncio.fixture(scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeSite]:
    async with fake_site(tmp_path_factory.mktemp("site")) as site:
        site.installation.domains._verifier = Verifier(lookup)
        yield site


@pytest_asyncio.fixture(autouse=True)
async def nothing_mapped(site: FakeSite) -> AsyncIterator[None]:
    yield
    domains = site.installation.domains
    for row in list(domains._routes.mappings.values()):
        await domains.unmap(row.account, row.domain)
    for owned in list(domains._routes.owned.values()):
        await domains.release(owned.account, owned.domain)
    for account in await site.installation.accounts.list():
        for pending in await domains.verifications(account.id):
            await domains.cancel(account.id, pending.domain, pending.code)
    RECORDS.clear()


@pytest_asyncio.fixture
async def ours(site: FakeSite) -> AsyncIterator[Caller]:
    async with calling(site) as caller:
        yield caller


@pytest_asyncio.fixture
async def theirs(site: FakeSite) -> AsyncIterator[Caller]:
    async with calling(site, "stranger") as caller:
        yield caller
