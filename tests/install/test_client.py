"""The client, installed from the wheel without any extra, with each Python that is found on this host."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support import ROOT, client_tests

from .conftest import Dist

UV = Path(sys.executable).with_name("uv")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
BIGGEST_MB = 40
Result = subprocess.CompletedProcess[str]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("network")]


def find_python(version: str) -> str | None:
    """On PATH, or a version of pyenv that is not selected."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [str(path) for path in pyenv.glob(f"versions/{version}.*/bin")] + [os.environ["PATH"]]
    found = run(UV, "python", "find", "--no-python-downloads", version, PATH=os.pathsep.join(folders))
    return found.stdout.strip() if found.returncode == 0 else None


def run(*words: str | Path, **variables: str) -> Result:
    return subprocess.run(
        words, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


def done(*words: str | Path, **variables: str) -> str:
    result = run(*words, **variables)
    assert result.returncode == 0, f"{result.stdout[-4000:]}{result.stderr[-4000:]}"
    return result.stdout


class Environment:
    """A virtual environment with the client."""

    def __init__(self, folder: Path, python: str, wheel: Path, resolution: str) -> None:
        self.folder = folder
        done(UV, "venv", "--quiet", "--python", python, folder)
        self.install("--resolution", resolution, wheel)

    def install(self, *words: str | Path) -> None:
        done(UV, "pip", "install", "--quiet", "--python", self.folder, *words)

    def run(self, program: str, *words: str) -> Result:
        return run(self.folder / "bin" / program, *words)

    @property
    def megabytes(self) -> float:
        return sum(path.stat().st_size for path in (self.folder / "lib").rglob("*") if path.is_file()) / 1e6


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("version", "resolution"), [("3.11", "lowest-direct"), *((version, "highest") for version in PYTHONS)]
)
def test_client_passes_its_tests(version: str, resolution: str, dist: Dist, tmp_path: Path) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this host")
    environment = Environment(tmp_path / "venv", python, dist.wheel, resolution)
    environment.install(*client_tests.PACKAGES)
    tests = [*client_tests.ARGUMENTS, *client_tests.client_tests()]
    told = done(tmp_path / "venv/bin/python", "-m", "pytest", *tests, **client_tests.ENVIRONMENT)
    print(f"{version} {resolution}: {told.splitlines()[-1]}")
    assert " passed" in told


def test_client_alone_is_small_and_names_the_extras(dist: Dist, tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv", sys.executable, dist.wheel, "highest")
    size = environment.megabytes
    print(f"{size:.0f} MB")
    assert size < BIGGEST_MB
    assert environment.run("stead", "--version").stdout.strip() in dist.wheel.name
    for command, extra in {"serve": "server", "demo": "server", "doctor": "server", "mcp": "mcp"}.items():
        result = environment.run("stead", command)
        assert (result.returncode, result.stdout) == (2, "")
        [line] = result.stderr.splitlines()
        assert line.startswith(f"error: `stead {command}` needs the extra `{extra}`: run pip install ")
    result = environment.run("python", "-c", "from stead.agents.openai import SteadSandboxClient")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "ImportError: stead.agents.openai needs the extra `openai-agents`: run pip install "
    )


@pytest.mark.timeout(900)
def test_sdist_builds_the_same_wheel(dist: Dist, tmp_path: Path) -> None:
    with tarfile.open(dist.sdist) as sdist:
        top = {name.split("/")[1] for name in sdist.getnames()}
    assert top == {
        "src",
        "guest",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        "PKG-INFO",
        "pyproject.toml",
        ".gitignore",
    }
    done(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, dist.sdist)
    [built] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as one, zipfile.ZipFile(dist.wheel) as other:
        assert {each.filename: each.CRC for each in one.infolist()} == {
            each.filename: each.CRC for each in other.infolist()
        }
