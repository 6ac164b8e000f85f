"""Terminals and forwarded ports of a VM, beside OpenSSH to the same VM.

Both sides run the same shell in the same VM, in turns. Stead's side is a WebSocket client of `stead serve`, a
process of its own; the other side is `ssh` from the network namespace of the VMs, without Stead in between.
"""

import argparse
import asyncio
import contextlib
import shutil
import socket
import ssl
import string
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from measuring import (
    Figure,
    Served,
    figure,
    host_facts,
    own_settings,
    removed_at_the_end,
    report,
    run,
    say,
    serving,
    since,
)
from websockets.asyncio.client import ClientConnection, connect

from stead import AsyncStead
from stead.host.namespaces import NamespaceThread
from stead.host.network import namespace_path
from stead.installation import open_machines
from stead.sdk import AsyncVm
from stead.settings import Settings, Size

SCROLLBACK = 10_000
PORT = 9000
SHELL = "/usr/local/bin/bench-shell"
PROMPT = b"ready> "
LINES = "/var/tmp/lines"
DONE = b"all-was-printed"
SHELL_SCRIPT = f"""#!/bin/sh
export TERM=xterm PS1='{PROMPT.decode()}'
exec /bin/bash --norc --noprofile
"""
_SENDER = f"""
import socket, threading

def serve(address):
    listener = socket.create_server(address)
    while True:
        connection, _ = listener.accept()
        with connection, open("{LINES}", "rb") as file:
            connection.sendfile(file)

threading.Thread(target=serve, args=(("127.0.0.1", {PORT}),)).start()
serve(("0.0.0.0", {PORT + 1}))
"""


class Channel(Protocol):
    """A shell on a terminal."""

    async def write(self, data: bytes) -> None: ...
    async def read(self) -> bytes: ...


class Terminal:
    """A shell through Stead's API."""

    def __init__(self, link: ClientConnection) -> None:
        self._link = link

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, server: Served, path: str, trusting: ssl.SSLContext | None = None
    ) -> AsyncIterator["Terminal"]:
        """With `trusting`, over HTTPS; every server listens on loopback."""
        async with connect(
            f"{server.url.replace('http', 'ws', 1)}{path}",
            additional_headers={"Authorization": f"Bearer {server.key}"},
            compression=None,
            max_size=None,
            proxy=None,
            host="127.0.0.1",
            ssl=trusting,
        ) as link:
            yield cls(link)

    async def write(self, data: bytes) -> None:
        await self._link.send(data)

    async def read(self) -> bytes:
        while isinstance(received := await self._link.recv(), str):
            pass
        return received


class Ssh:
    """A shell through OpenSSH."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, settings: Settings, address: str, identity: Path) -> AsyncIterator["Ssh"]:
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR"]
        # Newer clients send keys only every 20 ms, to hide their timing.
        options += ["IgnoreUnknown=ObscureKeystrokeTiming", "ObscureKeystrokeTiming=no"]
        process = await asyncio.create_subprocess_exec(
            *("nsenter", f"--net={namespace_path(settings)}", "ssh", "-F", "none", "-tt", "-i", identity),
            *(word for option in options for word in ("-o", option)),
            *(f"root@{address}", SHELL),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        try:
            yield cls(process)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def write(self, data: bytes) -> None:
        self._stdin.write(data)
        await self._stdin.drain()

    async def read(self) -> bytes:
        if not (received := await self._stdout.read(1 << 18)):
            raise RuntimeError("ssh has ended")
        return received


async def until(channel: Channel, mark: bytes) -> int:
    """Read up to a mark; how many bytes came."""
    tail, count = b"", 0
    async with asyncio.timeout(600):
        while mark not in tail:
            received = await channel.read()
            count += len(received)
            tail = tail[-len(mark) :] + received
    return count


async def press(channel: Channel, key: bytes) -> float:
    """Milliseconds from a key to its echo by the shell."""
    start = time.perf_counter()
    await channel.write(key)
    await until(channel, key)
    return since(start)


async def echoes(channels: list[Channel], samples: int) -> list[list[float]]:
    """Keys on all channels in turns; each line is abandoned before it wraps."""
    times: list[list[float]] = [[] for _ in channels]
    for number in range(samples):
        key = string.ascii_letters[number % len(string.ascii_letters)].encode()
        for channel, taken in zip(channels, times, strict=True):
            taken.append(await press(channel, key))
        if number % 50 == 49:
            for channel in channels:
                await channel.write(b"\x03")
                await until(channel, PROMPT)
    for channel in channels:
        await channel.write(b"\x03")
        await until(channel, PROMPT)
    return times


async def print_lines(channel: Channel, size: int) -> float:
    """Megabytes per second of a file that the shell prints. Every byte has to arrive."""
    start = time.perf_counter()
    # The prompt comes right after this, often in the same piece: the next command does not wait for it.
    await channel.write(f"cat {LINES}; echo all-was-'printed'\n".encode())
    count = await until(channel, DONE)
    took = since(start)
    if count < size:
        raise RuntimeError(f"only {count} of {size} bytes arrived: the client was too slow")
    return count / 1000 / took


async def replay(server: Served, path: str) -> float:
    """Milliseconds from the request to attach until the scrollback is there."""
    start = time.perf_counter()
    async with Terminal.opened(server, path) as terminal, asyncio.timeout(60):
        lines = 0
        while lines < SCROLLBACK:
            lines += (await terminal.read()).count(b"\n")
        return since(start)


async def transfers(read: Callable[[], Awaitable[bytes]], size: int) -> float:
    """Megabytes per second of one connection to its end."""
    start = time.perf_counter()
    count = 0
    while received := await read():
        count += len(received)
    if count != size:
        raise RuntimeError(f"{count} of {size} bytes arrived")
    return count / 1000 / since(start)


async def forwarded(server: Served, vm: AsyncVm, size: int) -> float:
    headers = {"Authorization": f"Bearer {server.key}"}
    address = f"{server.url.replace('http', 'ws')}/v1/vms/{vm.id}/forward/{PORT}"
    async with connect(address, additional_headers=headers, compression=None, max_size=None) as link:

        async def read() -> bytes:
            received = await link.recv()
            return received if isinstance(received, bytes) else b""  # text: the other side has ended

        return await transfers(read, size)


async def direct(settings: Settings, address: str, size: int) -> float:
    """The same over TCP from the namespace of the VMs: what the network device gives."""
    thread = NamespaceThread.named(namespace_path(settings))
    try:
        link = await thread.call(lambda: socket.create_connection((address, PORT + 1)))
    finally:
        thread.close()
    reader, writer = await asyncio.open_connection(sock=link, limit=1 << 20)
    try:
        return await transfers(lambda: reader.read(1 << 18), size)
    finally:
        writer.close()


async def prepare(vm: AsyncVm, identity: Path, mib: int) -> int:
    """The shell, the key, and a file of lines in the VM; the size of the file."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(identity)]
    await asyncio.to_thread(subprocess.run, command, check=True)
    await vm.fs.write_text(SHELL, SHELL_SCRIPT)
    await vm.fs.write_text("/root/.ssh/authorized_keys", identity.with_suffix(".pub").read_text())
    await vm.fs.write_text("/root/sender.py", _SENDER)
    line = "the quick brown fox jumps over the lazy dog and runs into the forest at night"
    await vm.exec(
        f"chmod +x {SHELL}; chmod 700 /root/.ssh; chmod 600 /root/.ssh/*;"
        f" yes '{line}' | head -c {mib << 20} > {LINES};"
        " systemd-run --quiet --unit=sender python3 /root/sender.py",
        check=True,
        timeout=600,
    )
    return mib << 20


def better(ours: list[float], theirs: list[float]) -> float:
    """Stead's median divided by OpenSSH's."""
    return round(median(ours) / median(theirs), 3)


def rate(samples: list[float]) -> Figure:
    """For rates the bad end is the low one: `p99` is what 99 of 100 samples reach."""
    ordered = sorted(samples, reverse=True)
    return figure(samples) | {"p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 2)}


async def compare(
    settings: Settings, server: Served, vm: AsyncVm, samples: int, rounds: int, mib: int
) -> dict[str, Any]:
    address = (await vm.info()).address
    identity = settings.data / "identity"
    size = await prepare(vm, identity, mib)
    results: dict[str, Any] = {}
    path = f"/v1/vms/{vm.id}/pty?cols=80&rows=24&exec={SHELL}&sessionId=bench"
    async with (
        Terminal.opened(server, path) as terminal,
        Ssh.opened(settings, str(address), identity) as ssh,
    ):
        channels: list[Channel] = [terminal, ssh]
        for channel in channels:
            await until(channel, PROMPT)
        say("keys and their echoes, through Stead and through OpenSSH in turns")
        await echoes(channels, 20)
        ours, theirs = await echoes(channels, samples)
        results |= {"echo_rtt_ms": figure(ours), "ssh_echo_rtt_ms": figure(theirs)}
        results["echo_ratio"] = better(ours, theirs)
        echo = median(ours)
        say(f"{mib} MiB of lines, in turns")
        rates: list[list[float]] = [[], []]
        for _ in range(rounds):
            for channel, found in zip(channels, rates, strict=True):
                found.append(await print_lines(channel, size))
        results |= {"throughput_mb_s": rate(rates[0]), "ssh_throughput_mb_s": rate(rates[1])}
        results["throughput_ratio"] = better(*rates)
    say(f"attach to {SCROLLBACK} lines")
    path = f"/v1/vms/{vm.id}/pty/sessions/bench?cols=80&rows=24"
    replays = [await replay(server, path) for _ in range(max(5, samples // 10))]
    results["attach_replay_ms"] = figure(replays)
    results["replay_echo_times"] = round(median(replays) / echo, 2)
    say("a forwarded port, and the same over plain TCP")
    results["forward_throughput_mb_s"] = rate([await forwarded(server, vm, size) for _ in range(rounds)])
    results["tcp_throughput_mb_s"] = rate([await direct(settings, str(address), size) for _ in range(rounds)])
    return results


async def measure(size: Size, samples: int, rounds: int, mib: int) -> dict[str, Any]:
    if shutil.which("ssh") is None:
        raise SystemExit("bench/pty compares with OpenSSH: install the package openssh-client first")
    with own_settings(size, pool=0) as settings:
        async with removed_at_the_end(settings):
            async with open_machines(settings) as machines:
                await machines.template()
                facts = await host_facts(machines)
            async with (
                serving(settings) as server,
                AsyncStead(server.key, base_url=server.url) as stead,
                await stead.vms.create() as vm,
            ):
                return {"host": facts} | await compare(settings, server, vm, samples, rounds, mib)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", default="2x1Gx20G", help="size of the VM")
    parser.add_argument("--samples", type=int, default=400, help="keys to measure")
    parser.add_argument("--rounds", type=int, default=5, help="transfers to measure")
    parser.add_argument("--mib", type=int, default=16, help="MiB of each transfer")
    arguments = parser.parse_args()
    results = run(measure(Size.parse(arguments.size), arguments.samples, arguments.rounds, arguments.mib))
    report(results, as_json=arguments.json)


if __name__ == "__main__":
    main()
