"""Commands that run programs and copy files in VMs, against a server with VMs."""

import asyncio
import hashlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from support.run_cli import PROGRAM, Shell
from support.waiting import until

# Commands in VMs


async def test_create_exec_delete_prints_only_the_output(shell: Shell) -> None:
    before = await shell.vm_ids()
    result = await shell.try_("vm", "create", "--exec", "uname -s; echo oh >&2; exit 3", "--delete")
    assert (result.stdout, result.stderr, result.returncode) == ("Linux\n", "oh\n", 3)
    assert await shell.vm_ids() == before


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
    assert made["id"] not in await shell.vm_ids()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_an_interrupted_create_deletes_the_vm(shell: Shell, number: signal.Signals, code: int) -> None:
    before = await shell.vm_ids()
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
    assert await shell.vm_ids() == before


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

    assert await until(ended, 60)


async def test_a_closed_output_pipe_ends_the_command(shell: Shell, vm: str) -> None:
    process = await shell.start("vm", "exec", vm, "yes 13579")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"13579\n"
    process.stdout._transport.close()  # type: ignore[attr-defined]  # a pipe has no other way to be closed early
    assert await asyncio.wait_for(process.wait(), 60) == 1

    async def ended() -> bool:
        return (await shell.try_("vm", "exec", vm, "pgrep -fx 'yes 13579'")).returncode == 1

    assert await until(ended, 60)


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
    alone = await shell.refused("vm", "fs", "mkdir", vm, "/tmp/a/b/c")
    assert "cannot create /tmp/a/b/c: no such folder: /tmp/a; create it first, or use `parents`" in alone
    kernel = await shell.try_("vm", "fs", "write", vm, "/proc/cpuinfo", stdin=b"x")
    assert kernel.returncode == 1
    assert (
        "cannot replace /proc/cpuinfo: no file can be created in /proc; write to it with a command"
        in kernel.stderr
    )
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


async def test_input_that_comes_late_reaches_the_command(shell: Shell, vm: str) -> None:
    """`pg_dump | stead vm exec vm psql`: the command runs before its input is there."""
    process = await shell.start(
        "vm", "exec", vm, "echo ready; sha256sum; exit 3", stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
    data = os.urandom(3_000_000)
    process.stdin.write(data)
    process.stdin.close()
    assert (await process.stdout.read()).split()[0].decode() == hashlib.sha256(data).hexdigest()
    assert await asyncio.wait_for(process.wait(), 60) == 3


async def test_a_closed_output_is_no_error_and_a_wait_says_that_the_vm_runs(shell: Shell, vm: str) -> None:
    line = f"exec {PROGRAM} vm exec {vm} 'echo hi' >&-"
    closed = await asyncio.create_subprocess_exec("sh", "-c", line, env=shell.environment, stderr=-1)
    assert (await asyncio.wait_for(closed.communicate(), 60))[1] == b""
    refusal = await shell.refused("vm", "await", vm, "--timeout", "1", code=124)
    assert refusal == f"error: VM {vm} is still running after 1 seconds\n"
