"""The command line, typed as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stead.machines import Machines
from stead.settings import Settings


def stead(
    *arguments: str, settings: Settings, data: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "stead"
    return subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={
            **os.environ,
            "STEAD_DATA": str(data),
            "STEAD_CACHE": str(settings.cache_folder),
            "STEAD_DEFAULT_SIZE": str(settings.default_size),
            "STEAD_POOL": "1",
            **environment,
        },
    )


def test_doctor_speaks_json(settings: Settings, image: object, tmp_path: Path) -> None:
    result = stead("doctor", "--json", settings=settings, data=tmp_path)
    report = json.loads(result.stdout)
    names = {finding["name"] for finding in report["findings"]}
    assert {"kvm", "qemu", "cgroups", "memory", "disk", "privileges"} <= names
    assert result.returncode == (0 if report["healthy"] else 1)


def test_prepare_is_a_matter_of_seconds_the_second_time(
    settings: Settings, machines: Machines, tmp_path: Path
) -> None:
    """The template exists (`machines` made it): prepare finds it and says which one it is."""
    result = stead("prepare", "--json", settings=settings, data=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["size"] == str(settings.default_size)


def test_the_demo_shows_the_main_job_and_leaves_nothing(
    settings: Settings, machines: Machines, tmp_path: Path
) -> None:
    result = stead("demo", "--count", "2", settings=settings, data=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "hello from the host" in result.stdout
    assert "3 different machine ids" in result.stdout
    assert list((tmp_path / "machines").glob("*")) == []


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (("prepare", "--size", "3x1Gx20G"), {}, "power of two"),
        (("prepare", "--size", "big"), {}, "a size looks like"),
        (("demo",), {"STEAD_POOL": "many"}, "bad STEAD_ setting"),
        (("prepare",), {"STEAD_DATA": "/proc/nowhere"}, "No such file or directory: /proc/nowhere"),
    ],
)
def test_a_mistake_gets_one_sentence_and_an_exit_code(
    arguments: tuple[str, ...], environment: dict[str, str], words: str, settings: Settings, tmp_path: Path
) -> None:
    result = stead(*arguments, settings=settings, data=tmp_path, **environment)
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr
