"""What the documents say of tests and benchmarks is true."""

import re

import pytest

from support import ROOT

PAGES = ["SPECIFICATION.md", "CONTRIBUTING.md", "SECURITY.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_and_benchmark_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:tests|bench)/[\w./-]+)(?:::(\w+))?", text)
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
