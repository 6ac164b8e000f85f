"""Creates with `ifMissing` and with idempotency keys, over HTTP and with the SDK, without VMs."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from stead import AsyncStead
from stead.sdk import errors
from support.git_hosting import RepoServer, served
from support.scripted_server import Drop, Reply
from support.sdk_calls import BUSY, CREATED, VM
from support.sdk_clients import Client, attempt
from support.serve_process import client_of

KINDS = {
    "/git/v1/repo": ("repositories", "repoId"),
    "/identity/v1/identities": ("identities", "id"),
    "/v1/vpcs": ("vpcs", "vpcId"),
}


@pytest_asyncio.fixture
async def repo_server(tmp_path: Path) -> AsyncIterator[RepoServer]:
    async with served(tmp_path) as repo_server:
        yield repo_server


@pytest.mark.parametrize("path", KINDS)
async def test_if_missing_creates_one_of_a_name(repo_server: RepoServer, path: str) -> None:
    items, id_key = KINDS[path]
    wanted = {"name": "x", "ifMissing": True}
    async with (
        client_of(repo_server.url, repo_server.key) as http,
        client_of(repo_server.url, repo_server.their_key) as theirs,
    ):

        async def ask(client: httpx2.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        made = await asyncio.gather(*(ask(http, wanted) for _ in range(5)))
        assert len({each[id_key] for each in made}) == 1
        assert sorted(each["created"] for each in made) == [False] * 4 + [True]
        assert (await ask(theirs, wanted))["created"], "names of other accounts do not count"
        assert (await ask(http, {"name": "x"}))["created"]
        several = await http.post(path, json=wanted)
        assert (several.status_code, several.json()["code"]) == (409, "NAME_NOT_UNIQUE")
        assert (await http.post(path, json={"ifMissing": True})).status_code == 400
        assert len((await http.get(path)).json()[items]) == 2


@pytest.mark.parametrize("path", KINDS)
async def test_idempotency_key_creates_once(repo_server: RepoServer, path: str) -> None:
    items, id_key = KINDS[path]
    key = {"Idempotency-Key": "one"}
    async with client_of(repo_server.url, repo_server.key) as http:
        made = await asyncio.gather(*(http.post(path, json={"name": "x"}, headers=key) for _ in range(5)))
        assert {each.status_code for each in made} == {200}
        assert len({each.text for each in made}) == 1
        other = await http.post(path, json={"name": "y"}, headers=key)
        assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")
        invalid = await http.post(path, json={"name": "x"}, headers={"Idempotency-Key": '""'})
        assert invalid.status_code == 400
        assert [each["name"] for each in (await http.get(path)).json()[items]] == ["x"]
        assert made[0].json()[id_key]


async def test_sdk_says_whether_it_created(repo_server: RepoServer) -> None:
    async with AsyncStead(api_key=repo_server.key, base_url=repo_server.url) as stead:
        for create in (stead.git.repos.create, stead.identities.create, stead.vpcs.create):
            first = await create(name="x", if_missing=True)
            again = await create(name="x", if_missing=True)
            assert (first.created, again.created, first.id) == (True, False, again.id)
            keyed = [await create(name="y", idempotency_key=create.__qualname__) for _ in range(2)]
            assert keyed[0].id == keyed[1].id != first.id
            with pytest.raises(errors.IdempotencyKeyReused):
                await create(name="z", idempotency_key=create.__qualname__)
            await create(name="x")
            with pytest.raises(errors.NameNotUnique):
                await create(name="x", if_missing=True)


@pytest.mark.parametrize("step", [Drop(), BUSY, Reply(502, b"<html>bad gateway</html>")])
async def test_sdk_retries_creates_that_may_be_repeated(client: Client, step: Any) -> None:
    vm, seen = await attempt(client, lambda stead: stead.vms.create(idempotency_key="k"), step, CREATED)
    assert vm.id == VM
    assert [request.headers["idempotency-key"] for request in seen] == ["k", "k"]
    forks = Reply(content={"vmId": VM, "forks": [{"id": VM}]})
    _, seen = await attempt(client, lambda stead: stead.vms.ref(VM).fork(idempotency_key="k"), step, forks)
    assert len(seen) == 2
    existing = Reply(content={"id": VM, "domains": [], "created": False})
    vm, seen = await attempt(
        client, lambda stead: stead.vms.create(name="x", if_missing=True), step, existing
    )
    assert len(seen) == 2 and vm.created is False
