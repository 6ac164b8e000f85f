"""The monitor of a QEMU, with an ordinary process and a socket in QEMU's place."""

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from stead.errors import StartFailed
from stead.host.vm import QemuVm, Spawner, VmFiles, bound_log, last_words
from stead.processes import ProcessId, WatchedProcess
from stead.settings import Settings
from support.waiting import until

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


@contextlib.asynccontextmanager
async def flooding(path: Path, event: dict[str, object]) -> AsyncIterator[None]:
    """A monitor that sends events as fast as they are read, and answers between them."""
    line = json.dumps({**event, "timestamp": {"seconds": 0, "microseconds": 0}}).encode() + b"\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(GREETING).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            while message := await reader.read(65536):
                answer = {"return": {"status": "running"}, "id": json.loads(message).get("id")}
                writer.write(json.dumps(answer).encode() + b"\n" + line * 2000)
                await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield


@pytest.mark.parametrize("event", ["GUEST_CRASHLOADED", "GUEST_PANICKED", "BLOCK_IO_ERROR"])
async def test_a_flood_of_events_is_neither_kept_nor_holds_the_loop(
    process: ProcessId, files: VmFiles, event: str
) -> None:
    async with flooding(files.qmp, {"event": event, "data": {}}):
        vm = await QemuVm.connect(process, files)
        turns = 0

        async def turning() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(turning())
        for _ in range(3):
            assert await vm.execute("query-status") == {"status": "running"}
        task.cancel()
        assert turns > 100  # events of one read alone are thousands
        assert vm._monitor._seen > 2000
        assert vm._monitor.events.empty() and not vm._monitor.events.history
        assert vm.stop_cause == ("guest-panic" if event == "GUEST_PANICKED" else None)
        await vm.release()


async def test_a_log_is_cut_while_qemu_appends_to_it(root: None, files: VmFiles) -> None:
    spawner = Spawner()
    script = "echo first >&2; yes x | tr -d '\\n' | head -c 3000000 >&2; read -r _ <&9; echo last >&2"
    ours, theirs = os.pipe()

    try:
        process = await spawner.spawn(
            lambda _: ["bash", "-c", script.replace("&9", f"&{ours}")],
            files,
            uid=Settings().uid(0),
            descriptors=(ours,),
        )
        watched = WatchedProcess(process)
        await until(lambda: files.log.stat().st_size > 3_000_000, 60)
        assert len(last_words(files)) <= 4096
        bound_log(files)
        assert files.log.stat().st_size == 65536
        os.write(theirs, b"go on\n")
        await watched.wait()
    finally:
        os.close(ours)
        os.close(theirs)
        spawner.close()
    assert files.log.read_bytes().startswith(b"first\n")
    assert files.log.stat().st_size == 65536 + len("last\n")
    assert last_words(files).endswith("last")


async def test_an_event_that_comes_before_the_first_answer_is_no_failure(
    process: ProcessId, files: VmFiles
) -> None:
    """A guest that wakes from saved state begins to run just when its monitor is connected to."""
    async with monitor(files.qmp, early_events=2):
        vm = await QemuVm.connect(process, files)
        assert await vm.execute("query-status") == {"status": "running"}
        await vm.release()


async def test_a_monitor_that_never_answers_in_order_is_refused(process: ProcessId, files: VmFiles) -> None:
    async with monitor(files.qmp, early_events=100):
        with pytest.raises(StartFailed, match=r"^QEMU monitor failed: .*Negotiation failed"):
            await QemuVm.connect(process, files)
