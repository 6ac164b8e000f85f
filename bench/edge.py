"""What the edge costs: the same requests through it and straight to the VM's address, in turns."""

import argparse
import asyncio
import contextlib
import json
import re
import ssl
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Any

from internals import engine_of
from measuring import Figure, figure, half_of_host, host_facts, installation, report, run, say, since, succeed
from ssh_figures import ssh_figures
from websockets.asyncio.client import ClientConnection, connect

from stead.edge.edge import Edge
from stead.host.authority import Authority
from stead.host.commands import run as run_command
from stead.host.interface import narrowed
from stead.host.local import LocalHost
from stead.host.network import namespace_path
from stead.installation import bind, serve
from stead.installation_parts import Installation
from stead.machines import Machine
from stead.machines.records import Properties
from stead.settings import Size

HOST = "bench.style.dev"
PORT = 8000
CONNECTIONS = 8
_SERVER = """
const http = require('http'), crypto = require('crypto');
const server = http.createServer((request, response) => response.end('ok'));
server.on('upgrade', (request, socket) => {
  const key = request.headers['sec-websocket-key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11';
  const accepted = crypto.createHash('sha1').update(key).digest('base64');
  socket.setNoDelay(true);
  socket.write('HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n' +
    'Sec-WebSocket-Accept: ' + accepted + '\\r\\n\\r\\n');
  socket.on('error', () => {});
  socket.on('data', frame => {  // one short masked message in each frame
    const size = frame[1] & 127, mask = frame.subarray(2, 6), body = frame.subarray(6, 6 + size);
    socket.write(Buffer.concat([Buffer.from([frame[0], size]), body.map((each, i) => each ^ mask[i % 4])]));
  });
});
server.listen(Number(process.argv[2]), '0.0.0.0');
"""
_LATENCY = re.compile(r"99%\s+([0-9.]+)(us|ms|s)")
_RATE = re.compile(r"Requests/sec:\s+([0-9.]+)")
_MILLISECONDS = {"us": 0.001, "ms": 1.0, "s": 1000.0}


@dataclass(frozen=True)
class MappedMachine:
    opened: Installation
    edge: Edge
    machine: Machine
    account: str
    address: str

    @property
    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=Authority.open(self.opened.settings).certificate.decode())

    async def map(self, host: str) -> None:
        await self.opened.domains.map(self.account, host, self.machine.id, PORT)

    async def ask(self, host: str) -> None:
        """A request on a connection of its own, until its answer is 200."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.edge.https_port, ssl=self.trusting, server_hostname=host
        )
        try:
            writer.write(f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"a request failed: {status!r}")
            await reader.read()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def mapped_machine(size: Size) -> AsyncIterator[MappedMachine]:
    async with installation(size, pool=0) as opened:
        anywhere = "127.0.0.1:0"
        with bind(opened.settings.replace(listen=anywhere, ssh_listen=anywhere)) as listeners:
            async with serve(opened, listeners) as served:
                account = (await opened.accounts.create("bench")).id
                machine = await opened.machines.create(Properties(account=account))
                await machine.files().write("/root/server.js", _SERVER.encode())
                start = f"systemd-run --unit=bench node /root/server.js {PORT}"
                await succeed(machine.exec(start))
                listening = f"until curl -sf http://127.0.0.1:{PORT}/; do sleep 0.1; done"
                await succeed(machine.exec(listening, timeout=60))
                address = str((await machine.info()).address)
                yield MappedMachine(opened, served.edge, machine, account, address)


async def wrk(*prefix: str, url: str, seconds: int) -> tuple[float, float]:
    """Requests in a second, and the 99th percentile of their latency in milliseconds."""
    options = ("-t", "1", "-c", str(CONNECTIONS), "-d", f"{seconds}s", "--latency", "-H", f"Host: {HOST}")
    printed = (await run_command(*prefix, "wrk", *options, url, timeout=seconds + 60)).stdout.decode()
    rate, latency = _RATE.search(printed), _LATENCY.search(printed)
    if rate is None or latency is None or "Non-2xx" in printed:
        raise RuntimeError(f"wrk failed: {printed}")
    return float(rate[1]), float(latency[1]) * _MILLISECONDS[latency[2]]


async def proxying(mapped: MappedMachine, arguments: argparse.Namespace) -> dict[str, Any]:
    seconds = arguments.seconds
    inside = ("nsenter", f"--net={namespace_path(mapped.opened.settings)}")
    straight, through = [], []
    for _ in range(arguments.rounds + 1):
        straight.append(await wrk(*inside, url=f"http://{mapped.address}:{PORT}/", seconds=seconds))
        through.append(await wrk(url=f"https://127.0.0.1:{mapped.edge.https_port}/", seconds=seconds))
    # In the first round the server's code is not compiled yet.
    del straight[0], through[0]
    return {
        "straight_rps": figure(rate for rate, _ in straight),
        "proxy_rps": figure(rate for rate, _ in through),
        "proxy_rps_ratio": _ratio(through, straight, 0),
        "proxy_p99_ratio": _ratio(through, straight, 1),
    }


def _ratio(above: list[tuple[float, float]], below: list[tuple[float, float]], index: int) -> float:
    return round(statistics.median(a[index] / b[index] for a, b in zip(above, below, strict=True)), 3)


async def round_trip(socket: ClientConnection) -> float:
    start = time.perf_counter()
    await socket.send("ping")
    await socket.recv()
    return since(start)


async def websockets(mapped: MappedMachine, arguments: argparse.Namespace) -> dict[str, Figure]:
    network = narrowed(engine_of(mapped.opened.machines).host, LocalHost).network
    direct = await network.dial(IPv4Address(mapped.address), PORT)
    port, added = mapped.edge.https_port, []
    async with (
        connect(f"ws://{mapped.address}:{PORT}/", sock=direct, compression=None, proxy=None) as near,
        connect(
            *(f"wss://{HOST}:{port}/",),
            host="127.0.0.1",
            port=port,
            ssl=mapped.trusting,
            compression=None,
            proxy=None,
        ) as far,
    ):
        for _ in range(arguments.samples * 10):
            straight = await round_trip(near)
            added.append(await round_trip(far) - straight)
    return {"ws_rtt_overhead_ms": figure(added)}


async def mapping(mapped: MappedMachine, arguments: argparse.Namespace) -> dict[str, Figure]:
    times = []
    for number in range(arguments.samples):
        start = time.perf_counter()
        await mapped.map(f"new{number}.style.dev")
        await mapped.ask(f"new{number}.style.dev")
        times.append(since(start))
    return {"map_to_first_200_ms": figure(times)}


async def waking(mapped: MappedMachine, arguments: argparse.Namespace) -> dict[str, Figure]:
    times = []
    for _ in range(min(arguments.samples, 10)):
        await mapped.machine.suspend()
        start = time.perf_counter()
        await mapped.ask(HOST)
        times.append(since(start))
    return {"wake_to_first_200_ms": figure(times)}


async def ssh(mapped: MappedMachine, arguments: argparse.Namespace) -> dict[str, Any]:
    return await ssh_figures(
        mapped.opened,
        mapped.machine,
        mapped.account,
        samples=arguments.samples,
        rounds=arguments.rounds,
        mib=arguments.mib,
    )


PARTS = {"proxy": proxying, "websockets": websockets, "mapping": mapping, "wake": waking, "ssh": ssh}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    async with mapped_machine(Size.parse(arguments.size)) as mapped:
        await mapped.map(HOST)
        await mapped.ask(HOST)
        results: dict[str, Any] = {}
        for name, part in PARTS.items():
            if name in arguments.parts:
                say(name)
                found = await part(mapped, arguments)
                say(json.dumps(found))
                results |= found
        return {"host": await host_facts(mapped.opened.machines), "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", default=str(half_of_host()), help="size of the VM")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=8, help="runs of wrk, each way")
    parser.add_argument("--seconds", type=int, default=4, help="length of a run of wrk")
    parser.add_argument("--mib", type=int, default=16, help="size of the file that scp copies")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=" ".join(PARTS)
    )
    arguments = parser.parse_args()
    found = run(measure(arguments))
    report(found, as_json=arguments.json)


if __name__ == "__main__":
    main()
