"""The trial on KVM tells the truth about each test, also when the machine that runs them crashes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT
from support.kvm_trial import ARGUMENTS, Crash, Progress, continued, panicked

TESTS = """
import os
import pathlib
import pytest

def test_good():
    pass

def test_bad():
    print("said before it failed")
    assert 1 + 1 == 3

def test_skipped():
    pytest.skip("not here")

@pytest.fixture
def broken_end():
    yield
    raise RuntimeError("cannot clean up")

def test_bad_end(broken_end):
    pass

def test_takes_the_machine_down_once():
    file = pathlib.Path("was-here")
    if not file.exists():
        file.touch()
        os._exit(9)

def test_takes_the_machine_down():
    os._exit(9)

def test_last():
    pass
"""


class FakeOuterVms:
    """Runs the tests in processes that stand for outer VMs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.progress = folder, Progress()
        self.told: list[str] = []
        self.starts = 0
        self.arguments: tuple[str, ...] = ()

    def start(self, number: int, seconds: float) -> None:
        self.starts = number
        stream, left = self.folder / f"stream-{number}", self.folder / "left"
        more = []
        if self.progress.collected is not None:
            left.write_text("".join(f"{test}\n" for test in self.progress.left))
            more = ["--left", str(left)]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", *ARGUMENTS),
                *("-c", os.devnull, "--rootdir", ".", "--stream", str(stream), *more, *self.arguments),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
        )
        assert "cannot clean up" not in done.stdout
        for line in stream.read_bytes().splitlines():
            self.told += self.progress.read(line)
        if done.returncode == 9:
            self.progress.crashed("it panicked")
        else:
            self.progress.read(json.dumps({"kind": "finished", "status": done.returncode}).encode())

    def run(self, *arguments: str, restarts: int = 8) -> None:
        self.arguments = arguments
        continued(self.start, self.progress, restarts, 600)


@pytest.fixture
def outer_vms(tmp_path: Path) -> FakeOuterVms:
    (tmp_path / "test_it.py").write_text(TESTS)
    return FakeOuterVms(tmp_path)


def test_a_trial_survives_crashes_and_accounts_for_every_test(outer_vms: FakeOuterVms) -> None:
    outer_vms.run()
    once, down = "test_it.py::test_takes_the_machine_down_once", "test_it.py::test_takes_the_machine_down"
    assert outer_vms.starts == 4
    assert outer_vms.progress.outcomes == {
        "test_it.py::test_good": "passed",
        "test_it.py::test_bad": "failed",
        "test_it.py::test_skipped": "skipped",
        "test_it.py::test_bad_end": "failed",
        once: "passed",
        "test_it.py::test_last": "passed",
    }
    assert outer_vms.progress.crashes == [Crash(test, "it panicked") for test in (once, down, down)]
    assert list(outer_vms.progress.summary()) == [
        f"crash 1 of the outer VM: it panicked, during {once}",
        f"crash 2 of the outer VM: it panicked, during {down}",
        f"crash 3 of the outer VM: it panicked, during {down}",
        "failed: test_it.py::test_bad",
        "failed: test_it.py::test_bad_end",
        f"interrupted: {down}: the outer VM crashed 2 times during it",
        "on KVM 3 passed, 2 failed, 1 skipped, 1 interrupted, 0 not run; 3 crashes of the outer VM",
    ]
    assert not outer_vms.progress.good
    # What failed is told when it fails, with the reason and the output.
    (bad,) = (text for text in outer_vms.told if text.startswith("failed in call: test_it.py::test_bad\n"))
    assert 'print("said before it failed")\n>       assert 1 + 1 == 3' in bad
    assert "said before it failed" in bad
    (end,) = (text for text in outer_vms.told if text.startswith("failed in teardown"))
    assert "RuntimeError: cannot clean up" in end


def test_a_trial_ends_after_its_restarts_and_names_what_did_not_run(outer_vms: FakeOuterVms) -> None:
    outer_vms.run("-k", "machine or last", restarts=1)
    assert outer_vms.starts == 2
    assert "not run: test_it.py::test_last" in outer_vms.progress.summary()
    assert not outer_vms.progress.good


def test_a_trial_is_good_when_all_tests_passed_after_a_crash(outer_vms: FakeOuterVms) -> None:
    outer_vms.run("-k", "once or last or skipped")
    assert (outer_vms.starts, len(outer_vms.progress.crashes)) == (2, 1)
    assert outer_vms.progress.good


def test_tests_can_be_repeated(outer_vms: FakeOuterVms) -> None:
    outer_vms.run("-k", "good", "--repeat", "3")
    assert outer_vms.progress.collected == [f"test_it.py::test_good[{number}]" for number in range(3)]
    assert outer_vms.progress.good


def test_what_cannot_be_collected_is_told_and_not_tried_again(outer_vms: FakeOuterVms) -> None:
    (outer_vms.folder / "test_it.py").write_text("import nothing_of_this_name")
    outer_vms.run()
    assert outer_vms.starts == 1
    assert any("No module named 'nothing_of_this_name'" in text for text in outer_vms.told)
    assert not outer_vms.progress.good


def test_a_machine_that_never_starts_the_tests_is_no_success() -> None:
    progress = Progress()
    continued(lambda *_: progress.crashed("it hangs"), progress, 2, 60)
    assert list(progress.summary()) == [
        *(f"crash {number} of the outer VM: it hangs, during no test" for number in (1, 2, 3)),
        "on KVM 0 passed, 0 failed, 0 skipped, 0 interrupted, 0 not run; 3 crashes of the outer VM",
        "the tests were never collected",
    ]
    assert not progress.good


def test_a_trial_without_time_does_not_start() -> None:
    progress = Progress()
    continued(lambda *_: pytest.fail("it started"), progress, 2, 0)
    assert not progress.good


def test_a_line_that_a_crash_cut_short_changes_nothing() -> None:
    progress = Progress()
    for line in (b'{"kind": "ended", "te', b"", b"7", b"{}", b"\xff", b'{"kind": "ended", "test": "a"}'):
        assert progress.read(line) == []
    assert progress == Progress()


def test_only_the_outer_kernel_panics() -> None:
    last = b"---[ end Kernel panic - not syncing: corrupted stack end detected inside scheduler ]---\n"
    assert panicked(b"Welcome\n[  226.526190] " + last)
    assert not panicked(b"test_a PASSED\nE   [  226.526190] " + last)
    assert not panicked(b"[  226.526190] reboot: Power down\n")
