"""The command line against a server with VMs."""

import asyncio
import hashlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from stead.cli.main import app
from stead.machines import Machines
from stead.settings import Settings
from support.api_calls import new_account
from support.installations import Server, other_settings
from support.typed import PROGRAM, Shell, stead
from support.waiting import until

VM_ID = re.compile(r"[a-z0-9]{20}")


@pytest_asyncio.fixture(scope="module")
async def shell(server: Server) -> Shell:
    """A user with an account."""
    _, key = await new_account(server, "cli")
    return Shell(server.url, key)


@pytest_asyncio.fixture(scope="module")
async def vm(shell: Shell) -> AsyncIterator[str]:
    """A VM for all tests that leave it unchanged."""
    made = await shell.ask("vm", "create", "--name", "workbench", "--workdir", "/srv")
    yield made["id"]
    await shell.run("vm", "delete", made["id"])


async def ids(shell: Shell) -> list[str]:
    return (await shell.run("vm", "list", "--quiet")).split()


# This host


def test_doctor_prints_json(settings: Settings, image: object) -> None:
    result = stead("doctor", "--json", settings=settings)
    report = json.loads(result.stdout)
    names = {finding["name"] for finding in report["findings"]}
    assert {"kvm", "qemu", "cgroups", "memory", "disk", "privileges"} <= names
    assert result.returncode == (0 if report["healthy"] else 1)


def test_prepare_reuses_the_template(settings: Settings, machines: Machines) -> None:
    """The fixture `machines` built the template: prepare finds it and prints its size."""
    with other_settings(settings) as other:
        result = stead("prepare", "--json", settings=other)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["size"] == str(settings.default_size)


def test_demo_starts_a_server_and_leaves_nothing(settings: Settings, machines: Machines) -> None:
    """Without a server the demo starts one and ends it."""
    with other_settings(settings) as other:
        # No server listens there; the server of another installation could be at the default address.
        result = stead("demo", settings=other, STEAD_API_URL="http://127.0.0.1:9")
        assert result.returncode == 0, result.stderr
        assert "hello from the host" in result.stdout
        assert "3 different machine-ids" in result.stdout
        assert "create a VM from the snapshot" in result.stdout
        assert "delete everything" in result.stdout
        keys = stead("keys", "list", "--all", "--json", settings=other)
        assert [key["revoked_at"] is not None for key in json.loads(keys.stdout)["keys"]] == [True]
        assert not _processes(str(other.data))


def _processes(text: str) -> list[int]:
    """Processes that have a text in their environment or command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            about = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if text.encode() in about:
            found.append(int(folder.name))
    return found


async def test_demo_uses_a_running_server(shell: Shell, settings: Settings) -> None:
    before = await ids(shell)
    result = await shell.try_("demo", "--json", environment={"STEAD_DATA": "/proc/nowhere"})
    assert result.returncode == 0, result.stderr
    times = json.loads(result.stdout)
    assert {"create_ms", "exec_ms", "fork_ms", "suspend_ms", "wake_ms", "snapshot_ms", "delete_ms"} <= set(
        times
    )
    assert await ids(shell) == before
    assert (await shell.ask("snapshot", "list"))["snapshots"] == []


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (("prepare", "--size", "3x1Gx20G"), {}, "power of two"),
        (("prepare", "--size", "big"), {}, "invalid size 'big': must be VCPUSxMEMORYxDISK"),
        (("demo",), {"STEAD_POOL": "many"}, "invalid STEAD_POOL='many': must be an integer of at least 0"),
        (("prepare",), {"STEAD_DATA": "/proc/nowhere"}, "No such file or directory: /proc/nowhere"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    arguments: tuple[str, ...], environment: dict[str, str], words: str, settings: Settings
) -> None:
    with other_settings(settings) as other:
        result = stead(*arguments, settings=other, **environment)
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


# Account and server


async def test_whoami_shows_account_and_server(shell: Shell, server: Server) -> None:
    me = await shell.ask("whoami")
    assert me["url"] == server.url
    assert me["identity_id"] is None
    assert me["account_id"] in await shell.run("whoami")


@pytest.mark.parametrize("prefix", ["STEAD", "FREESTYLE"])
async def test_options_override_the_environment(shell: Shell, prefix: str) -> None:
    wrong = {f"{prefix}_API_URL": "http://127.0.0.1:9", f"{prefix}_API_KEY": "wrong"}
    bare = Shell("", "")
    result = await bare.try_("--url", shell.url, "--key", shell.key, "whoami", environment=wrong)
    assert result.returncode == 0, result.stderr
    right = {f"{prefix}_API_URL": shell.url, f"{prefix}_API_KEY": shell.key}
    assert (await bare.try_("whoami", environment=right)).returncode == 0


async def test_connection_errors_say_what_to_do(shell: Shell) -> None:
    assert (
        await Shell("http://127.0.0.1:9", "any").refused("vm", "list")
        == "error: cannot reach Stead at http://127.0.0.1:9: is `stead serve` running?\n"
    )
    assert "`stead keys create`" in await Shell(shell.url, "").refused("vm", "list")
    refusal = await Shell(shell.url, "wrong").refused("vm", "list")
    assert "`stead keys create`" in refusal
    assert re.search(r"\(UNAUTHORIZED_ERROR, trace [0-9a-f]+\)", refusal)
    assert "invalid base URL" in await Shell("nonsense", "any").refused("vm", "list")


@pytest.mark.parametrize(
    "arguments",
    [
        ("vm", "no-such-command"),
        ("vm", "create", "--size", "big"),
        ("vm", "create", "--size", "2x4Gx20G", "--cpu", "2"),
        ("vm", "create", "--memory", "much"),
        ("vm", "create", "--idle-timeout", "0"),
        ("vm", "create", "--delete"),
        ("vm", "exec", "x" * 20, "--env", "novalue", "true"),
        ("vm", "resize", "x" * 20),
        ("vm", "cp", "here", "there"),
        ("vm", "cp", "one:/here", "two:/there"),
        ("vm", "fs", "write", "x" * 20, "/file", "--mode", "9"),
        ("vm", "logs", "x" * 20, "--since", "yesterday"),
        ("vm", "fork", "x" * 20, "--count", "0"),
    ],
)
def test_invalid_arguments_are_usage_errors(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: " in result.stderr


async def test_vm_list_imports_no_slow_modules(shell: Shell, vm: str) -> None:
    """Importing one of these takes longer than the request."""
    source = (
        "import sys\n"
        "from stead.cli.main import app\n"
        "try: app(['vm', 'list'])\n"
        "except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        check=True,
        env=shell.environment,
    )
    assert vm in result.stdout
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert "httpx2" in loaded
    assert not loaded & {"alembic", "cryptography", "fastapi", "pydantic", "rich", "sqlalchemy", "structlog"}


# Finding VMs


async def test_a_vm_is_listed_and_shown(shell: Shell, vm: str, settings: Settings) -> None:
    listed = await shell.ask("vm", "list")
    (found,) = (each for each in listed["vms"] if each["id"] == vm)
    assert (found["name"], found["state"]) == ("workbench", "running")
    assert listed["total_count"] == len(listed["vms"])
    table = (await shell.run("vm", "list")).splitlines()
    assert table[0].split() == ["id", "name", "state", "size", "address", "created"]
    assert [vm, "workbench", "running", "2x512Mx20G"] in [line.split()[:4] for line in table]
    assert (await shell.ask("vm", "get", vm))["workdir"] == "/srv"
    described = await shell.run("vm", "get", vm)
    assert re.search(r"^state +running$", described, re.M)
    assert re.search(r"^last traffic +(never|\d{4}-\d\d-\d\d .*ago\))$", described, re.M)
    assert await shell.run("vm", "list", "--state", "stopped", "--quiet") == ""
    assert (await shell.run("vm", "list", "--search", "workb", "--quiet")).split() == [vm]


async def test_vms_are_found_by_id_prefix_and_name(shell: Shell, vm: str) -> None:
    for given in (vm[:4], vm[:12], "workbench"):
        assert (await shell.ask("vm", "get", given))["id"] == vm
    assert await shell.refused("vm", "get", "absent") == "error: no VM 'absent' (VM_NOT_FOUND)\n"
    assert "at least 4 characters" in await shell.refused("vm", "get", vm[:3])
    missing = "0" * 20
    assert re.search(
        rf"VM {missing} not found \(VM_NOT_FOUND, trace \w+\)", await shell.refused("vm", "get", missing)
    )


async def test_an_ambiguous_reference_is_refused(shell: Shell, vm: str) -> None:
    """A second VM has the same name, and the name of a third is an id prefix of the first."""
    second = (await shell.ask("vm", "create", "--name", "workbench"))["id"]
    third = (await shell.ask("vm", "create", "--name", vm[:5]))["id"]
    try:
        refusal = await shell.refused("vm", "delete", third, "workbench")
        assert vm in refusal and second in refusal
        refusal = await shell.refused("vm", "suspend", vm[:5])
        assert f"{vm} (workbench)" in refusal and third in refusal
        assert {vm, second, third} <= set(await ids(shell))
    finally:
        await shell.run("vm", "delete", second, third)
    assert await ids(shell) == [vm]


# Commands in VMs


async def test_create_exec_delete_prints_only_the_output(shell: Shell) -> None:
    before = await ids(shell)
    result = await shell.try_("vm", "create", "--exec", "uname -s; echo oh >&2; exit 3", "--delete")
    assert (result.stdout, result.stderr, result.returncode) == ("Linux\n", "oh\n", 3)
    assert await ids(shell) == before


async def test_an_ephemeral_vm_exists_until_it_stops(shell: Shell) -> None:
    result = await shell.try_(
        "vm", "create", "--ephemeral", "--idle-timeout", "never", "-e", "exit 1", "--json"
    )
    assert result.returncode == 1
    made = json.loads(result.stdout)
    assert (made["deleted"], made["exec"]["status_code"]) == (False, 1)
    info = await shell.ask("vm", "get", made["id"])
    assert info["persistence"]["type"] == "ephemeral"
    assert info["idle_timeout_seconds"] is None
    await shell.run("vm", "kill", made["id"])
    assert made["id"] not in await ids(shell)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_an_interrupted_create_deletes_the_vm(shell: Shell, number: signal.Signals, code: int) -> None:
    before = await ids(shell)
    process = await shell.start("vm", "create", "--exec", "echo begun; sleep 1000", "--delete")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    # Signals often come twice: to the process and to its group.
    process.send_signal(number)
    await asyncio.sleep(0.05)
    process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), 60) == code
    assert process.stderr is not None
    assert await process.stderr.read() == b""
    assert await ids(shell) == before


async def test_one_word_is_a_shell_line_and_several_are_a_program(shell: Shell, vm: str) -> None:
    assert await shell.run("vm", "exec", vm, "echo $((6 * 7)); pwd") == "42\n/srv\n"
    words = "/usr/bin/printf", "%s|", "a b", "$HOME", "*", "-x"
    assert await shell.run("vm", "exec", vm, "--", *words) == "a b|$HOME|*|-x|"
    options = ("--user", "nobody", "--cwd", "/tmp", "--env", "A=1", "--env", "B=x=y z")
    assert await shell.run("vm", "exec", vm, *options, "id -un; pwd; echo $A $B") == "nobody\n/tmp\n1 x=y z\n"


@pytest.mark.parametrize(
    ("line", "options", "code"),
    [
        ("exit 7", (), 7),
        ("kill -9 $$", (), 137),
        ("kill -TERM $$", (), 143),
        ("sleep 60", ("--timeout", "0.3"), 124),
        ("no-such-program", (), 127),
        ("/etc/passwd", (), 126),
    ],
)
async def test_the_exit_code_is_the_commands(
    shell: Shell, vm: str, line: str, options: tuple[str, ...], code: int
) -> None:
    result = await shell.try_("vm", "exec", vm, *options, line)
    assert result.returncode == code


@pytest.mark.parametrize(
    ("program", "code"), [("no-such-program", 127), ("/etc/passwd", 126), ("/usr/bin/ls", 0)]
)
async def test_a_program_with_options_runs_without_separator(
    shell: Shell, vm: str, program: str, code: int
) -> None:
    result = await shell.try_("vm", "exec", vm, program, "-l", "/srv")
    assert result.returncode == code
    assert (result.stderr == "") == (code == 0)


async def test_exec_json_has_output_and_status(shell: Shell, vm: str) -> None:
    result = await shell.try_("vm", "exec", vm, "--json", "echo out; echo err >&2; exit 4")
    assert result.returncode == 4
    ending = json.loads(result.stdout)
    assert (ending["stdout"], ending["stderr"], ending["status_code"]) == ("out\n", "err\n", 4)


async def test_standard_input_is_passed_to_the_command(shell: Shell, vm: str) -> None:
    data = os.urandom(1_000_000)
    counted = await shell.run("vm", "exec", vm, "sha256sum | cut -c1-64; cat", stdin=data)
    assert counted.strip() == hashlib.sha256(data).hexdigest()
    assert await shell.run("vm", "exec", vm, "--no-stdin", "cat", stdin=b"unread") == ""


async def test_output_is_streamed_and_ctrl_c_ends_the_command(shell: Shell, vm: str) -> None:
    mark = "sleep 98765"
    process = await shell.start("vm", "exec", vm, f"echo first; {mark}; echo never")
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"first\n"
    running = f"pgrep -fx '{mark}'"
    await shell.run("vm", "exec", vm, running)
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 60) == 130

    async def ended() -> bool:
        return (await shell.try_("vm", "exec", vm, running)).returncode == 1

    assert await until(ended, 30)


async def test_a_closed_output_pipe_ends_the_command(shell: Shell, vm: str) -> None:
    process = await shell.start("vm", "exec", vm, "yes 13579")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"13579\n"
    process.stdout._transport.close()  # type: ignore[attr-defined]  # a pipe has no other way to be closed early
    assert await asyncio.wait_for(process.wait(), 60) == 1

    async def ended() -> bool:
        return (await shell.try_("vm", "exec", vm, "pgrep -fx 'yes 13579'")).returncode == 1

    assert await until(ended, 30)


# Files


async def test_files_are_written_read_and_removed(shell: Shell, vm: str) -> None:
    path = "/srv/new/deep/a file.bin"
    data = bytes(range(256)) * 100
    written = await shell.ask("vm", "fs", "write", vm, path, "--mode", "640", stdin=data)
    assert written == {"path": path, "bytes": len(data)}
    read = await shell.run("vm", "fs", "cat", vm, path)
    assert read.encode(errors="surrogateescape") == data
    found = await shell.ask("vm", "fs", "stat", vm, path)
    assert (found["kind"], found["size"], found["mode"]) == ("file", len(data), 0o640)
    assert re.search(r"^permissions +640$", await shell.run("vm", "fs", "stat", vm, path), re.M)
    assert await shell.run("vm", "fs", "ls", vm, "/srv/new/deep") == "a file.bin\n"
    assert "directory not empty" in await shell.refused("vm", "fs", "rm", vm, "/srv/new")
    await shell.run("vm", "fs", "rm", "--recursive", vm, "/srv/new")
    assert f"no such file or folder: {path} (FILE_NOT_FOUND" in await shell.refused(
        "vm", "fs", "cat", vm, path
    )


async def test_directories_are_created_as_a_user_and_files_moved(shell: Shell, vm: str) -> None:
    await shell.run("vm", "fs", "mkdir", vm, "--parents", "--user", "nobody", "/tmp/mine/too")
    assert (await shell.ask("vm", "fs", "stat", vm, "/tmp/mine/too"))["owner"] == "nobody"
    assert "file exists" in await shell.refused("vm", "fs", "mkdir", vm, "/tmp/mine/too")
    await shell.run("vm", "fs", "write", vm, "/tmp/mine/text", "--content", "grüße")
    listed = await shell.ask("vm", "fs", "ls", vm, "/tmp/mine")
    assert listed["files"] == [{"name": "text", "kind": "file"}, {"name": "too", "kind": "directory"}]
    await shell.run("vm", "fs", "mv", vm, "/tmp/mine/text", "/tmp/mine/too/moved")
    assert await shell.run("vm", "fs", "cat", vm, "/tmp/mine/too/moved") == "grüße"
    assert (await shell.ask("vm", "fs", "ls", vm, "/tmp/mine"))["files"] == listed["files"][1:]
    await shell.run("vm", "fs", "rm", vm, "-r", "/tmp/mine")


async def test_a_file_is_copied_in_and_out(shell: Shell, vm: str, tmp_path: Path) -> None:
    source = tmp_path / "tool: a script.sh"
    source.write_bytes(b"#!/bin/sh\necho run\n")
    source.chmod(0o755)
    assert (await shell.ask("vm", "cp", source, f"{vm}:/opt/tool"))["path"] == "/opt/tool"
    assert await shell.run("vm", "exec", vm, "/opt/tool") == "run\n"
    # Into a folder it goes under its own name.
    assert (await shell.ask("vm", "cp", source, "workbench:/opt"))["path"] == f"/opt/{source.name}"
    back = tmp_path / "back"
    await shell.run("vm", "cp", f"{vm[:6]}:/opt/tool", back)
    assert back.read_bytes() == source.read_bytes()
    assert back.stat().st_mode & 0o777 == 0o755
    (tmp_path / "folder").mkdir()
    await shell.run("vm", "cp", f"{vm}:/opt/tool", tmp_path / "folder")
    assert (tmp_path / "folder" / "tool").read_bytes() == source.read_bytes()
    await shell.run("vm", "fs", "rm", vm, "/opt/tool")
    await shell.run("vm", "fs", "rm", vm, f"/opt/{source.name}")
    assert "No such file or directory" in await shell.refused("vm", "cp", tmp_path / "none", f"{vm}:/opt/x")


async def test_a_stream_is_copied_in_and_out(shell: Shell, vm: str) -> None:
    data = os.urandom(3_000_000)
    await shell.run("vm", "cp", "-", f"{vm}:/var/tmp/stream", stdin=data)
    back = await shell.run("vm", "cp", f"{vm}:/var/tmp/stream", "-")
    assert back.encode(errors="surrogateescape") == data
    await shell.run("vm", "fs", "rm", vm, "/var/tmp/stream")


async def test_a_directory_is_copied_in_and_out(shell: Shell, vm: str, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "main.py").write_text("print('hello')")
    (project / "link").symlink_to("src/main.py")
    await shell.run("vm", "cp", project, f"{vm}:/srv/app")
    assert await shell.run("vm", "exec", vm, "python3 /srv/app/link") == "hello\n"
    # A second time it goes into the folder that is there, as with `cp -r`.
    assert (await shell.ask("vm", "cp", project, f"{vm}:/srv/app"))["path"] == "/srv/app/project"
    await shell.run("vm", "fs", "rm", vm, "-r", "/srv/app/project")
    await shell.run("vm", "exec", vm, "ln -s /etc/passwd /srv/app/out")
    copied = await shell.ask("vm", "cp", f"{vm}:/srv/app", tmp_path / "copy")
    assert copied["skipped"] == ["out"]
    assert (tmp_path / "copy" / "link").read_text() == "print('hello')"
    await shell.run("vm", "fs", "rm", vm, "-r", "/srv/app")


# State changes


async def test_forks_are_named_suspended_woken_killed_and_resized(shell: Shell, vm: str) -> None:
    await shell.run("vm", "exec", vm, "echo shared > /root/mark")
    left, right = (await shell.run("vm", "fork", "workbench", "--count", "2", "--name", "copy")).split()
    assert await shell.run("vm", "fs", "cat", "copy-1", "/root/mark") == "shared\n"
    assert (await shell.ask("vm", "rename", "copy-2", "other"))["id"] == right
    assert (await shell.ask("vm", "get", "other"))["name"] == "other"

    assert await shell.run("vm", "suspend", left, right) == f"suspended {left}\nsuspended {right}\n"
    assert re.search(r"^state +suspended$", await shell.run("vm", "get", left), re.M)
    assert await shell.ask("vm", "start", left) == {"vms": [{"id": left, "state": "running"}]}
    assert (await shell.ask("vm", "get", left))["state"] == "running"

    waiting = await shell.start("vm", "await", left)
    await shell.run("vm", "kill", left)
    out, _ = await asyncio.wait_for(waiting.communicate(), 60)
    assert waiting.returncode == 0
    assert out.strip()
    refusal = await shell.refused("vm", "stop", left)
    assert "it is stopped (VM_NOT_RUNNING, trace" in refusal

    resized = await shell.ask("vm", "resize", left, "--disk", "24G", "--memory", "1G")
    assert resized["sizing"] == {"vcpu_count": 2, "mem_size_mib": 1024, "rootfs_size_mb": 24 * 1024}
    assert "cannot shrink" in await shell.refused("vm", "resize", left, "--disk", "20G")
    deleted = await shell.ask("vm", "delete", left, right)
    assert deleted == {"vms": [{"id": left, "state": "deleted"}, {"id": right, "state": "deleted"}]}
    assert await ids(shell) == [vm]


async def test_snapshots_are_listed_renamed_restored_and_deleted(shell: Shell, vm: str) -> None:
    taken = (await shell.run("vm", "snapshot", vm, "--name", "kept")).strip()
    assert re.fullmatch(r"sc-[a-z0-9]{20}", taken)
    table = await shell.run("snapshot", "list")
    assert taken in table and "kept" in table and vm in table
    found = await shell.ask("snapshot", "get", "kept")
    assert found["id"] == taken and found["size_bytes"] > 0
    await shell.run("snapshot", "rename", taken[3:9], "renamed")
    assert (await shell.ask("snapshot", "get", taken[:8]))["name"] == "renamed"
    made = await shell.try_("vm", "create", "--snapshot", "renamed", "--exec", "hostname", "--delete")
    assert VM_ID.fullmatch(made.stdout.strip()) and made.stdout.strip() != vm
    assert await shell.ask("snapshot", "delete", "renamed") == {"snapshots": [{"id": taken, "deleted": True}]}
    assert await shell.run("snapshot", "list", "--quiet") == ""
    assert "no snapshot 'renamed'" in await shell.refused("snapshot", "get", "renamed")
    assert re.search(r"\bdeleted\b", await shell.run("snapshot", "list", "--all"))


async def test_a_spec_becomes_a_snapshot_and_a_vm(shell: Shell, vm: str, tmp_path: Path) -> None:
    spec = {"additionalFiles": {"/srv/note": {"content": "from a spec"}}, "workdir": "/srv"}
    file = tmp_path / "spec.json"
    file.write_text(json.dumps(spec))
    first = (await shell.run("snapshot", "create", "--spec", file, "--name", "built")).strip()
    assert (await shell.ask("snapshot", "create", "--spec", "-", stdin=file.read_bytes()))["id"] == first
    result = await shell.try_("vm", "create", "--spec", file, "--exec", "pwd; cat note", "--delete")
    assert (result.stdout, result.returncode) == ("/srv\nfrom a spec", 0)
    await shell.run("snapshot", "delete", *(await shell.run("snapshot", "list", "-q")).split())

    file.write_text("[]")
    assert "must hold a JSON object" in await shell.refused("vm", "create", "--spec", file)
    file.write_text("{")
    assert "is not valid JSON" in await shell.refused("vm", "create", "--spec", file)
    file.write_text(json.dumps({"systemd": {"services": [{"name": "", "exec": ["true"]}]}}))
    assert "SERVICE_NAME_EMPTY, trace" in await shell.refused("vm", "create", "--spec", file)
    assert await ids(shell) == [vm]


async def test_set_up_options_are_cached_as_a_snapshot(shell: Shell, vm: str) -> None:
    """The command of the set-up runs once: the second create gets the result from the snapshot."""
    arguments = (
        "vm",
        "create",
        "--run",
        "cat /proc/uptime > /srv/mark",
        "--exec",
        "cat /srv/mark",
        "--delete",
    )
    first = await shell.try_(*arguments)
    assert (first.returncode, first.stdout != "") == (0, True), first.stderr
    assert (await shell.run(*arguments)) == first.stdout
    again, built, *_ = (await shell.ask("build", "list"))["builds"]
    assert (again["state"], built["state"]) == ("succeeded", "succeeded")
    assert any("cached" in each["name"] for each in (await shell.ask("build", "get", again["id"]))["phases"])
    phases = (await shell.ask("build", "get", built["id"][:10]))["phases"]
    assert phases and all(each["finished_at"] for each in phases)
    assert await shell.run("build", "logs", built["id"], "--follow") != ""
    await shell.run("snapshot", "delete", *(await shell.run("snapshot", "list", "-q")).split())
    assert await ids(shell) == [vm]


# Logs


async def test_logs_are_shown_and_followed(shell: Shell, vm: str) -> None:
    await shell.run("vm", "exec", vm, "logger --tag cli-test before")
    lines = (await shell.ask("vm", "logs", vm, "--limit", "1000"))["logs"]
    assert any(f"VM {vm} created" in line["message"] for line in lines)
    assert len((await shell.ask("vm", "logs", vm, "--limit", "1"))["logs"]) == 1
    process = await shell.start("vm", "logs", vm, "--follow", "--json", "--limit", "1")
    assert process.stdout is not None
    await process.stdout.readline()
    await shell.run("vm", "exec", vm, "logger --tag cli-test after")
    async with asyncio.timeout(60):
        while "after" not in json.loads(await process.stdout.readline())["message"]:
            pass
    process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), 30) == 130


# Identities


async def test_an_identity_uses_the_vm_that_was_granted(shell: Shell, vm: str) -> None:
    identity = (await shell.run("identity", "create", "--name", "ci")).strip()
    token = (await shell.run("identity", "token", "create", "ci")).strip()
    assert token.startswith("stid_")
    guest = Shell(shell.url, token)
    assert (await guest.ask("whoami"))["identity_id"] == identity
    assert await ids(guest) == []

    await shell.run("identity", "grant", identity, "workbench")
    granted = await shell.ask("identity", "grant", identity, vm, "--user", "nobody")
    assert granted["allowed_users"] == ["nobody"]
    (permission,) = (await shell.ask("identity", "permissions", identity))["permissions"]
    assert permission["vm_id"] == vm
    assert await guest.run("vm", "exec", "workbench", "id -un") == "nobody\n"
    assert "(FORBIDDEN, trace" in await guest.refused("vm", "delete", vm)

    await shell.run("identity", "revoke", identity, vm)
    assert await ids(guest) == []
    (listed,) = (await shell.run("identity", "token", "list", identity)).split()
    await shell.run("identity", "token", "revoke", identity, listed[:8])
    assert "UNAUTHORIZED_ERROR" in await guest.refused("vm", "list")
    assert identity in await shell.run("identity", "list")
    await shell.run("identity", "delete", identity)
    assert (await shell.ask("identity", "list"))["identities"] == []


# Terminals and shells


async def test_a_table_on_a_narrow_terminal_has_colours_and_complete_ids(shell: Shell, vm: str) -> None:
    main, side = pty.openpty()
    with os.fdopen(main, "rb", 0):
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            "vm",
            "list",
            stdout=side,
            stderr=asyncio.subprocess.DEVNULL,
            env=shell.environment | {"COLUMNS": "60", "TERM": "xterm-256color"},
        )
        os.close(side)
        assert await process.wait() == 0
        shown = os.read(main, 100_000).decode()
    assert vm in shown
    assert "\x1b[32mrunning" in shown


async def test_ids_are_completed(shell: Shell, vm: str) -> None:
    words = f"stead vm exec {vm[:4]}"
    options = {"_STEAD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "3"}
    assert vm in (await shell.try_(environment=options)).stdout
    alone = Shell("http://127.0.0.1:9", "any")
    result = await alone.try_(environment=options)
    assert (result.stdout.strip(), result.stderr) == ("", "")
    commands = {"_STEAD_COMPLETE": "complete_bash", "COMP_WORDS": "stead vm s", "COMP_CWORD": "2"}
    names = ["start", "stop", "suspend", "snapshot", "shell", "sessions"]
    assert (await alone.try_(environment=commands)).stdout.split() == names


def test_every_command_has_help() -> None:
    seen = []

    def visit(*path: str) -> None:
        result = CliRunner().invoke(app, [*path, "--help"])
        assert result.exit_code == 0, result.output
        assert "machine" not in result.output.lower(), "users read of VMs"
        seen.append(path)
        _, _, commands = re.sub(r"─ (VMs|Commands) ─", "─ commands ─", result.output).partition(
            "─ commands ─"
        )
        for name in re.findall(r"^│ ([a-z-]+)  +[A-Z]", commands, re.M):
            visit(*path, name)

    visit()
    expected = {
        ("vm", "exec"),
        ("vm", "fs", "ls"),
        ("identity", "token", "create"),
        ("serve",),
        ("demo",),
        ("build", "logs"),
    }
    assert expected <= set(seen)
