"""A running QEMU process: start, restore, watch, end. Independent of the database."""

import asyncio
import contextlib
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from qemu.qmp import ConnectError, Message, QMPClient, QMPError
from qemu.qmp.qmp_client import NegotiationError

from stead.deadlines import scaled
from stead.errors import HostError, StartFailed
from stead.host import console
from stead.host.console import ConsoleFile
from stead.host.namespaces import NamespaceThread
from stead.host.network import Taps
from stead.host.qemu import Command, Saved, node_name
from stead.logs import get_logger
from stead.processes import ProcessId, WatchedProcess, command_lines, spawn
from stead.settings import Settings

QMP_TIMEOUT = scaled(20.0)
_GREETINGS = 3
_MAX_MESSAGE = 2 << 20
"""The longest answer is a console of 64 KiB, in JSON."""
_EVENTS_PER_TURN = 32
_FREE_EVENTS = 1000
"""A guest can cause events at will: beyond these, all its events together are slowed down."""
_SLOWED = 0.005
_MAX_LOG = 1 << 20
_KEPT_LOG = 64 << 10
_LAST_WORDS = 4096
_DISK_RETRY = 1.0
_DISK_ROOM = 16 << 20
# Guest memory must never land in a core file. Set before QEMU starts: later it is another user's process.
_LIMITS = ("prlimit", "--core=0:0", "--nofile=4096:4096", "--")


log = get_logger("stead.vm")


@dataclass(frozen=True)
class VmFiles:
    """The paths of one QEMU's own files."""

    folder: Path
    """QEMU's chroot, with the top disk layer."""
    runtime: Path

    @property
    def devices(self) -> Path:
        """Saved device state; removed after it is read."""
        return self.folder / "devices"

    def drop_devices(self) -> None:
        # The folder is writable by QEMU, so its content is untrusted.
        with contextlib.suppress(OSError):
            self.devices.unlink()

    @property
    def qmp(self) -> Path:
        return self.runtime / "qmp.sock"

    @property
    def log(self) -> Path:
        return self.runtime / "qemu.log"

    @property
    def console(self) -> Path:
        return self.runtime / "console"


class Spawner:
    """Starts QEMU processes in an empty network namespace."""

    def __init__(self) -> None:
        self._thread = NamespaceThread.empty()

    async def spawn(
        self, arguments: Callable[[int], list[str]], files: VmFiles, descriptors: tuple[int, ...] = ()
    ) -> ProcessId:
        """Start QEMU; its monitor is already listening, so connecting never has to wait for it."""
        return await self._thread.call(lambda: self._spawn(arguments, files, descriptors))

    def _spawn(
        self, arguments: Callable[[int], list[str]], files: VmFiles, descriptors: tuple[int, ...]
    ) -> ProcessId:
        files.runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
        files.qmp.unlink(missing_ok=True)
        files.log.unlink(missing_ok=True)
        files.console.unlink(missing_ok=True)
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
            # Append mode, so that it can be cut while QEMU writes.
            files.log.open("ab") as log,
        ):
            listener.bind(str(files.qmp))
            listener.listen(1)
            identity = spawn(
                [*_LIMITS, *arguments(listener.fileno())],
                environment={},
                descriptors=(listener.fileno(), *descriptors),
                errors=log,
            )
        if identity is None:
            raise StartFailed(f"QEMU exited at once: {last_words(files)}")
        return identity

    def close(self) -> None:
        self._thread.close()


class QemuVm:
    """A QEMU process with its monitor connected."""

    def __init__(self, watched: WatchedProcess, files: VmFiles, monitor: "_Monitor") -> None:
        self._watched = watched
        self.files = files
        self._monitor = monitor
        self.stop_cause: str | None = None
        """Why the guest ended, as QEMU reports it: guest-shutdown, guest-reset, guest-panic, ..."""
        self._monitor.on_event = self._note
        self._disk_errors: asyncio.Task[None] | None = None
        self._console = ConsoleFile(files.console)
        self._panic: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, identity: ProcessId, files: VmFiles) -> Self:
        """Connect to a running QEMU; ProcessLookupError when it has ended."""
        process = WatchedProcess(identity)
        try:
            monitor = await _monitor(process, files)
        except (QMPError, OSError) as error:
            ended = await process.ends_now() or not identity.alive()
            process.forget()
            if ended:
                raise StartFailed(f"QEMU exited: {last_words(files)}") from error
            raise StartFailed(f"QEMU monitor failed: {error}") from error
        except BaseException:
            process.forget()
            raise
        return cls(process, files, monitor)

    @property
    def process(self) -> ProcessId:
        return self._watched.identity

    @property
    def ended(self) -> bool:
        return self._watched.ended

    async def ends_now(self) -> bool:
        """Whether it has ended, or does so in a moment: its files are closed a little earlier."""
        return await self._watched.ends_now()

    async def execute(self, command: str, **arguments: Any) -> Any:
        """One monitor command, with a deadline."""
        try:
            async with asyncio.timeout(QMP_TIMEOUT):
                return await self._monitor.execute(command, arguments or None)
        except QMPError as error:
            if self.ended or not self.process.alive():
                raise HostError(f"QEMU exited: {last_words(self.files)}") from error
            raise HostError(f"QEMU rejected {command}: {error}") from error
        except TimeoutError as error:
            raise HostError(f"QEMU did not answer {command} within {QMP_TIMEOUT:g} s") from error

    def _note(self, event: Message) -> None:
        if event["event"] == "BLOCK_IO_ERROR":
            self.retry_disk()
        elif event["event"] == "GUEST_PANICKED":
            self._end_panicked()
        elif event["event"] == "SHUTDOWN" and self.stop_cause is None:
            data = event.get("data")
            self.stop_cause = str(data.get("reason", "unknown")) if isinstance(data, dict) else "unknown"

    def _end_panicked(self) -> "asyncio.Task[None]":
        self.stop_cause = "guest-panic"
        if self._panic is None:
            self._panic = asyncio.create_task(self._read_console_and_end())
        return self._panic

    async def _read_console_and_end(self) -> None:
        try:
            async with asyncio.timeout(QMP_TIMEOUT):
                with contextlib.suppress(HostError):
                    await self._read_console()
                await self.quit()
        except TimeoutError:
            log.warning("QEMU of a panicked guest did not quit", folder=str(self.files.folder))
            self._watched.kill()

    async def end_if_panicked(self) -> bool:
        """End a QEMU whose guest panicked while the server was not connected; False if it did not."""
        if (await self.execute("query-status"))["status"] != "guest-panicked":
            return False
        await self._end_panicked()
        return True

    def retry_disk(self) -> None:
        """QEMU stops a guest whose write finds the host's disk full; wake it again once there is room.

        Nothing is lost: the write is repeated, and the guest never sees the error.
        """
        if self._disk_errors is None or self._disk_errors.done():
            self._disk_errors = asyncio.create_task(self._wake_after_disk_error())

    async def _wake_after_disk_error(self) -> None:
        log.warning("vm paused: disk write failed on the host", folder=str(self.files.folder))
        with contextlib.suppress(HostError):
            while True:
                await asyncio.sleep(_DISK_RETRY)
                if (await self.execute("query-status"))["status"] != "io-error":
                    return
                if shutil.disk_usage(self.files.folder).free > _DISK_ROOM:
                    await self.execute("cont")

    async def running(self) -> None:
        """Wait until a QEMU that was started with saved state has loaded it and runs."""
        deadline = asyncio.get_running_loop().time() + QMP_TIMEOUT
        while (status := (await self.execute("query-status"))["status"]) != "running":
            if asyncio.get_running_loop().time() > deadline:
                raise StartFailed(f"QEMU is {status} instead of running: {last_words(self.files)}")
            await asyncio.sleep(0.002)

    async def load(self, saved: Saved) -> None:
        """Load the device state that this QEMU was started to wait for; the guest stays paused."""
        await self.execute("migrate-incoming", uri=saved.uri)
        deadline = asyncio.get_running_loop().time() + QMP_TIMEOUT
        while (status := (await self.execute("query-status"))["status"]) == "inmigrate":
            if asyncio.get_running_loop().time() > deadline:
                raise StartFailed(f"QEMU did not load the saved state: {last_words(self.files)}")
            await asyncio.sleep(0.001)
        if status != "paused":
            raise StartFailed(f"QEMU is {status} instead of paused: {last_words(self.files)}")

    async def pause(self) -> None:
        await self.execute("stop")

    async def resume(self) -> None:
        await self.execute("cont")

    async def resume_if_paused(self) -> None:
        if (await self.execute("query-status"))["status"] == "paused":
            await self.resume()

    async def resume_after_crash(self) -> None:
        """Resume a guest whose capture was interrupted by a crash of the server."""
        if (await self.execute("query-status"))["status"] == "io-error":
            self.retry_disk()
        await self.resume_if_paused()
        self.files.drop_devices()

    async def power_down(self) -> None:
        """Press the ACPI power button."""
        await self.execute("system_powerdown")

    def bound_log(self) -> None:
        bound_log(self.files)

    async def save_devices(self) -> Path:
        """Write all device and CPU state of the paused guest, without its memory, into QEMU's own folder."""
        await self.execute("xen-save-devices-state", filename=f"/{self.files.devices.name}", live=False)
        return self.files.devices

    # Disk layers, by the names of their files in QEMU's own folder

    async def add_layer(self, layer: str) -> None:
        """Open an empty layer that can become the writable one."""
        await self.execute(
            "blockdev-add",
            **{
                "driver": "qcow2",
                "node-name": node_name(layer),
                "file": {"driver": "file", "filename": f"/{layer}.qcow2", "discard": "unmap"},
                "discard": "unmap",
                "backing": None,
            },
        )

    async def switch_layer(self, layer: str, to: str) -> None:
        """Switch to another writable layer; the old one becomes its frozen backing file."""
        await self.execute("blockdev-snapshot", node=node_name(layer), overlay=node_name(to))

    async def drop_layer(self, layer: str) -> None:
        await self.execute("blockdev-del", **{"node-name": node_name(layer)})

    async def written_layer(self) -> str:
        """The current writable layer."""
        for device in await self.execute("query-block"):
            if device.get("qdev") and "inserted" in device:
                return str(device["inserted"]["node-name"]).removeprefix(node_name(""))
        raise HostError("QEMU has no disk")

    async def quit(self) -> None:
        """Quit QEMU cleanly, with its disk closed."""
        with contextlib.suppress(HostError):
            await self.execute("quit")
        await self._watched.wait()

    async def console(self) -> str:
        """The end of the guest's serial console output; of an ended guest, what was read before."""
        if not self.ended:
            await self._read_console()
        return self._console.text()

    async def _read_console(self) -> None:
        # As base64: a NUL would end the answer, and what is behind it would be lost.
        read = await self.execute("ringbuf-read", device="console", size=console.SIZE, format="base64")
        self._console.append(read)

    async def wait(self) -> str:
        """Wait until QEMU has ended; returns how."""
        how = await self._watched.wait()
        # The monitor's last event may still be on its way through the loop.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(scaled(0.2)):
                await self._monitor.ended.wait()
        return how

    async def kill(self) -> None:
        self._watched.kill()
        await self._watched.wait()

    async def release(self) -> None:
        """Disconnect without ending the process."""
        tasks = [task for task in (self._disk_errors, self._panic) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(QMPError, OSError, EOFError):
            await self._monitor.disconnect()
        self._watched.forget()


class _Monitor(QMPClient):
    """A QMP client without event queues, which have no bound: events go to `on_event` as they are read.

    Reading buffered messages does not yield to the event loop by itself, so a flood of events has to.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, _MAX_MESSAGE)
        self.on_event: Callable[[Message], None] = lambda _: None
        self.ended = asyncio.Event()
        """Everything that QEMU sent has been read."""
        self._seen = 0

    async def _event_dispatch(self, msg: Message) -> None:
        self.on_event(msg)
        self._seen += 1
        if self._seen == _FREE_EVENTS:
            log.warning("slowing down a flood of QEMU events", monitor=self.name, kind=str(msg["event"]))
        if self._seen % _EVENTS_PER_TURN == 0:
            await asyncio.sleep(0 if self._seen < _FREE_EVENTS else _SLOWED)

    async def _bh_recv_message(self) -> None:
        self.ended.clear()
        try:
            await super()._bh_recv_message()
        except BaseException:
            self.ended.set()
            raise


async def _monitor(process: WatchedProcess, files: VmFiles) -> _Monitor:
    """Connect to the monitor, unless the process ends first."""
    monitor = _Monitor(f"stead-{process.identity.pid}")
    connecting = asyncio.ensure_future(_greet(monitor, files.qmp))
    ending = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({connecting, ending}, timeout=QMP_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            raise StartFailed(
                f"QEMU {ending.result()}: {last_words(files)}"
                if ending.done()
                else f"QEMU monitor did not answer within {QMP_TIMEOUT:g} s"
            )
        connecting.result()
    finally:
        for task in (connecting, ending):
            task.cancel()
        await asyncio.gather(connecting, ending, return_exceptions=True)
    return monitor


async def _greet(monitor: QMPClient, path: Path) -> None:
    """Connect; again when an event, as of a guest that begins to run, was taken for the first answer."""
    for _ in range(_GREETINGS):
        try:
            return await monitor.connect(str(path))
        except ConnectError as error:
            if not isinstance(error.exc, NegotiationError):
                raise
    return await monitor.connect(str(path))


async def launch(
    spawner: Spawner, command: Command, files: VmFiles, taps: Taps, inherited: tuple[int, ...]
) -> ProcessId:
    """Start QEMU; the tap descriptors are closed here in any case."""
    try:
        return await spawner.spawn(
            lambda qmp: replace(command, qmp=qmp).arguments(),
            files,
            (taps.data, taps.management, *inherited),
        )
    finally:
        taps.close()


def last_words(files: VmFiles) -> str:
    """The end of QEMU's log, for error messages."""
    try:
        with files.log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LAST_WORDS))
            lines = log.read(_LAST_WORDS).decode(errors="replace").strip().splitlines()
    except OSError:
        return "no message in its log"
    return " | ".join(lines[-2:]) or "no message in its log"


def bound_log(files: VmFiles) -> None:
    """Cut the log of a QEMU that prints without end, which a guest can make it do; its beginning is kept."""
    try:
        # Blocks, not bytes: a QEMU that does not append leaves a hole where the log was cut.
        if files.log.stat().st_blocks * 512 > _MAX_LOG:
            os.truncate(files.log, _KEPT_LOG)
            log.warning("cut the log of a QEMU", path=str(files.log))
    except OSError as error:
        log.warning("cannot cut the log of a QEMU", path=str(files.log), error=str(error.strerror))


def process_name(instance: str, machine: str) -> str:
    return f"stead-{instance}-{machine}"


_NAME = re.compile(rb"(?:[a-z0-9]{20}|template-[0-9a-f]{20}-[0-9a-f]{8})")
_PROGRAMS = ("qemu-system-", "prlimit")


def running_machines(settings: Settings) -> dict[int, str]:
    """Every QEMU process of an installation by pid, found by its process name.

    Any user can start a process with any arguments, and the name leads to folders that root removes. So only
    names of the exact form count, and only programs that root or a user of this installation runs.
    """
    prefix = f"guest={process_name(settings.instance, '')}".encode()
    found = {}
    for pid, arguments in command_lines():
        for argument in arguments:
            name = argument.partition(b",")[0].removeprefix(prefix)
            if argument.startswith(prefix) and _NAME.fullmatch(name) and _is_qemu(settings, pid):
                found[pid] = name.decode()
    return found


def _is_qemu(settings: Settings, pid: int) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        program, uid = (folder / "exe").readlink().name, folder.stat().st_uid
    except OSError:
        return False
    return program.startswith(_PROGRAMS) and (uid == 0 or settings.owns_uid(uid))
