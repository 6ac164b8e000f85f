"""The real guest agent as a process of this machine, on a loopback port."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from stead.guest.agent import Agent
from stead.guest_agent import agent_path


@contextlib.asynccontextmanager
async def native_agent() -> AsyncIterator[tuple[Agent, int]]:
    """A client of an agent, and the pid of its process."""
    process = await asyncio.create_subprocess_exec(
        agent_path(), "-listen", "127.0.0.1:0", stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            while not (found := re.search(rb"listening on .*:(\d+)", await process.stderr.readline())):
                assert process.returncode is None
        draining = asyncio.create_task(process.stderr.read())

        async def dial() -> tuple[socket.socket, tuple[Any, ...]]:
            link = socket.socket()
            link.setblocking(False)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return link, ("127.0.0.1", int(found[1]))

        agent = Agent(dial, "native")
        try:
            yield agent, process.pid
        finally:
            agent.abort("the test is over")
            await agent.close()
    finally:
        process.kill()
        await process.wait()
        await draining


def resident_mib(pid: int) -> float:
    (line,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(line) / 1024
