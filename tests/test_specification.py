"""SPECIFICATION.md names only tests and benchmarks that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["SPECIFICATION.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"]


@pytest.mark.parametrize("page", PAGES)
def test_every_named_test_and_benchmark_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:tests|bench)/[\w./-]+)(?:::(\w+))?", text)
    assert named or page == "ARCHITECTURE.md"
    for path, test in named:
        assert (ROOT / path).exists(), f"{page} names {path}"
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(), f"{page} names {path}::{test}"


def test_the_number_of_crash_operations_is_right() -> None:
    from test_recovery import EVERY_TIME, OUTCOMES

    promise = f"{len(EVERY_TIME)} operations in every run, all {len(OUTCOMES)} as a trial"
    assert promise in (ROOT / "SPECIFICATION.md").read_text()
