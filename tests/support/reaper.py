"""Removes what installations of a test run leave when its process is killed, as xdist does on Ctrl-C.

A process in a session of its own: it reads from a pipe which folders are in use, and acts when the pipe ends
before their removal was noted.
"""

import asyncio
import atexit
import contextlib
import functools
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from stead.edge.edge import edge_folder
from stead.host import network
from stead.host.cgroups import ControlGroups
from stead.host.git_groups import GitGroups
from stead.host.vm import running_machines
from stead.processes import ProcessId, kill
from stead.settings import Settings


@contextlib.contextmanager
def reaped(folder: Path) -> Iterator[None]:
    """A data folder or a mount, which is removed with its VMs if this process ends inside the block."""
    pipe = _pipe()
    pipe.write(f"+{folder}\n")
    pipe.flush()
    try:
        yield
    finally:
        pipe.write(f"-{folder}\n")
        pipe.flush()


@functools.cache
def _pipe() -> IO[str]:
    command = [sys.executable, "-m", "support.reaper"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, text=True, start_new_session=True, cwd=Path(__file__).parent.parent
    )
    assert process.stdin is not None
    atexit.register(process.communicate)
    return process.stdin


async def sweep(settings: Settings) -> None:
    """End the VMs of an installation, and remove its groups and networks."""
    for pid in running_machines(settings):
        if (process := ProcessId.of(pid)) is not None:
            await kill(process)
    groups = ControlGroups(settings)
    for machine in groups.machines():
        groups.release(machine)
    groups.remove()
    GitGroups(settings).close()
    await network.remove(settings)
    shutil.rmtree(settings.runtime / settings.instance, ignore_errors=True)
    shutil.rmtree(edge_folder(settings), ignore_errors=True)


def main(lines: Iterable[str]) -> None:
    left: dict[str, None] = {}
    for line in lines:
        folder = line[1:].rstrip("\n")
        if line.startswith("+"):
            left[folder] = None
        else:
            left.pop(folder, None)
    for folder in reversed(left):
        asyncio.run(sweep(Settings(data=Path(folder))))
        subprocess.run(["umount", "--quiet", folder], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.stdin)
