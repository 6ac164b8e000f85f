"""The console of a guest: bounded, without control characters, kept when the guest panics."""

import asyncio
import base64
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from stead.errors import HostError
from stead.host.console import SIZE, ConsoleFile, clean
from stead.host.vm import QemuVm, VmFiles
from stead.processes import ProcessId

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}}, "capabilities": []}}
PANIC = {
    "event": "GUEST_PANICKED",
    "data": {"action": "pause"},
    "timestamp": {"seconds": 0, "microseconds": 0},
}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (b"[    0.1] Linux\r\nsecond\tline\r\n", "[    0.1] Linux\nsecond line\n"),
        (b"\x1b[31;1mred\x1b[0m \x1b]0;title\x07plain \x1bcreset", "red plain reset"),
        (b"a\x00b\x07c\x9bd\xff\xc3", "a\ufffdb\ufffdc\ufffdd\ufffd\ufffd"),
        ("gr\u00fcn \u202e reversed".encode(), "gr\u00fcn \ufffd reversed"),
        (b"\x1b]" * 3 + b"\x1b", ""),
    ],
)
def test_text_of_a_console_has_no_control_characters(said: bytes, shown: str) -> None:
    assert clean(said) == shown
    assert clean(said).replace("\n", "").isprintable()


def test_what_was_read_is_kept_up_to_a_limit(tmp_path: Path) -> None:
    console = ConsoleFile(tmp_path / "console")
    assert console.text() == ""
    console.append(base64.b64encode(b"first ").decode())
    console.append(base64.b64encode(b"second").decode())
    # Another server, after a restart, has it too.
    assert ConsoleFile(tmp_path / "console").text() == "first second"
    for _ in range(3):
        console.append(base64.b64encode(b"x" * SIZE).decode())
    assert console.text() == "x" * SIZE
    for answer in ({"status": "running"}, None):
        console.append(answer)
    with pytest.raises(HostError):
        console.append("no base64")


class PausedQemu:
    """A monitor whose guest has panicked, in front of a process that ends when it is told to quit."""

    def __init__(self, process: ProcessId, *, obeys: bool = True) -> None:
        self.orders: list[str] = []
        self.panicking = asyncio.Event()
        self._obeys = obeys
        self._pid = process.pid
        self._console = [b"Kernel panic\x00 - not syncing"]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(what: object) -> None:
            writer.write(json.dumps(what).encode() + b"\n")

        async def panic() -> None:
            await self.panicking.wait()
            say(PANIC)

        say(GREETING)
        task = asyncio.create_task(panic())
        with contextlib.suppress(ConnectionError):
            while message := await reader.read(65536):
                order = json.loads(message)
                self.orders.append(order["execute"])
                say({"return": self.answer(order["execute"]), "id": order.get("id")})
        task.cancel()
        writer.close()

    def answer(self, order: str) -> object:
        match order:
            case "ringbuf-read":
                # QEMU hands it out once.
                return base64.b64encode(self._console.pop() if self._console else b"").decode()
            case "query-status":
                return {"status": "guest-panicked"}
            case "quit" if self._obeys:
                os.kill(self._pid, signal.SIGTERM)
        return {}


@pytest.fixture
def process() -> Iterator[ProcessId]:
    child = Popen(["sleep", "600"])
    identity = ProcessId.of(child.pid)
    assert identity is not None
    yield identity
    child.kill()
    child.wait()


@contextlib.asynccontextmanager
async def connected(tmp_path: Path, process: ProcessId, qemu: PausedQemu) -> AsyncIterator[QemuVm]:
    files = VmFiles(tmp_path, tmp_path)
    async with await asyncio.start_unix_server(qemu.serve, files.qmp):
        vm = await QemuVm.connect(process, files)
        try:
            yield vm
        finally:
            await vm.release()


@pytest.mark.parametrize("connected_before", [True, False], ids=["connected", "at the next start"])
async def test_a_panicked_guest_is_ended_after_its_console_is_read(
    tmp_path: Path, process: ProcessId, connected_before: bool
) -> None:
    qemu = PausedQemu(process)
    async with connected(tmp_path, process, qemu) as vm:
        if connected_before:
            assert "not syncing" in await vm.console()
            qemu.panicking.set()
        else:
            assert await vm.end_if_panicked()
        async with asyncio.timeout(60):
            await vm.wait()
        assert vm.stop_cause == "guest-panic"
        assert qemu.orders[-2:] == ["ringbuf-read", "quit"]
        # What was read before its end is still there.
        assert await vm.console() == "Kernel panic\ufffd - not syncing"


async def test_a_qemu_that_does_not_quit_after_a_panic_is_killed(
    tmp_path: Path, process: ProcessId, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stead.host.vm.QMP_TIMEOUT", 0.5)
    qemu = PausedQemu(process, obeys=False)
    async with connected(tmp_path, process, qemu) as vm:
        qemu.panicking.set()
        async with asyncio.timeout(60):
            assert await vm.wait() == "ended by SIGKILL"
        assert "quit" in qemu.orders
