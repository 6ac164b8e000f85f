"""The report of how long tests took."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from support import ROOT

TESTS = """
import time
import pytest

@pytest.fixture(scope="module")
def slow_fixture():
    time.sleep(0.2)

def test_first(slow_fixture):
    time.sleep(0.1)

def test_second(slow_fixture):
    pass
"""


def test_durations_of_files_fixtures_and_tests_are_reported_by_workers(tmp_path: Path) -> None:
    """With workers of pytest-xdist, whose measurements reach the controller as properties of the tests."""
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "support.durations"]
    report = tmp_path / "report"
    command += ["--numprocesses", "1", f"--junit-xml={report}/junit.xml", "test_it.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr

    total, *lists = (report / "durations.txt").read_text().split("\n\n")
    assert float(total.split()[0]) >= 0.3 and "in 2 tests of 1 files" in total
    files, fixtures, tests = (part.splitlines()[1:] for part in lists)
    assert [line.split()[1:] for line in files] == [["2", "test_it.py"]]
    assert [line.split()[1:] for line in fixtures] == [["1", "slow_fixture", "(module)"]]
    seconds, setup, call, _, name = tests[0].split()
    assert name == "test_it.py::test_first"
    assert float(setup) >= 0.2 and float(call) >= 0.1 and float(seconds) >= 0.3

    cases = ElementTree.parse(report / "junit.xml").iter("testcase")
    assert [(case.get("name"), float(case.get("time", 0)) >= 0.3) for case in cases] == [
        ("test_first", True),
        ("test_second", False),
    ]
