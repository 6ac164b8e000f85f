"""Processes outlive their parents and are never mistaken for later ones with the same pid."""

import asyncio
import os
import subprocess
import sys

import pytest

from stead.host.processes import ProcessId, WatchedProcess, kill


def start(*argv: str) -> ProcessId:
    child = subprocess.Popen(argv)
    child.returncode = 0
    identity = ProcessId.of(child.pid)
    assert identity is not None
    return identity


async def test_wait_returns_the_signal() -> None:
    watched = WatchedProcess(start("sleep", "60"))
    watched.kill()
    assert await asyncio.wait_for(watched.wait(), 5) == "ended by SIGKILL"
    assert ProcessId.of(watched.identity.pid) is None, "the child was collected"


async def test_wait_returns_the_exit_status() -> None:
    watched = WatchedProcess(start("sh", "-c", "sleep 0.05; exit 7"))
    assert await asyncio.wait_for(watched.wait(), 5) == "exited with status 7"


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
    assert await asyncio.wait_for(watched.wait(), 5) == "ended"


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
