"""Limits of the server on calls and creates in progress, over VMs in memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from support.api_calls import refused
from support.fake_api import FakeApi, fake_api
from support.waiting import until

BACKGROUND = {"x-freestyle-background-after-secs": "5"}


@pytest_asyncio.fixture
async def api(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path, max_calls=16) as opened:
        yield opened


async def test_calls_over_the_share_of_an_account_are_refused(api: FakeApi) -> None:
    """A quarter of the places. Other accounts, and health checks, are served meanwhile."""
    vms = f"{api.url}/v1/vms"
    async with api.http() as http:
        waiting = [asyncio.create_task(http.post("/await")) for _ in range(4)]

        async def refuses() -> bool:
            return (await http.get(vms)).status_code == 503

        await until(refuses, 60)
        for answer in await asyncio.gather(*(http.get(vms) for _ in range(3))):
            refused(answer, 503, "SERVICE_UNAVAILABLE")
            assert int(answer.headers["retry-after"]) >= 1
        async with api.http("stranger") as stranger:
            assert (await stranger.get(vms)).status_code == 200
        assert (await http.get(f"{api.url}/healthz")).status_code == 200
        assert not any(each.done() for each in waiting)
        await api.installation.machines.kill(api.vm)
        ended = await asyncio.gather(*waiting)
        assert [each.status_code for each in ended] == [200] * 4
        assert (await http.get(vms)).status_code == 200


async def test_calls_over_the_rate_of_an_account_or_an_address_are_refused(tmp_path: Path) -> None:
    """Ten seconds of the rate at once. Other accounts, and health checks, are served meanwhile."""
    async with fake_api(tmp_path, call_rate=1, anonymous_rate=1) as api:
        vms, jwks = f"{api.url}/v1/vms", f"{api.url}/.well-known/jwks.json"
        for caller, path in (("owner", vms), ("nobody", jwks), ("not a key", vms)):
            async with api.http(caller) as http:
                answers = [await http.get(path) for _ in range(15)]
            body = refused(answers[-1], 429, "SERVICE_UNAVAILABLE")
            assert "too many requests a second" in body["message"]
            assert int(answers[-1].headers["retry-after"]) >= 1
        async with api.http("stranger") as stranger, api.http("nobody") as nobody:
            assert (await stranger.get(vms)).status_code == 200
            assert (await nobody.get(f"{api.url}/healthz")).status_code == 200


@pytest_asyncio.fixture
async def few_creates(tmp_path: Path) -> AsyncIterator[FakeApi]:
    async with fake_api(tmp_path, max_creations=8) as opened:
        yield opened


async def test_concurrent_creates_are_bounded(few_creates: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """An account creates two VMs at a time: eight more wait, and the next is refused at once."""
    api = few_creates
    dial, begun, released = api.world.dial, list[str](), asyncio.Event()

    async def dial_later(place: object) -> object:
        begun.append(str(place))
        await released.wait()
        return await dial(place)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(api.world, "dial", dial_later)
    places = api.installation.creation.places
    vms = f"{api.url}/v1/vms"
    async with api.http() as http:
        creating = [asyncio.create_task(http.post(vms)) for _ in range(10)]
        await until(lambda: len(begun) >= 2 and places.waiting == 8, 60)
        for headers in ({}, BACKGROUND):
            answer = await http.post(vms, headers=headers)
            body = refused(answer, 503, "SERVICE_UNAVAILABLE")
            assert "too many VMs are being created: at most 2 for an account and 8 in all" in body["message"]
            assert body["retryable"] is True
            assert answer.headers["retry-after"] == "5"
        assert len(begun) == 2 and not any(each.done() for each in creating)
        released.set()
        assert [each.status_code for each in await asyncio.gather(*creating)] == [200] * 10
        assert (await http.post(vms)).status_code == 200
        assert (await http.get(vms)).json()["totalCount"] == 12


async def test_background_requests_of_an_account_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_api(tmp_path, max_background=8) as api:
        released = asyncio.Event()
        create = api.installation.machines.create

        async def create_later(*arguments: object, **options: object) -> object:
            await released.wait()
            return await create(*arguments, **options)  # type: ignore[arg-type]  # passed on as they came

        monkeypatch.setattr(api.installation.machines, "create", create_later)
        vms, at_once = f"{api.url}/v1/vms", {"x-freestyle-background-after-secs": "0"}
        async with api.http() as ours, api.http("stranger") as theirs:
            accepted = [await ours.post(vms, headers=at_once) for _ in range(2)]
            assert [each.status_code for each in accepted] == [202, 202]
            body = refused(await ours.post(vms, headers=at_once), 503, "SERVICE_UNAVAILABLE")
            assert "too many background requests are in progress: at most 2" in body["message"]
            assert (await theirs.post(vms, headers=at_once)).status_code == 202
            released.set()

            async def room() -> bool:
                return (await ours.post(vms, headers=at_once)).status_code == 202

            await until(room, 60)
