"""Processes outlive their parents and are never mistaken for later ones with the same pid."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from stead.host.vm import running_machines
from stead.processes import ProcessId, WatchedProcess, kill
from stead.settings import Settings


def start(*argv: str) -> ProcessId:
    child = subprocess.Popen(argv)
    child.returncode = 0
    identity = ProcessId.of(child.pid)
    assert identity is not None
    return identity


async def test_wait_returns_the_signal() -> None:
    watched = WatchedProcess(start("sleep", "60"))
    watched.kill()
    assert await asyncio.wait_for(watched.wait(), 60) == "ended by SIGKILL"
    assert ProcessId.of(watched.identity.pid) is None, "the child was collected"


async def test_wait_returns_the_exit_status() -> None:
    watched = WatchedProcess(start("sh", "-c", "sleep 0.05; exit 7"))
    assert await asyncio.wait_for(watched.wait(), 60) == "exited with status 7"


async def test_a_process_that_is_no_child_can_be_watched() -> None:
    """A QEMU that outlived its Stead is not our child: its end is still noticed."""
    script = "import os, subprocess; print(subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3).pid)"
    command = [sys.executable, "-c", script]
    parent = await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    pid = int(parent.stdout)
    identity = ProcessId.of(pid)
    assert identity is not None
    watched = WatchedProcess(identity)
    watched.kill()
    assert await asyncio.wait_for(watched.wait(), 60) == "ended"


async def test_a_reused_pid_is_another_process() -> None:
    identity = start("sleep", "60")
    stranger = ProcessId(identity.pid, identity.started - 1)
    assert not stranger.alive()
    with pytest.raises(ProcessLookupError):
        WatchedProcess(stranger)
    await kill(stranger)
    assert identity.alive(), "killing the former owner of a pid does not touch the present one"
    await kill(identity)
    assert not identity.alive()


async def test_release_does_not_end_the_process() -> None:
    identity = start("sleep", "60")
    WatchedProcess(identity).forget()
    assert identity.alive()
    await kill(identity)


def test_process_names_with_parentheses() -> None:
    assert ProcessId.of(os.getpid()) is not None


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("name", "uid", "program"),
    [
        ("../../../etc", "own", "qemu-system-x86_64"),
        ("a" * 19 + "/", "own", "qemu-system-x86_64"),
        ("a" * 20, "stranger", "qemu-system-x86_64"),
        ("a" * 20, "own", "sleep"),
    ],
)
def test_arguments_alone_do_not_make_a_process_a_vm(
    tmp_path: Path, name: str, uid: str, program: str
) -> None:
    """Any user can start a program with any arguments; what it names would be removed by root."""
    settings = Settings(data=tmp_path / "data")
    tmp_path.chmod(0o755)
    mine = settings.uid(7)
    with _pretending(settings, "b" * 20, mine, "qemu-system-x86_64") as real:
        assert running_machines(settings) == {real: "b" * 20}
        with _pretending(settings, name, mine if uid == "own" else 12345, program):
            assert running_machines(settings) == {real: "b" * 20}


@contextlib.contextmanager
def _pretending(settings: Settings, name: str, uid: int, program: str) -> Iterator[int]:
    """A process that has the arguments of a VM's QEMU."""
    with tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        copy = Path(folder, program)
        shutil.copy("/bin/bash", copy)
        argument = f"guest=stead-{settings.instance}-{name},debug-threads=on"
        child = subprocess.Popen([copy, "-c", "read", argument], user=uid, stdin=subprocess.PIPE)
        try:
            yield child.pid
        finally:
            child.kill()
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
