"""Calls without a valid credential, by address of the client. VMs are in memory, the test is Caddy."""

import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from stead.api import admission
from stead.api.server import serving
from stead.shares import RateLimit
from stead.store.accounts import KeyStore
from support.api_calls import refused
from support.fake_api import FakeApi, fake_api

HERE, THERE = "198.51.100.7", "198.51.100.8"
BURST = 20

Client = Callable[..., httpx2.AsyncClient]


@pytest_asyncio.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApi]:
    """Its rates allow a burst, and then nothing: their clock stands."""
    monkeypatch.setattr(admission, "RateLimit", partial(RateLimit, clock=lambda: 0.0))
    async with fake_api(tmp_path, anonymous_rate=2) as api:
        yield api


@pytest_asyncio.fixture
async def client(api: FakeApi, tmp_path: Path) -> AsyncIterator[Client]:
    """Clients at an address: requests over a Unix socket are believed to come from Caddy."""
    path = str(tmp_path / "edge.sock")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    async with contextlib.AsyncExitStack() as stack:

        def of(address: str, caller: str = "nobody", **headers: str) -> httpx2.AsyncClient:
            return httpx2.AsyncClient(
                transport=httpx2.AsyncHTTPTransport(uds=path),
                base_url="http://stead.localhost",
                headers={"X-Forwarded-For": address} | api.callers[caller] | headers,
            )

        await stack.enter_async_context(serving(api.installation, [listening]))
        yield of


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hashes of API keys that were looked for in the database."""
    found: list[str] = []
    find = KeyStore.find_valid

    async def counted(self: KeyStore, key_hash: str) -> object:
        found.append(key_hash)
        return await find(self, key_hash)

    monkeypatch.setattr(KeyStore, "find_valid", counted)
    return found


def _made_up(number: int) -> dict[str, str]:
    return {"Authorization": f"Bearer stead_{number:043}"}


def _refs(repo: str) -> str:
    return f"/{repo}/info/refs?service=git-upload-pack"


async def test_requests_of_git_without_a_credential_are_counted_before_any_work(
    api: FakeApi, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = await api.installation.repos.create(api.account)
    looked = 0
    get = api.installation.repos.get

    async def counted(repo_id: str) -> object:
        nonlocal looked
        looked += 1
        return await get(repo_id)

    monkeypatch.setattr(api.installation.repos, "get", counted)
    async with client(HERE) as stranger, client(THERE) as other:
        answers = [await stranger.get(_refs(repo.id)) for _ in range(BURST + 5)]
        assert [each.status_code for each in answers[:BURST]] == [401] * BURST
        assert [each.status_code for each in answers[BURST:]] == [429] * 5
        assert int(answers[-1].headers["retry-after"]) >= 1
        assert looked == BURST
        assert (await other.get(_refs(repo.id))).status_code == 401


async def test_a_visitor_of_a_public_repository_is_counted_once(api: FakeApi, client: Client) -> None:
    repo = await api.installation.repos.create(api.account, public=True)
    async with client(HERE) as visitor:
        answers = [await visitor.get(_refs(repo.id)) for _ in range(BURST)]
        assert [each.status_code for each in answers] == [200] * BURST
        assert (await visitor.get(_refs(repo.id))).status_code == 429


@pytest.mark.parametrize("path", ["/v1/vms", _refs("00000000-0000-4000-8000-000000000000")])
async def test_made_up_keys_are_not_looked_for_without_end(
    client: Client, lookups: list[str], path: str
) -> None:
    async with client(HERE) as stranger, client(THERE, "owner") as victim:
        statuses = [
            (await stranger.get(path, headers=_made_up(number))).status_code for number in range(2 * BURST)
        ]
        assert statuses == [401] * BURST + [429] * BURST
        assert len(lookups) == BURST
        assert (await victim.get("/v1/vms")).status_code == 200


async def test_a_key_in_use_works_beside_a_flood_from_its_address(
    api: FakeApi, client: Client, lookups: list[str]
) -> None:
    """Also one that is revoked during the flood, which is then refused like made up ones."""
    foreign = api.callers["stranger"]
    async with client(HERE) as stranger, client(HERE, "owner") as known:
        assert (await known.get("/v1/vms")).status_code == 200
        for number in range(2 * BURST):
            await stranger.get("/v1/vms", headers=_made_up(number))
        assert (await known.get("/v1/vms")).status_code == 200
        answer = await stranger.get("/v1/vms", headers=foreign)
        body = refused(answer, 429, "SERVICE_UNAVAILABLE")
        assert "STEAD_ANONYMOUS_RATE" in body["message"]
        await api.installation.accounts.revoke_key(api.keys["owner"])
        assert (await known.get("/v1/vms")).status_code == 429
        before = len(lookups)
        assert (await known.get("/v1/vms")).status_code == 429
        assert len(lookups) == before


async def test_a_flood_through_a_proxy_on_this_host_locks_no_key_out(api: FakeApi) -> None:
    """All its clients have the address of the proxy."""
    async with api.http("nobody") as stranger, api.http() as owner:
        for number in range(2 * BURST):
            flooded = await stranger.get(f"{api.url}/v1/vms", headers=_made_up(number))
        assert flooded.status_code == 429
        assert (await owner.get(f"{api.url}/v1/vms")).status_code == 200
