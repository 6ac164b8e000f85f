"""A running QEMU process: start, restore, watch, end. Independent of the database."""

import asyncio
import contextlib
import os
import re
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar

from qemu.qmp import Message, QMPError

from stead.deadlines import scaled
from stead.disk_marks import DiskMarks, DiskSpace
from stead.errors import HostError, StartFailed
from stead.host import console, disks, monitor
from stead.host.cgroups import VmGroup
from stead.host.console import ConsoleFile
from stead.host.monitor import QMP_TIMEOUT, Monitor, Passed
from stead.host.network import Taps
from stead.host.qemu import Command, KernelBoot, Saved, block_node, node_name, reading_label, writing_label
from stead.host.sandbox import Sandbox
from stead.logs import get_logger
from stead.processes import ProcessId, WatchedProcess, command_lines
from stead.settings import Settings
from stead.tasks import in_thread

_MAX_LOG = 1 << 20
_KEPT_LOG = 64 << 10
_LAST_WORDS = 4096
_DISK_RETRY = 1.0
_DISK_ROOM = 16 << 20
_DEVICES = "devices"
_DEVICES_LIMIT = 64 << 20

T = TypeVar("T")

log = get_logger("stead.vm")


@dataclass(frozen=True)
class VmFiles:
    """The paths of one QEMU's own files."""

    folder: Path
    """The disk layers that it writes."""
    runtime: Path

    def layer(self, layer: str) -> Path:
        return self.folder / f"{layer}.qcow2"

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
    """Starts the QEMU processes of VMs in the sandbox."""

    def __init__(self) -> None:
        self.sandbox = Sandbox()

    async def spawn(
        self,
        arguments: Callable[[int], list[str]],
        files: VmFiles,
        *,
        uid: int,
        kvm: bool = False,
        descriptors: Sequence[int] = (),
        group: VmGroup | None = None,
    ) -> ProcessId:
        """Start QEMU; its monitor is already listening, so connecting never has to wait for it."""
        with contextlib.ExitStack() as opened:
            listener, errors = await in_thread(_open_runtime, files, opened)
            identity = await self.sandbox.spawn(
                arguments(listener.fileno()),
                uid=uid,
                kvm=kvm,
                descriptors=(listener.fileno(), *descriptors),
                errors=errors,
                group=group,
            )
        if identity is None:
            raise StartFailed(f"QEMU exited at once: {last_words(files)}")
        return identity

    def close(self) -> None:
        self.sandbox.close()


def _open_runtime(files: VmFiles, opened: contextlib.ExitStack) -> tuple[socket.socket, BinaryIO]:
    """The socket that a new QEMU listens on, and its log."""
    files.runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (files.qmp, files.log, files.console):
        path.unlink(missing_ok=True)
    listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(str(files.qmp))
    listener.listen(1)
    # Append mode, so that it can be cut while QEMU writes.
    return listener, opened.enter_context(files.log.open("ab"))


class QemuVm:
    """A QEMU process with its monitor connected."""

    def __init__(self, watched: WatchedProcess, files: VmFiles, connection: Monitor) -> None:
        self._watched = watched
        self.files = files
        self._monitor = connection
        self.stop_cause: str | None = None
        """Why the guest ended, as QEMU reports it: guest-shutdown, guest-reset, guest-panic, ..."""
        self._monitor.on_event = self._note
        self._disk_errors: asyncio.Task[None] | None = None
        self._console = ConsoleFile(files.console)
        self._panic: asyncio.Task[None] | None = None
        self._held = False
        self._paused = False
        """Whether an operation has paused the guest."""

    @classmethod
    async def connect(cls, identity: ProcessId, files: VmFiles) -> Self:
        """Connect to a running QEMU; ProcessLookupError when it has ended."""
        process = WatchedProcess(identity)
        try:
            connection = await monitor.connect(process, files.qmp, lambda: last_words(files))
        except (QMPError, OSError) as error:
            ended = await process.ends_now() or not identity.alive()
            process.forget()
            if ended:
                raise StartFailed(f"QEMU exited: {last_words(files)}") from error
            raise StartFailed(f"QEMU monitor failed: {error}") from error
        except BaseException:
            process.forget()
            raise
        return cls(process, files, connection)

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
        return await self._answer(command, self._monitor.execute(command, arguments or None))

    async def _answer(self, command: str, answer: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(QMP_TIMEOUT):
                return await answer
        except QMPError as error:
            if self.ended or not self.process.alive():
                raise HostError(f"QEMU exited: {last_words(self.files)}") from error
            raise HostError(f"QEMU rejected {command}: {error}") from error
        except TimeoutError as error:
            raise HostError(f"QEMU did not answer {command} within {QMP_TIMEOUT:g} s") from error
        except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise HostError(f"QEMU answered {command} with something else: {error}") from error

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
                space = DiskSpace.of(self.files.folder)
                room = _DISK_ROOM + DiskMarks.of(space.total).reserve
                if space.free > room and not self._held:
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
        self._paused = True
        await self.execute("stop")

    async def resume(self) -> None:
        self._paused = False
        if not self._held:
            await self.execute("cont")

    async def resume_if_paused(self) -> None:
        self._paused = False
        if (await self.execute("query-status"))["status"] == "paused":
            await self.resume()

    async def hold(self) -> None:
        """Pause the guest until `end_hold`, whatever an operation orders meanwhile."""
        self._held = True
        await self.execute("stop")

    async def end_hold(self) -> None:
        """Let the guest continue, unless an operation has paused it."""
        self._held = False
        if not self._paused:
            await self.execute("cont")

    async def resume_after_crash(self) -> None:
        """Resume a guest whose capture was interrupted by a crash of the server."""
        if (await self.execute("query-status"))["status"] == "io-error":
            self.retry_disk()
        await self.resume_if_paused()

    async def power_down(self) -> None:
        """Press the ACPI power button."""
        await self.execute("system_powerdown")

    def bound_log(self) -> None:
        bound_log(self.files)

    @contextlib.asynccontextmanager
    async def saving_devices(self) -> "AsyncIterator[Callable[[], Awaitable[bytes]]]":
        """In the block, a function saves all device and CPU state of the paused guest, without its memory.

        QEMU writes it into a file in memory, which is passed to it before the guest is paused.
        """
        descriptor = os.memfd_create("stead-devices", os.MFD_CLOEXEC)
        try:
            writing = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                path = await self._pass(Passed(writing, _DEVICES))
            finally:
                os.close(writing)

            async def save() -> bytes:
                await self.execute("xen-save-devices-state", filename=path, live=False)
                if (size := os.fstat(descriptor).st_size) > _DEVICES_LIMIT:
                    raise HostError(f"QEMU saved {size} bytes of device state: {_DEVICES_LIMIT} are allowed")
                return os.pread(descriptor, size, 0)

            try:
                yield save
            finally:
                with contextlib.suppress(HostError):
                    await self._withdraw(_DEVICES)
        finally:
            os.close(descriptor)

    async def _pass(self, *passed: Passed) -> str:
        """Pass descriptors of one file to QEMU; returns the name under which it opens the file."""
        return await self._answer("add-fd", self._monitor.add_descriptors(passed))

    async def _withdraw(self, label: str) -> None:
        await self._answer("remove-fd", self._monitor.remove_descriptors(label))

    # Disk layers, by their names

    async def add_layer(self, layer: str) -> None:
        """Open an empty layer that can become the writable one."""
        with contextlib.ExitStack() as opened:
            top = await in_thread(disks.open_top, self.files.layer(layer), opened)
            labels = (reading_label(layer), writing_label(layer))
            file = await self._pass(*map(Passed, top.descriptors, labels))
            await self.execute("blockdev-add", **block_node(top, file, node_name(layer), None))

    async def switch_layer(self, layer: str, to: str) -> None:
        """Switch to another writable layer; the old one becomes its frozen backing file."""
        await self.execute("blockdev-snapshot", node=node_name(layer), overlay=node_name(to))

    async def give_up_writing(self, layer: str) -> None:
        """Let QEMU close its writable descriptor of a frozen layer, which it reads through another one now.

        QEMU closes descriptors only while the guest runs. Whether it really did is not left to it: see
        `LayerFiles.open`.
        """
        await self._withdraw(writing_label(layer))

    async def drop_layer(self, layer: str) -> None:
        await self.execute("blockdev-del", **{"node-name": node_name(layer)})
        await self._withdraw(writing_label(layer))
        await self._withdraw(reading_label(layer))

    async def resize_disk(self, layer: str, size_gib: int) -> None:
        """Grow the writable layer to this size, which it may have already, and notify the guest of it."""
        await self.execute("block_resize", **{"node-name": node_name(layer)}, size=size_gib << 30)

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


def open_kernel(
    kernel: Path, initrd: Path, opened: contextlib.ExitStack, generation: str = "auto"
) -> KernelBoot:
    """A kernel for a QEMU that boots it. `opened` closes its descriptors."""
    return KernelBoot(open_for_all(kernel, opened), open_for_all(initrd, opened), generation)


def open_for_all(path: Path, opened: contextlib.ExitStack) -> int:
    """Open a file that QEMU opens once more by the name of its descriptor, and so must be allowed to read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        opened.callback(os.close, descriptor)
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if not mode & stat.S_IROTH:
            os.fchmod(descriptor, mode | stat.S_IROTH)
    except OSError as error:
        raise HostError(f"cannot open {path}: {error.strerror}") from error
    return descriptor


async def launch(
    spawner: Spawner, command: Command, files: VmFiles, taps: Taps, uid: int, group: VmGroup | None
) -> ProcessId:
    """Start QEMU; the tap descriptors are closed here in any case."""
    try:
        return await spawner.spawn(
            lambda qmp: replace(command, qmp=qmp).arguments(),
            files,
            uid=uid,
            kvm=command.platform.accelerator == "kvm",
            descriptors=command.descriptors,
            group=group,
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
_PROGRAMS = ("qemu-system-", "setpriv", "sh", "dash", "bash")


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
