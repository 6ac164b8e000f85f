"""Processes that are not awaited by their parent, identified by pid and start time."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from stead.deadlines import scaled

_LAST_MOMENT = scaled(0.5)


PROTECTED, EXPENDABLE = -500, 500
"""OOM scores: when the host runs out of memory, VMs and git end before the server that all of them need."""


@dataclass(frozen=True)
class ProcessId:
    """A pid with its process's start time, so that a reused pid is not mistaken for it."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The process that has this pid now; None when there is none or it is a zombie."""
        try:
            # The name may hold spaces and parentheses: fields are counted after its last one.
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else cls(pid, int(fields[19]))

    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self


def spawn(
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: str | Path = "/",
    descriptors: Sequence[int] = (),
    errors: int | IO[Any],
    standard_input: int = subprocess.DEVNULL,
) -> ProcessId | None:
    """Start a process in a session of its own, with standard error to `errors`; None when it ended at once.

    The thread that calls this is its parent for `setpriv --pdeathsig`.
    """
    child = subprocess.Popen(
        arguments,
        pass_fds=descriptors,
        stdin=standard_input,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        cwd=folder,
        env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", **environment},
        start_new_session=True,
    )
    # Its end is collected through a pidfd, not by subprocess.
    child.returncode = 0
    set_oom_score(child.pid, 0)
    identity = ProcessId.of(child.pid)
    if identity is None:
        os.waitpid(child.pid, 0)
    return identity


def set_oom_score(pid: int | Literal["self"], score: int) -> None:
    """Change the order in which the kernel ends processes without memory; children inherit it.

    Does nothing where that is not allowed, as in a container, or when the process has ended.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(score))


class WatchedProcess:
    """A process watched through a pidfd; it need not be a child."""

    def __init__(self, identity: ProcessId) -> None:
        """Raises ProcessLookupError when the process is already gone."""
        self.identity = identity
        self._descriptor = os.pidfd_open(identity.pid)
        if not identity.alive():
            # Either gone, or a later process with the same pid; a zombie of ours is still to be collected.
            _collect(identity.pid)
            os.close(self._descriptor)
            raise ProcessLookupError(identity.pid)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._loop.add_reader(self._descriptor, self._on_end)

    def _on_end(self) -> None:
        self._release()
        self._ended.set_result(_describe(_collect(self.identity.pid)))

    def _release(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)

    @property
    def ended(self) -> bool:
        return self._ended.done()

    async def wait(self) -> str:
        """Wait for the exit; returns how it ended."""
        return await asyncio.shield(self._ended)

    async def ends_now(self) -> bool:
        """Whether it has ended, or does so in a moment: its files are closed a little earlier."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_MOMENT):
                await self.wait()
        return self.ended

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def forget(self) -> None:
        """Stop watching; the process continues."""
        if not self._ended.done():
            self._release()
            self._ended.cancel()


def _collect(pid: int) -> int | None:
    """The wait status of a child that ended; None for a process that is not our child."""
    try:
        collected, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return status if collected == pid else None


def _describe(status: int | None) -> str:
    if status is None:
        return "ended"
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exited with status {os.WEXITSTATUS(status)}"


async def kill(identity: ProcessId) -> None:
    """Kill a process and wait until it has ended."""
    try:
        watched = WatchedProcess(identity)
    except ProcessLookupError:
        return
    watched.kill()
    await watched.wait()


async def end_of(identity: ProcessId) -> None:
    """Wait until a process has ended."""
    with contextlib.suppress(ProcessLookupError):
        watched = WatchedProcess(identity)
        try:
            await watched.wait()
        finally:
            watched.forget()


def of_user(uid: int) -> Iterator[ProcessId]:
    """Every process of a Linux user."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                # The owner of the folder is root if the process has been denied core dumps.
                users = (
                    (folder / "status").read_text(errors="replace").partition("\nUid:")[2].split(maxsplit=1)
                )
                if users[0] == str(uid) and (process := ProcessId.of(int(folder.name))) is not None:
                    yield process


def command_lines() -> Iterator[tuple[int, list[bytes]]]:
    """Every process with its arguments."""
    return _each("cmdline")


def environments() -> Iterator[tuple[int, list[bytes]]]:
    """Every process with its initial environment, as far as it is readable."""
    return _each("environ")


def _each(name: str) -> Iterator[tuple[int, list[bytes]]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / name).read_bytes().split(b"\0")
