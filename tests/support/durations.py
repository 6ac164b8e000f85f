"""A pytest plugin: how long each file, fixture and test took, as a text file beside the JUnit XML report.

Only runs with `--junit-xml` write it. With pytest-xdist the workers measure and the controller writes.
"""

import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path

import pytest

FIXTURE = "fixture"
"""The property of a test that has the name, the scope and the seconds of a fixture that was set up for it."""
SHORTEST = 0.01
"""Seconds; shorter fixtures and tests are left out of the lists, not out of the sums."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("xmlpath", None) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(DurationReport(Path(config.getoption("xmlpath"))), "stead-durations")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Measure a fixture without those that it needs: they are set up before."""
    started = time.perf_counter()
    try:
        return (yield)
    finally:
        seconds = time.perf_counter() - started
        if seconds >= SHORTEST:
            measured = f"{fixturedef.argname} {fixturedef.scope} {seconds:.3f}"
            # A fixture of a session or module belongs to the test that was the first to need it.
            request._pyfuncitem.user_properties.append((FIXTURE, measured))


class DurationReport:
    """Sums the phases of each test and writes the lists at the end of the run."""

    def __init__(self, junit: Path) -> None:
        self._path = junit.with_name("durations.txt")
        self._tests: dict[str, dict[str, float]] = defaultdict(dict)
        self._fixtures: dict[str, list[float]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tests[report.nodeid][report.when] = report.duration
        if report.when == "teardown":  # each phase repeats the properties of those before
            for name, value in report.user_properties:
                if name == FIXTURE:
                    fixture, scope, seconds = str(value).rsplit(" ", 2)
                    self._fixtures[f"{fixture} ({scope})"].append(float(seconds))

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text("\n".join(self._lines()) + "\n", encoding="utf-8")

    def _lines(self) -> Iterable[str]:
        files: dict[str, list[float]] = defaultdict(list)
        for test, phases in self._tests.items():
            files[test.partition("::")[0]].append(sum(phases.values()))
        total = sum(sum(seconds) for seconds in files.values())
        yield f"{total:9.2f} s in {len(self._tests)} tests of {len(files)} files: setup, call and teardown"
        yield "\n# Files: seconds, tests"
        for name, each in _longest(files):
            yield f"{sum(each):9.2f} {len(each):5} {name}"
        yield "\n# Fixtures: seconds, how often they were set up"
        for name, each in _longest(self._fixtures):
            yield f"{sum(each):9.2f} {len(each):5} {name}"
        yield "\n# Tests: seconds, of them setup, call, teardown"
        for name, (seconds,) in _longest({test: [sum(p.values())] for test, p in self._tests.items()}):
            split = (self._tests[name].get(when, 0) for when in ("setup", "call", "teardown"))
            if seconds >= SHORTEST:
                yield f"{seconds:9.2f} {' '.join(f'{phase:8.2f}' for phase in split)} {name}"


def _longest(sums: dict[str, list[float]]) -> list[tuple[str, list[float]]]:
    return sorted(sums.items(), key=lambda entry: -sum(entry[1]))
