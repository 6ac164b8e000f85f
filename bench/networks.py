"""What a private network costs on this host: a NIC at create, round trips, throughput, WireGuard."""

import argparse
import asyncio
import contextlib
import os
import re
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from internals import pool_of
from measuring import (
    clear,
    figure,
    half_of_host,
    host_facts,
    own_settings,
    removed_at_the_end,
    report,
    run,
    say,
    since,
    succeed,
)

from stead.addresses import GATEWAY, VPC_ROUTER
from stead.host.commands import run as command
from stead.host.namespaces import NamespaceThread, namespace_of
from stead.installation import open_installation
from stead.installation_parts import Installation
from stead.machines import Machine
from stead.machines.nics import NicRequest
from stead.machines.records import Properties
from stead.settings import Size

_PORT = 5000
_OUTSIDE, _LAPTOP = IPv4Network("198.51.100.0/30"), IPv4Network("198.51.100.4/30")
"""For documentation: no network has them."""
_VPC = IPv4Network("192.168.10.0/24")
_MEMBER, _MEMBER_TAP = _VPC[250], "sd65000"
_ROUNDS = 5
Figures = dict[str, Any]
_SINK = (
    "import socket; s = socket.create_server(('0.0.0.0', 5000))\n"
    "while True:\n"
    "    c, _ = s.accept()\n"
    "    while c.recv(1 << 20): pass\n"
    "    c.sendall(b'.'); c.close()\n"
)
_SEND = (
    "import socket, sys, time; c = socket.create_connection((sys.argv[1], 5000)); b = bytes(1 << 18)\n"
    "n = int(sys.argv[2]) * 4; t = time.perf_counter()\n"
    "for _ in range(n): c.sendall(b)\n"
    "c.shutdown(1); c.recv(1); print(int(sys.argv[2]) / (time.perf_counter() - t))\n"
)


async def create_times(here: Installation, account: str, vpc: str, samples: int) -> Figures:
    """Milliseconds of a create without and with a NIC, in turns."""
    results: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(samples):
        for kind, nic in (("without", None), ("with", NicRequest(vpc))):
            await pool_of(here.machines).filled(60)
            start = time.perf_counter()
            machine = await here.machines.create(Properties(account=account), nic=nic)
            results[kind].append(since(start))
            await machine.delete()
    medians = {kind: sorted(found)[len(found) // 2] for kind, found in results.items()}
    return {
        "attach_ms": round(medians["with"] - medians["without"], 1),
        "create_ms": figure(results["without"]),
        "create_with_nic_ms": figure(results["with"]),
    }


async def round_trip(machine: Machine, address: str, count: int) -> float:
    """The median round trip of pings in milliseconds."""
    result = await succeed(machine.exec(f"ping -i 0.05 -c {count} {address}"))
    found = sorted(float(each) for each in re.findall(r"time=([\d.]+)", result.stdout.decode()))
    return found[len(found) // 2]


async def throughput(machine: Machine, address: str, mib: int) -> float:
    """MB per second of one TCP connection from a VM."""
    result = await succeed(machine.exec(["python3", "-c", _SEND, address, str(mib)]))
    return float(result.stdout) * 1.048576


@dataclass(frozen=True)
class Side:
    """A network namespace beside the host."""

    name: str

    async def run(self, *argv: str) -> str:
        return (await command("ip", "netns", "exec", self.name, *argv, timeout=600)).stdout.decode()

    async def throughput(self, address: str, mib: int) -> float:
        """MB per second of one TCP connection from here."""
        return float(await self.run("python3", "-c", _SEND, address, str(mib))) * 1.048576

    @contextlib.asynccontextmanager
    async def sink(self) -> AsyncIterator[None]:
        """A program that receives, as that in a VM."""
        thread = NamespaceThread.named(namespace_of(self.name))
        try:
            listener = await thread.call(lambda: socket.create_server(("0.0.0.0", _PORT)))
        finally:
            thread.close()
        number = listener.fileno()
        program = _SINK.replace("socket.create_server(('0.0.0.0', 5000))", f"socket.socket(fileno={number})")
        process = await asyncio.create_subprocess_exec("python3", "-c", program, pass_fds=[number])
        listener.close()
        try:
            yield
        finally:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def namespace(kind: str) -> AsyncIterator[Side]:
    name = f"stbench{os.getpid()}{kind}"
    await command("ip", "netns", "add", name)
    try:
        yield Side(name)
    finally:
        await command("ip", "netns", "delete", name)


@contextlib.asynccontextmanager
async def beside(kind: str, link: IPv4Network) -> AsyncIterator[Side]:
    """A namespace with a link to the host, which has the first address of `link`."""
    outer = f"stb{os.getpid()}{kind}"
    async with namespace(kind) as side:
        await command("ip", "link", "add", outer, "type", "veth", "peer", "name", "eth0", "netns", side.name)
        await command("ip", "addr", "add", f"{link[1]}/30", "dev", outer)
        await command("ip", "link", "set", outer, "up")
        await command("ip", "-n", side.name, "addr", "add", f"{link[2]}/30", "dev", "eth0")
        await command("ip", "-n", side.name, "link", "set", "eth0", "up")
        yield side


@contextlib.asynccontextmanager
async def member(vpc: str) -> AsyncIterator[Side]:
    """A namespace in the place of a VM: what it receives passes the same rules of the namespace `vpc`."""
    async with namespace("m") as side:
        inside = f"""
link set lo up
link set eth0 up
addr add {_MEMBER}/32 dev eth0
route add {VPC_ROUTER} dev eth0
route add default via {VPC_ROUTER} dev eth0
"""
        tap = ["link", "add", _MEMBER_TAP, "type", "veth", "peer", "name", "eth0", "netns", side.name]
        await command("ip", "-n", vpc, *tap)
        await command("ip", "-n", vpc, "link", "set", _MEMBER_TAP, "up")
        await command("ip", "-n", vpc, "route", "add", f"{_MEMBER}/32", "dev", _MEMBER_TAP)
        await command("ip", "-n", side.name, "-batch", "-", stdin=inside.encode())
        yield side


async def tunnel_figures(here: Installation, account: str, vpc: str, machine: Machine, mib: int) -> Figures:
    """Throughput between a laptop, with `wg-quick`, and a VM that runs the sink, both ways."""
    session = await here.tunnels.create(account, vpc)
    target = str((await machine.info()).nic.address)  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as folder:
        async with beside("l", _LAPTOP) as laptop, laptop.sink():
            config = Path(folder, "bench.conf")
            config.touch(mode=0o600)
            config.write_text(replace(session, endpoint=str(_LAPTOP[1])).config)
            await laptop.run("wg-quick", "up", str(config))
            try:
                ways: dict[str, Callable[[int], Awaitable[float]]] = {
                    "vpn": lambda mib: laptop.throughput(target, mib),
                    "vpn_from_vm": lambda mib: throughput(machine, str(session.address), mib),
                }
                rates, first = {}, {}
                for name, send in ways.items():
                    await send(1)
                    short = sorted([await timed_mib(send) for _ in range(3)])
                    rates[f"{name}_throughput_mb_s"] = round(
                        sorted([await send(mib) for _ in range(3)])[1], 1
                    )
                    first[f"{name}_1_mib_ms"] = round(short[1], 1)
            finally:
                await laptop.run("wg-quick", "down", str(config))
    await here.tunnels.delete(account, vpc, session.id)
    return rates | first


async def timed_mib(send: Callable[[int], Awaitable[float]]) -> float:
    """Milliseconds that 1 MiB takes on a new connection."""
    return 1048.576 / await send(1)


async def measure(size: Size, samples: int, mib: int) -> Figures:
    with own_settings(size, pool=1) as plain:
        settings = plain.replace(allow_private=(_OUTSIDE,), wireguard_port=free_port())
        async with (
            beside("o", _OUTSIDE) as outside,
            outside.sink(),
            removed_at_the_end(settings),
            open_installation(settings) as here,
        ):
            await here.machines.template()
            results = await _measure(here, samples, mib)
            await clear(here.machines)
            return results


def free_port() -> int:
    """A UDP port for WireGuard that no other installation has."""
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("0.0.0.0", 0))
            if probe.getsockname()[1] < 55_000:
                return int(probe.getsockname()[1])


async def _measure(here: Installation, samples: int, mib: int) -> Figures:
    account = (await here.accounts.create("bench")).id
    vpc = (await here.networks.create(account, str(_VPC))).id
    say("creates with and without a NIC")
    results = await create_times(here, account, vpc, samples)
    machines = here.machines
    first, second = [
        await machines.create(Properties(account=account), nic=NicRequest(vpc)) for _ in range(2)
    ]
    target = str((await second.info()).nic.address)  # type: ignore[union-attr]
    await succeed(second.exec(["systemd-run", "--quiet", "python3", "-c", _SINK]))
    await asyncio.sleep(3)
    say("round trips")
    await round_trip(first, target, 20)
    ratios = []
    for _ in range(3):
        near = await round_trip(first, str(GATEWAY), 60)
        ratios.append((await round_trip(first, target, 60), near))
    across, near = sorted(ratios, key=lambda pair: pair[0] / pair[1])[1]
    say("throughput")
    (namespace_name,) = [path.name for path in Path("/run/netns").glob(f"stead-{here.settings.instance}-*")]
    rounds = []
    async with member(namespace_name) as native, native.sink():
        for _ in range(_ROUNDS):
            goals = (target, str(_MEMBER), str(_OUTSIDE[2]))
            rounds.append([await throughput(first, goal, mib) for goal in goals])
    inside, _, through_nat = sorted(rounds, key=lambda rates: rates[0] / rates[2])[_ROUNDS // 2]
    _, to_native, beside_it = sorted(rounds, key=lambda rates: rates[1] / rates[2])[_ROUNDS // 2]
    say("WireGuard")
    return {
        "host": await host_facts(machines),
        **results,
        "vpc_rtt_ms": across,
        "gateway_rtt_ms": near,
        "vpc_rtt_ratio": round(across / near, 2),
        "vpc_mb_s": round(inside, 1),
        "nat_mb_s": round(through_nat, 1),
        "vpc_throughput_ratio": round(inside / through_nat, 2),
        "vpc_forwarding_ratio": round(to_native / beside_it, 2),
        **await tunnel_figures(here, account, vpc, second, max(1, mib // 4)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", type=Size.parse, default=half_of_host(), help="size of each VM")
    parser.add_argument("--samples", type=int, default=15, help="creates of each kind")
    parser.add_argument("--mib", type=int, default=256, help="MiB of a transfer")
    options = parser.parse_args()
    report(run(measure(options.size, options.samples, options.mib)), as_json=options.json)


if __name__ == "__main__":
    main()
