"""The tests that pytest collects, slow ones included, with the marks that decide whether they run.

Run as a program it writes them as JSON to standard output: collecting in the running pytest would change it.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from support import ROOT


@dataclass(frozen=True)
class CollectedTest:
    """A test function with all its parameters."""

    slow: bool
    """All its parameters are slow: only `make trials` runs it."""
    skipped: bool
    """None of its parameters runs, by a mark that is known before the test starts."""


def collected() -> dict[str, CollectedTest]:
    """By id without parameters, such as `tests/unit/test_vm.py::test_x`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ended = subprocess.run(
        [sys.executable, "-m", "support.collected"],
        cwd=ROOT / "tests",
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=500,
    )
    return {name: CollectedTest(**marks) for name, marks in json.loads(ended.stdout).items()}


class _Collector:
    def __init__(self) -> None:
        self.found: dict[str, dict[str, bool]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            slow = item.get_closest_marker("slow") is not None
            conditions = [mark.args[0] for mark in item.iter_markers("skipif") if mark.args]
            skipped = item.get_closest_marker("skip") is not None or any(
                condition for condition in conditions if not isinstance(condition, str)
            )
            before = self.found.setdefault(item.nodeid.split("[")[0], {"slow": True, "skipped": True})
            before["slow"] &= slow
            before["skipped"] &= skipped


def _main() -> None:
    collector = _Collector()
    out = os.dup(1)
    os.dup2(2, 1)  # pytest's own lines
    options = ["--collect-only", "-qq", "-m", "", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    status = pytest.main([*options, "-c", str(ROOT / "pyproject.toml"), str(ROOT / "tests")], [collector])
    with os.fdopen(out, "w") as answer:
        json.dump(collector.found, answer)
    sys.exit(status)


if __name__ == "__main__":
    _main()
