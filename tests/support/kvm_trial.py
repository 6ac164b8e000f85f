"""Both sides of the stream of `scripts/trial-kvm`: the plugin of pytest that writes it, and its reader.

The outer VM, in which pytest runs, may crash at any time: each event is one line of JSON, written at once.
"""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

TEXT_LIMIT = 1 << 16
HEARTBEAT = 10
ATTEMPTS = 2
ARGUMENTS = [
    *("-p", "support.kvm_trial", "-p", "no:cacheprovider", "-v", "--color=no", "--tb=long"),
    "--no-summary",  # the stream has what failed and why, and the console is left to the kernel
]
"""Of pytest in the outer VM."""
_RANK = {"passed": 0, "skipped": 1, "failed": 2}


# In the outer VM


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("trial on KVM")
    group.addoption("--stream", type=Path, help="where to write events")
    group.addoption("--left", type=Path, help="a file with the tests to run, one per line")
    group.addoption("--repeat", type=int, default=1, help="how often to run each test")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--stream"):
        config.pluginmanager.register(Teller(path))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if (times := metafunc.config.getoption("--repeat")) > 1:
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(times))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if path := config.getoption("--left"):
        left = set(path.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in left])
        items[:] = [item for item in items if item.nodeid in left]


class Teller:
    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._lock = threading.Lock()
        self._reports: list[pytest.TestReport] = []
        self._ended = threading.Event()
        threading.Thread(target=self._live, daemon=True).start()

    def _tell(self, kind: str, **more: object) -> None:
        with self._lock:
            self._stream.write(json.dumps({"kind": kind, **more}).encode() + b"\n")
            self._stream.flush()

    def _live(self) -> None:
        """A test may take long: as long as this is heard, the outer VM does not hang."""
        while not self._ended.wait(HEARTBEAT):
            self._tell("alive")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(
                "problem", text=f"cannot collect {report.nodeid}:\n{report.longreprtext}"[-TEXT_LIMIT:]
            )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tell("collected", tests=[item.nodeid for item in session.items])

    def pytest_internalerror(self, excrepr: object) -> None:
        self._tell("problem", text=f"pytest failed:\n{excrepr}"[-TEXT_LIMIT:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports = []
        self._tell("began", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)
        if report.failed:
            parts = [
                report.longreprtext,
                *(f"-- {name}\n{text[-TEXT_LIMIT:]}" for name, text in report.sections),
            ]
            self._tell("failure", test=report.nodeid, phase=report.when, text="\n".join(parts))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcome = max((report.outcome for report in self._reports), key=_RANK.__getitem__, default="failed")
        self._tell("ended", test=nodeid, outcome=outcome, seconds=sum(r.duration for r in self._reports))

    def pytest_unconfigure(self) -> None:
        self._ended.set()


# On the host


def panicked(console: bytes) -> bool:
    """Whether the kernel of the outer VM says so itself, and not a test that shows a guest's console."""
    return re.search(rb"^\[ *\d+\.\d+\] ---\[ end Kernel panic", console, re.MULTILINE) is not None


@dataclass(frozen=True)
class Crash:
    """An end of the outer VM before that of the tests; `test` is the one that ran, if any."""

    test: str | None
    reason: str


@dataclass
class Progress:
    """What is known of a trial, over all starts of its outer VM."""

    collected: list[str] | None = None
    outcomes: dict[str, str] = field(default_factory=dict)
    crashes: list[Crash] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    running: str | None = None
    status: int | None = None
    """With what the command in the outer VM ended."""

    def read(self, line: bytes) -> list[str]:
        """Take in one line of the stream; returns what to tell about it."""
        try:
            event = json.loads(line)
            return self._take(event["kind"], event.get("test", ""), event)
        except (ValueError, KeyError, TypeError, AttributeError):
            return []  # a line that a crash cut short, or a program that wrote to the port

    def _take(self, kind: str, test: str, event: dict[str, Any]) -> list[str]:
        match kind:
            case "collected":
                if self.collected is None:
                    self.collected = list(event["tests"])
                return [f"{len(event['tests'])} tests to run"]
            case "began":
                self.running = test
            case "failure":
                return [f"failed in {event['phase']}: {test}\n{event['text']}"]
            case "ended":
                told = f"{event['outcome']}: {test} ({event['seconds']:.0f} s)"
                self.running = None
                self.outcomes[test] = event["outcome"]
                return [told]
            case "problem":
                self.problems.append(event["text"])
                return [event["text"]]
            case "finished":
                self.status = int(event["status"])
        return []

    def crashed(self, reason: str) -> None:
        self.crashes.append(Crash(self.running, reason))
        self.running = None

    @property
    def interrupted(self) -> list[str]:
        """Tests that the outer VM did not survive as often as they are tried."""
        times = Counter(crash.test for crash in self.crashes if crash.test)
        return [test for test, number in times.items() if number >= ATTEMPTS and test not in self.outcomes]

    @property
    def left(self) -> list[str]:
        """What to run after a restart. Before the tests are known: none, which means all."""
        done = {*self.outcomes, *self.interrupted}
        return [test for test in self.collected or () if test not in done]

    @property
    def complete(self) -> bool:
        """Nothing is left to run, or a restart would not change it: pytest itself came to its end."""
        return self.status is not None or (self.collected is not None and not self.left)

    @property
    def good(self) -> bool:
        """Each test ran to its end and none failed."""
        outcomes = set(self.outcomes.values())
        return (
            "passed" in outcomes
            and "failed" not in outcomes
            and not (self.interrupted or self.left or self.problems or self.status not in (0, None))
        )

    def summary(self) -> Iterable[str]:
        for number, crash in enumerate(self.crashes, 1):
            yield f"crash {number} of the outer VM: {crash.reason}, during {crash.test or 'no test'}"
        for test, outcome in self.outcomes.items():
            if outcome == "failed":
                yield f"failed: {test}"
        for test in self.interrupted:
            yield f"interrupted: {test}: the outer VM crashed {ATTEMPTS} times during it"
        for test in self.left:
            yield f"not run: {test}"
        counts = Counter(self.outcomes.values())
        yield (
            f"on KVM {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped,"
            f" {len(self.interrupted)} interrupted, {len(self.left)} not run;"
            f" {len(self.crashes)} crashes of the outer VM"
        )
        if self.collected is None:
            yield "the tests were never collected"
        if self.status not in (0, 1, None):
            yield f"pytest ended with status {self.status}"


def continued(start: Callable[[int, float], None], progress: Progress, restarts: int, seconds: float) -> None:
    """Call `start` with its number and the time that is left, until the tests came to their end."""
    deadline = time.monotonic() + seconds
    for number in range(1, restarts + 2):
        left = deadline - time.monotonic()
        if progress.complete or left <= 0:
            return
        start(number, left)
