"""Builds by the SDK, with both clients."""

from typing import Any

import pytest

from stead import Service, VmSpec
from stead.sdk import errors
from stead.sdk.models import LogEntry
from support.scripted_server import Drop, Reply, scripted
from support.sdk_calls import CREATED, VM, make
from support.sdk_clients import Client, attempt, close, done


async def test_build_is_polled_as_a_background_request(client: Client) -> None:
    """The client polls for the result, also across an outage, and reports each log line once."""
    line_1 = {"timestamp": "2026-01-01T00:00:01.000001Z", "message": "one"}
    line_2 = {"timestamp": "2026-01-01T00:00:02.000001Z", "message": "two"}
    lines: list[LogEntry] = []
    vm, seen = await attempt(
        client,
        lambda stead: stead.vms.create(spec=VmSpec().apt("git"), progress=lines.append),
        Reply(202, {"requestId": "ri-other"}, {"x-freestyle-background-request-id": "ri-1"}),
        Reply(202, {"status": "pending"}),
        Reply(content={"logs": [line_1]}),
        Drop(),
        Reply(502, b"bad gateway"),
        Reply(503, {"code": "SERVICE_UNAVAILABLE", "message": "being stopped"}),
        Reply(202, {"status": "pending"}),
        Reply(500, {"code": "INTERNAL", "message": "no lines today"}),
        CREATED,
        Reply(content={"logs": [line_1], "nextPageToken": "more"}),
        Reply(content={"logs": [line_2], "nextPageToken": None}),
    )
    assert vm.id == VM
    assert [str(entry) for entry in lines] == ["one", "two"]
    assert seen[0].headers["x-freestyle-background-after-secs"] == "5"
    assert seen[1].target == "/auth/v1/background-requests/ri-1"
    assert seen[2].target == "/observability/v1/logs?requestId=ri-1"
    assert "pageToken=more" in seen[-1].target and len(seen) == 11


@pytest.mark.parametrize("finished", [False, True], ids=["running", "finished"])
async def test_interrupted_create_is_cancelled(client: Client, finished: bool) -> None:
    """A VM that was created by then is deleted: its caller never gets its id."""
    line = {"timestamp": "2026-01-01T00:00:01.000001Z", "message": "one"}

    def interrupt(_: LogEntry) -> None:
        raise KeyboardInterrupt

    with scripted(
        Reply(202, {"requestId": "ri-1"}),
        Reply(202, {"status": "pending"}),
        Reply(content={"logs": [line]}),
        CREATED if finished else Reply(202, {"status": "pending"}),
        Reply(content={}),
    ) as server:
        stead = client(server.url)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            await done(stead.vms.create(progress=interrupt))
        await close(stead)
    calls = [(call.method, call.target) for call in server.seen[3:]]
    deleted = [("DELETE", f"/v1/vms/{VM}")] if finished else []
    assert calls == [("DELETE", "/auth/v1/background-requests/ri-1"), *deleted]
    assert not getattr(interrupted.value, "__notes__", ())


async def test_interrupted_create_that_cannot_be_cancelled_says_so(client: Client) -> None:
    def interrupt(_: LogEntry) -> None:
        raise KeyboardInterrupt

    with scripted(
        Reply(202, {"requestId": "ri-1"}),
        Reply(202, {"status": "pending"}),
        Reply(content={"logs": [{"timestamp": "2026-01-01T00:00:01Z", "message": "one"}]}),
        Reply(404, {"code": "NOT_FOUND", "message": "no such route"}),
    ) as server:
        stead = client(server.url)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            await done(stead.vms.create(progress=interrupt))
        await close(stead)
    assert interrupted.value.__notes__ == ["background request ri-1 could not be cancelled"]


async def test_poll_of_a_build_ends_after_a_long_outage(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the id of the background request."""
    for module in ("_async", "_sync"):
        monkeypatch.setattr(f"stead.sdk.{module}.background._OUTAGE", 0.5)
    error, _ = await attempt(
        client,
        lambda stead: stead.vms.create(spec=VmSpec()),
        Reply(202, {"requestId": "ri-1"}),
        *[Drop()] * 20,
        max_retries=0,
    )
    assert isinstance(error, errors.ServerUnreachable) and "ri-1" in str(error)


async def test_failed_background_build_raises_build_failed(client: Client) -> None:
    failed = {"code": "BUILD_FAILED", "message": "make failed", "exitCode": 2, "stderr": "no rule"}
    error, _ = await attempt(
        client,
        lambda stead: stead.vms.snapshots.ensure(VmSpec().run("make")),
        Reply(202, {"requestId": "ri-1"}),
        Reply(202, {}),
        Reply(400, failed),
    )
    assert isinstance(error, errors.BuildFailed)
    assert (error.exit_code, error.stderr) == (2, "no rule")


async def test_create_without_a_spec_is_no_background_request(client: Client) -> None:
    _, seen = await attempt(client, make, CREATED)
    assert "x-freestyle-background-after-secs" not in seen[0].headers
    assert seen[0].json == {}


async def test_builds_are_listed_with_phases_and_logs(client: Client) -> None:
    row = {"buildId": "bld-1", "state": "running", "startedAt": "2026-01-01T00:00:10Z"}
    found, seen = await attempt(
        client,
        lambda stead: stead.vms.builds.list(state="running", limit=5, offset=1),
        Reply(content={"builds": [row], "totalCount": 7}),
    )
    assert seen[0].target == "/v1/vms/builds?state=running&limit=5&offset=1"
    assert [build.id for build in found] == ["bld-1"] and found.total_count == 7
    phases = [
        {"phaseId": "p1", "name": "apt", "state": "succeeded", "finishedAt": "2026-01-01T00:00:12Z"},
        {"phaseId": "p2", "name": "run", "state": "running", "finishedAt": None},
    ]
    found, _ = await attempt(
        client, lambda stead: stead.vms.builds.phases("bld-1"), Reply(content={"phases": phases})
    )
    assert [(phase.state, phase.finished_at is not None) for phase in found] == [
        ("succeeded", True),
        ("running", False),
    ]
    lines = Reply(content={"logs": [{"message": "one", "timestamp": "2026-01-01T00:00:11Z"}]})
    page, seen = await attempt(
        client, lambda stead: stead.vms.builds.logs("bld-1"), Reply(content=row), lines
    )
    assert [str(entry) for entry in page] == ["one"]
    # The server's default window is the last day: an older build has its lines too.
    assert "buildId=bld-1&startTime=2026-01-01T00%3A00%3A05" in seen[1].target


@pytest.mark.parametrize("create", ["vms", "snapshots"])
async def test_unknown_keys_of_a_spec_are_refused(client: Client, create: str) -> None:
    """The header asks the server to; other clients get a warning in the log instead."""

    def call(stead: Any) -> Any:
        spec = {"aptDeps": ["git"], "aptdeps": ["make"]}
        return stead.vms.create(spec=spec) if create == "vms" else stead.vms.snapshots.ensure(spec)

    refused = {"code": "CREATE_VM_BAD_REQUEST", "message": "unknown key spec.aptdeps (nearest: aptDeps)"}
    error, seen = await attempt(client, call, Reply(400, refused))
    assert seen[0].headers["x-stead-unknown-keys"] == "refuse"
    assert isinstance(error, errors.InvalidRequest) and "spec.aptdeps" in str(error)


async def test_unknown_arguments_are_refused_without_a_request(client: Client) -> None:
    with pytest.raises(TypeError, match="vcpus"):
        await attempt(client, lambda stead: stead.vms.create(vcpus=2))
    with pytest.raises(TypeError, match="colour"):
        Service(name="x", command="y", colour="green")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="service must be Service, not str"):
        VmSpec().service("x")  # type: ignore[arg-type]


async def test_wait_for_a_build_ends_or_times_out(client: Client) -> None:
    def wait(stead: Any, timeout: float = 60) -> Any:
        return stead.vms.builds.wait("bld-1", timeout=timeout, interval=0.05)

    building = Reply(content={"buildId": "bld-1", "state": "running"})
    built = Reply(content={"buildId": "bld-1", "state": "failed", "failureReason": "no rule"})
    build, _ = await attempt(client, wait, building, built)
    assert build.finished and build.failure_reason == "no rule"
    error, _ = await attempt(client, lambda stead: wait(stead, 0.2), *[building] * 20)
    assert isinstance(error, errors.WaitTimedOut)
