"""Slow trials of terminals: as many as a VM may have, and a gigabyte through one, with memory measured."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from stead import AsyncStead
from stead.host.image import BaseImage
from stead.sdk import AsyncPtySession, AsyncVm, SteadApiError
from stead.settings import Settings
from support.installations import other_settings
from support.serve_process import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

TERMINALS = 128
GIB = 1 << 30
READER = """
import asyncio, json, sys
from pathlib import Path
from stead import AsyncStead

async def main(url, key, vm_id, session):
    async with AsyncStead(key, base_url=url) as stead:
        vm = await stead.vms.get(vm_id)
        count, tail = 0, b""
        async with await vm.pty.attach(session) as terminal:
            await terminal.write("./print\\n")
            async for data in terminal:
                count += len(data)
                tail = tail[-20:] + data
                if b"the-end-2" in tail:
                    break
    print(json.dumps({"count": count, "status": Path("/proc/self/status").read_text()}))

asyncio.run(main(*sys.argv[1:]))
"""


@dataclass(frozen=True)
class ServedVm:
    """A VM behind a server in a process of its own."""

    url: str
    key: str
    pid: int
    vm: AsyncVm

    def server_peak(self) -> float:
        """MiB of memory that the server has used at most."""
        return _peak(Path(f"/proc/{self.pid}/status").read_text())

    async def agent_peak(self) -> float:
        command = "cat /proc/$(systemctl show --property MainPID --value stead-agent)/status"
        return _peak((await self.vm.exec(command, check=True)).stdout)


def _peak(status: str) -> float:
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


@pytest_asyncio.fixture
async def served_vm(settings: Settings, image: BaseImage) -> AsyncIterator[ServedVm]:
    with other_settings(settings) as other:
        async with (
            serving(other) as (process, said),
            AsyncStead(said["key"], base_url=said["url"]) as stead,
            await stead.vms.create(idle_timeout_seconds=None) as vm,
        ):
            yield ServedVm(said["url"], said["key"], process.pid, vm)


async def test_128_terminals_at_once(served_vm: ServedVm) -> None:
    """All answer at the same time; one more is refused until one of them is closed."""
    before = served_vm.server_peak(), await served_vm.agent_peak()
    few = asyncio.Semaphore(8)  # programs start and are killed slowly under emulation

    async def open_one(number: int) -> AsyncPtySession:
        async with few:
            terminal = await served_vm.vm.pty.open(exec="/bin/sh", session_id=f"t{number}")
            await answers(number, terminal)
            return terminal

    async def answers(number: int, terminal: AsyncPtySession) -> None:
        await terminal.write(f"echo answer-$(({number} + 1000))\n")
        seen = b""
        async for data in terminal:
            seen += data
            if f"answer-{number + 1000}\r".encode() in seen:
                return
        raise AssertionError(seen)

    async def close_one(number: int) -> None:
        async with few:
            await served_vm.vm.pty.close(f"t{number}")

    async with asyncio.timeout(1200):
        opened = await asyncio.gather(*(open_one(number) for number in range(TERMINALS)))
        await asyncio.gather(*(answers(number, each) for number, each in enumerate(opened)))
        await asyncio.gather(*(each.detach() for each in opened))
    found = await served_vm.vm.pty.list()
    assert {each.id for each in found if each.running} == {f"t{number}" for number in range(TERMINALS)}
    with pytest.raises(SteadApiError) as refused:
        await served_vm.vm.pty.open(exec="/bin/sh")
    assert (refused.value.status, refused.value.code) == (429, "SESSION_CAP_REACHED")
    after = served_vm.server_peak(), await served_vm.agent_peak()
    print(
        f"MiB of the server {before[0]:.0f} -> {after[0]:.0f}, of the agent {before[1]:.0f} -> {after[1]:.0f}"
    )
    assert after[0] - before[0] < 100
    assert after[1] - before[1] < 100
    await served_vm.vm.pty.close("t7")
    async with await served_vm.vm.pty.open(exec="/bin/sh", session_id="t7"):
        pass
    await asyncio.gather(*(close_one(number) for number in range(TERMINALS)))
    assert await served_vm.vm.pty.list() == []


async def test_a_gigabyte_through_one_terminal(served_vm: ServedVm) -> None:
    """Guest agent, server and client hold a bounded part of it, whatever is printed.

    A client that does not read for a moment is sent the screen instead of what it missed, so that not
    everything need arrive.
    """
    line = "the quick brown fox jumps over the lazy dog and runs into the forest at night"
    script = f"#!/bin/sh\nyes '{line}' | head -c {GIB}\necho the-end-$((1 + 1))\n"
    await served_vm.vm.fs.write_text("/root/print", script)
    await served_vm.vm.exec("chmod +x /root/print", check=True)
    await (await served_vm.vm.pty.open(session_id="flood")).detach()
    before = served_vm.server_peak(), await served_vm.agent_peak()
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", READER, served_vm.url, served_vm.key, served_vm.vm.id, "flood"),
        stdout=asyncio.subprocess.PIPE,
    )
    printed, _ = await reader.communicate()
    assert reader.returncode == 0
    report = json.loads(printed)
    client = _peak(report["status"])
    after = served_vm.server_peak(), await served_vm.agent_peak()
    print(
        f"{report['count']} bytes arrived; MiB of the server {before[0]:.0f} -> {after[0]:.0f},"
        f" of the agent {before[1]:.0f} -> {after[1]:.0f}, of the client {client:.0f}"
    )
    assert report["count"] > GIB // 2
    assert after[0] - before[0] < 100
    assert after[1] - before[1] < 100
    assert client < 150
    # The terminal is as usable as before, with the end of the output on its screen.
    async with await served_vm.vm.pty.attach("flood") as terminal:
        seen = b""
        async for data in terminal:
            seen += data
            if b"the-end-2" in seen:
                break
    assert seen.count(line.encode()) > 9000
