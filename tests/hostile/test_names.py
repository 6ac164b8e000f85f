"""Names that one tenant maps take nothing from the resolver of the others."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from stead import addresses
from stead.edge import names
from stead.edge.names import GuestResolver
from stead.settings import Settings
from support.guest_dns import (
    NO_ERROR,
    PUBLIC,
    Answer,
    NetworkWithTwoVms,
    network_with_two_vms,
)
from support.waiting import until

pytestmark = pytest.mark.root


@pytest_asyncio.fixture(scope="module")
async def two_vms(settings: Settings) -> AsyncIterator[NetworkWithTwoVms]:
    async with network_with_two_vms(settings) as made:
        yield made


@pytest_asyncio.fixture
async def resolver(two_vms: NetworkWithTwoVms) -> AsyncIterator[GuestResolver]:
    async with GuestResolver.running(two_vms.settings, two_vms.network, ("style.dev",)) as made:
        yield made


async def test_mapping_a_wildcard_in_a_loop_loses_no_query(
    two_vms: NetworkWithTwoVms, resolver: GuestResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    # More often than the installation does it, so that some reloads happen during the test.
    monkeypatch.setattr(names, "_RELOAD_INTERVAL", 0.1)
    processes = two_vms.processes()
    published = 0

    async def attack() -> None:
        nonlocal published
        while True:
            await resolver.publish({f"*.x{published}.attacker.example"})
            published += 1
            await asyncio.sleep(0.005)

    attacking = asyncio.create_task(attack())
    try:
        rounds = 0
        while rounds < 200 or published < 50:
            rounds += 1
            own = await two_vms.ask_once("app.style.dev", guest=1)
            assert own == Answer(NO_ERROR, [addresses.GATEWAY])
            other = await two_vms.ask_once(f"name{rounds}.example.com", guest=1)
            assert other == Answer(NO_ERROR, [PUBLIC])
            # A VM may send 200 queries in a second.
            await asyncio.sleep(0.01)
    finally:
        attacking.cancel()
    assert two_vms.processes() == processes

    async def last_one_resolves() -> bool:
        name = f"any.x{published - 1}.attacker.example"
        return await two_vms.address_of(name) == addresses.GATEWAY

    await until(last_one_resolves, 60)
    assert await two_vms.address_of("any.x0.attacker.example") == PUBLIC


async def test_more_wildcards_than_fit_a_command_line_resolve(
    two_vms: NetworkWithTwoVms, resolver: GuestResolver
) -> None:
    processes = two_vms.processes()
    parent = ".".join(["a" * 63] * 3)
    wildcards = [f"*.w{number}.{parent}.example" for number in range(12_000)]
    assert sum(map(len, wildcards)) > 2 << 20  # what execve takes
    await resolver.publish(wildcards)

    async def resolves() -> bool:
        return await two_vms.address_of(f"any.w11999.{parent}.example") == addresses.GATEWAY

    await until(resolves, 60)
    assert await two_vms.ask("app.style.dev") == Answer(NO_ERROR, [addresses.GATEWAY])
    assert two_vms.processes() == processes
