"""SSH through the gateway and straight to sshd in the same VM, in turns, with OpenSSH's clients."""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from measuring import figure, since, succeed

from stead.api.server import listen_on
from stead.host.network import namespace_path
from stead.installation import ssh_gateway
from stead.installation_parts import Installation
from stead.machines import Machine

_OPTIONS = ("-F", "none", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR")


@dataclass(frozen=True)
class Route:
    """How OpenSSH's clients reach a VM."""

    prefix: tuple[str, ...]
    options: tuple[str, ...]
    port: int
    login: str

    def ssh(self, *arguments: str) -> Sequence[str]:
        return *self.prefix, "ssh", *self.options, "-p", str(self.port), *arguments, self.login

    def scp(self, source: str, target: str) -> Sequence[str]:
        return *self.prefix, "scp", "-q", *self.options, "-P", str(self.port), source, target


async def _timed(command: Sequence[str]) -> float:
    """Milliseconds until a command has ended."""
    start = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL)
    if await asyncio.wait_for(process.wait(), 300):
        raise RuntimeError(f"failed with exit code {process.returncode}: {' '.join(command)}")
    return since(start)


@contextlib.asynccontextmanager
async def _routes(here: Installation, machine: Machine, account: str) -> AsyncIterator[tuple[Route, Route]]:
    """Through the gateway, and straight from the namespace of the VMs."""
    identity = await here.identities.create(account)
    await here.identities.grant(account, identity.id, machine.id)
    _, token = await here.identities.create_token(account, identity.id)
    with tempfile.TemporaryDirectory() as folder, listen_on("127.0.0.1", 0) as listening:
        key = Path(folder) / "key"
        await _timed(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
        public = key.with_suffix(".pub").read_text()
        await succeed(machine.exec("install -d -m 700 /root/.ssh"))
        await machine.files().write("/root/.ssh/authorized_keys", public.encode())
        known = ("-o", f"UserKnownHostsFile={folder}/known")
        inside = ("nsenter", f"--net={namespace_path(here.settings)}")
        straight = Route(
            inside, (*_OPTIONS, *known, "-i", str(key)), 22, f"root@{(await machine.info()).address}"
        )
        async with ssh_gateway(here, listening):
            port = listening.getsockname()[1]
            yield Route((), (*_OPTIONS, *known), port, f"{machine.id},{token}@127.0.0.1"), straight


async def ssh_figures(
    here: Installation, machine: Machine, account: str, *, samples: int, rounds: int, mib: int
) -> dict[str, Any]:
    """Times of a connection with a command, of a command on an open connection, and of copies."""
    async with _routes(here, machine, account) as (through, straight):
        routes = (through, straight)
        connects: tuple[list[float], list[float]] = ([], [])
        for _ in range(samples):
            for route, times in zip(routes, connects, strict=True):
                times.append(await _timed([*route.ssh(), "true"]))
        overhead = await _commands(routes, samples)
        rates = await _copies(machine, routes, rounds, mib)
    return {
        "ssh_connect_ms": figure(connects[0]),
        "direct_ssh_connect_ms": figure(connects[1]),
        "ssh_connect_ratio": round(median(connects[0]) / median(connects[1]), 3),
        "ssh_exec_overhead_ms": figure(overhead),
        "scp_mb_s": figure(rates[0]),
        "direct_scp_mb_s": figure(rates[1]),
        "scp_ratio": round(median(rates[0]) / median(rates[1]), 3),
    }


async def _commands(routes: tuple[Route, Route], samples: int) -> list[float]:
    """What the gateway adds to a command on an open connection."""
    with tempfile.TemporaryDirectory() as folder:
        shared = [("-o", f"ControlPath={folder}/{number}") for number in range(2)]
        masters = [
            await asyncio.create_subprocess_exec(*route.ssh(*options, "-M", "-N"))
            for route, options in zip(routes, shared, strict=True)
        ]
        try:
            async with asyncio.timeout(60):
                while len(list(Path(folder).iterdir())) < 2:  # noqa: ASYNC110  # ssh does not say when it is ready
                    await asyncio.sleep(0.1)
            added = []
            for _ in range(samples):
                one, other = [
                    await _timed([*route.ssh(*options), "true"])
                    for route, options in zip(routes, shared, strict=True)
                ]
                added.append(one - other)
            return added
        finally:
            for master in masters:
                master.terminate()
                await master.wait()


async def _copies(
    machine: Machine, routes: tuple[Route, Route], rounds: int, mib: int
) -> tuple[list[float], list[float]]:
    """MB/s of copies into and out of the VM."""
    rates: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(os.urandom(mib << 20))
        for _ in range(rounds):
            for route, found in zip(routes, rates, strict=True):
                took = await _timed(route.scp(str(file), f"{route.login}:/var/tmp/file"))
                took += await _timed(route.scp(f"{route.login}:/var/tmp/file", f"{folder}/back"))
                found.append(2 * (mib << 20) / took / 1000)
    await succeed(machine.exec("rm /var/tmp/file"))
    return rates
