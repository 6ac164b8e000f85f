"""The monitor of a QEMU, with an ordinary process and a socket in QEMU's place."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from stead.errors import StartFailed
from stead.host.processes import ProcessId
from stead.host.vm import Vm, VmFiles

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}}, "capabilities": []}}
EVENT = {"event": "RESUME", "timestamp": {"seconds": 0, "microseconds": 0}}


@pytest.fixture
def process() -> Iterator[ProcessId]:
    child = subprocess.Popen(["sleep", "600"])
    identity = ProcessId.of(child.pid)
    assert identity is not None
    yield identity
    child.kill()
    child.wait()


@pytest.fixture
def files(tmp_path: Path) -> VmFiles:
    return VmFiles(tmp_path, tmp_path)


@contextlib.asynccontextmanager
async def monitor(path: Path, early_events: int) -> AsyncIterator[None]:
    """To the first so many who connect, an event is said where they wait for an answer."""
    left = early_events

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left

        def say(what: object) -> None:
            writer.write(json.dumps(what).encode() + b"\n")

        say(GREETING)
        while message := await reader.read(65536):
            if left:
                left -= 1
                say(EVENT)
            say({"return": {"status": "running"}, "id": json.loads(message).get("id")})
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield


async def test_an_event_that_comes_before_the_first_answer_is_no_failure(
    process: ProcessId, files: VmFiles
) -> None:
    """A guest that wakes from saved state begins to run just when its monitor is connected to."""
    async with monitor(files.qmp, early_events=2):
        vm = await Vm.connect(process, files)
        assert await vm.execute("query-status") == {"status": "running"}
        await vm.release()


async def test_a_monitor_that_never_answers_in_order_is_refused(process: ProcessId, files: VmFiles) -> None:
    async with monitor(files.qmp, early_events=100):
        with pytest.raises(StartFailed, match=r"^QEMU monitor failed: .*Negotiation failed"):
            await Vm.connect(process, files)
