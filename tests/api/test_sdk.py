"""The client library against a scripted server: failures, retries, errors, streams and files.

Each test runs with both clients, the asynchronous and the synchronous one.
"""

import ast
import asyncio
import base64
import io
import json
import pickle
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from stead import AsyncStead, Stead, VmSpec
from stead.sdk import errors
from stead.sdk.models import Exited, LogEntry, Output, Token, VmInfo
from stead.sdk.parsing import parse
from stead.sdk.requests import GRACE
from stead.sdk.retries import RetryPolicy
from support import ROOT
from support.scripted_server import Drop, Pieces, Reply, Step, free_port, scripted
from support.sdk_clients import Client, attempt, close, done

VM = "abcdefghij0123456789"


async def first(stream: Any) -> Any:
    """The first event of a stream; closes the stream."""
    if hasattr(stream, "__aiter__"):
        async with stream:
            return await anext(stream)
    with stream:
        return next(stream)


def read(stead: Any) -> Any:
    return stead.vms.get(VM)


def make(stead: Any) -> Any:
    return stead.vms.create()


def delete(stead: Any) -> Any:
    return stead.vms.delete(VM)


INFO = Reply(content={"id": VM, "state": "running"})
CREATED = Reply(content={"id": VM, "domains": []})
BUSY = Reply(503, {"code": "SERVICE_UNAVAILABLE", "message": "busy"})


async def test_read_is_retried_after_a_broken_connection(client: Client) -> None:
    vm, seen = await attempt(client, read, Drop(), INFO)
    assert vm.last_info.state == "running"
    assert [request.target for request in seen] == [f"/v1/vms/{VM}"] * 2


async def test_create_is_not_retried_once_sent(client: Client) -> None:
    """A lost request and a lost answer look the same; a retry could create two VMs."""
    error, seen = await attempt(client, make, Drop(), CREATED)
    assert isinstance(error, errors.ServerUnreachable) and error.sent
    assert pickle.loads(pickle.dumps(error)).sent
    assert len(seen) == 1


async def test_command_is_not_retried_once_sent(client: Client) -> None:
    for step in (Drop(), BUSY, Reply(502, b"<html>bad gateway</html>")):
        error, seen = await attempt(client, lambda stead: stead.vms.ref(VM).exec("reboot"), step, Reply())
        assert isinstance(error, errors.ServerUnreachable | errors.ServiceUnavailable)
        assert len(seen) == 1


UNSURE = [
    Drop(),
    BUSY,
    Reply(502, b"<html>bad gateway</html>"),
    Reply(503, b"unavailable"),
    Reply(504, b"gateway timeout"),
    Reply(504, {"code": "VM_START_TIMEOUT", "message": "not ready"}),
    Reply(content={}, after=0.5),
]
"""Failures after which the server may have executed the request."""


def run_streamed(stead: Any) -> Any:
    stream = stead.vms.ref(VM).exec_stream("reboot")
    return anext(stream) if hasattr(stream, "__anext__") else next(stream)


@pytest.mark.parametrize("step", UNSURE)
async def test_not_retryable_once_a_command_or_create_may_have_started(client: Client, step: Step) -> None:
    calls: list[Callable[[Any], Any]] = [
        # The client waits GRACE seconds longer than the command's own timeout.
        lambda stead: stead.vms.ref(VM).exec("reboot", timeout=0.2 - GRACE),
        run_streamed,
        lambda stead: stead.vms.create(),
        lambda stead: stead.vms.snapshots.ensure(VmSpec()),
        lambda stead: stead.vms.ref(VM).fork(),
    ]
    for call in calls[:1] if isinstance(step, Reply) and step.after else calls:
        error, seen = await attempt(client, call, step)
        assert isinstance(error, errors.SteadException) and not error.retryable
        assert not pickle.loads(pickle.dumps(error)).retryable
        assert len(seen) == 1


async def test_retryable_if_the_failed_call_had_no_effect(client: Client) -> None:
    def run(stead: Any) -> Any:
        return stead.vms.ref(VM).exec("reboot")

    for step in (
        Reply(409, {"code": "VM_IS_SUSPENDING", "message": "m"}),
        Reply(429, {}),
        Reply(503, {"code": "NO_LOCAL_STORAGE_CAPACITY", "message": "m"}),
    ):
        error, _ = await attempt(client, run, step)
        assert error.retryable
    error, _ = await attempt(client, read, Drop(), max_retries=0)
    assert error.retryable and error.sent
    error, _ = await attempt(client, read, BUSY, max_retries=0)
    assert error.retryable
    stead = client(f"http://127.0.0.1:{free_port()}", max_retries=0)
    with pytest.raises(errors.ServerUnreachable) as caught:
        await done(run(stead))
    assert caught.value.retryable and not caught.value.sent
    await close(stead)


async def test_not_retryable_after_refusals(client: Client) -> None:
    error, _ = await attempt(client, make, Reply(403, {"code": "FORBIDDEN", "message": "m"}))
    assert not error.retryable
    assert not errors.MissingCredentials("m").retryable
    started = {"code": "VM_IS_SUSPENDING", "message": "m", "retryable": False}
    error, _ = await attempt(client, read, Reply(409, started))
    assert isinstance(error, errors.VmBusy) and not error.retryable


async def test_create_is_retried_until_the_server_listens(client: Client) -> None:
    """Nothing was sent, so that a retry is safe for every request."""
    port = free_port()
    up, over = threading.Event(), threading.Event()
    seen: list[Any] = []

    def serve_soon() -> None:
        time.sleep(0.4)
        with scripted(CREATED, port=port) as server:
            up.set()
            over.wait(10)
            seen.extend(server.seen)

    thread = threading.Thread(target=serve_soon)
    thread.start()
    try:
        stead = client(f"http://127.0.0.1:{port}", max_retries=6)
        assert (await done(stead.vms.create())).id == VM
        await close(stead)
    finally:
        over.set()
        thread.join()
    assert up.is_set() and len(seen) == 1


async def test_connection_refused_is_server_unreachable(client: Client) -> None:
    stead = client(f"http://127.0.0.1:{free_port()}", max_retries=1)
    with pytest.raises(errors.ServerUnreachable, match="cannot connect") as caught:
        await done(stead.whoami())
    assert not caught.value.sent
    await close(stead)


async def test_retried_delete_that_finds_nothing_has_succeeded(client: Client) -> None:
    missing = Reply(404, {"code": "VM_NOT_FOUND", "message": "no VM"})
    for lost in (Drop(), Reply(502, b"bad gateway"), Reply(504, b"gateway timeout")):
        result, seen = await attempt(client, delete, lost, missing)
        assert result is None
        assert len(seen) == 2


async def test_delete_of_a_missing_vm_fails(client: Client) -> None:
    """Also after a 503 of the server, which says that it did not delete anything."""
    missing = Reply(404, {"code": "VM_NOT_FOUND", "message": "no VM", "vmId": VM})
    error, seen = await attempt(client, delete, missing)
    assert isinstance(error, errors.VmNotFound) and error.vm_id == VM
    error, seen = await attempt(client, delete, BUSY, missing)
    assert isinstance(error, errors.VmNotFound)
    assert len(seen) == 2


async def test_retry_after_is_honoured(client: Client) -> None:
    started = time.monotonic()
    vm, _ = await attempt(client, read, Reply(503, {}, {"Retry-After": "1"}), INFO)
    assert vm.id == VM
    assert time.monotonic() - started >= 1


async def test_retry_after_beyond_the_maximum_is_final(client: Client) -> None:
    error, seen = await attempt(client, read, Reply(503, {}, {"Retry-After": "3600"}), INFO)
    assert isinstance(error, errors.ServiceUnavailable) and error.retryable
    assert len(seen) == 1


async def test_create_is_retried_after_429_with_retry_after(client: Client) -> None:
    vm, seen = await attempt(client, make, Reply(429, {}, {"Retry-After": "0"}), CREATED)
    assert vm.id == VM and len(seen) == 2
    error, seen = await attempt(client, make, Reply(429, {}), CREATED)
    assert isinstance(error, errors.TooManyRequests) and len(seen) == 1


async def test_retries_are_bounded(client: Client) -> None:
    error, seen = await attempt(client, read, *[BUSY] * 9, max_retries=2)
    assert isinstance(error, errors.ServiceUnavailable)
    assert len(seen) == 3
    error, seen = await attempt(client, read, *[Drop()] * 9, max_retries=0)
    assert isinstance(error, errors.ServerUnreachable)
    assert len(seen) == 1


async def test_final_error_codes_are_not_retried(client: Client) -> None:
    slow = Reply(504, {"code": "VM_START_TIMEOUT", "message": "not ready"})
    error, seen = await attempt(client, read, slow, INFO)
    assert isinstance(error, errors.VmStartTimeout) and len(seen) == 1


def test_backoff_grows_with_jitter() -> None:
    policy = RetryPolicy(attempts=20)
    waits = [
        policy.after_failure(number, sent=False, idempotent=False, timed_out=False) or 0
        for number in range(1, 20)
    ]
    assert 0.1 < waits[0] <= 0.25 and 4 <= waits[-1] <= 8
    repeated = {policy.after_failure(9, sent=False, idempotent=True, timed_out=False) for _ in range(20)}
    assert len(repeated) > 10


async def test_timed_out_read_is_not_retried(client: Client) -> None:
    error, seen = await attempt(client, read, Reply(content={}, after=1), INFO, timeout=0.2)
    assert isinstance(error, errors.NoAnswerInTime) and error.sent
    assert len(seen) == 1


async def test_exec_has_its_own_timeout(client: Client) -> None:
    def run(stead: Any) -> Any:
        return stead.vms.ref(VM).exec("sleep 1", timeout=30)

    answer = {"stdout": "done", "stderr": None, "statusCode": 0, "durationMs": 1000.5}
    result, seen = await attempt(client, run, Reply(content=answer, after=0.8), timeout=0.2)
    assert result.ok and result.stdout == "done" and result.stderr == "" and result.duration == 1.0005
    assert seen[0].json == {"command": "sleep 1", "terminal": None, "timeoutMs": 30000}


async def test_exec_sends_cwd_env_stdin_and_user(client: Client) -> None:
    def run(stead: Any) -> Any:
        vm = stead.vms.ref(VM).user("alice")
        return vm.exec(["wc", "-c"], cwd="/tmp", env={"A": "b"}, stdin="12345", check=True)

    answer = {"stdout": "", "stderr": "first\nbad\n", "statusCode": 3, "stdoutTruncated": True}
    error, seen = await attempt(client, run, Reply(content=answer))
    assert isinstance(error, errors.CommandFailed)
    assert str(error) == "`wc -c` exited with 3: bad"
    assert error.result.status_code == 3 and error.result.stdout_truncated and not error.result.ok
    assert pickle.loads(pickle.dumps(error)).result == error.result
    assert seen[0].headers["x-freestyle-vm-linux-user-id"] == "alice"
    assert seen[0].json["command"] == ["wc", "-c"]
    assert seen[0].json["cwd"] == "/tmp" and seen[0].json["env"] == {"A": "b"}
    assert base64.b64decode(seen[0].json["stdin"]) == b"12345"


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "CREATE_VM_MEM_NOT_POWER_OF_TWO", errors.InvalidSize),
        (400, "SERVICE_NAME_EMPTY", errors.InvalidService),
        (400, "VM_NOT_RUNNING", errors.VmNotRunning),
        (401, "UNAUTHORIZED_ERROR", errors.Unauthorized),
        (403, "FORBIDDEN", errors.Forbidden),
        (403, "TOTAL_VM_LIMIT_EXCEEDED", errors.VmLimitExceeded),
        (404, "FILE_NOT_FOUND", errors.FileNotFound),
        (409, "VM_IS_SUSPENDING", errors.VmBusy),
        (410, "VM_DELETED", errors.VmDeleted),
        (500, "VM_SETUP_FAILED", errors.SetupFailed),
        (503, "NO_LOCAL_STORAGE_CAPACITY", errors.NoCapacity),
        # Codes without their own class are selected by status.
        (400, "INVALID_ACCOUNT_ID", errors.InvalidRequest),
        (403, "RECORD_OWNERSHIP_ERROR", errors.Forbidden),
        (404, "JOB_NOT_FOUND", errors.NotFound),
        (409, "ALREADY_IN_PROGRESS", errors.Conflict),
        (500, "KERNEL_PANIC", errors.ServerError),
        (418, "NEVER_HEARD_OF", errors.InvalidRequest),
    ],
)
async def test_error_codes_select_the_exception_class(
    client: Client, status: int, code: str, kind: type[errors.SteadApiError]
) -> None:
    body = {"code": code, "error": code, "message": "this is why", "extra": 7}
    step = Reply(status, body, {"x-freestyle-trace-id": "abc123"})
    error, _ = await attempt(client, make, step)
    assert type(error) is kind
    assert (error.code, error.status, error.message, error.trace_id) == (
        code,
        status,
        "this is why",
        "abc123",
    )
    assert error.body["extra"] == 7
    assert str(error) == f"{code}: this is why (trace abc123)"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and again.body == error.body and str(again) == str(error)


async def test_answers_that_are_not_json(client: Client) -> None:
    error, _ = await attempt(client, make, Reply(502, b"<html>Bad Gateway</html>"))
    assert type(error) is errors.ServiceUnavailable
    assert error.code is None and "Bad Gateway" in str(error)
    for page in (b"<html>hello</html>", b"[]", b'{"domains": []}'):
        error, _ = await attempt(client, make, Reply(200, page))
        assert isinstance(error, errors.UnexpectedAnswer)


async def test_errors_have_the_fields_of_the_answer(client: Client) -> None:
    step = Reply(
        408, {"code": "EXEC_TIMED_OUT", "message": "m", "timeoutMs": 1500, "stdout": "out", "stderr": None}
    )
    error, _ = await attempt(client, lambda stead: stead.vms.ref(VM).exec("sleep 9"), step)
    assert isinstance(error, errors.ExecTimedOut)
    assert (error.stdout, error.stderr, error.timeout) == ("out", "", 1.5)

    diagnostics = {
        "serviceStates": [{"activeState": "failed", "subState": "failed", "services": ["app.service"]}],
        "failedServiceLogs": [{"unitName": "app.service", "log": "boom"}],
    }
    facts = {"failedReason": "app failed", "snapshotId": "sc-1", "diagnostics": diagnostics}
    error, _ = await attempt(client, make, Reply(500, {"code": "VM_SETUP_FAILED", "message": "m", **facts}))
    assert isinstance(error, errors.SetupFailed) and error.diagnostics is not None
    assert error.snapshot_id == "sc-1" and error.failed_reason == "app failed"
    assert error.diagnostics.service_states[0].services == ("app.service",)
    assert error.diagnostics.failed_service_logs[0].log == "boom"

    over = {"code": "MEM_OVER_PLAN_LIMIT", "message": "m", "got": 64, "max": 8}
    error, _ = await attempt(client, make, Reply(403, over))
    assert isinstance(error, errors.LimitExceeded) and (error.limit, error.requested) == (8, 64)


# Builds


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
        VmSpec().service("x", command="y", colour="green")  # type: ignore[call-arg]


async def test_wait_for_a_build_ends_or_times_out(client: Client) -> None:
    def wait(stead: Any) -> Any:
        return stead.vms.builds.wait("bld-1", timeout=0.2, interval=0.05)

    building = Reply(content={"buildId": "bld-1", "state": "running"})
    built = Reply(content={"buildId": "bld-1", "state": "failed", "failureReason": "no rule"})
    build, _ = await attempt(client, wait, building, built)
    assert build.finished and build.failure_reason == "no rule"
    error, _ = await attempt(client, wait, *[building] * 20)
    assert isinstance(error, errors.WaitTimedOut)


# Streams


def line(kind: str, **facts: Any) -> bytes:
    return json.dumps({"type": kind, **facts}).encode() + b"\n"


def said(kind: str, data: bytes) -> bytes:
    return line(kind, data=base64.b64encode(data).decode())


async def test_exec_stream_decodes_events_across_chunks(client: Client) -> None:
    """Chunks end anywhere: within a line, within a character."""
    coin = "€".encode()
    whole = (
        said("stdout", b"a" + coin[:1])
        + b"\n"
        + line("news", about="something newer than this client")
        + said("stderr", b"oops")
        + said("stdout", coin[1:])
        + said("stdout", b"\xff")
        + said("stderr", coin[:2])
        + line("exit", statusCode=137, signal="SIGKILL", timedOut=True, durationMs=1500)
    )
    for size in (1, 7, len(whole)):
        pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
        with scripted(Pieces(pieces)) as server:
            stead = client(server.url)
            found = await done(stead.vms.ref(VM).exec_stream("x", timeout=60))
            await close(stead)
        assert found[:-1] == [
            Output("stdout", b"a" + coin[:1], "a"),
            Output("stderr", b"oops", "oops"),
            Output("stdout", coin[1:], "€"),
            Output("stdout", b"\xff", "\ufffd"),
            Output("stderr", coin[:2], ""),
            Output("stderr", b"", "\ufffd"),
        ]
        assert found[-1] == Exited(137, "SIGKILL", True, 1.5)
        assert server.seen[0].target == f"/v1/vms/{VM}/exec-stream"


@pytest.mark.parametrize("complete", [True, False])
async def test_exec_stream_that_is_cut_is_server_unreachable(client: Client, complete: bool) -> None:
    whole = said("stdout", b"begun")
    for pieces in ([whole], [whole, whole[: len(whole) // 2]]):
        with scripted(Pieces(pieces, complete=complete)) as server:
            stead = client(server.url)
            with pytest.raises(errors.ServerUnreachable) as caught:
                await done(stead.vms.ref(VM).exec_stream("x"))
            assert caught.value.sent and not caught.value.retryable
            await close(stead)


async def test_error_event_of_a_lost_vm_is_the_matching_error(client: Client) -> None:
    gone = line("error", code="VM_NOT_RUNNING", message="the VM was stopped")
    with scripted(Pieces([said("stdout", b"begun"), gone]), Reply(404, {"code": "VM_NOT_FOUND"})) as server:
        stead = client(server.url)
        with pytest.raises(errors.VmNotRunning, match="the VM was stopped"):
            await done(stead.vms.ref(VM).exec_stream("x"))
        with pytest.raises(errors.VmNotFound):
            await done(stead.vms.ref(VM).exec_stream("x"))
        await close(stead)


async def test_error_event_of_a_stopping_server_is_the_matching_error(client: Client) -> None:
    """The command had started, so that the error is not retryable, whatever its code."""
    stopped = line("error", code="SERVICE_UNAVAILABLE", message="the server is stopping")
    with scripted(Pieces([said("stdout", b"begun"), stopped]), Pieces([stopped])) as server:
        stead = client(server.url)
        with pytest.raises(errors.ServiceUnavailable, match="the server is stopping") as caught:
            await done(stead.vms.ref(VM).exec_stream("x"))
        assert not caught.value.retryable
        with pytest.raises(errors.ServiceUnavailable):
            await done(stead.vms.ref(VM).fs.watch())
        await close(stead)


async def test_closing_a_stream_closes_its_connection(client: Client) -> None:
    """The server kills the command when the connection closes."""
    step = Pieces([said("stdout", b"begun")], hold=True)
    with scripted(step) as server:
        stead = client(server.url)
        event = await first(stead.vms.ref(VM).exec_stream("x"))
        assert event.text == "begun"
        assert await asyncio.to_thread(step.gone.wait, 5)
        await close(stead)


async def test_watch_yields_file_events(client: Client) -> None:
    change = b'{"eventType": "change", "filename": "/etc/hosts"}\n'
    last = b'{"eventType": "rename", "filename": "/tmp/x", "overflow": true}'
    with scripted(Pieces([b"\n", change + b"\n\n", last])) as server:
        stead = client(server.url)
        found = await done(stead.vms.ref(VM).fs.watch())
        await close(stead)
    assert [(event.event_type, event.filename, event.overflow) for event in found] == [
        ("change", "/etc/hosts", False),
        ("rename", "/tmp/x", True),
    ]


async def test_following_logs_yields_each_new_line_once(client: Client) -> None:
    """Lines from before the call are skipped, and lines that the next query returns again."""

    def entry(second: int) -> dict[str, str]:
        return {"timestamp": f"2026-01-01T00:00:{second:02}.500000Z", "message": f"line {second}"}

    steps = [
        Reply(content={"logs": [entry(1)]}),
        Reply(content={"logs": [entry(1), entry(2)], "nextPageToken": "p"}),
        Reply(content={"logs": [entry(3)]}),
        Reply(content={"logs": [entry(3)]}),
        Reply(content={"logs": [entry(3), entry(4)]}),
    ]
    with scripted(*steps) as server:
        stead = client(server.url)
        stream = stead.logs.stream(vm_id=VM, interval=0.01)
        found = [
            str(await done(anext(stream) if hasattr(stream, "__anext__") else next(stream))) for _ in range(3)
        ]
        await close(stream)
        await close(stead)
    assert found == ["line 2", "line 3", "line 4"]
    assert "startTime=2026-01-01T00%3A00%3A03.500000Z" in server.seen[-1].target


# Files


async def test_paths_are_percent_encoded(client: Client) -> None:
    path = "/srv/a b/ü?#%2F/\udcff"
    _, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fs.write(path, b"\x00data", mode=0o640), Reply()
    )
    encoded = "%2Fsrv%2Fa%20b%2F%C3%BC%3F%23%252F%2F%FF"
    assert seen[0].target == f"/v1/vms/{VM}/files/{encoded}?mode=0640"
    assert seen[0].body == b"\x00data" and seen[0].headers["content-length"] == "5"
    assert seen[0].headers["content-type"] == "application/octet-stream"


async def test_read_returns_bytes(client: Client) -> None:
    data, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fs.read("/x"), Drop(), Reply(content=b"\xff\x00")
    )
    assert data == b"\xff\x00"
    assert seen[1].headers["accept"] == "application/octet-stream"
    error, _ = await attempt(
        client, lambda stead: stead.vms.ref(VM).fs.read("/x"), Reply(404, {"code": "FILE_NOT_FOUND"})
    )
    assert isinstance(error, errors.FileNotFound)


async def test_exists_is_false_for_missing_files_only(client: Client) -> None:
    """A missing VM, or a file without permission, is an error."""

    def ask(stead: Any) -> Any:
        return stead.vms.ref(VM).fs.exists("/x")

    facts = {"name": "x", "kind": "directory", "size": 1, "mode": 0o755, "user": "root", "mtimeMs": 1000.0}
    assert (await attempt(client, ask, Reply(content=facts)))[0] is True
    assert (await attempt(client, ask, Reply(404, {"code": "FILE_NOT_FOUND"})))[0] is False
    error, _ = await attempt(client, ask, Reply(404, {"code": "VM_NOT_FOUND"}))
    assert isinstance(error, errors.VmNotFound)


async def test_read_dir_of_a_file_is_not_a_directory_error(client: Client) -> None:
    with scripted(Reply(content={"content": "", "encoding": "utf8"})) as server:
        stead = client(server.url)
        with pytest.raises(NotADirectoryError):
            await done(stead.vms.ref(VM).fs.read_dir("/etc/hosts"))
        await close(stead)


async def test_upload_is_retried_from_the_start_of_the_file(client: Client, tmp_path: Path) -> None:
    file = tmp_path / "tool"
    file.write_bytes(b"x" * 300_000)
    file.chmod(0o755)
    _, seen = await attempt(client, lambda stead: stead.vms.ref(VM).fs.upload(file, "/opt/"), Drop(), Reply())
    assert [len(request.body) for request in seen] == [300_000, 300_000]
    assert seen[1].target == f"/v1/vms/{VM}/files/%2Fopt%2Ftool?mode=0755"


async def test_write_from_an_iterator_is_not_retried(client: Client) -> None:
    with scripted(Drop(), Reply()) as server:
        stead = client(server.url)
        is_async = isinstance(stead, AsyncStead)

        async def later() -> Any:
            yield b"only once"

        source: Any = later() if is_async else iter([b"only once"])
        with pytest.raises(errors.ServerUnreachable):
            await done(stead.vms.ref(VM).fs.write("/x", source))
        await close(stead)
    assert [request.body for request in server.seen] == [b"only once"]


async def test_folder_is_uploaded_as_a_tar_archive(client: Client, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_bytes(b"y" * 1000)
    (tmp_path / "link").symlink_to("sub/data")
    (tmp_path / "empty").touch()
    _, seen = await attempt(client, lambda stead: stead.vms.ref(VM).fs.upload(tmp_path, "/srv"), Reply())
    assert seen[0].target == f"/v1/vms/{VM}/archives/%2Fsrv"
    assert seen[0].headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(seen[0].body)) as tar:
        assert sorted(tar.getnames()) == ["empty", "link", "sub", "sub/data"]
        content = tar.extractfile("sub/data")
        assert content is not None and content.read() == b"y" * 1000
        assert tar.getmember("link").linkname == "sub/data"
        assert {entry.uid for entry in tar} == {0}


async def test_interrupted_download_keeps_the_old_file(client: Client, tmp_path: Path) -> None:
    target = tmp_path / "report"
    target.write_text("old")
    facts = Reply(content={"name": "report", "kind": "file", "size": 9, "mode": 0o6755})

    def fetch(stead: Any) -> Any:
        return stead.vms.ref(VM).fs.download("/srv/report", tmp_path)

    error, _ = await attempt(client, fetch, facts, Pieces([b"new"], complete=False))
    assert isinstance(error, errors.ServerUnreachable)
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]
    skipped, _ = await attempt(client, fetch, facts, Pieces([b"new ", b"report"]))
    assert skipped == [] and target.read_text() == "new report"
    assert target.stat().st_mode & 0o7777 == 0o755 and list(tmp_path.iterdir()) == [target]


# VMs


async def used(vm: Any, error: BaseException | None) -> None:
    """Use a VM in a `with` statement whose body raises."""
    if hasattr(vm, "__aenter__"):
        async with vm:
            if error is not None:
                raise error
    else:
        with vm:
            if error is not None:
                raise error


async def test_context_manager_deletes_the_vm(client: Client) -> None:
    with scripted(Reply(), Reply(404, {"code": "VM_NOT_FOUND"})) as server:
        stead = client(server.url)
        await used(stead.vms.ref(VM), None)
        await used(stead.vms.ref(VM), None)
        await close(stead)
    assert [request.method for request in server.seen] == ["DELETE", "DELETE"]


async def test_failed_delete_does_not_hide_an_earlier_error(client: Client) -> None:
    refused = Reply(403, {"code": "FORBIDDEN", "message": "not yours"})
    with scripted(refused, refused) as server:
        stead = client(server.url)
        with pytest.raises(ZeroDivisionError) as caught:
            await used(stead.vms.ref(VM), ZeroDivisionError("the body"))
        assert "not yours" in caught.value.__notes__[0]
        with pytest.raises(errors.Forbidden):
            await used(stead.vms.ref(VM), None)
        await close(stead)


async def test_cancelled_task_deletes_its_vm() -> None:
    with scripted(CREATED, Pieces([said("stdout", b"begun")], hold=True), Reply()) as server:
        begun = asyncio.Event()

        async def work() -> None:
            async with AsyncStead("key", base_url=server.url) as stead, await stead.vms.create() as vm:
                async for _ in vm.exec_stream("sleep inf"):
                    begun.set()

        task = asyncio.create_task(work())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [request.method for request in server.seen] == ["POST", "POST", "DELETE"]


async def test_fork_returns_vms(client: Client) -> None:
    answer = {"vmId": VM, "forks": [{"id": "fork1", "domains": []}, {"id": "fork2"}]}
    forks, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fork(count=2, persistence="ephemeral"), Reply(content=answer)
    )
    assert [fork.id for fork in forks] == ["fork1", "fork2"]
    assert seen[0].json == {"count": 2, "persistence": {"type": "ephemeral"}}


async def test_fork_names_its_forks(client: Client) -> None:
    answer = {"vmId": VM, "forks": [{"id": "fork1", "name": "try-1"}, {"id": "fork2", "name": "try-2"}]}
    forks, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fork(count=2, name="try"), Reply(content=answer)
    )
    assert seen[0].json == {"count": 2, "name": "try"}
    assert [fork.name for fork in forks] == ["try-1", "try-2"]


async def test_rename_returns_the_new_info(client: Client) -> None:
    answer = Reply(content={"id": VM, "state": "running", "name": "web"})
    info, seen = await attempt(client, lambda stead: stead.vms.ref(VM).rename("web"), Drop(), answer)
    assert info.name == "web"
    assert [(request.method, request.json) for request in seen] == [("PATCH", {"name": "web"})] * 2


async def test_move_sends_both_paths_once_as_the_linux_user(client: Client) -> None:
    def move(stead: Any) -> Any:
        return stead.vms.ref(VM).user("alice").fs.move("/srv/a", Path("/srv/b"))

    _, seen = await attempt(client, move, Reply())
    assert seen[0].target == f"/v1/vms/{VM}/move" and seen[0].json == {"from": "/srv/a", "to": "/srv/b"}
    assert seen[0].headers["x-freestyle-vm-linux-user-id"] == "alice"
    error, seen = await attempt(client, move, Drop(), Reply())
    assert isinstance(error, errors.ServerUnreachable) and len(seen) == 1
    _, seen = await attempt(
        client, lambda stead: stead.vms.ref(VM).fs.move("/a", "/b", overwrite=True), Reply()
    )
    assert seen[0].json == {"from": "/a", "to": "/b", "overwrite": True}


async def test_idle_timeout_none_differs_from_not_given(client: Client) -> None:
    """Without the argument the server decides; None disables the timeout."""
    _, seen = await attempt(client, lambda stead: stead.vms.create(idle_timeout_seconds=None), CREATED)
    assert seen[0].json == {"idleTimeoutSeconds": None}
    _, seen = await attempt(client, lambda stead: stead.vms.ref(VM).start(), Reply())
    assert seen[0].json == {}


def test_ids_cannot_change_the_path() -> None:
    """An empty id would address the collection, dots a parent path."""
    with Stead("key", base_url="http://127.0.0.1:1") as stead:
        for vm_id in ("", ".", ".."):
            with pytest.raises(ValueError, match="invalid id or path"):
                stead.vms.delete(vm_id)


async def test_fetch_sends_any_request(client: Client) -> None:
    answer, seen = await attempt(
        client,
        lambda stead: stead.fetch("/v1/{odd}/x", method="post", json={"a": 1}, query={"b": True, "c": None}),
        Reply(404, {"code": "NOT_FOUND"}),
    )
    assert answer.status_code == 404 and answer.json() == {"code": "NOT_FOUND"}
    assert seen[0].method == "POST" and seen[0].json == {"a": 1}
    assert seen[0].target == "/v1/%7Bodd%7D/x?b=true"
    assert seen[0].headers["authorization"] == "Bearer key"


# Client


def test_settings_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STEAD_API_KEY", "STEAD_API_URL", "FREESTYLE_API_KEY", "FREESTYLE_API_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.MissingCredentials):
        Stead()
    with pytest.raises(ValueError, match="either"):
        Stead(api_key="a", access_token="b")
    with pytest.raises(ValueError, match="base URL"):
        Stead(api_key="a", base_url="localhost:8600")
    with Stead(api_key="a") as stead:
        assert stead.base_url == "http://127.0.0.1:8600"
    monkeypatch.setenv("FREESTYLE_API_KEY", "theirs")
    monkeypatch.setenv("FREESTYLE_API_URL", "http://theirs/")
    with Stead() as stead:
        assert stead.base_url == "http://theirs"
    monkeypatch.setenv("STEAD_API_KEY", "ours")
    monkeypatch.setenv("STEAD_API_URL", "http://ours")
    with Stead() as stead:
        assert stead.base_url == "http://ours"
        assert stead._connection.settings.headers["Authorization"] == "Bearer ours"


async def test_access_token_replaces_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEAD_API_KEY", "secret")
    with (
        scripted(Reply(content={"accountId": "a", "identityId": "i"})) as server,
        Stead(access_token="stid_x", base_url=f"{server.url}/prefix/") as stead,
    ):
        assert stead.whoami().identity_id == "i"
        assert "stid_x" not in repr(stead) + repr(stead._connection.settings)
    assert server.seen[0].target == "/prefix/auth/v1/whoami"
    assert server.seen[0].headers["x-freestyle-identity-access-token"] == "stid_x"
    assert "authorization" not in server.seen[0].headers


def test_supplied_http_client_is_not_closed() -> None:
    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json={"accountId": request.url.host})

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        with Stead("key", base_url="https://example.test", http_client=http) as stead:
            assert stead.whoami().account_id == "example.test"
        assert not http.is_closed


def test_loopback_requests_bypass_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with scripted(Reply(content={"accountId": "a"})) as server, Stead("key", base_url=server.url) as stead:
        assert stead.whoami().account_id == "a"


def test_unknown_fields_and_values_of_a_newer_server_are_accepted() -> None:
    info = parse(
        VmInfo,
        {
            "id": VM,
            "state": "hibernating",
            "createdAt": "2026-01-31T12:00:00.123456Z",
            "sizing": {"vcpuCount": 4, "novelty": True},
            "cpuTimeSeconds": 3,
            "name": None,
            "colour": "green",
        },
    )
    assert str(info.state) == "hibernating" and info.name is None and info.cpu_time_seconds == 3.0
    assert info.created_at is not None and info.created_at.microsecond == 123456
    assert info.sizing is not None and info.sizing.vcpu_count == 4 and info.sizing.mem_size_mib is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"state": "running"}, "missing required field `id`"),
        ({"id": VM, "state": None}, "Expected `str`, got `null` - at `$.state`"),
        (
            {"id": VM, "state": "running", "persistence": {"type": "sticky", "priority": "high"}},
            "Expected `int | null`, got `str` - at `$.persistence.priority`",
        ),
        ({"id": VM, "state": "running", "createdAt": "today"}, "at `$.createdAt`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_an_invalid_answer_is_an_error_with_the_path_of_the_field(data: object, message: str) -> None:
    with pytest.raises(errors.UnexpectedAnswer) as refused:
        parse(VmInfo, data)
    assert str(refused.value).startswith("the answer is not a valid VmInfo: ") and message in str(
        refused.value
    )


def test_repr_of_a_model_hides_secrets_and_contents() -> None:
    token = parse(Token, {"id": "t", "token": "secret"})
    assert repr(token) == "Token(id='t')" and token.__rich_repr__() == [("id", "t")]
    assert token.token == "secret"


# Package


def test_sync_client_is_up_to_date_with_unasync() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "unasync"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, f"run scripts/unasync; stale: {done.stdout}{done.stderr}"


def test_sdk_imports_nothing_else_of_the_package() -> None:
    for path in (ROOT / "src" / "stead" / "sdk").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module or ""]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                top = name.partition(".")[0]
                assert name.startswith("stead.sdk") or top in {
                    "httpx2",
                    "msgspec",
                    *sys.stdlib_module_names,
                }, f"{path.name} imports {name}"


def test_import_of_stead_does_not_load_the_client() -> None:
    code = "import sys, stead; print('httpx2' in sys.modules); stead.Stead; print('httpx2' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]


def test_all_exported_names_exist() -> None:
    import stead
    from stead import sdk

    assert all(getattr(stead, name) is getattr(sdk, name) for name in stead.__all__)
    assert set(stead.__all__) <= set(sdk.__all__)
    with pytest.raises(AttributeError):
        stead.Nonsense  # type: ignore[attr-defined] # noqa: B018
