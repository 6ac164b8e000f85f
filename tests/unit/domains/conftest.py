"""Domains of two accounts."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from stead.domains.domains import Domains
from support.domains_with_dns import DomainsWithDns, domains_with_dns


@pytest_asyncio.fixture
async def domains_dns(tmp_path: Path) -> AsyncIterator[DomainsWithDns]:
    async with domains_with_dns(tmp_path) as domains_dns:
        yield domains_dns


@pytest_asyncio.fixture
async def domains(domains_dns: DomainsWithDns) -> Domains:
    return await domains_dns.open()


@pytest_asyncio.fixture
async def ours(domains_dns: DomainsWithDns) -> str:
    return (await domains_dns.accounts.create("ours")).id


@pytest_asyncio.fixture
async def theirs(domains_dns: DomainsWithDns) -> str:
    return (await domains_dns.accounts.create("theirs")).id
