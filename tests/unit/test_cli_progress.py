"""Progress and durations of the command line."""

import pytest

from stead.cli.installation.host import ProgressDisplay
from stead.cli.output import duration_text
from stead.host.interface import Progress


def test_each_phase_is_a_line_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    display = ProgressDisplay()
    for phase, detail in (("download", "package lists"), ("install", "git"), ("install", "curl")):
        display(Progress(phase, detail, 0.1))
    display(Progress("booting the image", "2x1Gx20G", 0.1, "template"))
    display(Progress("ready", "", 1.0, "template"))
    display.close()
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "base image: download",
        "base image: install",
        "template: booting the image",
        "template: ready",
    ]
    assert printed.out == ""


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00123, "1.2 ms"), (1.5, "1500.0 ms"), (9.99, "9990.0 ms"), (10.0, "10.0 s"), (123.456, "123.5 s")],
)
def test_long_times_are_shown_in_seconds(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
