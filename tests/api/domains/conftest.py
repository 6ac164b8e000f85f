"""A site with VMs in memory; TXT records are those of `support.domain_calls.RECORDS`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stead.domains.verification import Verifier
from support.domain_calls import RECORDS, Caller, calling, lookup
from support.fake_api import FakeApi, fake_api


@pytest_asyncio.fixture(scope="module")
async def api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path_factory.mktemp("site")) as api:
        api.installation.domains._verifier = Verifier(lookup)
        yield api


@pytest_asyncio.fixture(autouse=True)
async def nothing_mapped(api: FakeApi) -> AsyncIterator[None]:
    yield
    domains = api.installation.domains
    for row in list(domains._routes.mappings.values()):
        await domains.unmap(row.account, row.domain)
    for owned in list(domains._routes.owned.values()):
        await domains.release(owned.account, owned.domain)
    for account in await api.installation.accounts.list():
        for pending in await domains.verifications(account.id):
            await domains.cancel(account.id, pending.domain, pending.code)
    RECORDS.clear()


@pytest_asyncio.fixture
async def ours(api: FakeApi) -> AsyncIterator[Caller]:
    async with calling(api) as caller:
        yield caller


@pytest_asyncio.fixture
async def theirs(api: FakeApi) -> AsyncIterator[Caller]:
    async with calling(api, "stranger") as caller:
        yield caller
