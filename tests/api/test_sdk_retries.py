"""Retries, time-outs and errors of the SDK, with both clients."""

import base64
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from stead import VmSpec
from stead.sdk import errors
from stead.sdk.retries import RetryPolicy
from support.scripted_server import Drop, Reply, Step, free_port, scripted
from support.sdk_calls import BUSY, CREATED, INFO, VM, delete, make, read
from support.sdk_clients import Client, attempt, close, done


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
    for step in (BUSY, Reply(502, b"<html>bad gateway</html>")):
        error, seen = await attempt(client, make, step, CREATED)
        assert isinstance(error, errors.ServerUnreachable | errors.ServiceUnavailable)
        assert len(seen) == 1


async def test_command_is_not_retried_once_sent(client: Client) -> None:
    for step in (Drop(), BUSY, Reply(502, b"<html>bad gateway</html>")):
        error, seen = await attempt(client, lambda stead: stead.vms.ref(VM).exec("reboot"), step, Reply())
        assert isinstance(error, errors.ServerUnreachable | errors.ServiceUnavailable)
        assert len(seen) == 1


async def test_requests_refused_for_overload_are_retried_when_the_server_says_so(client: Client) -> None:
    """Nothing was executed, so a create or a command is sent again too."""
    refusal = {"code": "SERVICE_UNAVAILABLE", "message": "too many requests at once", "retryable": True}
    refused = Reply(503, refusal, {"Retry-After": "0"})
    result, seen = await attempt(client, make, refused, refused, CREATED)
    assert result.id == VM and len(seen) == 3
    error, seen = await attempt(client, make, *[refused] * 9)
    assert isinstance(error, errors.ServiceUnavailable) and error.retryable
    assert len(seen) == 5
    for unsure in (
        Reply(503, {**refusal, "retryable": None}, {"Retry-After": "0"}),
        Reply(503, refusal),
        Reply(503, refusal, {"Retry-After": "3600"}),
    ):
        error, seen = await attempt(client, make, unsure, CREATED)
        assert isinstance(error, errors.ServiceUnavailable) and len(seen) == 1


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
async def test_not_retryable_once_a_command_or_create_may_have_started(
    client: Client, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("_sync", "_async"):
        monkeypatch.setattr(f"stead.sdk.{module}.vm.GRACE", 0.1)
    calls: list[Callable[[Any], Any]] = [
        # The client waits GRACE seconds longer than the command's own timeout.
        lambda stead: stead.vms.ref(VM).exec("reboot", timeout=0.1),
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
    error, seen = await attempt(client, read, Reply(content={}, after=2), INFO, timeout=1)
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
