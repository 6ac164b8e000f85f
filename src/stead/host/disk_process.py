"""A QEMU process without a guest, in the sandbox: it grows disk layers and commits one layer into another."""

import asyncio
import contextlib
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from qemu.qmp import Message, QMPError

from stead.errors import HostError, StartFailed
from stead.host import monitor
from stead.host.disks import open_top
from stead.host.monitor import QMP_TIMEOUT, Monitor
from stead.host.qcow2 import read_header
from stead.host.qemu import SECCOMP, OpenLayer, disk_arguments, frozen_name, node_name
from stead.host.sandbox import Sandbox
from stead.processes import ProcessId, WatchedProcess, kill
from stead.tasks import finished, in_thread, or_undo

_JOB = "commit"
# VMs come first, for the processor and for the disk.
_GENTLY = ("nice", "-n", "19", "ionice", "-t", "-c", "3")
_LAST_WORDS = 4096


class DiskProcess:
    """Such a QEMU, connected. Its disk is the chain that it was started with."""

    def __init__(self, connection: Monitor, timeout: float) -> None:
        self._monitor = connection
        self._timeout = timeout
        self._changed = asyncio.Event()
        self._monitor.on_event = self._note

    def _note(self, event: Message) -> None:
        self._changed.set()

    async def _execute(self, command: str, **arguments: object) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await self._monitor.execute(command, arguments)
        except QMPError as error:
            raise HostError(f"QEMU rejected {command}: {error}") from error
        except TimeoutError as error:
            raise HostError(f"QEMU did not answer {command} within {self._timeout:g} s") from error

    async def grow(self, layer: str, size: int) -> None:
        await self._execute("block_resize", **{"node-name": node_name(layer), "size": size})

    async def commit(self, into: str) -> None:
        """Copy what the top layer has into the one below it, which grows if it is smaller."""
        nodes = {"device": frozen_name(0), "base-node": node_name(into)}
        await self._execute("block-commit", **nodes, **{"job-id": _JOB, "auto-dismiss": False})
        while (job := await self._job())["status"] != "concluded":
            if job["status"] == "ready":
                await self._execute("job-complete", id=_JOB)
            await self._changed.wait()
        if "error" in job:
            raise HostError(f"cannot merge a disk layer: {job['error']}")

    async def _job(self) -> dict[str, Any]:
        self._changed.clear()
        (job,) = await self._execute("query-jobs")
        return {"status": "unknown", **job}

    async def quit(self) -> None:
        """End it with all that it wrote on disk."""
        await self._execute("quit")


@contextlib.asynccontextmanager
async def disk_process(
    sandbox: Sandbox, uid: int, layers: Sequence[OpenLayer], *, gently: bool = False, timeout: float
) -> AsyncIterator[DiskProcess]:
    """Open a disk of these layers in a process of its own, which ends with the block."""
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as errors:
        arguments = [
            *("qemu-system-x86_64", "-no-user-config", "-nodefaults", "-display", "none"),
            *("-machine", "none", "-S", *disk_arguments(layers)),
            *("-chardev", f"socket,id=qmp,fd={theirs.fileno()}", "-mon", "chardev=qmp,mode=control"),
            *SECCOMP,
        ]
        passed = [descriptor for layer in layers for descriptor in layer.descriptors]
        started = sandbox.spawn(
            arguments,
            uid=uid,
            descriptors=(theirs.fileno(), *passed),
            errors=errors,
            priority=_GENTLY if gently else (),
            lasting=False,
        )
        process = await or_undo(started, _kill)
        theirs.close()
        if process is None:
            raise HostError(f"QEMU ended at once: {_last_words(errors)}")
        async with _connected(process, ours, errors, timeout) as (watched, connection):
            opened = DiskProcess(connection, timeout)
            yield opened
            await opened.quit()
            if (how := await watched.wait()) != "exited with status 0":
                raise HostError(f"QEMU {how}: {_last_words(errors)}")


@contextlib.asynccontextmanager
async def _connected(
    process: ProcessId, ours: socket.socket, errors: BinaryIO, timeout: float
) -> AsyncIterator[tuple[WatchedProcess, Monitor]]:
    try:
        watched = WatchedProcess(process)
    except ProcessLookupError:
        raise HostError(f"QEMU ended at once: {_last_words(errors)}") from None
    connection: Monitor | None = None
    try:
        try:
            connection = await monitor.connect(watched, ours, lambda: _last_words(errors), timeout)
        except StartFailed as error:
            raise HostError(str(error)) from error
        except (QMPError, OSError) as error:
            raise HostError(f"QEMU monitor failed: {error}: {_last_words(errors)}") from error
        yield watched, connection
    except HostError as error:
        if await watched.ends_now():
            raise HostError(f"{error} (QEMU {await watched.wait()})") from error
        raise
    finally:
        watched.kill()
        await finished(watched.wait())
        if connection is not None:
            with contextlib.suppress(QMPError, OSError, EOFError):
                await connection.disconnect()


async def _kill(process: ProcessId | None) -> None:
    if process is not None:
        await kill(process)


def _last_words(errors: BinaryIO) -> str:
    size = os.fstat(errors.fileno()).st_size
    said = os.pread(errors.fileno(), _LAST_WORDS, max(0, size - _LAST_WORDS))
    return " | ".join(said.decode(errors="replace").strip().splitlines()[-2:]) or "no message"


async def grow(sandbox: Sandbox, uid: int, path: Path, size: int) -> None:
    """Grow a layer that no QEMU has open; does nothing if it is large enough."""
    with contextlib.ExitStack() as opened:
        layer = await in_thread(open_top, path, opened)
        if read_header(layer.reading, path.name).size >= size:
            return
        async with disk_process(sandbox, uid, [layer], timeout=QMP_TIMEOUT) as process:
            await process.grow(layer.name, size)
