"""Domains of two accounts."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from stead.domains.domains import Domains
from support.domain_stage import DomainStage, domain_stage


@pytest_asyncio.fixture
async def stage(tmp_path: Path) -> AsyncIterator[DomainStage]:
    async with domain_stage(tmp_path) as stage:
        yield stage


@pytest_asyncio.fixture
async def domains(stage: DomainStage) -> Domains:
    return await stage.open()


@pytest_asyncio.fixture
async def ours(stage: DomainStage) -> str:
    return (await stage.accounts.create("ours")).id


@pytest_asyncio.fixture
async def theirs(stage: DomainStage) -> str:
    return (await stage.accounts.create("theirs")).id
