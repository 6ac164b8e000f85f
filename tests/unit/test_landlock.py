"""Landlock and the launcher that applies it, with real processes of this kernel."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from stead import landlock
from stead.host import disks, examination
from stead.landlock import FileAccess
from stead.launcher import Launch
from stead.settings import Settings

NO_LANDLOCK = b"".join(
    struct.pack("HBBI", *each)
    for each in (
        (0x20, 0, 0, 0),
        (0x15, 0, 1, 444),
        (0x06, 0, 0, 0x00050000 | 38),  # ENOSYS
        (0x06, 0, 0, 0x7FFF0000),
    )
)
"""A seccomp filter by which a kernel has no Landlock."""
needs_landlock = pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")


def ran(launch: Launch) -> tuple[int, str, str]:
    done = subprocess.run(launch.arguments, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("found", "used"), [(-1, 0), (0, 0), (1, 0), (2, 2), (3, 3), (4, 4), (5, 5), (6, 5), (99, 5)]
)
def test_versions_that_can_be_used(found: int, used: int) -> None:
    assert landlock.usable(found) == used


def test_a_kernel_without_landlock_has_version_0() -> None:
    program = "from stead import landlock; print(landlock.version())"
    command = [sys.executable, "-c", program]
    assert ran(Launch(command))[1] == f"{landlock.version()}\n"
    assert ran(Launch(command, system_calls=NO_LANDLOCK)) == (0, "0\n", "")
    assert list(FileAccess().rules(0)) == []


@needs_landlock
@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_rules_of_each_version_hold(tmp_path: Path, version: int) -> None:
    if version > landlock.version():
        pytest.skip(f"this kernel has version {landlock.version()}")
    own, shared, other = (tmp_path / name for name in ("own", "shared", "other"))
    for folder in (own, shared, other):
        (folder / "below").mkdir(parents=True)
        (folder / "file").write_text(folder.name)
    absent = tmp_path / "absent"
    access = FileAccess(read=(shared, other / "file", absent), change=(own, landlock.NULL))
    script = f"""
attempt() {{ "$@" > /dev/null 2>&1 && printf '%s\\n' "${{*#{tmp_path}/}}"; }}
cd {tmp_path}
attempt cat own/file
attempt mv own/file own/below/moved
attempt truncate -s 0 own/below/moved
attempt cat shared/file
attempt touch shared/new
attempt rm shared/file
attempt mv own/below/moved shared/moved
attempt truncate -s 0 shared/file
attempt cat other/file
attempt ls other
attempt ln -s x own/link
attempt mkfifo own/pipe
attempt cat /proc/self/status
true
"""
    status, possible, errors = ran(Launch(["bash", "-c", script], rules=tuple(access.rules(version))))
    assert (status, errors) == (0, "")
    expected = [
        "cat own/file",
        "mv own/file own/below/moved",
        "truncate -s 0 own/below/moved",
        "cat shared/file",
        # Opening a file to write it is a right of its own from the first version on.
        "cat other/file",
    ]
    assert possible.splitlines() == expected


@needs_landlock
def test_a_program_that_cannot_be_restricted_does_not_run() -> None:
    rules = tuple(FileAccess().rules(landlock.version()))
    status, printed, errors = ran(Launch(["echo", "ran"], rules=rules))
    assert (status, printed, errors) == (0, "ran\n", "")
    # The kernel of the outer launcher, which starts the inner one, has no Landlock.
    inner = Launch(["echo", "ran"], rules=rules)
    status, printed, errors = ran(Launch(inner.arguments, system_calls=NO_LANDLOCK))
    assert (status, printed) == (127, "")
    assert errors == "launcher: cannot make a Landlock ruleset: Function not implemented\n"


def test_an_unknown_option_is_refused() -> None:
    arguments = Launch(["echo", "ran"], rules=("landlok=1",)).arguments
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr == "launcher: unknown option landlok: Invalid argument\n"


def test_doctor_tells_whether_files_can_be_limited() -> None:
    assert examination.file_access(5).status == "ok"
    finding = examination.file_access(0)
    assert finding.status == "degraded" and "lsm=" in finding.remedy


# File systems without leases


def test_a_file_system_without_leases_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """None can be mounted here, so a folder is asked for a lease: the kernel's answer is the same."""
    settings = Settings(data=tmp_path)
    assert examination.leases(settings).status == "ok"
    disks._report_no_leases.cache_clear()
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        assert [disks.has_writers(folder) for _ in range(2)] == [False, False]
    finally:
        os.close(folder)
    assert sum("no leases" in record.getMessage() for record in caplog.records) == 1
    monkeypatch.setattr(disks, "knows_writers", lambda _: False)
    finding = examination.leases(settings)
    assert finding.status == "degraded" and "no leases" in finding.what
