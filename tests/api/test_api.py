"""The HTTP API: answers, errors, long calls, disconnects, streams, and a server stop."""

import asyncio
import contextlib
import inspect
import json
import os
import signal
import socket
import tarfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import ValidationError

from stead.api import calls as calls_module
from stead.api import server as server_module
from stead.api.app import create_app
from stead.api.background import BackgroundRequests
from stead.api.callers import current_caller, owned_vm
from stead.api.parts import limit_creations
from stead.api.server import running
from stead.api.wire import Wire
from stead.api.wire.guests import Exec
from stead.api.wire.vms import Fork, PersistenceModel, Resize, Start
from stead.errors import HostError
from stead.machines import Ephemeral, Machine, Machines, SnapshotInfo, State
from stead.settings import Settings
from stead.store.database import open_database
from stead.store.requests import RequestRow, RequestStore
from support.installations import Server, another_installation
from support.serve_process import client_of
from support.waiting import until

TRACE = "x-freestyle-trace-id"


@pytest_asyncio.fixture(scope="module")
async def http(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    async with client_of(server.url, server.key) as client:
        yield client


@pytest_asyncio.fixture(scope="module")
async def vm(server: Server) -> AsyncIterator[Machine]:
    """One VM of the tests' account, shared by the tests of this module."""
    machine = await server.installation.machines.create(account=server.account, name="shared")
    yield machine
    await machine.delete()


@contextlib.asynccontextmanager
async def another_account(server: Server, name: str, **limits: int) -> AsyncIterator[httpx2.AsyncClient]:
    account = await server.installation.accounts.create(name, limits)
    _, key = await server.installation.accounts.create_key(account.id)
    async with client_of(server.url, key) as client:
        yield client
        for each in (await client.get("/v1/vms")).json()["vms"]:
            assert (await client.delete(f"/v1/vms/{each['id']}")).status_code == 200


def refused(answer: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    """Checks the form of an error answer and returns its body."""
    body: dict[str, Any] = answer.json()
    assert (answer.status_code, body["code"]) == (status, code), answer.text
    assert body["message"] == body["description"]
    assert answer.headers[TRACE]
    return body


# Errors on every path


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nothing/here", b"", 404, "NOT_FOUND"),
        ("PATCH", "/v1/vms", b"", 405, "BAD_REQUEST"),
        ("POST", "/v1/vms", b"{", 400, "CREATE_VM_BAD_REQUEST"),
        ("POST", "/v1/vms", b"[]", 400, "CREATE_VM_BAD_REQUEST"),
        ("POST", "/v1/vms", b'{"name": 7}', 400, "CREATE_VM_BAD_REQUEST"),
        ("POST", "/v1/vms", b'{"domains": [{"domain": "a.example"}]}', 400, "CREATE_VM_BAD_REQUEST"),
        ("POST", "/v1/vms", b'{"nics": [{"vpc": "x"}]}', 400, "CREATE_VM_BAD_REQUEST"),
        ("POST", "/v1/vms", b'{"idleTimeoutSeconds": -1}', 400, "VALIDATION_ERROR"),
        ("POST", "/v1/vms", b'{"snapshotId": "sc-nobodys"}', 404, "SNAPSHOT_NOT_FOUND"),
        ("POST", "/v1/vms/snapshots", b"", 400, "CREATE_SNAPSHOT_BAD_REQUEST"),
        ("POST", "/v1/vms/nobodys/fork", b'{"count": 0}', 404, "VM_NOT_FOUND"),
        ("GET", "/v1/vms?limit=-1", b"", 400, "INVALID_REQUEST"),
        ("GET", "/observability/v1/logs?startTime=yesterday", b"", 400, "INVALID_QUERY"),
        ("GET", "/observability/v1/logs?pageToken=%21", b"", 400, "INVALID_QUERY"),
        ("GET", "/auth/v1/background-requests/ri-nobodys", b"", 404, "NOT_FOUND"),
        ("POST", "/execute/v3/script", b'{"script": "1"}', 404, "NOT_FOUND"),
        ("GET", "/git/v1/nothing", b"", 404, "NOT_FOUND"),
    ],
)
async def test_every_error_has_a_code_a_message_and_a_trace_id(
    http: httpx2.AsyncClient, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    headers = {"Content-Type": "application/json"} if content else {}
    refused(await http.request(method, path, content=content, headers=headers), status, code)


async def test_malformed_http_gets_a_json_error(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01 hello\r\n\r\n")
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["code"] == "BAD_REQUEST"
    writer.close()
    await writer.wait_closed()


async def test_too_large_body_is_refused_before_it_is_read(
    http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "MAX_BODY", 1000)
    body = refused(await http.post("/v1/vms", json={"name": "x" * 2000}), 413, "BAD_REQUEST")
    assert "too large" in body["message"]

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 100

    refused(await http.post("/v1/vms", content=chunks()), 413, "BAD_REQUEST")
    disguised = {"Content-Type": "application/octet-stream"}
    refused(await http.post("/v1/vms", content=b" " * 2000, headers=disguised), 413, "BAD_REQUEST")


async def test_body_without_credentials_is_not_read(server: Server) -> None:
    """A call without a key is refused before its body has arrived."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/vms HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert answer.startswith(b"HTTP/1.1 401")
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_unexpected_exception_does_not_leak_details(
    server: Server, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(server.installation.machines, "list", broken)
    answer = await http.get("/v1/vms")
    refused(answer, 500, "INTERNAL")
    assert "secret" not in answer.text


async def test_calls_over_the_limit_are_refused(server: Server, vm: Machine) -> None:
    settings = server.installation.settings.replace(max_calls=2, listen="127.0.0.1:0")
    async with (
        running(settings, replace(server.installation, settings=settings)) as url,
        client_of(url, server.key) as http,
    ):
        path, body = f"/v1/vms/{vm.id}/exec-await", {"command": "sleep 2"}
        answers = await asyncio.gather(*(http.post(path, json=body) for _ in range(5)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200, 200, 503, 503, 503]
        for answer in answers:
            if answer.status_code == 503:
                refused(answer, 503, "SERVICE_UNAVAILABLE")
                assert int(answer.headers["retry-after"]) >= 1


async def test_concurrent_creates_are_bounded(server: Server) -> None:
    installation = replace(server.installation, creations=limit_creations(0))
    settings = server.installation.settings.replace(listen="127.0.0.1:0")
    async with running(settings, installation) as url, client_of(url, server.key) as http:
        refused(await http.post("/v1/vms"), 503, "SERVICE_UNAVAILABLE")
        again = await http.post("/v1/vms", headers={"x-freestyle-background-after-secs": "5"})
        refused(again, 503, "SERVICE_UNAVAILABLE")


# Clients that leave, and long calls


@contextlib.asynccontextmanager
async def asking(server: Server, path: str, body: object) -> AsyncIterator[None]:
    """A request whose client disconnects at the end of the block, before the answer."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    try:
        yield
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("recorded", [False, True], ids=["at once", "with a row"])
async def test_disconnect_during_create_leaves_no_vm(
    server: Server, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """The client disconnects when the server has begun to create a VM, or has stored a row of it."""
    store, builder = server.installation.machines.journal.store, server.installation.builder
    build, begun, ended = builder.create_machine, asyncio.Event(), asyncio.Event()

    async def create(*arguments: Any, **options: Any) -> Machine:
        begun.set()
        try:
            machine: Machine = await build(*arguments, **options)
        finally:
            ended.set()
        return machine

    async def rows() -> set[str]:
        return {row.id for row in await store.list(account=server.account)}

    async def more() -> bool:
        return await rows() > before

    async def gone() -> bool:
        return await rows() == before

    before = await rows()
    monkeypatch.setattr(builder, "create_machine", create)
    async with asking(server, "/v1/vms", {}):
        await begun.wait()
        if recorded:
            await until(more, 60)
    await ended.wait()
    await until(gone, 60)


async def test_undelivered_create_is_rolled_back(
    server: Server, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The VM was created and the answer on its way when the client disconnected."""
    machines = server.installation.machines
    before = {info.id for info in await machines.list(server.account)}
    build = server.installation.builder.create_machine
    made: list[str] = []
    leaving = asyncio.Event()

    async def create_and_wait(*arguments: Any, **options: Any) -> Machine:
        machine: Machine = await build(*arguments, **options)
        made.append(machine.id)
        leaving.set()
        # Until the connection is gone, whether that has been noticed or not.
        await asyncio.sleep(0.02)
        return machine

    async def gone() -> bool:
        return {info.id for info in await machines.list(server.account)} == before

    monkeypatch.setattr(server.installation.builder, "create_machine", create_and_wait)
    settings = server.installation.settings.replace(listen="127.0.0.1:0")
    async with running(settings, server.installation) as url:
        async with asking(replace(server, url=url), "/v1/vms", {}):
            await leaving.wait()
        await until(gone, 60)
    assert len(made) == 1


async def test_undelivered_snapshot_is_deleted(
    server: Server, vm: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot was complete when the client left: only the answer was still to be sent."""
    machines = server.installation.machines
    before = {info.id for info in await machines.snapshots.list(server.account)}
    take = machines.snapshot
    taken: list[str] = []
    complete = asyncio.Event()

    async def take_and_wait(*arguments: Any, **options: Any) -> SnapshotInfo:
        info: SnapshotInfo = await take(*arguments, **options)
        taken.append(info.id)
        complete.set()
        await asyncio.sleep(0.02)
        return info

    async def gone() -> bool:
        return {info.id for info in await machines.snapshots.list(server.account)} == before

    monkeypatch.setattr(machines, "snapshot", take_and_wait)
    settings = server.installation.settings.replace(listen="127.0.0.1:0")
    async with running(settings, server.installation) as url:
        path = f"/v1/vms/{vm.id}/snapshot"
        async with asking(replace(server, url=url), path, {}):
            await complete.wait()
        await until(gone, 60)
    assert len(taken) == 1


async def runs(vm: Machine, command: str) -> bool:
    return (await vm.exec(f"pgrep -fx '{command}'")).ok


async def ended(vm: Machine, command: str) -> bool:
    return not await runs(vm, command)


async def test_command_is_killed_when_its_client_disconnects(server: Server, vm: Machine) -> None:
    command = "sleep 4321"
    async with asking(server, f"/v1/vms/{vm.id}/exec-await", {"command": command}):
        await until(lambda: runs(vm, command), 30)
    await until(lambda: ended(vm, command), 30)


async def test_slow_calls_send_102_processing(
    server: Server, vm: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "_PROCESSING_AFTER", 0.2)
    monkeypatch.setattr(calls_module, "_PROCESSING_EVERY", 0.2)

    async def heard(agent: str) -> bytes:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"command": "sleep 2; exit 7"}'
        head = f"POST /v1/vms/{vm.id}/exec-await HTTP/1.1\r\nHost: x\r\nUser-Agent: {agent}\r\n"
        head += f"Authorization: Bearer {server.key}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        text = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        await writer.wait_closed()
        return text

    told = await heard("freestyle-sdk-ts/0.1.0")
    assert told.count(b"HTTP/1.1 102 Processing\r\n\r\n") >= 2
    assert told.count(b"HTTP/1.1 200 OK") == 1
    assert b'"statusCode":7' in told
    assert b"102" not in (await heard("curl/8")).partition(b"\r\n\r\n")[0]


# Work in the background


async def test_long_create_continues_in_the_background(server: Server, http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/vms", headers={"x-freestyle-background-after-secs": "0"})
    assert answer.status_code == 202
    request = answer.headers["x-freestyle-background-request-id"]
    assert answer.json() == {"requestId": request, "status": "pending"}
    path = f"/auth/v1/background-requests/{request}"
    async with another_account(server, "curious") as stranger:
        refused(await stranger.get(path), 404, "NOT_FOUND")

    async def done() -> bool:
        return (await http.get(path)).status_code != 202

    await until(done, 60)
    result = (await http.get(path)).json()
    assert result["domains"] == []
    assert (await http.get(path)).json() == result
    assert (await http.get(f"/v1/vms/{result['id']}")).json()["state"] == "running"

    async def logged() -> bool:
        logs = (await http.get(f"/observability/v1/logs?requestId={request}")).json()["logs"]
        return any(line["message"].endswith(" created") for line in logs)

    await until(logged, 20)
    await http.delete(f"/v1/vms/{result['id']}")


async def test_quick_create_is_answered_directly(http: httpx2.AsyncClient) -> None:
    answer = await http.post("/v1/vms", headers={"x-freestyle-background-after-secs": "100"})
    assert answer.status_code == 200
    await http.delete(f"/v1/vms/{answer.json()['id']}")


async def test_background_failure_is_returned(http: httpx2.AsyncClient) -> None:
    service = {"name": "broken", "mode": "oneshot", "exec": ["/bin/sh -c 'echo why; exit 3'"]}
    answer = await http.post(
        "/v1/vms",
        json={"systemd": {"services": [service]}},
        headers={"x-freestyle-background-after-secs": "0"},
    )
    path = f"/auth/v1/background-requests/{answer.json()['requestId']}"

    async def done() -> bool:
        return (await http.get(path)).status_code != 202

    await until(done, 60)
    body = refused(await http.get(path), 500, "VM_SETUP_FAILED")
    assert "why" in json.dumps(body["diagnostics"]["failedServiceLogs"])
    assert body["snapshotId"].startswith("sc-")
    await http.delete(f"/v1/vms/snapshots/{body['snapshotId']}")


async def test_background_requests_survive_a_crash(tmp_path: Path) -> None:
    """A request that had its result is answered with it; others get an error that says to retry."""
    database = await open_database(tmp_path / "stead.db")
    store = RequestStore(database)
    for number in (1, 2):
        await store.insert(RequestRow(f"ri-{number}", "me"))

    async def made_for(request: str) -> dict[str, Any] | None:
        return {"id": "it"} if request == "ri-1" else None

    background = BackgroundRequests(store)
    await background.recover(made_for)
    found = await background.result("me", "ri-1")
    assert (found.status_code, json.loads(bytes(found.body))) == (200, {"id": "it"})
    lost = await background.result("me", "ri-2")
    assert (lost.status_code, json.loads(bytes(lost.body))["code"]) == (503, "SERVICE_UNAVAILABLE")
    await database.dispose()


# The server's end


async def test_calls_finish_within_the_grace_period_of_a_stop(server: Server, vm: Machine) -> None:
    """The command ends when the server already refuses new connections."""
    settings = server.installation.settings.replace(listen="127.0.0.1:0")
    command = "touch /run/begun; until [ -e /run/end ]; do sleep 0.2; done; echo done"

    async def begun() -> bool:
        return (await vm.exec("test -e /run/begun")).ok

    async def refuses() -> bool:
        try:
            _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        except ConnectionError:
            return True
        writer.close()
        return False

    async def end_during_the_stop() -> None:
        await until(refuses, 30)
        await vm.exec("touch /run/end")

    async with running(settings, server.installation) as url:
        http = client_of(url, server.key)
        call = asyncio.create_task(http.post(f"/v1/vms/{vm.id}/exec-await", json={"command": command}))
        await until(begun, 30)
        ending = asyncio.create_task(end_during_the_stop())
    await ending
    assert (await call).json()["stdout"] == "done\n"
    await http.aclose()


async def test_calls_over_the_grace_period_get_an_error_without_retry_after(
    server: Server, vm: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_GRACE", 0.3)
    settings = server.installation.settings.replace(listen="127.0.0.1:0")
    async with running(settings, server.installation) as url:
        http = client_of(url, server.key)
        call = asyncio.create_task(http.post(f"/v1/vms/{vm.id}/exec-await", json={"command": "sleep 600"}))
        await until(lambda: runs(vm, "sleep 600"), 30)
    answer = await call
    body = refused(answer, 503, "SERVICE_UNAVAILABLE")
    # The command has run: a client that took this for an invitation to retry would run it twice.
    assert "retry-after" not in answer.headers
    assert body["retryable"] is False
    await http.aclose()
    assert (await vm.info()).state is State.RUNNING


async def test_exec_stream_ends_with_an_error_event_when_the_server_stops(
    server: Server, vm: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunked response ends properly, after an event that says why; the command is killed."""
    monkeypatch.setattr(server_module, "STOP_GRACE", 0.3)
    settings = server.installation.settings.replace(listen="127.0.0.1:0")
    async with contextlib.AsyncExitStack() as stack:
        serving = running(settings, server.installation)
        http = await stack.enter_async_context(client_of(await serving.__aenter__(), server.key))
        command = {"command": "echo begun; exec sleep 4321"}
        answer = await stack.enter_async_context(
            http.stream("POST", f"/v1/vms/{vm.id}/exec-stream", json=command)
        )
        lines = answer.aiter_lines()
        assert json.loads(await anext(lines))["data"] == "YmVndW4K"
        await serving.__aexit__(None, None, None)
        # httpx raises unless the last chunk has arrived.
        rest = [json.loads(line) async for line in lines]
    assert [(event["type"], event["code"]) for event in rest] == [("error", "SERVICE_UNAVAILABLE")]
    assert "stopping" in rest[0]["message"]
    await until(lambda: ended(vm, "sleep 4321"), 30)


async def test_file_watch_does_not_delay_a_stop(
    server: Server, vm: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STOP_GRACE", 3600.0)  # a stop that waits for it does not end
    settings = server.installation.settings.replace(listen="127.0.0.1:0")
    async with contextlib.AsyncExitStack() as stack:
        serving = running(settings, server.installation)
        http = await stack.enter_async_context(client_of(await serving.__aenter__(), server.key))
        answer = await stack.enter_async_context(http.stream("POST", f"/v1/vms/{vm.id}/watch-files"))
        lines = answer.aiter_lines()
        await vm.exec("touch /srv/seen")
        assert "/srv/seen" in await anext(lines)
        await serving.__aexit__(None, None, None)
        *_, last = [line async for line in lines]
        assert json.loads(last)["type"] == "error"


# Machines


async def test_create_applies_its_options_and_null_differs_from_missing(http: httpx2.AsyncClient) -> None:
    """A null idle timeout means never; a missing one means the default."""
    body = {
        "name": "mine",
        "idleTimeoutSeconds": 600,
        "activityThresholdBytes": 100,
        "workdir": "/srv",
        "persistence": {"type": "sticky", "priority": 3},
        "someKeyOfTomorrow": True,
    }
    created = (await http.post("/v1/vms", json=body)).json()
    path = f"/v1/vms/{created['id']}"
    try:
        details = (await http.get(path)).json()
        assert details["name"] == "mine"
        assert details["idleTimeoutSeconds"] == 600
        assert details["activityThresholdBytes"] == 100
        assert details["persistence"] == {"type": "sticky", "priority": 3, "deleteEvent": None}
        assert details["sizing"] == {"vcpuCount": 2, "memSizeMib": 512, "rootfsSizeMb": 20480}
        where = await http.post(f"{path}/exec-await", json={"command": "pwd"})
        assert where.json()["stdout"] == "/srv\n"
        await http.post(f"{path}/start", json={"idleTimeoutSeconds": None})
        assert (await http.get(path)).json()["idleTimeoutSeconds"] is None
        await http.post(f"{path}/start", json={})
        assert (await http.get(path)).json()["idleTimeoutSeconds"] is None
    finally:
        await http.delete(path)
    refused(await http.get(path), 404, "VM_NOT_FOUND")
    refused(await http.delete(path), 404, "VM_NOT_FOUND")


async def test_vm_list_filters_and_pages(http: httpx2.AsyncClient, vm: Machine) -> None:
    whole = (await http.get("/v1/vms")).json()
    assert vm.id in [each["id"] for each in whole["vms"]]
    assert len(whole["vms"]) == whole["totalCount"]
    row = next(each for each in whole["vms"] if each["id"] == vm.id)
    assert row["address"] == (await http.get(f"/v1/vms/{vm.id}")).json()["address"]
    assert (await http.get("/v1/vms?limit=0")).json()["vms"] == []
    assert [each["id"] for each in (await http.get("/v1/vms?search=SHARED")).json()["vms"]] == [vm.id]
    assert (await http.get("/v1/vms?search=nosuchthing")).json()["vms"] == []
    stopped = (await http.get("/v1/vms?vmState=stopped")).json()
    assert vm.id not in [each["id"] for each in stopped["vms"]]
    assert stopped["runningCount"] == whole["runningCount"]


async def test_rename_changes_and_removes_the_name(http: httpx2.AsyncClient, vm: Machine) -> None:
    path = f"/v1/vms/{vm.id}"
    renamed = (await http.patch(path, json={"name": "other"})).json()
    assert renamed["name"] == "other"
    assert renamed == (await http.get(path)).json()
    assert (await http.patch(path, json={"name": None})).json()["name"] is None
    assert (await http.patch(path, json={"name": "shared"})).json()["name"] == "shared"
    for wrong in ({}, {"name": ""}, {"name": "a\nb"}, {"name": 7}):
        refused(await http.patch(path, json=wrong), 400, "INVALID_REQUEST")
    refused(await http.patch("/v1/vms/nobodys", json={"name": "x"}), 404, "VM_NOT_FOUND")


async def test_forks_get_the_given_name(http: httpx2.AsyncClient, vm: Machine) -> None:
    forks = (await http.post(f"/v1/vms/{vm.id}/fork", json={"count": 2.0, "name": "child"})).json()["forks"]
    try:
        assert [each["name"] for each in forks] == ["child-1", "child-2"]
        for each in forks:
            assert (await http.get(f"/v1/vms/{each['id']}")).json()["name"] == each["name"]
    finally:
        for each in forks:
            await http.delete(f"/v1/vms/{each['id']}")


@pytest.mark.parametrize(
    ("model", "body", "field", "value"),
    [
        (Exec, {"command": "x", "timeoutMs": 1100.0000000000002}, "timeout_ms", 1100),
        (Exec, {"command": "x", "timeoutMs": 0.2}, "timeout_ms", 1),
        (Start, {"idleTimeoutSeconds": 59.99999999999999}, "idle_timeout_seconds", 60),
        (Start, {"activityThresholdBytes": 2.0}, "activity_threshold_bytes", 2),
        (Fork, {"count": 3.0}, "count", 3),
        (Resize, {"vcpuCount": 2.0}, "vcpu_count", 2),
        (Resize, {"memSizeGb": 4.000000000000001}, "mem_size_gb", 4),
        (Resize, {"rootfsSizeGb": 20.000000000000004}, "rootfs_size_gb", 20),
        (PersistenceModel, {"type": "sticky", "priority": 3.0}, "priority", 3),
    ],
)
def test_integers_may_come_as_floats(
    model: type[Wire], body: dict[str, Any], field: str, value: float
) -> None:
    assert getattr(model.model_validate(body), field) == value


def test_a_count_is_never_rounded() -> None:
    with pytest.raises(ValidationError, match="whole number"):
        Resize.model_validate({"vcpuCount": 2.5})


async def test_suspend_wake_kill_and_await(http: httpx2.AsyncClient, server: Server) -> None:
    """Suspend, wake by a command, kill, await; a stopped VM cannot be stopped or suspended."""
    path = f"/v1/vms/{(await http.post('/v1/vms')).json()['id']}"
    waiting = asyncio.create_task(http.post(f"{path}/await"))
    asleep = (await http.post(f"{path}/suspend")).json()
    assert asleep["vmInstanceId"] and asleep["snapshotLayerId"]
    assert (await waiting).json()["exitStatus"] == "suspended"
    assert (await http.get(path)).json()["state"] == "suspended"
    assert (await http.post(f"{path}/exec-await", json={"command": "echo up"})).json()["stdout"] == "up\n"
    command = {"command": "echo begun; exec sleep 600"}
    async with http.stream("POST", f"{path}/exec-stream", json=command) as stream:
        lines = stream.aiter_lines()
        assert json.loads(await anext(lines))["type"] == "stdout"
        killed = (await http.post(f"{path}/kill")).json()
        (last,) = [json.loads(line) async for line in lines]
    assert (last["type"], last["code"]) == ("error", "VM_NOT_RUNNING")
    assert killed["id"] in path
    assert (await http.get(path)).json()["state"] == "stopped"
    for verb in ("stop", "suspend"):
        refused(await http.post(f"{path}/{verb}"), 400, "VM_NOT_RUNNING")
    assert (await http.delete(path)).json() == {"id": killed["id"], "recreate": False}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "RESIZE_VM_EMPTY_REQUEST"),
        ({"vcpuCount": 3}, 400, "RESIZE_VM_VCPU_NOT_POWER_OF_TWO"),
        ({"vcpuCount": 0}, 400, "RESIZE_VM_VCPU_OUT_OF_RANGE"),
        ({"vcpuCount": 1024}, 400, "RESIZE_VM_VCPU_OUT_OF_RANGE"),
        ({"memSizeGb": 3}, 400, "RESIZE_VM_MEM_NOT_POWER_OF_TWO"),
        ({"memSizeGb": 1.7}, 400, "RESIZE_VM_MEM_NOT_POWER_OF_TWO"),
        ({"memSizeGb": 100000}, 400, "RESIZE_VM_MEM_OUT_OF_RANGE"),
        ({"rootfsSizeGb": 10}, 400, "RESIZE_VM_ROOTFS_SHRINK_NOT_SUPPORTED"),
        ({"rootfsSizeGb": 100000}, 400, "ROOTFS_SIZE_TOO_LARGE"),
        ({"vcpuCount": "many"}, 400, "INVALID_REQUEST"),
    ],
)
async def test_invalid_sizes_are_refused(
    http: httpx2.AsyncClient, vm: Machine, body: dict[str, Any], status: int, code: str
) -> None:
    refused(await http.post(f"/v1/vms/{vm.id}/resize", json=body), status, code)


async def test_limit_errors_have_their_numbers(server: Server) -> None:
    async with another_account(server, "frugal", vms=1, snapshots=1, disk_gib=30) as http:
        vm = (await http.post("/v1/vms")).json()["id"]
        body = refused(await http.post("/v1/vms"), 403, "TOTAL_VM_LIMIT_EXCEEDED")
        assert (body["limit"], body["current"]) == (1, 1)
        refused(await http.post(f"/v1/vms/{vm}/fork"), 403, "TOTAL_VM_LIMIT_EXCEEDED")
        big = await http.post(f"/v1/vms/{vm}/resize", json={"rootfsSizeGb": 40})
        body = refused(big, 403, "ROOTFS_OVER_PLAN_LIMIT")
        assert (body["got"], body["max"]) == (40, 30)
        first = (await http.post(f"/v1/vms/{vm}/snapshot")).json()["snapshotId"]
        refused(await http.post(f"/v1/vms/{vm}/snapshot"), 403, "SNAPSHOT_LIMIT_EXCEEDED")
        assert (await http.get(f"/v1/vms/{vm}")).json()["state"] == "running"
        await http.delete(f"/v1/vms/snapshots/{first}")


async def test_snapshot_lifecycle(http: httpx2.AsyncClient, vm: Machine) -> None:
    taken = (await http.post(f"/v1/vms/{vm.id}/snapshot", json={"name": "one"})).json()
    path = f"/v1/vms/snapshots/{taken['snapshotId']}"
    found = (await http.get(path)).json()
    assert (found["name"], found["state"], found["sourceVmId"]) == ("one", "ready", vm.id)
    assert (found["failed"], found["deleted"]) == (False, False)
    assert found["sizeBytes"] > 0
    assert (await http.patch(path, json={"name": "two"})).json() == {
        "snapshot_id": taken["snapshotId"],
        "name": "two",
    }
    child = (await http.post("/v1/vms", json={"snapshotId": taken["snapshotId"]})).json()
    assert child["snapshotId"] == taken["snapshotId"]
    gone = (await http.delete(path)).json()
    assert gone["snapshotId"] == gone["snapshot_id"] == taken["snapshotId"]
    refused(await http.delete(path), 409, "SNAPSHOT_ALREADY_DELETED")
    refused(await http.get(path), 404, "SNAPSHOT_NOT_FOUND")
    for body in (
        {"snapshotId": taken["snapshotId"]},
        {"template": {"snapshotId": taken["snapshotId"]}},
        {"spec": {"snapshot": {"snapshotId": taken["snapshotId"]}}},
    ):
        refused(await http.post("/v1/vms", json=body), 410, "SOURCE_SNAPSHOT_DELETED")
    listed = (await http.get("/v1/vms/snapshots?includeDeleted=true")).json()
    assert taken["snapshotId"] in [each["snapshotId"] for each in listed["snapshots"]]
    assert listed["deletedCount"] >= 1
    # What was made from it lives on.
    said = await http.post(f"/v1/vms/{child['id']}/exec-await", json={"command": "echo here"})
    assert said.json()["stdout"] == "here\n"
    await http.delete(f"/v1/vms/{child['id']}")


# Inside a machine


async def test_exec_await(http: httpx2.AsyncClient, vm: Machine) -> None:
    path = f"/v1/vms/{vm.id}/exec-await"
    said = await http.post(
        path,
        json={
            "command": "cat; echo $X >&2; pwd; kill -9 $$",
            "terminal": None,
            "timeoutMs": None,
            "stdin": "aGVsbG8K",
            "env": {"X": "y"},
            "cwd": "/tmp",
        },
    )
    body = said.json()
    assert (body["stdout"], body["stderr"]) == ("hello\n/tmp\n", "y\n")
    assert (body["statusCode"], body["signal"]) == (137, "SIGKILL")
    late = await http.post(path, json={"command": "echo early; sleep 60", "timeoutMs": 4000})
    body = refused(late, 408, "EXEC_TIMED_OUT")
    assert (body["timeoutMs"], body["stdout"]) == (4000, "early\n")
    refused(await http.post(path, json={"command": ""}), 400, "INVALID_REQUEST")
    refused(await http.post(path, json={"command": "true", "stdin": "%"}), 400, "INVALID_REQUEST")
    refused(await http.post(path, json={"command": "true", "timeoutMs": 0}), 400, "INVALID_REQUEST")


async def test_exec_stream_sends_output_as_it_is_printed(http: httpx2.AsyncClient, vm: Machine) -> None:
    path = f"/v1/vms/{vm.id}/exec-stream"
    times: list[float] = []
    lines: list[dict[str, Any]] = []
    async with http.stream("POST", path, json={"command": "echo a; sleep 1; echo b >&2; exit 4"}) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        async for line in answer.aiter_lines():
            times.append(time.monotonic())
            lines.append(json.loads(line))
    assert [line["type"] for line in lines] == ["stdout", "stderr", "exit"]
    assert (lines[-1]["statusCode"], lines[-1]["timedOut"]) == (4, False)
    assert times[1] - times[0] > 0.5
    refused(await http.post(path, json={"command": []}), 400, "INVALID_REQUEST")


async def test_file_calls(http: httpx2.AsyncClient, vm: Machine) -> None:
    base = f"/v1/vms/{vm.id}"
    raw = {"Content-Type": "application/octet-stream"}
    odd = "%2Fsrv%2Fa%20b%25%3F%23%C3%A9%FF.bin"
    content = os.urandom(3 << 20)
    assert (await http.put(f"{base}/files/{odd}?mode=600", content=content, headers=raw)).json() == {}
    back = await http.get(f"{base}/files/{odd}", headers={"Accept": "application/octet-stream"})
    assert back.content == content
    assert (await http.get(f"{base}/stat/{odd}")).json()["mode"] & 0o777 == 0o600
    assert (await http.get(f"{base}/files/{odd}")).json()["encoding"] == "base64"
    assert (
        await http.put(f"{base}/files/%2Fsrv%2Ftext", json={"content": "é", "encoding": "utf-8"})
    ).json() == {}
    assert (await http.get(f"{base}/files/srv/text")).json() == {"content": "é", "encoding": "utf8"}
    listed = (await http.get(f"{base}/files/%2Fsrv")).json()["files"]
    assert {"name": "text", "kind": "file"} in listed
    missing = refused(await http.get(f"{base}/files/%2Fsrv%2Fnone"), 404, "FILE_NOT_FOUND")
    assert missing["path"] == "/srv/none"
    refused(await http.put(f"{base}/files/%2Fsrv", json={"content": ""}), 400, "FILES_BAD_REQUEST")
    refused(await http.put(f"{base}/files/%2Fx", content=b"{"), 400, "FILES_BAD_REQUEST")
    refused(
        await http.put(f"{base}/files/%2Fx", json={"content": "%", "encoding": "base64"}),
        400,
        "FILES_BAD_REQUEST",
    )
    assert (await http.post(f"{base}/directories/%2Fsrv%2Fd%2Fe?parents=true")).json() == {}
    refused(await http.delete(f"{base}/files/%2Fsrv%2Fd"), 400, "FILES_BAD_REQUEST")
    assert (await http.delete(f"{base}/files/%2Fsrv%2Fd?recursive=true")).json() == {}
    as_nobody = {"X-Freestyle-Vm-Linux-User-Id": "nobody"}
    refused(await http.get(f"{base}/files/%2Fetc%2Fshadow", headers=as_nobody), 403, "VM_ACCESS_DENIED")


async def test_move_renames_files_and_keeps_existing_targets(http: httpx2.AsyncClient, vm: Machine) -> None:
    base = f"/v1/vms/{vm.id}"
    await http.put(f"{base}/files/%2Fsrv%2Fone", json={"content": "1"})
    await http.put(f"{base}/files/%2Fsrv%2Ftwo", json={"content": "2"})
    moved = {"from": "/srv/one", "to": "/srv/three"}
    assert (await http.post(f"{base}/move", json=moved)).json() == {}
    assert (await http.get(f"{base}/files/srv/three")).json()["content"] == "1"
    missing = refused(await http.post(f"{base}/move", json=moved), 404, "FILE_NOT_FOUND")
    assert "/srv/one" in missing["message"]
    nowhere = {"from": "/srv/three", "to": "/srv/none/three"}
    missing = refused(await http.post(f"{base}/move", json=nowhere), 404, "FILE_NOT_FOUND")
    assert "/srv/none/three" in missing["message"]
    onto = {"from": "/srv/three", "to": "/srv/two"}
    refused(await http.post(f"{base}/move", json=onto), 400, "FILES_BAD_REQUEST")
    as_nobody = {"X-Freestyle-Vm-Linux-User-Id": "nobody"}
    forced = onto | {"overwrite": True}
    refused(await http.post(f"{base}/move", json=forced, headers=as_nobody), 403, "VM_ACCESS_DENIED")
    assert (await http.post(f"{base}/move", json=forced)).json() == {}
    assert (await http.get(f"{base}/files/srv/two")).json()["content"] == "1"
    for wrong in ({"from": "srv", "to": "/x"}, {"from": "/srv\0", "to": "/x"}, {"from": "/srv"}):
        refused(await http.post(f"{base}/move", json=wrong), 400, "FILES_BAD_REQUEST")
    surrogate = b'{"from": "/srv\\ud800", "to": "/x"}'
    answer = await http.post(f"{base}/move", content=surrogate, headers={"Content-Type": "application/json"})
    assert "offset 4" in refused(answer, 400, "FILES_BAD_REQUEST")["message"]


async def test_archive_upload_and_download(http: httpx2.AsyncClient, vm: Machine) -> None:
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("sub/one.txt")
        entry.size = 3
        archive.addfile(entry, BytesIO(b"one"))
    path = f"/v1/vms/{vm.id}/archives/%2Fsrv%2Ftree"
    put = await http.put(path, content=packed.getvalue(), headers={"Content-Type": "application/x-tar"})
    assert put.json()["files"] >= 1
    with tarfile.open(fileobj=BytesIO((await http.get(path)).content)) as archive:
        member = archive.extractfile("sub/one.txt") or pytest.fail("it is not in the archive")
        assert member.read() == b"one"
    refused(await http.get(f"/v1/vms/{vm.id}/archives/%2Fnowhere"), 404, "FILE_NOT_FOUND")


# What happened


async def test_logs_of_vms_and_services(http: httpx2.AsyncClient, vm: Machine) -> None:
    await vm.exec("systemd-run --wait --unit talker sh -c 'echo Loud And Clear'")
    path = f"/observability/v1/logs?vmId={vm.id}"
    lines = (await http.get(path)).json()["logs"]
    assert any(line["message"] == f"VM {vm.id} created" for line in lines)
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    spoken = (await http.get(f"{path}&vmService=talker&search=loud")).json()["logs"]
    assert all("loud" in line["message"].lower() for line in spoken)
    said = next(line for line in spoken if line["message"] == "Loud And Clear")
    assert (said["vmService"], said["resourceId"]) == ("talker.service", vm.id)
    again = (await http.get(f"{path}&vmService=talker&startTime={said['timestamp']}")).json()["logs"]
    assert said in again
    refused(await http.get("/observability/v1/logs?vmService=talker"), 400, "INVALID_QUERY")


async def all_pages(http: httpx2.AsyncClient, path: str) -> list[list[dict[str, Any]]]:
    """The lines of each page, read to the last one."""
    pages: list[list[dict[str, Any]]] = []
    token = ""
    while True:
        answer = await http.get(f"{path}{token}")
        assert answer.status_code == 200, answer.text
        found = answer.json()
        pages.append(found["logs"])
        if found["nextPageToken"] is None:
            return pages
        token = f"&pageToken={found['nextPageToken']}"


async def test_pages_merge_the_journal_with_the_log_of_a_vm(
    http: httpx2.AsyncClient, server: Server, vm: Machine
) -> None:
    """Over several pages: nothing lost, nothing twice, ordered by time; search covers the whole journal."""
    path = f"/observability/v1/logs?vmId={vm.id}"
    said = await vm.exec("seq -f 'Marker (%g)' 1 40 | logger -t pager; journalctl --sync")
    assert said.ok, said.stderr
    await server.installation.logbook.write(server.account, "noise marker (41)", machine=vm.id)
    # Enough lines after the first ones that no page of the newest lines would hold them.
    await vm.exec("seq -f 'filler %g' 1 60 | logger -t pager; journalctl --sync")
    pages = await all_pages(http, f"{path}&pageSize=16&search=mARKER%20%28")
    assert [len(page) for page in pages] == [16, 16, 9]
    found = [line for page in pages for line in page]
    expected = [f"Marker ({number})" for number in range(1, 41)] + ["noise marker (41)"]
    assert [line["message"] for line in found] == expected
    assert [line["timestamp"] for line in found] == sorted(line["timestamp"] for line in found)
    start = found[0]["timestamp"]
    whole = (await http.get(f"{path}&startTime={start}")).json()["logs"]
    split = await all_pages(http, f"{path}&startTime={start}&pageSize=40")
    assert len(split) > 2
    common = [line for page in split for line in page][: len(whole)]
    assert common == whole
    assert [line["message"] for line in whole if "filler" in line["message"]] == [
        f"filler {number}" for number in range(1, 61)
    ]


async def test_lines_belong_to_a_run_of_the_vm(http: httpx2.AsyncClient) -> None:
    """`instanceId` filters the log and the journal by the run of the VM that wrote the lines."""
    vm = (await http.post("/v1/vms")).json()["id"]
    path, logs = f"/v1/vms/{vm}", f"/observability/v1/logs?vmId={vm}"

    async def say(word: str) -> None:
        command = {"command": f"logger -t speaker {word}; journalctl --sync"}
        assert (await http.post(f"{path}/exec-await", json=command)).json()["statusCode"] == 0

    async def lines(instance: str) -> dict[str, str]:
        found = (await http.get(f"{logs}&instanceId={instance}")).json()["logs"]
        assert {line["instanceId"] for line in found} <= {instance}
        return {line["message"]: line["source"] for line in found}

    try:
        first = (await http.get(path)).json()["vmInstanceId"]
        await say("morning")
        await http.post(f"{path}/suspend")
        await say("evening")
        second = (await http.get(path)).json()["vmInstanceId"]
        assert first != second
        early, late = await lines(first), await lines(second)
        assert early["morning"] == "journal" and "evening" not in early
        assert late["evening"] == "journal" and "morning" not in late
        suspended = f"VM {vm} suspended: requested"
        assert suspended in early and suspended not in late
        assert await lines("0" * 20) == {}
        everything = (await http.get(logs)).json()["logs"]
        assert {line["instanceId"] for line in everything} == {first, second}
    finally:
        await http.delete(path)


async def test_following_logs_does_not_keep_a_vm_awake(settings: Settings, machines: Machines) -> None:
    async with (
        another_installation(settings, idle_timeout=None, idle_check=0.2, listen="127.0.0.1:0") as other,
        running(other.settings, other) as url,
    ):
        account = await other.accounts.create("followers")
        _, key = await other.accounts.create_key(account.id)
        machine = await other.machines.create(account=account.id, idle_timeout=4)
        async with client_of(url, key) as http:
            logs = f"/observability/v1/logs?vmId={machine.id}"
            await machine.exec("logger awake; journalctl --sync")
            followed = (await http.get(logs)).json()["logs"]
            assert any(line["source"] == "journal" for line in followed)

            async def asleep() -> bool:
                assert (await http.get(logs)).status_code == 200
                return (await machine.info()).state is State.SUSPENDED

            await until(asleep, 60)

            async def recorded() -> bool:
                lines = (await http.get(logs)).json()["logs"]
                return any("suspended" in line["message"] for line in lines)

            # Nor does reading wake it.
            await until(recorded, 30)
            assert (await machine.info()).state is State.SUSPENDED
        await machine.delete()


async def test_sleep_wake_crash_and_deletion_of_a_vm_are_log_lines_with_their_reason(
    server: Server, http: httpx2.AsyncClient
) -> None:
    machines = server.installation.machines
    vm = await machines.create(account=server.account)
    (child,) = await vm.fork(persistence=Ephemeral())
    await http.post(f"/v1/vms/{child.id}/suspend")
    await http.post(f"/v1/vms/{vm.id}/suspend")
    assert (await http.get(f"/v1/vms/{vm.id}/files/%2Fetc%2Fhostname")).is_success
    pid = (await machines._row(vm.id)).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert await vm.wait_for_exit() == "crashed: QEMU ended by SIGKILL"
    await http.delete(f"/v1/vms/{vm.id}")

    async def lines(vm_id: str) -> list[tuple[str, str]]:
        logs = (await http.get(f"/observability/v1/logs?vmId={vm_id}")).json()["logs"]
        return [(line["level"], line["message"]) for line in logs]

    expected = [
        ("info", f"VM {vm.id} created"),
        ("info", f"VM {vm.id} suspended: requested"),
        ("info", f"VM {vm.id} woken: file access"),
        ("error", f"VM {vm.id} crashed: QEMU ended by SIGKILL"),
        ("info", f"VM {vm.id} deleted: requested"),
    ]

    async def all_there() -> bool:
        return await lines(vm.id) == expected

    await until(all_there, 10)
    assert await lines(child.id) == [
        ("info", f"VM {child.id} created: forked from {vm.id}"),
        ("info", f"VM {child.id} deleted: ephemeral: suspended"),
    ]


async def test_logbook_pages(server: Server) -> None:
    async with another_account(server, "talkative") as http:
        account = (await http.get("/auth/v1/whoami")).json()["accountId"]
        for number in range(25):
            await server.installation.logbook.write(account, f"line {number}", build="bld-1")
        seen: list[str] = []
        token = ""
        for _ in range(4):
            found = (await http.get(f"/observability/v1/logs?buildId=bld-1&pageSize=10{token}")).json()
            seen += [line["message"] for line in found["logs"]]
            if found["nextPageToken"] is None:
                break
            token = f"&pageToken={found['nextPageToken']}"
        assert seen == [f"line {number}" for number in range(25)]


# Pages of the server's own


async def test_health_metrics_and_openapi_pages(server: Server, vm: Machine) -> None:
    """They need no API key."""
    async with httpx2.AsyncClient(base_url=server.url) as http:
        assert (await http.get("/healthz")).json()["status"] == "ok"
        counts = (await http.get("/metrics")).text
        assert 'stead_http_requests_total{method="GET",route="/healthz",status="200"}' in counts
        assert 'stead_machines{state="running"}' in counts
        schema = (await http.get("/openapi.json")).json()
    assert "/v1/vms/{vm_id}/exec-await" in schema["paths"]


async def test_cors_preflight_allows_all_methods_and_headers(server: Server) -> None:
    """Preflight requests, as browsers send them before cross-origin calls."""
    async with httpx2.AsyncClient(base_url=server.url) as http:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            asked = {
                "Origin": "https://app.example",
                "Access-Control-Request-Method": method,
                "Access-Control-Request-Headers": "authorization,content-type,user-agent,"
                "x-freestyle-identity-access-token,x-freestyle-sdk,x-freestyle-sdk-version,"
                "x-freestyle-vm-linux-user-id,x-freestyle-background-after-secs,x-freestyle-request-url",
            }
            allowed = await http.options("/v1/vms/x/exec-await", headers=asked)
            assert allowed.status_code == 200, allowed.text
            assert allowed.headers["access-control-allow-origin"] == "*"
            assert method in allowed.headers["access-control-allow-methods"]
        refused_call = await http.get("/v1/vms", headers={"Origin": "https://app.example"})
        assert refused_call.headers["access-control-allow-origin"] == "*"
        exposed = refused_call.headers["access-control-expose-headers"]
        assert TRACE in exposed and "x-freestyle-background-request-id" in exposed


def test_port_in_use_fails_at_once(server: Server) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = server.installation.settings.replace(listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(HostError, match="cannot listen"):
            server_module.bind(settings)


async def test_tcp_nodelay_is_set(settings: Settings) -> None:
    """Nagle's algorithm would delay the second segment of an answer until the first is acknowledged."""
    held_back: list[bool] = []

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        held_back.append(
            writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 0
        )
        writer.close()

    listening = server_module.bind(settings.replace(listen="127.0.0.1:0"))
    async with await asyncio.start_server(accepted, sock=listening):
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        await reader.read()
        writer.close()
    assert held_back == [False]


def test_all_dependencies_are_coroutines() -> None:
    """FastAPI runs dependencies that are not coroutines in a thread, which takes longer than their work."""
    found: set[object] = set()
    contexts = iter_route_contexts(create_app().routes)
    waiting = [each.route.dependant for each in contexts if isinstance(each.route, APIRoute)]
    while waiting:
        dependant = waiting.pop()
        found.add(dependant.call)
        waiting += dependant.dependencies
    assert {current_caller, owned_vm} <= found
    kinds = inspect.iscoroutinefunction, inspect.isasyncgenfunction
    assert [call for call in found if not any(kind(call) for kind in kinds)] == []
