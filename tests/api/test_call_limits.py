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
    async with fake_api(tmp_path, max_calls=4, max_creations=2) as opened:
        yield opened


async def test_calls_over_the_limit_are_refused(api: FakeApi) -> None:
    vms = f"{api.url}/v1/vms"
    async with api.http() as http:
        waiting = [asyncio.create_task(http.post("/await")) for _ in range(4)]

        async def refuses() -> bool:
            return (await http.get(vms)).status_code == 503

        await until(refuses, 60)
        for answer in await asyncio.gather(*(http.get(vms) for _ in range(3))):
            refused(answer, 503, "SERVICE_UNAVAILABLE")
            assert int(answer.headers["retry-after"]) >= 1
        assert not any(each.done() for each in waiting)
        await api.installation.machines.kill(api.vm)
        ended = await asyncio.gather(*waiting)
        assert [each.status_code for each in ended] == [200] * 4
        assert (await http.get(vms)).status_code == 200


async def test_concurrent_creates_are_bounded(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two creates wait for their guests: a third is refused until one of them is done."""
    dial, begun, released = api.world.dial, list[str](), asyncio.Event()

    async def dial_later(place: object) -> object:
        begun.append(str(place))
        await released.wait()
        return await dial(place)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(api.world, "dial", dial_later)
    vms = f"{api.url}/v1/vms"
    async with api.http() as http:
        creating = [asyncio.create_task(http.post(vms)) for _ in range(2)]
        await until(lambda: len(begun) >= 2, 60)
        for headers in ({}, BACKGROUND):
            answer = await http.post(vms, headers=headers)
            assert (
                "2 VMs and snapshots are being created"
                in refused(answer, 503, "SERVICE_UNAVAILABLE")["message"]
            )
            assert answer.headers["retry-after"] == "5"
        assert not any(each.done() for each in creating)
        released.set()
        assert [each.status_code for each in await asyncio.gather(*creating)] == [200, 200]
        assert (await http.post(vms)).status_code == 200
        assert (await http.get(vms)).json()["totalCount"] == 4
