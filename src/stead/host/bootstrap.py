"""Runs mmdebstrap to create the Debian root directory, and turns its output into progress and errors."""

import os
import re
import shlex
from pathlib import Path

from stead.deadlines import scaled
from stead.errors import HostError, ImageError
from stead.host.commands import CommandFailed, run
from stead.host.interface import Progress, Report

_TIMEOUT = scaled(1800.0)


async def bootstrap(
    suite: str,
    mirror: str | None,
    files: Path,
    stage: Path,
    root: Path,
    *,
    out: Path,
    progress: Report,
) -> None:
    """Fill `root` with the packages listed in `files` and with `stage`; put kernel and initrd in `out`."""
    packages = read_packages(files / "packages.txt")
    script = shlex.quote(str(files / "customize.sh"))
    hook = f'sh {script} "$1" {shlex.join(map(str, (stage, files, out)))}'
    reader = OutputReader()

    def on_line(line: str) -> None:
        if step := reader.feed(line):
            progress(step)

    try:
        await run(
            # Mounts and processes live in namespaces that end with us, even when we are killed.
            *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"),
            *("--mount-proc", "--propagation", "private", "mmdebstrap", "--mode=root", "--variant=minbase"),
            *("--format=directory", "--verbose", f"--include={','.join(packages)}"),
            # The package lists stay, so that `apt-get install` works in a new VM; customize.sh cleans up.
            "--skip=cleanup/apt",
            *('--aptopt=Acquire::GzipIndexes "true"', '--aptopt=Acquire::Languages "none"'),
            *('--aptopt=Acquire::Retries "2"', '--aptopt=Acquire::http::Timeout "30"'),
            *(f"--dpkgopt={files / 'dpkg.cfg'}", f"--customize-hook={hook}", suite, root),
            *([mirror] if mirror else []),
            timeout=_TIMEOUT,
            env={**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"},
            on_line=on_line,
        )
    except CommandFailed as error:
        raise ImageError(explain(reader)) from error
    except HostError as error:
        raise ImageError(f"cannot build the base image: {error}") from error


def read_packages(path: Path) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]


# The share of the whole build that is behind us when mmdebstrap says that a step begins.
_STEPS = {
    "running apt-get update": ("download", "package lists", 0.01),
    "downloading packages with apt": ("download", "essential packages", 0.05),
    "extracting archives": ("install", "essential packages", 0.08),
    "installing essential packages": ("install", "essential packages", 0.25),
    "installing remaining packages": ("download", "packages", 0.32),
    "running --customize-hook": ("configure", "settings, kernel and initrd", 0.82),
    "skipping cleanup/apt": ("configure", "cleaning", 0.89),
}
_DOWNLOAD_ERRORS = ("Failed to fetch", "Unable to fetch", "Could not", "Some index files", "The repository")
_REMAINING = "installing remaining packages"
_INSTALLED = re.compile(r"\d+ upgraded, (\d+) newly installed")
_FETCHED = re.compile(r"Get:(\d+) \S+ \S+ \S+ (\S+)")
_WORKED = re.compile(r"(Unpacking|Setting up) ([^\s:]+)")


class OutputReader:
    """Turns the output of mmdebstrap and apt into progress, and keeps what it said about errors."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.last = ""
        self._total = 0
        self._worked = 0
        self._remaining = False

    def feed(self, line: str) -> Progress | None:
        if line.startswith("E: "):
            self.errors.append(line.removeprefix("E: "))
            return None
        if line.startswith("I: "):
            return self._step(line.removeprefix("I: "))
        if line.strip():
            self.last = line.strip()
        if not self._remaining:
            return None
        if match := _INSTALLED.match(line):
            self._total = int(match[1])
        elif self._total and (match := _FETCHED.match(line)):
            return Progress("download", match[2], 0.32 + 0.13 * min(1.0, int(match[1]) / self._total))
        elif self._total and (match := _WORKED.match(line)):
            self._worked += 1
            # Each package is unpacked once and set up once.
            return Progress("install", match[2], 0.45 + 0.37 * min(1.0, self._worked / (2 * self._total)))
        return None

    def _step(self, line: str) -> Progress | None:
        for start, (phase, detail, fraction) in _STEPS.items():
            if line.startswith(start):
                self._remaining = start == _REMAINING
                return Progress(phase, detail, fraction)
        return None


def explain(reader: OutputReader) -> str:
    """An error message from the first error in the output: later ones are only its consequences."""
    own = ("setup failed", "mmdebstrap failed", "apt-get ")
    words = next((error for error in reader.errors if not error.startswith(own)), reader.last or "no message")
    words = " ".join(words.split()).rstrip(".")
    if words.startswith("Unable to locate package"):
        return f"Debian {words.replace('Unable to locate', 'has no')}"
    if words.startswith(_DOWNLOAD_ERRORS):
        return f"cannot download Debian packages: {words[0].lower()}{words[1:]}"
    return f"cannot build the base image: {words}"
