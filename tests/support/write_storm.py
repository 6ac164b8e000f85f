"""Runs inside a machine: writes all the time in ways that can be checked at any instant.

`write_storm.py run DIRECTORY` starts the writers and returns; `write_storm.py check DIRECTORY` lets them come
to the end of what they are doing and then checks everything that they ever said was written.
"""

import contextlib
import hashlib
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

KEPT = 40
RUN = Path("/run/storm")
"""In memory: what the writers have been told is written. It is carried by memory, the rest by the disk."""


def acknowledged(name: str) -> int:
    path = RUN / name
    return int(path.read_text()) if path.exists() else 0


def acknowledge(name: str, number: int) -> None:
    temporary = RUN / f".{name}"
    temporary.write_text(str(number))
    temporary.rename(RUN / name)


def write_files(folder: Path, number: int) -> None:
    """A file whose name is the checksum of its content, renamed into place; the oldest is deleted."""
    content = os.urandom(1000 + number * 7919 % 200_000)
    temporary = folder / ".new"
    with temporary.open("wb") as file:
        file.write(content)
        if number % 3 == 0:
            file.flush()
            os.fsync(file.fileno())
    temporary.rename(folder / f"{number:08}-{hashlib.sha256(content).hexdigest()}")
    for old in folder.glob(f"{number - KEPT:08}-*"):
        old.unlink()


def check_files(folder: Path, last: int) -> None:
    found = {}
    for path in folder.glob("0*"):
        number, checksum = path.name.split("-")
        assert hashlib.sha256(path.read_bytes()).hexdigest() == checksum, path
        found[int(number)] = path
    missing = [number for number in range(max(1, last - KEPT + 1), last + 1) if number not in found]
    assert not missing, ("files", missing, last)


def write_rows(folder: Path, number: int) -> None:
    with sqlite3.connect(folder / "rows.db") as database:
        database.execute(
            "create table if not exists rows (number integer primary key, data blob, checksum text)"
        )
        data = os.urandom(3000)
        database.execute(
            "insert into rows values (?, ?, ?)", (number, data, hashlib.sha256(data).hexdigest())
        )
        database.execute("delete from rows where number < ?", (number - 200,))
    database.close()


def check_rows(folder: Path, last: int) -> None:
    database = sqlite3.connect(folder / "rows.db")
    assert database.execute("pragma integrity_check").fetchall() == [("ok",)]
    numbers = set()
    for number, data, checksum in database.execute("select * from rows"):
        assert hashlib.sha256(data).hexdigest() == checksum, number
        numbers.add(number)
    missing = set(range(max(1, last - 200), last + 1)) - numbers
    assert not missing, ("rows", missing, last)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=storm", "-c", "user.email=storm@localhost")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write_commits(folder: Path, number: int) -> None:
    if not (folder / ".git").exists():
        git(folder, "init", "-q", "-b", "main")
    (folder / f"file-{number % 10}").write_bytes(os.urandom(5000))
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", str(number))


def check_commits(folder: Path, last: int) -> None:
    git(folder, "fsck", "--full", "--strict")
    messages = git(folder, "log", "--format=%s").split()
    assert messages[-1:] == ["1"], messages[-3:]
    assert int(messages[0]) >= last, ("commits", messages[0], last)
    assert messages == [str(number) for number in range(int(messages[0]), 0, -1)]


def write_packages(folder: Path, number: int) -> None:
    """Build, install and remove a Debian package."""
    package = folder / "package"
    (package / "DEBIAN").mkdir(parents=True, exist_ok=True)
    (package / "usr/share/storm").mkdir(parents=True, exist_ok=True)
    (package / "usr/share/storm/data").write_bytes(os.urandom(50_000))
    control = f"Package: storm\nVersion: {number}\nArchitecture: all\nMaintainer: storm\nDescription: storm\n"
    (package / "DEBIAN/control").write_text(control)
    subprocess.run(
        ["dpkg-deb", "-Znone", "--build", str(package), str(folder / "storm.deb")],
        check=True,
        capture_output=True,
    )
    subprocess.run(["dpkg", "-i", str(folder / "storm.deb")], check=True, capture_output=True)
    if number % 2:
        subprocess.run(["dpkg", "-r", "storm"], check=True, capture_output=True)


def check_packages(folder: Path, last: int) -> None:
    audit = subprocess.run(["dpkg", "--audit"], check=True, capture_output=True, text=True).stdout
    assert audit == "", audit
    shown = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Version} ${db:Status-Status}", "storm"],
        check=False,
        capture_output=True,
        text=True,
    ).stdout
    if shown and last:
        version, status = shown.split()
        assert int(version) >= last, ("packages", shown, last)
        assert status in ("installed", "not-installed", "config-files"), shown


Work = Callable[[Path, int], None]
WRITERS: dict[str, tuple[Work, Work]] = {
    "files": (write_files, check_files),
    "rows": (write_rows, check_rows),
    "commits": (write_commits, check_commits),
    "packages": (write_packages, check_packages),
}


def run(base: Path) -> None:
    RUN.mkdir(exist_ok=True)
    (RUN / "stop").unlink(missing_ok=True)
    for name, (write, _) in WRITERS.items():
        folder = base / name
        folder.mkdir(parents=True, exist_ok=True)
        if os.fork() == 0:
            os.setsid()
            silence = os.open("/dev/null", os.O_RDWR)
            errors = os.open(RUN / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for descriptor, target in ((silence, 0), (silence, 1), (errors, 2)):
                os.dup2(descriptor, target)
            (RUN / f"{name}.pid").write_text(str(os.getpid()))
            number = acknowledged(name)
            while not (RUN / "stop").exists():
                number += 1
                write(folder, number)
                acknowledge(name, number)
            (RUN / f"{name}.pid").unlink()
            os._exit(0)


def check(base: Path) -> None:
    RUN.mkdir(exist_ok=True)
    (RUN / "stop").touch()
    deadline = time.monotonic() + 120
    while pids := list(RUN.glob("*.pid")):
        assert time.monotonic() < deadline, [path.name for path in pids]
        for path in pids:
            with contextlib.suppress(FileNotFoundError):  # it has just come to its end
                alive = Path(f"/proc/{path.read_text() or 0}").exists()
                log = RUN / path.name.replace(".pid", ".log")
                assert alive or not path.exists(), (path.name, log.read_text())
        time.sleep(0.05)
    for name, (_, verify) in WRITERS.items():
        verify(base / name, acknowledged(name))
    said = subprocess.run(["dmesg"], check=True, capture_output=True, text=True).stdout
    bad = [
        line for line in said.splitlines() if "EXT4-fs error" in line or "I/O error" in line or "BUG" in line
    ]
    assert not bad, bad
    print({name: acknowledged(name) for name in WRITERS})


if __name__ == "__main__":
    {"run": run, "check": check}[sys.argv[1]](Path(sys.argv[2]))
