"""The command line against a scripted server: arguments, standard input, errors. No VMs are started."""

import base64
import json
import os
import pty
import re
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stead.cli.main import app
from support.run_cli import PROGRAM, Shell
from support.scripted_server import Pieces, Reply, Script, Seen, scripted

VM = "x" * 20


def output(status: int = 0, text: str = "") -> Pieces:
    """The answer to a command that prints a text and ends."""
    events: list[dict[str, Any]] = [{"type": "exit", "statusCode": status}]
    if text:
        events.insert(0, {"type": "stdout", "data": base64.b64encode(text.encode()).decode()})
    return Pieces([json.dumps(event).encode() + b"\n" for event in events])


def start(script: Script, *arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = Shell(script.url, "key").environment
    return subprocess.Popen([PROGRAM, *arguments], env=environment, **(pipes | options))


def run(script: Script, *arguments: str, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """Run a command: in a new process if it gets a standard input, else in this one, which is faster."""
    if not options:
        result = CliRunner().invoke(app, arguments, env={"STEAD_API_URL": script.url, "STEAD_API_KEY": "key"})
        return subprocess.CompletedProcess(
            arguments, result.exit_code, result.stdout_bytes, result.stderr_bytes
        )
    with start(script, *arguments, **options) as process:
        out, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def stdin_of(seen: Seen) -> bytes | None:
    data = seen.json.get("stdin")
    return None if data is None else base64.b64decode(data)


# The words of a command


@pytest.mark.parametrize(
    ("arguments", "command", "user"),
    [
        ((VM, "ls", "-l", "/srv"), ["ls", "-l", "/srv"], None),
        ((VM, "--", "ls", "-l"), ["ls", "-l"], None),
        (("--user", "nobody", VM, "ls", "--user", "me"), ["ls", "--user", "me"], "nobody"),
        ((VM, "--user=nobody", "git", "--version"), ["git", "--version"], "nobody"),
        ((VM, "-unobody", "--no-stdin", "env", "-u", "HOME"), ["env", "-u", "HOME"], "nobody"),
        ((VM, "ls", "--json"), ["ls", "--json"], None),
        ((VM, "grep", "--", "-x"), ["grep", "--", "-x"], None),
        ((VM, "echo $HOME"), "echo $HOME", None),
    ],
)
def test_options_after_the_first_word_belong_to_the_command(
    arguments: tuple[str, ...], command: str | list[str], user: str | None
) -> None:
    with scripted(output(3, "printed")) as script:
        result = run(script, "vm", "exec", *arguments)
    assert (result.stdout, result.returncode) == (b"printed", 3), result.stderr
    (call,) = script.seen
    assert call.json["command"] == command
    assert call.headers.get("x-freestyle-vm-linux-user-id") == user


@pytest.mark.parametrize("status", [126, 127])
def test_a_program_that_cannot_be_executed_has_the_exit_code_of_a_shell(status: int) -> None:
    with scripted(output(status)) as script:
        assert run(script, "vm", "exec", VM, "missing", "-x").returncode == status


@pytest.mark.parametrize("command", [("bash",), ("/bin/sh", "-l"), ("python3",)])
def test_an_interactive_program_on_a_terminal_is_refused_with_a_hint(command: tuple[str, ...]) -> None:
    leader, terminal = pty.openpty()
    try:
        with scripted() as script:
            result = run(script, "vm", "exec", VM, *command, stdin=terminal)
    finally:
        os.close(terminal)
        os.close(leader)
    assert result.returncode == 1
    assert f"stead vm exec -it {VM} {shlex.join(command)}".encode() in result.stderr
    assert f"stead vm shell {VM}".encode() in result.stderr
    assert script.seen == []


def test_a_terminal_that_is_asked_for_needs_one() -> None:
    """As in `docker exec -it`."""
    with scripted() as script:
        result = run(script, "vm", "exec", "-it", VM, "bash", "--json")
        refused = run(script, "vm", "exec", "--json", "-it", VM, "bash")
    assert result.returncode == 1 and b"standard input is not a terminal" in result.stderr
    assert refusal(refused)["code"] == "NO_TERMINAL"
    assert script.seen == []


def test_a_command_on_a_terminal_runs_without_input() -> None:
    leader, terminal = pty.openpty()
    try:
        with scripted(output()) as script:
            assert run(script, "vm", "exec", VM, "bash", "-c", "ls", stdin=terminal).returncode == 0
    finally:
        os.close(terminal)
        os.close(leader)
    assert stdin_of(script.seen[0]) is None


# Standard input


def test_a_pipe_that_is_complete_is_one_request() -> None:
    data = os.urandom(60_000)  # as much as a pipe holds
    reading, writing = os.pipe()
    with scripted(output()) as script:
        try:
            os.write(writing, data)
        finally:
            os.close(writing)
        assert run(script, "vm", "exec", VM, "cat", stdin=reading).returncode == 0
        os.close(reading)
    assert [stdin_of(each) for each in script.seen] == [data]


def test_a_file_is_passed_on_and_no_stdin_reads_nothing() -> None:
    with tempfile.TemporaryFile() as file, scripted(output(), output()) as script:
        file.write(b"content")
        file.seek(0)
        assert run(script, "vm", "exec", VM, "--no-stdin", "cat", stdin=file).returncode == 0
        assert run(script, "vm", "exec", VM, "cat", stdin=file).returncode == 0
    assert [stdin_of(each) for each in script.seen] == [None, b"content"]


def test_a_closed_or_empty_standard_input_is_no_input() -> None:
    with scripted(output(), output()) as script:
        result = run(script, "vm", "exec", VM, "cat", stdin=None, preexec_fn=lambda: os.close(0))
        assert (result.returncode, result.stderr) == (0, b"")
        assert run(script, "vm", "exec", VM, "cat", stdin=subprocess.DEVNULL).returncode == 0
    assert [stdin_of(each) for each in script.seen] == [None, None]


# Global options


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url", "{url}", "--key", "k", "whoami"),
        ("whoami", "--url", "{url}", "--key", "k"),
        ("identity", "--url={url}", "list", "--key", "k"),
        ("--url", "http://127.0.0.1:9", "--key", "other", "vm", "list", "--key", "k", "--url", "{url}"),
    ],
)
def test_global_options_work_before_and_after_the_command(arguments: tuple[str, ...]) -> None:
    answer = {"accountId": "a", "identities": [], "vms": [], "totalCount": 0}
    with scripted(Reply(content=answer)) as script:
        wrong = Script("http://127.0.0.1:9", [])
        given = [each.format(url=script.url) for each in arguments]
        result = run(wrong, *given)
    assert result.returncode == 0, result.stderr
    assert script.seen[0].headers["authorization"] == "Bearer k"


# Errors


def refusal(result: "subprocess.CompletedProcess[bytes]") -> Any:
    """The error of a command that was called with --json: one line on standard error."""
    assert result.stdout == b""
    (line,) = result.stderr.splitlines()
    return json.loads(line)["error"]


def test_errors_after_json_are_one_line_of_json() -> None:
    body = {"code": "VM_NOT_FOUND", "message": f"no VM {VM}"}
    with scripted(Reply(404, body, {"x-trace-id": "abc"}), Reply(404, body)) as script:
        result = run(script, "vm", "get", VM, "--json")
        text = run(script, "vm", "get", VM)
    assert result.returncode == 1
    assert refusal(result)["code"] == "VM_NOT_FOUND"
    assert refusal(result)["message"] == f"no VM {VM}"
    assert "traceId" in refusal(result)
    assert text.stderr.startswith(f"error: no VM {VM} (VM_NOT_FOUND".encode())


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (("vm", "list", "--json"), 1, "SERVER_UNREACHABLE"),
        (("vm", "list", "--bad", "--json"), 2, "USAGE"),
        (("vm", "create", "--size", "big", "--json"), 2, "USAGE"),
        (("vm", "create", "--spec", "/nowhere/spec.json", "--json"), 1, "SPEC_UNREADABLE"),
    ],
)
def test_local_errors_have_a_code_too(arguments: tuple[str, ...], exit_code: int, code: str) -> None:
    result = run(Script("http://127.0.0.1:9", []), *arguments)
    assert result.returncode == exit_code
    assert refusal(result)["code"] == code


# Set-up layers of `vm create`


def created(script: Script) -> Any:
    """The body of the create, which is the last request."""
    call = script.seen[-1]
    assert (call.method, call.target) == ("POST", "/v1/vms")
    return call.json


def test_set_up_options_are_a_layer_that_the_server_caches() -> None:
    options = (
        "--apt",
        "jq",
        "--run",
        "make -C /srv",
        "--run",
        "true",
        "--repo",
        "https://example.com/a#v1:/srv",
    )
    with scripted(Reply(content={"id": VM})) as script:
        result = run(script, "vm", "create", "--name", "web", "--size", "2x1Gx20G", *options)
    assert result.stdout.decode().strip() == VM, result.stderr
    body = created(script)
    assert set(body["spec"]) == {"name", "snapshot"}
    layer = body["spec"]["snapshot"]
    assert layer["aptDeps"] == ["jq"]
    assert layer["git"]["repos"] == [{"repo": "https://example.com/a", "path": "/srv", "rev": "v1"}]
    assert len(layer["systemd"]["services"]) == 2
    assert "make -C /srv" in str(layer["additionalFiles"])
    assert (layer["vcpuCount"], layer["memSizeGb"], layer["rootfsSizeGb"]) == (2, 1, 20)
    assert "aptDeps" not in body and "git" not in body


def test_set_up_options_go_on_top_of_a_spec(tmp_path: Path) -> None:
    file = tmp_path / "spec.json"
    file.write_text(
        json.dumps({"workdir": "/srv", "waitForReadySignal": True, "snapshot": {"aptDeps": ["make"]}})
    )
    with scripted(Reply(content={"id": VM})) as script:
        run(script, "vm", "create", "--spec", str(file), "--apt", "jq", "--no-cache")
    assert created(script)["spec"] == {
        "name": None,
        "waitForReadySignal": True,
        "snapshot": {
            "aptDeps": ["jq"],
            "skipCache": True,
            "snapshot": {"workdir": "/srv", "snapshot": {"aptDeps": ["make"]}},
        },
    }


# VMs, builds and identities in lists


def test_vm_list_shows_address_and_size() -> None:
    row = {
        "id": VM,
        "name": "web",
        "state": "running",
        "address": "10.1.0.2",
        "sizing": {"vcpuCount": 2, "memSizeMib": 4096, "rootfsSizeMb": 20480},
    }
    answer = Reply(content={"vms": [row], "totalCount": 1})
    with scripted(answer, answer) as script:
        table = run(script, "vm", "list").stdout.decode().splitlines()
        listed = json.loads(run(script, "vm", "list", "--json").stdout)
    assert table[0].split() == ["id", "name", "state", "size", "address", "created"]
    assert table[1].split() == [VM, "web", "running", "2x4Gx20G", "10.1.0.2"]
    assert listed["vms"][0]["size"] == "2x4Gx20G"


def test_vm_get_shows_the_last_traffic_of_the_server() -> None:
    row = {"id": VM, "state": "running"}
    seen = {**row, "lastNetworkActivity": "2026-01-31T12:00:00Z"}
    with scripted(Reply(content=row), Reply(content=seen)) as script:
        assert re.search(r"^last traffic +never$", run(script, "vm", "get", VM).stdout.decode(), re.M)
        shown = run(script, "vm", "get", VM).stdout.decode()
    assert re.search(r"^last traffic +2026-\d\d-\d\d .*d ago\)$", shown, re.M)


def test_snapshot_list_shows_the_size_on_disk() -> None:
    row = {"snapshotId": f"sc-{VM}", "state": "ready", "sizeBytes": 3 << 20}
    with scripted(Reply(content={"snapshots": [row]}), Reply(content=row)) as script:
        assert "3M" in run(script, "snapshot", "list").stdout.decode().splitlines()[1].split()
        assert re.search(r"^on disk +3M$", run(script, "snapshot", "get", f"sc-{VM}").stdout.decode(), re.M)


SNAPSHOT = {"snapshotId": f"sc-{VM}", "state": "ready"}


def test_snapshots_of_agents_are_listed_apart() -> None:
    mine = {"snapshots": [SNAPSHOT], "agentCount": 2}
    with scripted(*[Reply(content=mine)] * 4) as script:
        default = run(script, "snapshot", "list")
        run(script, "snapshot", "list", "--agents")
        everything = run(script, "snapshot", "list", "--all")
        run(script, "snapshot", "list", "--quiet")
    assert default.stdout.decode().splitlines()[0].split()[-2:] == ["created", "expires"]
    assert default.stdout.decode().splitlines()[1].split()[-1] == "never"
    assert default.stderr.decode() == "not shown: 2 saved by agents (stead snapshot list --agents)\n"
    assert everything.stderr == b""
    assert [seen.target.partition("?")[2] for seen in script.seen] == [
        "purpose=use",
        "purpose=agent",
        "includeDeleted=true",
        "purpose=use",
    ]


def test_snapshots_of_agents_are_deleted_together() -> None:
    def saved(number: int, **facts: object) -> dict[str, object]:
        made = {"createdAt": f"20{number}-01-31T12:00:00Z"}
        return {"snapshotId": f"sc-{number:020}", "state": "ready", "purpose": "agent", **made, **facts}

    # The last one is of a server that knows no purposes.
    found = Reply(content={"snapshots": [saved(21), saved(22), saved(23), {**SNAPSHOT}]})
    expired = Reply(404, {"code": "SNAPSHOT_NOT_FOUND", "message": "not found"})
    with scripted(found, Reply(), expired, Reply()) as script:
        result = run(script, "snapshot", "delete", "--agents")
    assert result.stdout.decode().splitlines() == [f"deleted sc-{number:020}" for number in (21, 22, 23)]
    deleted = [seen.target.rpartition("/")[2] for seen in script.seen[1:]]
    assert deleted == [f"sc-{number:020}" for number in (21, 22, 23)]
    with scripted(found, Reply()) as script:
        run(script, "snapshot", "delete", "--agents", "--older-than", "2022-01-01")
    assert [seen.method for seen in script.seen] == ["GET", "DELETE"]
    with scripted() as script:
        for arguments in ((), ("--agents", "sc-1"), ("--older-than", "7d", "sc-1")):
            assert run(script, "snapshot", "delete", *arguments).returncode == 2
    assert script.seen == []


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("90s", {"ttlSeconds": 90}),
        ("7d", {"ttlSeconds": 7 * 86400}),
        ("2w", {"ttlSeconds": 14 * 86400}),
        ("2033-01-31T12:00:00Z", {"expiresAt": "2033-01-31T12:00:00+00:00"}),
        ("never", {"expiresAt": None}),
    ],
)
def test_expiry_of_a_snapshot_is_a_span_a_date_or_never(
    text: str, sent: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        with scripted(Reply(), Reply(content=SNAPSHOT), Reply(content=SNAPSHOT)) as script:
            run(script, "snapshot", "extend", f"sc-{VM}", "--expires", text)
            run(script, "vm", "snapshot", VM, "--expires", text)
    finally:
        monkeypatch.undo()
        time.tzset()
    extended, _, taken = script.seen
    assert (extended.method, extended.json) == ("PATCH", sent)
    assert taken.json == {key: value for key, value in sent.items() if value is not None}


@pytest.mark.parametrize("text", ["soon", "7", "-1d", "7y", "999999999w", ""])
def test_invalid_expiry_is_refused(text: str) -> None:
    with scripted() as script:
        result = run(script, "snapshot", "extend", f"sc-{VM}", "--expires", text)
    assert result.returncode == 2 and script.seen == []
    assert f"invalid expiry {text!r}" in result.stderr.decode()


def test_identities_are_listed_with_names_dates_and_grants() -> None:
    row = {"id": "i1", "name": "ci", "createdAt": "2026-01-31T12:00:00Z", "vmGrants": 2, "repoGrants": 3}
    with scripted(Reply(content={"identities": [row], "total": 1})) as script:
        heading, line = run(script, "identity", "list").stdout.decode().splitlines()
    assert heading.split() == ["id", "name", "VMs", "repos", "created"]
    assert line.split()[:4] == ["i1", "ci", "2", "3"] and line.endswith("d ago")


BUILD = f"bld-{VM}"
RUNNING = {"buildId": BUILD, "state": "running", "startedAt": "2026-01-31T12:00:00Z"}
FAILED = {
    **RUNNING,
    "state": "failed",
    "finishedAt": "2026-01-31T12:00:05Z",
    "failureReason": "run: `false` exited with 1\nlast output",
}


def test_builds_are_listed_with_their_state_and_duration() -> None:
    with scripted(Reply(content={"builds": [FAILED], "totalCount": 3})) as script:
        result = run(script, "build", "list", "--state", "failed", "--limit", "1")
    heading, line = result.stdout.decode().splitlines()
    assert heading.split() == ["id", "state", "started", "took", "phase", "or", "failure"]
    assert line.split()[:2] == [BUILD, "failed"] and "5.0 s" in line
    assert line.endswith("run: `false` exited with 1")
    assert b"2 more: --offset 1" in result.stderr
    assert script.seen[0].target == "/v1/vms/builds?state=failed&limit=1&offset=0"


def test_a_build_is_shown_with_the_times_of_its_phases() -> None:
    phase = {
        "phaseId": "p1",
        "name": "apt",
        "state": "failed",
        "startedAt": "2026-01-31T12:00:01Z",
        "finishedAt": "2026-01-31T12:00:04Z",
    }
    builds = Reply(content={"builds": [FAILED], "totalCount": 1})
    with scripted(builds, Reply(content=FAILED), Reply(content={"phases": [phase]})) as script:
        shown = run(script, "build", "get", "xxxx").stdout.decode()
    assert re.search(r"^took +5\.0 s$", shown, re.M)
    assert re.search(r"^failure +run: `false` exited with 1\n +last output$", shown, re.M)
    assert re.search(r"^apt +failed +\d\d:\d\d:\d\d +3\.0 s$", shown, re.M)


def test_following_a_build_ends_with_it_and_reports_its_failure() -> None:
    def page(*messages: str) -> Reply:
        logs = [
            {"message": each, "timestamp": f"2026-01-31T12:00:0{index}Z"}
            for index, each in enumerate(messages)
        ]
        return Reply(content={"logs": logs})

    steps = [RUNNING, RUNNING, page("one"), FAILED, FAILED, page("one", "two")]
    replies = [each if isinstance(each, Reply) else Reply(content=each) for each in steps]
    with scripted(*replies) as script:
        result = run(script, "build", "logs", BUILD, "--follow")
    lines = [line.rpartition(" ")[2] for line in result.stdout.decode().splitlines()]
    assert (lines, result.returncode) == (["one", "two"], 1), result.stderr


def test_repositories_are_granted_and_revoked() -> None:
    identity, repo = "11111111-0000-4000-8000-000000000000", "22222222-0000-4000-8000-000000000000"
    exists = Reply(409, {"code": "PERMISSION_ALREADY_EXISTS", "message": "permission exists"})
    with scripted(Reply(), exists, Reply(), Reply()) as script:
        assert run(script, "identity", "grant-repo", identity, repo).returncode == 0
        result = run(script, "identity", "grant-repo", identity, repo, "--permission", "write", "--json")
        assert json.loads(result.stdout) == {"identity_id": identity, "repo_id": repo, "permission": "write"}
        assert run(script, "identity", "revoke-repo", identity, repo).returncode == 0
    path = f"/identity/v1/identities/{identity}/permissions/git/{repo}"
    assert [(each.method, each.target) for each in script.seen] == [
        (method, path) for method in ("POST", "POST", "PUT", "DELETE")
    ]
    assert [each.json["permission"] for each in script.seen[:3]] == ["read", "write", "write"]
