"""What the documents, and the list of closed weaknesses, say of tests and benchmarks is true."""

import re
import tomllib
from dataclasses import dataclass
from typing import Any

import pytest

from support import ROOT
from support.collected import CollectedTest, collected

PAGES = ["SPECIFICATION.md", "CONTRIBUTING.md", "SECURITY.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_and_benchmark_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:tests|bench)/[\w./-]+)(?:::(test_\w+))?", text)
    assert named
    for path, test in named:
        assert (ROOT / path).exists(), f"{page} names {path}"
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(), f"{page} names {path}::{test}"


def test_every_row_of_the_comparison_of_clients_names_its_tests() -> None:
    text = (ROOT / "docs/coming-from.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests/agent_clients").glob("test_*.py"))
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|--")]
    headings = [line for line in rows if line.endswith("| Test |")]
    assert len(headings) == text.count("|---|\n"), "every table has a column of tests"
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.rpartition(" | ")[2])
        assert named or row in headings, row
        for test in named:
            assert f"def {test}(" in tests, f"docs/coming-from.md names {test}"


TEST = r"`(tests/[\w/]+\.py::[\w:]+|guest/[\w/]+_test\.go::\w+)`"


@dataclass(frozen=True)
class Promise:
    text: str
    proof: str
    line: int

    @property
    def tests(self) -> list[str]:
        return re.findall(TEST, self.proof)

    @property
    def trials(self) -> list[str]:
        return re.findall(TEST, "".join(re.split(r"\btrials?: ", self.proof)[1:]))


def promises() -> list[Promise]:
    found, inside = [], False
    for number, line in enumerate((ROOT / "SPECIFICATION.md").read_text().splitlines(), 1):
        if not line.startswith("|"):
            inside = False
        elif line == "| Promise | Proof |":
            inside = True
        elif inside and not line.startswith("|--"):
            text, proof = re.split(r"(?<!\\) \| ", line.strip("| "))
            found.append(Promise(text, proof, number))
    return found


def test_every_promise_has_a_proof() -> None:
    """Tests by id, a benchmark, or the words that there is none. A file or a folder proves nothing."""
    found = promises()
    assert len(found) > 500
    assert len({promise.text for promise in found}) > len(found) - 20, "promises are stated twice"
    for promise in found:
        where = f"SPECIFICATION.md:{promise.line}"
        assert ";" not in promise.text or "`bench/" in promise.proof or len(promise.text) < 120, (
            f"{where} has several promises: make rows of them"
        )
        named = re.findall(r"`((?:tests|guest)/[^`]*)`", promise.proof)
        assert sorted(named) == sorted(promise.tests), f"{where} names a file without a test"
        benchmarks = re.findall(r"`(bench/\w+)`", promise.proof)
        assert named or benchmarks or promise.proof in ("not shown", "not met"), f"{where} has no proof"
        for test in promise.tests:
            path, _, name = test.partition("::")
            keyword = "func" if path.endswith(".go") else "def"
            if "::" not in name:
                assert f"{keyword} {name}(" in (ROOT / path).read_text(), f"{where} names {test}"


@pytest.fixture(scope="module")
def tests() -> dict[str, CollectedTest]:
    return collected()


@pytest.mark.heavy
def test_every_proof_is_a_test_that_runs(tests: dict[str, CollectedTest]) -> None:
    wrong = []
    for promise in promises():
        for test in promise.tests:
            if test.startswith("guest/"):
                continue  # `scripts/check-guest` runs all of them
            found = tests.get(test)
            if found is None:
                wrong.append(f"{promise.line}: {test} is not collected")
            elif found.skipped:
                wrong.append(f"{promise.line}: {test} is skipped")
            elif found.slow != (test in promise.trials):
                wrong.append(f"{promise.line}: {test} is {'a trial' if found.slow else 'no trial'}")
    assert wrong == []


WEAKNESSES = [
    f"{harm}{number}" for harm, most in (("h", 10), ("m", 12), ("l", 10)) for number in range(1, most + 1)
]


@pytest.fixture(scope="module")
def weaknesses() -> dict[str, dict[str, Any]]:
    return tomllib.loads((ROOT / "tests/hostile/findings.toml").read_text())


def test_every_weakness_names_tests(weaknesses: dict[str, dict[str, Any]]) -> None:
    assert list(weaknesses) == WEAKNESSES
    assert len({each["weakness"] for each in weaknesses.values()}) == len(WEAKNESSES)
    for name, each in weaknesses.items():
        assert set(each) == {"weakness", "tests"} and each["tests"], name
        for test in each["tests"]:
            path, _, function = test.partition("::")
            assert f"def {function}(" in (ROOT / path).read_text(), f"{name} names {test}"


@pytest.mark.heavy
def test_every_weakness_is_shown_to_be_closed_by_tests_that_run(
    weaknesses: dict[str, dict[str, Any]], tests: dict[str, CollectedTest]
) -> None:
    named = {test for each in weaknesses.values() for test in each["tests"]}
    assert [test for test in sorted(named) if test not in tests] == []
    assert [test for test in sorted(named) if tests[test].skipped or tests[test].slow] == []


def test_every_line_with_a_proof_is_a_row_of_a_table() -> None:
    """Else it is not checked here, and not shown as a row."""
    text = (ROOT / "SPECIFICATION.md").read_text()
    assert [line for line in text.splitlines() if " | " in line and not line.startswith("|")] == []
