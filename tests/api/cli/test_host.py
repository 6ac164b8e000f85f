"""Commands for this host, the account and the server; help, completion and tables."""

import asyncio
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stead.cli.main import app
from stead.machines import Machines
from stead.settings import Settings
from support.cli_commands import cli_commands
from support.documents import commands, run_by
from support.installations import Server, other_settings
from support.run_cli import PROGRAM, Shell, stead

# This host


def test_doctor_prints_json(settings: Settings, image: object) -> None:
    result = stead("doctor", "--json", settings=settings)
    report = json.loads(result.stdout)
    names = {finding["name"] for finding in report["findings"]}
    assert {"kvm", "qemu", "cgroups", "memory", "disk", "privileges"} <= names
    assert result.returncode == (0 if report["healthy"] else 1)


def test_prepare_reuses_the_template(settings: Settings, machines: Machines) -> None:
    """The fixture `machines` built the template: prepare finds it and prints its size."""
    (block,) = run_by(__file__, "docs/install.md")
    (command,) = commands(block.body)
    line = command.line.replace("2x1Gx20G", str(settings.default_size))
    with other_settings(settings) as other:
        result = stead(*shlex.split(line)[1:], "--json", settings=other)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["size"] == str(settings.default_size)
    assert "building" not in result.stderr


def test_link_of_the_readme_puts_the_command_on_the_path() -> None:
    """In a mount namespace with a /usr/local/bin of its own."""
    (block,) = run_by(__file__, "README.md")
    (command,) = commands(block.body)
    script = f"mount -t tmpfs none /usr/local/bin && {command.line} && cd / && stead --version"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=PROGRAM.parents[2],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
    )
    assert (result.returncode, result.stdout) == (0, f"{version('stead')}\n"), result.stderr


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
        assert "primes: [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]" in result.stdout
        assert "1 page in 3 forks" in result.stdout
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


@pytest.mark.slow
async def test_demo_uses_a_running_server(shell: Shell, settings: Settings) -> None:
    before = await shell.vm_ids()
    result = await shell.try_("demo", "--json", "--no-agent", environment={"STEAD_DATA": "/proc/nowhere"})
    assert result.returncode == 0, result.stderr
    times = json.loads(result.stdout)
    assert {"create_ms", "exec_ms", "fork_ms", "suspend_ms", "wake_ms", "snapshot_ms", "delete_ms"} <= set(
        times
    )
    assert await shell.vm_ids() == before
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
        == "error: cannot reach Stead at http://127.0.0.1:9: connection refused: is `stead serve` running?\n"
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
    names = ["start", "stop", "suspend", "snapshot", "signal", "shell", "sessions", "ssh"]
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
    every = dict(cli_commands())
    expected = {("vm", "exec"), ("vm", "fs", "ls"), ("identity", "token", "create"), ("serve",), ("demo",)}
    assert expected | {("build", "logs")} <= set(every)
    assert [words for words, command in every.items() if not command.help] == []
    assert set(every) == {words for words in seen if words in every}, "all are in the help of their group"
