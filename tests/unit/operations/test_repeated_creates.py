"""Repeated creates of VMs over HTTP, on a host in memory: idempotency keys, `ifMissing`, and crashes."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from stead.api.app import create_app, with_middleware
from stead.installation import OpenedVms, open_parts
from stead.machines.records import Properties
from support.engine import audit
from support.fake_host import ServerCrashed
from support.fake_server import FakeServer
from support.waiting import until

KEY = {"Idempotency-Key": "8e03978e-40d5-43dd-bc93-6894a57f9324"}


@functools.cache
def _routes() -> FastAPI:
    """Made once: that takes longer than a test."""
    return create_app()


@contextlib.asynccontextmanager
async def served(server: FakeServer) -> AsyncIterator[httpx2.AsyncClient]:
    """The API over the engine, without a network."""
    async with open_parts(
        server.settings, server.database, OpenedVms(server.machines, server.host, server.store), None
    ) as here:
        account = await here.accounts.default()
        _, key = await here.accounts.create_key(account.id)
        routes = _routes()
        routes.state.installation = here
        app, _ = with_middleware(routes, here)
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app),
            base_url="http://stead.test",
            headers={"Authorization": f"Bearer {key}"},
        ) as http:
            yield http


async def vms(http: httpx2.AsyncClient) -> set[str]:
    return {vm["id"] for vm in (await http.get("/v1/vms")).json()["vms"]}


async def post(http: httpx2.AsyncClient, path: str, body: object, **headers: str) -> dict[str, Any]:
    answer = await http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_one_vm_one_fork_and_one_snapshot_for_a_key(server: FakeServer) -> None:
    async with served(server) as http:
        made = await asyncio.gather(*(post(http, "/v1/vms", {"name": "x"}, **KEY) for _ in range(5)))
        (vm,) = await vms(http)
        assert made == [made[0]] * 5 and made[0]["id"] == vm
        other = await http.post("/v1/vms", json={"name": "y"}, headers=KEY)
        assert (other.status_code, other.json()["code"]) == (422, "IDEMPOTENCY_KEY_REUSED")

        forking = {"Idempotency-Key": "fork"}
        forks = await asyncio.gather(*(post(http, f"/v1/vms/{vm}/fork", {}, **forking) for _ in range(3)))
        assert forks == [forks[0]] * 3 and len(await vms(http)) == 2
        saving = {"Idempotency-Key": "snapshot"}
        taken = [await post(http, f"/v1/vms/{vm}/snapshot", {}, **saving) for _ in range(3)]
        listed = (await http.get("/v1/vms/snapshots")).json()["snapshots"]
        assert [each["snapshotId"] for each in listed] == [taken[0]["snapshotId"]]
        assert taken == [taken[0]] * 3


async def test_if_missing_creates_one_vm_of_a_name(server: FakeServer) -> None:
    wanted = {"name": "x", "ifMissing": True}
    async with served(server) as http:
        made = await asyncio.gather(*(post(http, "/v1/vms", wanted) for _ in range(5)))
        (vm,) = await vms(http)
        assert {each["id"] for each in made} == {vm}
        assert sorted(each["created"] for each in made) == [False] * 4 + [True]
        assert (await http.post("/v1/vms", json={"name": "x"})).json()["created"] is True
        several = await http.post("/v1/vms", json=wanted)
        assert (several.status_code, several.json()["code"]) == (409, "NAME_NOT_UNIQUE")
        assert "2 VMs are named 'x'" in several.json()["message"]
        assert (await post(http, "/v1/vms", {"name": "y", "ifMissing": True}))["created"]
        nameless = await http.post("/v1/vms", json={"ifMissing": True})
        assert nameless.status_code == 400, nameless.text
        assert len(await vms(http)) == 3


KINDS = {
    "VM": ("/v1/vms", "/v1/vms", "vms", "id"),
    "fork": ("/v1/vms/{}/fork", "/v1/vms", "vms", "id"),
    "snapshot": ("/v1/vms/{}/snapshot", "/v1/vms/snapshots", "snapshots", "snapshotId"),
    "repository": ("/git/v1/repo", "/git/v1/repo", "repositories", "id"),
    "identity": ("/identity/v1/identities", "/identity/v1/identities", "identities", "id"),
    "VPC": ("/v1/vpcs", "/v1/vpcs", "vpcs", "vpcId"),
}
"""Where each is created and listed, and the keys of the list and of the id in it."""


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *(("VM", 9), ("fork", 9), ("snapshot", 5), ("repository", 1), ("identity", 1), ("VPC", 1)),
        *(pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("VM", "fork", "snapshot")),
    ],
)
async def test_a_crash_in_a_keyed_create_leaves_one_or_none(
    server: FakeServer, kind: str, every: int
) -> None:
    """The repeated call succeeds, a third one has its answer, and nothing was made twice."""
    parent = await server.machines.create(Properties(account=await default_account(server)))
    path, listed, items, id_key = KINDS[kind]
    path = path.format(parent.id)
    body = {"count": 2} if kind == "fork" else {}
    calls, crashed = 1, True
    while crashed:
        key = {"Idempotency-Key": f"{kind}-{calls}"}
        with contextlib.suppress(ServerCrashed):
            async with served(server) as http:
                server.host.crash_after(calls)
                with contextlib.suppress(ServerCrashed):
                    await http.post(path, json=body, headers=key)
        crashed = server.host.dead
        if crashed:
            await server.crash()
            await server.start()
        server.host.forget_faults()
        async with served(server) as http:
            first = await post(http, path, body, **key)
            assert await post(http, path, body, **key) == first
            made = {each[id_key] for each in (await http.get(listed)).json()[items]} - {parent.id}
            answered = first["forks"] if kind == "fork" else [first]
            assert made == {each.get("repoId", each.get(id_key)) for each in answered}
            assert len(made) == body.get("count", 1)
            for each in made:
                deleted = await http.delete(f"{listed}/{each}")
                assert deleted.status_code == 200, deleted.text
        await audit(server)
        calls += every
    assert calls > 2


async def ended(http: httpx2.AsyncClient, request: str) -> bool:
    return (await http.get(request)).status_code != 202


async def test_a_crash_in_a_background_create_is_answered_with_its_vm_or_503(server: FakeServer) -> None:
    """After any call on the way: 200 if the VM is there, 503 if there is none."""
    at_once = {"x-freestyle-background-after-secs": "0"}
    statuses = set[tuple[bool, int]]()
    calls, crashed = 1, True
    while crashed:
        request = ""
        async with contextlib.AsyncExitStack() as stack:
            # The rest of its stop fails in a server that has crashed.
            stack.enter_context(contextlib.suppress(ServerCrashed))
            http = await stack.enter_async_context(served(server))
            server.host.crash_after(calls)
            accepted = await http.post("/v1/vms", json={}, headers=at_once)
            if accepted.status_code == 202:
                request = f"/auth/v1/background-requests/{accepted.json()['requestId']}"
                await until(functools.partial(ended, http, request), 60)
        crashed = server.host.dead
        if crashed:
            await server.crash()
            await server.start()
        server.host.forget_faults()
        async with served(server) as http:
            made = await vms(http)
            if request:
                answer = await http.get(request)
                statuses.add((crashed, answer.status_code))
                assert made == ({answer.json()["id"]} if answer.status_code == 200 else set())
            for vm in made:
                assert (await http.delete(f"/v1/vms/{vm}")).status_code == 200
        await audit(server)
        calls += 1
    assert statuses == {(True, 200), (True, 503), (False, 200)}


async def default_account(server: FakeServer) -> str:
    async with open_parts(
        server.settings, server.database, OpenedVms(server.machines, server.host, server.store), None
    ) as here:
        return (await here.accounts.default()).id
