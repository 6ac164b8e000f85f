"""The HTTP API: answers, errors, VMs and their contents."""

import asyncio
import contextlib
import inspect
import json
import os
import socket
import tarfile
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from io import BytesIO
from typing import Any

import httpx2
import pytest
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import ValidationError

from stead.api import server as server_module
from stead.api.app import create_app
from stead.api.callers import current_caller, owned_vm
from stead.api.wire import Wire
from stead.api.wire.guests import Exec
from stead.api.wire.vms import Fork, PersistenceModel, Resize, Start
from stead.errors import HostError, InvalidRequest
from stead.machines import Machine
from stead.settings import Settings
from support.api_calls import another_account, refused
from support.installations import Server
from support.waiting import until

# Errors on every path


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nothing/here", b"", 404, "NOT_FOUND"),
        ("PATCH", "/v1/vms", b"", 405, "BAD_REQUEST"),
        ("POST", "/v1/vms", b"{", 400, "CREATE_VM_BAD_REQUEST"),
        ("POST", "/v1/vms", b"[]", 400, "CREATE_VM_BAD_REQUEST"),
        ("POST", "/v1/vms", b'{"name": 7}', 400, "CREATE_VM_BAD_REQUEST"),
        ("POST", "/v1/vms", b'{"domains": [{"domain": "a.example"}]}', 401, "DOMAIN_OWNERSHIP_NOT_VERIFIED"),
        ("POST", "/v1/vms", b'{"nics": [{"vpc": "x"}]}', 404, "NOT_FOUND"),
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
    head, _, body = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["code"] == "BAD_REQUEST"
    writer.close()
    await writer.wait_closed()


async def test_too_large_body_is_refused_before_it_is_read(http: httpx2.AsyncClient) -> None:
    body = refused(await http.post("/v1/vpcs", json={"name": "x" * 70_000}), 413, "BAD_REQUEST")
    assert "too large (max 64 KiB for this path)" in body["message"]

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 10_000

    refused(await http.post("/v1/vpcs", content=chunks()), 413, "BAD_REQUEST")
    disguised = {"Content-Type": "application/octet-stream"}
    refused(await http.post("/v1/vpcs", content=b" " * 70_000, headers=disguised), 413, "BAD_REQUEST")


async def test_body_without_credentials_is_not_read(server: Server) -> None:
    """A call without a key is refused before its body has arrived."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/vms HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
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


@pytest.mark.parametrize("name", ["", " \u2003"])
async def test_empty_names_are_refused(
    http: httpx2.AsyncClient, vm: Machine, server: Server, name: str
) -> None:
    """With one message for everything that has a name; null, and no name, mean none."""
    before = (await http.get("/v1/vms")).json()["totalCount"]
    for path, body in (
        ("/v1/vms", {"name": name}),
        ("/v1/vms", {"spec": {"name": name}}),
        (f"/v1/vms/{vm.id}/fork", {"name": name}),
        (f"/v1/vms/{vm.id}/snapshot", {"name": name}),
        ("/v1/vms/snapshots", {"name": name, "spec": {}}),
        ("/git/v1/repo", {"name": name}),
        ("/identity/v1/identities", {"name": name}),
        ("/v1/vpcs", {"name": name}),
    ):
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert answer.json()["message"].startswith(f"invalid name {name!r}: must be 1 to "), (
            path,
            answer.text,
        )
    assert (await http.patch(f"/v1/vms/{vm.id}", json={"name": name})).status_code == 400
    with pytest.raises(InvalidRequest, match="must be 1 to 200 printable characters"):
        await server.installation.accounts.create_key(server.account, name)
    assert (await http.get("/v1/vms")).json()["totalCount"] == before
    assert (await http.get(f"/v1/vms/{vm.id}")).json()["name"] == "shared"
    nameless = (await http.post("/git/v1/repo", json={"name": None})).json()["repoId"]
    await http.delete(f"/git/v1/repo/{nameless}")


async def test_rename_changes_and_removes_the_name(http: httpx2.AsyncClient, vm: Machine) -> None:
    path = f"/v1/vms/{vm.id}"
    before = (await http.get(path)).json()
    renamed = (await http.patch(path, json={"name": "other"})).json()
    assert renamed["name"] == "other"
    changed = {key for key in before if before[key] != renamed[key]}
    assert changed <= {"name", "lastNetworkActivity"}
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
        "expiresAt": None,
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


async def test_snapshot_lifetime(http: httpx2.AsyncClient, vm: Machine, server: Server) -> None:
    """It is set, changed and enforced; then VMs are refused with a code that every client knows."""
    body = {"name": "short", "ttlSeconds": 3600, "purpose": "agent"}
    taken = (await http.post(f"/v1/vms/{vm.id}/snapshot", json=body)).json()["snapshotId"]
    path = f"/v1/vms/snapshots/{taken}"
    found = (await http.get(path)).json()
    assert found["purpose"] == "agent"
    ends = datetime.fromisoformat(found["expiresAt"]) - datetime.fromisoformat(found["createdAt"])
    assert abs(ends.total_seconds() - 3600) < 60
    for purpose, listed in (("agent", True), ("use", False), (None, True)):
        answer = (await http.get("/v1/vms/snapshots", params={"purpose": purpose} if purpose else {})).json()
        assert (taken in [each["snapshotId"] for each in answer["snapshots"]]) == listed
        assert answer["agentCount"] == 1
    # A change of one leaves the other; null is never.
    changed = (await http.patch(path, json={"name": "renamed"})).json()
    assert (changed["name"], changed["expiresAt"]) == ("renamed", found["expiresAt"])
    changed = (await http.patch(path, json={"expiresAt": None})).json()
    assert (changed["name"], changed["expiresAt"]) == ("renamed", None)
    changed = (await http.patch(path, json={"expiresAt": "2033-01-31T13:00:00+01:00"})).json()
    assert changed["expiresAt"] == "2033-01-31T12:00:00.000000Z"
    assert (await http.patch(path, json={})).json() == changed
    for wrong in (
        {"ttlSeconds": 0},
        {"ttlSeconds": 10**12},
        {"expiresAt": "2020-01-01T00:00:00Z"},
        {"expiresAt": "9999-12-31T23:59:59Z"},
        {"expiresAt": "2033-01-31T13:00:00"},
        {"ttlSeconds": 60, "expiresAt": "2033-01-31T13:00:00Z"},
    ):
        assert (await http.patch(path, json=wrong)).status_code == 400, wrong
        assert (await http.post(f"/v1/vms/{vm.id}/snapshot", json=wrong)).status_code == 400, wrong
    assert (await http.get(path)).json()["expiresAt"] == changed["expiresAt"]
    end = datetime.fromisoformat((await http.patch(path, json={"ttlSeconds": 1})).json()["expiresAt"])
    await until(lambda: datetime.now(UTC) > end, 60)
    await server.installation.machines.snapshots.delete_expired()
    refused(await http.get(path), 404, "SNAPSHOT_NOT_FOUND")
    error = refused(await http.post("/v1/vms", json={"snapshotId": taken}), 410, "SOURCE_SNAPSHOT_DELETED")
    assert error["snapshotId"] == taken and "expired at 20" in error["message"]


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
