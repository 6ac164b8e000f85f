"""Long calls: clients that disconnect, background requests, and a server stop."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stead.api import calls as calls_module
from stead.api import server as server_module
from stead.api.background import failed, result
from stead.api.server import running
from stead.creation.background import BackgroundRequests
from stead.creation.creation import Creation, VmOrder
from stead.creation.results import CreatedVm
from stead.host.interface import Progress, Report, Template
from stead.machines import Machine, State
from stead.settings import Size
from stead.store.database import open_database
from stead.store.requests import RequestRow, RequestStore
from support.api_calls import another_account, refused
from support.installations import Server
from support.internals import inside
from support.serve_process import client_of
from support.waiting import until

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
    store = inside(server.installation.machines).store
    make, begun, ended = Creation.create, asyncio.Event(), asyncio.Event()

    async def create(creation: Creation, order: VmOrder) -> CreatedVm:
        begun.set()
        try:
            return await make(creation, order)
        finally:
            ended.set()

    async def rows() -> set[str]:
        return {row.id for row in await store.list(account=server.account)}

    async def more() -> bool:
        return await rows() > before

    async def gone() -> bool:
        return await rows() == before

    before = await rows()
    monkeypatch.setattr(Creation, "create", create)
    async with asking(server, "/v1/vms", {}):
        await begun.wait()
        if recorded:
            await until(more, 60)
    await ended.wait()
    await until(gone, 60)


@pytest.mark.parametrize("what", ["vm", "snapshot"])
async def test_undelivered_result_is_deleted(
    server: Server, vm: Machine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The VM or snapshot was complete when the client left: only the answer was still to be sent."""
    machines = server.installation.machines
    owner: Any = Creation if what == "vm" else machines
    name, path = ("create", "/v1/vms") if what == "vm" else ("snapshot", f"/v1/vms/{vm.id}/snapshot")
    make, made, complete = getattr(owner, name), list[str](), asyncio.Event()

    async def ids() -> set[str]:
        kind = machines if what == "vm" else machines.snapshots
        return {info.id for info in await kind.list(server.account)}

    async def make_and_wait(*arguments: Any, **options: Any) -> Any:
        result = await make(*arguments, **options)
        made.append(result.id)
        complete.set()
        # Until the connection is gone, whether that has been noticed or not.
        await asyncio.sleep(0.02)
        return result

    async def gone() -> bool:
        return await ids() == before

    before = await ids()
    monkeypatch.setattr(owner, name, make_and_wait)
    settings = server.installation.settings.replace(listen="127.0.0.1:0")
    async with running(settings, server.installation) as url:
        async with asking(replace(server, url=url), path, {}):
            await complete.wait()
        await until(gone, 60)
    assert len(made) == 1


async def runs(vm: Machine, command: str) -> bool:
    return (await vm.exec(f"pgrep -fx '{command}'")).ok


async def ended(vm: Machine, command: str) -> bool:
    return not await runs(vm, command)


async def test_command_is_killed_when_its_client_disconnects(server: Server, vm: Machine) -> None:
    command = "sleep 4321"
    async with asking(server, f"/v1/vms/{vm.id}/exec-await", {"command": command}):
        await until(lambda: runs(vm, command), 60)
    await until(lambda: ended(vm, command), 60)


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

    await until(logged, 60)
    await http.delete(f"/v1/vms/{result['id']}")


class SlowTemplates:
    """Has the template of the default size built again, until the test lets it be ready."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        templates = inside(server.installation.machines).host.templates
        self._find = templates.find
        self.ready = asyncio.Event()
        monkeypatch.setattr(templates, "find", self.find)
        monkeypatch.setattr(templates, "ensure", self.ensure)

    async def find(self, size: Size) -> Template | None:
        return await self._find(size) if self.ready.is_set() else None

    async def ensure(self, size: Size, report: Report) -> Template | None:
        report(Progress("booting the image", str(size), 0.1, "template"))
        await self.ready.wait()
        return await self._find(size)


async def test_create_logs_the_template_that_it_waits_for_and_can_be_cancelled(
    server: Server, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both requests wait for the same build and are told so; the cancelled one leaves no VM."""
    machines = server.installation.machines
    slow = SlowTemplates(server, monkeypatch)
    before = {info.id for info in await machines.list(server.account)}
    requests = []
    for _ in range(2):
        answer = await http.post("/v1/vms", headers={"x-freestyle-background-after-secs": "0"})
        assert answer.status_code == 202
        requests.append(answer.json()["requestId"])
    size = server.installation.settings.default_size.compute

    async def messages(request: str) -> list[str]:
        logs = (await http.get(f"/observability/v1/logs?requestId={request}")).json()["logs"]
        return [line["message"] for line in logs if line["source"] == "template"]

    async def told() -> bool:
        return all([len(await messages(request)) == 2 for request in requests])

    await until(told, 60)
    for request in requests:
        assert await messages(request) == [
            f"building the template of {size} (once for all disk sizes; 1 to 2 minutes without KVM)",
            f"building the template of {size}, once: booting the image",
        ]
    kept, cancelled = (f"/auth/v1/background-requests/{request}" for request in requests)
    async with another_account(server, "curious") as stranger:
        refused(await stranger.delete(cancelled), 404, "NOT_FOUND")
    assert (await http.delete(cancelled)).status_code == 202
    slow.ready.set()

    async def done() -> bool:
        return 202 not in [(await http.get(path)).status_code for path in (kept, cancelled)]

    await until(done, 60)
    refused(await http.get(cancelled), 400, "CREATE_VM_BAD_REQUEST")
    made = (await http.get(kept)).json()["id"]
    assert {info.id for info in await machines.list(server.account)} - before == {made}
    # A request that has finished is answered with its result, and stays.
    assert (await http.delete(kept)).json()["id"] == made
    assert (await http.get(f"/v1/vms/{made}")).status_code == 200
    await http.delete(f"/v1/vms/{made}")


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

    async def made_for(request: str) -> CreatedVm | None:
        return CreatedVm("it", domains=("a.style.dev",)) if request == "ri-1" else None

    background = BackgroundRequests(store)
    await background.recover(made_for, failed())
    found = await result(background, "me", "ri-1")
    body = json.loads(bytes(found.body))
    assert (found.status_code, body["id"], body["domains"]) == (200, "it", ["a.style.dev"])
    lost = await result(background, "me", "ri-2")
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
        await until(refuses, 60)
        await vm.exec("touch /run/end")

    async with running(settings, server.installation) as url:
        http = client_of(url, server.key)
        call = asyncio.create_task(http.post(f"/v1/vms/{vm.id}/exec-await", json={"command": command}))
        await until(begun, 60)
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
        await until(lambda: runs(vm, "sleep 600"), 60)
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
    await until(lambda: ended(vm, "sleep 4321"), 60)


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
