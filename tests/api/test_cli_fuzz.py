"""No input of a person ends in a traceback: every command with odd arguments, and odd standard streams."""

import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from stead.cli.main import app
from support.any_server import SNAPSHOT, UUID, VM, VPC, any_server
from support.cli_commands import cli_commands
from support.odd_values import odd_text
from support.run_cli import PROGRAM, Shell
from support.scripted_server import Pieces, Reply, scripted

SEED = 20_261
GOOD = (VM, SNAPSHOT, VPC, UUID, "80", "/tmp/file", "name", f"{VM}:/tmp/x", "ls")
NOT_RUN = {
    "serve": "runs a server",
    "mcp": "runs a server",
    "prepare": "builds an image",
    "demo": "creates VMs",
    "doctor": "inspects this host",
    "trust": "changes this host",
}
WAITING = {("vm", "forward"): "listens until Ctrl-C", ("vm", "ssh"): "runs ssh"}
"""Commands that do not end by themselves for good arguments: they get odd ones only."""


COMMANDS = dict(cli_commands(without=NOT_RUN))
"""Those that end by themselves."""


def arguments(words: tuple[str, ...], command: Any, random: Random) -> list[str]:
    """Values for the arguments of a command and for some of its options, mostly odd ones."""
    good = 0.0 if words in WAITING else random.choice((0.0, 0.5, 0.9))

    def value() -> str:
        return random.choice(GOOD) if random.random() < good else odd_text(random)

    given = []
    for each in command.params:
        if each.param_type_name == "argument":
            given += [value() for _ in range(random.choice((1, 1, 2) if each.nargs == -1 else (1,)))]
        elif random.random() < 0.25 and each.name not in ("help", "url", "key", "follow", "as_json"):
            option = each.opts[0]
            given += [option] if each.is_flag else [option, value()]
    return given


def invoke(url: str, line: list[str]) -> Result:
    environment = {"STEAD_API_URL": url, "STEAD_API_KEY": "key", "STEAD_DATA": str(Path.cwd() / "data")}
    return CliRunner().invoke(app, line, env=environment, input="")


def check(line: list[str], result: Result) -> None:
    shown = [each[:60] for each in line]
    failure = result.exception
    assert failure is None or isinstance(failure, SystemExit), (shown, repr(failure))
    assert "Traceback" not in result.stderr, (shown, result.stderr)
    if result.exit_code == 0:
        return
    assert result.exit_code in (1, 2, 124), (shown, result.exit_code)
    if line[2:3] == ["--json"] or line[1:2] == ["--json"]:
        (error,) = (each for each in result.stderr.splitlines() if each.startswith('{"error"'))
        assert json.loads(error)["error"]["code"], (shown, error)
    elif "--json" not in line:
        assert result.stderr.strip(), shown
        assert result.exit_code == 2 or result.stderr.count("error: ") == 1, (shown, result.stderr)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    with any_server() as url:
        yield url


def run_many(url: str, seed: int, rounds: int) -> None:
    random = Random(seed)
    for _ in range(rounds):
        for words, command in COMMANDS.items():
            as_json = ["--json"] if any(each.name == "as_json" for each in command.params) else []
            line = [*words, *random.choice((as_json, [])), *arguments(words, command, random)]
            check(line, invoke(url, line))


def test_odd_arguments_of_every_command_are_one_error(url: str) -> None:
    assert len(COMMANDS) > 80
    run_many(url, SEED, rounds=2)


@pytest.mark.slow
def test_odd_arguments_of_every_command_are_one_error_in_many_rounds(url: str) -> None:
    run_many(url, SEED + 1, rounds=60)


def printing(text: str) -> Pieces:
    """The answer to a command that prints a text and ends."""
    data = base64.b64encode(text.encode()).decode()
    events: list[dict[str, Any]] = [{"type": "stdout", "data": data}, {"type": "exit", "statusCode": 0}]
    return Pieces([json.dumps(event).encode() + b"\n" for event in events])


@pytest.mark.parametrize(
    ("redirection", "code"),
    [("<&-", 0), (">&-", 0), ("2>&-", 0), (">&- 2>&- <&-", 0), (">/dev/full", 1), ("2>/dev/full", 0)],
)
@pytest.mark.parametrize("command", ["whoami", f"vm exec {VM} 'echo hi'"])
def test_odd_standard_streams_are_no_traceback(command: str, redirection: str, code: int) -> None:
    account = Reply(content={"accountId": UUID})
    with scripted(printing("hi\n") if "exec" in command else account) as script:
        line = f"{PROGRAM} {command} {redirection}"
        environment = Shell(script.url, "key").environment
        result = subprocess.run(
            ["sh", "-c", line], env=environment, capture_output=True, timeout=60, check=False, text=True
        )
    assert result.returncode == code, result
    assert "Traceback" not in result.stderr and "Exception ignored" not in result.stderr
    assert len(result.stderr.splitlines()) == (redirection == ">/dev/full"), result.stderr
