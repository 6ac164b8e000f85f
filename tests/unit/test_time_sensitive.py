"""The list of tests for `scripts/repeat-tests`."""

from support import ROOT


def test_listed_time_sensitive_tests_exist() -> None:
    lines = (ROOT / "tests/time-sensitive.txt").read_text().splitlines()
    names = [line for line in lines if line and not line.startswith("#")]
    assert len(names) >= 30
    for name in names:
        path, _, test = name.partition("::")
        assert f"def {test}(" in (ROOT / path).read_text(), name
