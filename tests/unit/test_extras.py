"""Commands whose libraries are not installed name the extra that has them."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stead.cli import commands, extras
from stead.cli.main import app

ROOT = Path(__file__).parents[2]
SERVER = ["serve", "keys", "accounts", "trust", "github", "doctor", "prepare", "demo"]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of the packages that are installed, by name."""
    versions = {"stead": "1"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    requirements = ["rich>=13.8", "qemu.qmp>=0.0.6; extra == 'server'", "mcp[cli]<3,>=2.3; extra == 'mcp'"]
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: requirements)
    commands._loaded.cache_clear()
    return versions


@pytest.mark.parametrize("name", [*SERVER, "mcp"])
def test_command_without_its_extra_is_a_usage_error_of_one_line(name: str, installed: dict[str, str]) -> None:
    extra = "mcp" if name == "mcp" else "server"
    result = CliRunner().invoke(app, [name])
    assert result.exit_code == 2
    assert result.output == (
        f"error: `stead {name}` needs the extra `{extra}`: run pip install 'PATH[{extra}]', where PATH is the"
        " wheel or the checkout of Stead\n"
    )


def test_command_without_its_extra_is_json_after_json(installed: dict[str, str]) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    error = json.loads(result.stderr)["error"]
    assert (result.exit_code, error["code"]) == (2, "USAGE")
    assert error["message"].startswith("`stead doctor` needs the extra `server`: ")


def test_help_lists_commands_of_missing_extras(installed: dict[str, str]) -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in [*SERVER, "mcp"])


@pytest.mark.parametrize(
    ("version", "accepted"),
    [("2.2.9", False), ("2.3", True), ("2.3.0", True), ("2.10rc1", True), ("3.0", False), ("3", False)],
)
def test_version_must_be_within_the_bounds(version: str, accepted: bool, installed: dict[str, str]) -> None:
    installed["mcp"] = version
    assert extras.is_installed("mcp") is accepted


def test_every_requirement_of_every_extra_is_read() -> None:
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = importlib.metadata.requires("stead") or []
    found = [match for match in map(extras._REQUIREMENT.match, listed) if match]
    for extra, requirements in written.items():
        assert len([each for each in found if each[3] == extra]) == len(requirements)
        for requirement in requirements:
            bounds = re.findall(r"[<>=!~]+[\d.]+", requirement)
            assert all(extras._BOUND.fullmatch(bound) for bound in bounds), requirement
        assert extras.is_installed(extra)


def test_version_is_printed_without_the_libraries_of_other_commands() -> None:
    source = (
        "import sys\nfrom stead.cli.main import app\ntry: app(['--version'])\nfinally: print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in result.stdout.split()}
    assert "typer" in loaded
    assert not loaded & {"httpx2", "msgspec", "pydantic", "rich", "sqlalchemy", "structlog", "websockets"}
