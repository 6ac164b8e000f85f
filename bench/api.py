"""What the HTTP API costs: beside the engine in the same run, so that the guest's own time cancels out."""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
from internals import store_of
from measuring import (
    Figure,
    clear,
    figure,
    host_facts,
    installation,
    own_settings,
    report,
    run,
    say,
    serving,
    since,
    succeed,
)

from stead.api.server import running
from stead.host.template_builder import machine_slots
from stead.machines import Machine, Machines, State
from stead.machines.records import Properties
from stead.settings import Size
from stead.store.machines import MachineRow

CONNECTIONS = 16
LISTED = 1000
_WHOLE_ANSWER = 16 << 20
"""More than any answer has: a reader that stops in the middle of one would be measured too."""


def request(url: str, method: str, path: str, key: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: {url}\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Client:
    """One connection that is kept, without a library whose own time would be measured."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, url: str) -> AsyncIterator["Client"]:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=_WHOLE_ANSWER)
        try:
            yield cls(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def call(self, sent: bytes) -> bytes:
        self._writer.write(sent)
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a call failed: {head!r}")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return await self._reader.readexactly(int(length.split(b":")[1]))


async def exec_overhead(client: Client, sent: bytes, machine: Machine, samples: int) -> dict[str, Figure]:
    """The same command through the engine and over HTTP, in turns."""
    engine, http, added = [], [], []
    for _ in range(samples):
        start = time.perf_counter()
        await succeed(machine.exec("true"))
        engine.append(since(start))
        start = time.perf_counter()
        answer = json.loads(await client.call(sent))
        http.append(since(start))
        if answer["statusCode"] != 0:
            raise RuntimeError(f"a command failed: {answer}")
        added.append(http[-1] - engine[-1])
    return {
        "engine_exec_ms": figure(engine),
        "http_exec_ms": figure(http),
        "exec_http_overhead_ms": figure(added),
    }


async def create_overhead(
    client: Client, url: str, key: str, account: str, machines: Machines, samples: int
) -> dict[str, Figure]:
    engine, http, added = [], [], []
    for _ in range(samples):
        start = time.perf_counter()
        machine = await machines.create(Properties(account=account))
        engine.append(since(start))
        await machine.delete()
        start = time.perf_counter()
        made = json.loads(await client.call(request(url, "POST", "/v1/vms", key, b"{}")))
        http.append(since(start))
        await machines.delete(made["id"])
        added.append(http[-1] - engine[-1])
    return {
        "engine_create_ms": figure(engine),
        "http_create_ms": figure(http),
        "create_http_overhead_ms": figure(added),
    }


async def list_many(client: Client, sent: bytes, machines: Machines, account: str, samples: int) -> Figure:
    """A list of a thousand machines; they are rows only, and go before anyone takes them for more."""
    store = store_of(machines)
    rows = [
        MachineRow(
            id=f"b{number:019d}",
            name=f"machine {number}",
            state=State.STOPPED,
            step=None,
            vcpus=2,
            memory_mib=1024,
            disk_gib=20,
            slot=machine_slots()[-1 - number],
            template="none",
            hostname="none",
            guest_machine_id="0" * 32,
            account=account,
        )
        for number in range(LISTED)
    ]
    try:
        for row in rows:
            await store.insert(row)
        times = []
        for _ in range(samples):
            start = time.perf_counter()
            answer = await client.call(sent)
            times.append(since(start))
        if json.loads(answer)["totalCount"] < LISTED:
            raise RuntimeError("the list is not whole")
        return figure(times)
    finally:
        for row in rows:
            await store.delete(row.id)


async def many_at_once(url: str, key: str, machines: list[Machine]) -> dict[str, Any]:
    """Two hundred commands at once over four machines."""
    limits = httpx2.Limits(max_connections=200)
    headers = {"Authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=600) as client:

        async def one(number: int) -> bool:
            path = f"/v1/vms/{machines[number % len(machines)].id}/exec-await"
            answer = await client.post(path, json={"command": f"echo {number}"})
            return answer.status_code == 200 and answer.json()["stdout"] == f"{number}\n"

        start = time.perf_counter()
        right = await asyncio.gather(*(one(number) for number in range(200)))
        return {"concurrent_exec_200_ok": sum(right), "concurrent_exec_200_ms": round(since(start), 1)}


async def served(size: Size) -> dict[str, Any]:
    """A server in a process of its own, as users run it: how many calls it answers, what memory it takes."""
    with own_settings(size, pool=0) as settings:
        async with serving(settings) as server:
            rps = await _health(server.url, 5.0)
            status = Path(f"/proc/{server.pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return {"healthz_rps": rps, "rss_server_mb": round(int(resident.split()[1]) / 1024, 1)}


async def _health(url: str, seconds: float) -> float:
    sent = request(url, "GET", "/healthz", "")

    async def calls(end: float) -> int:
        count = 0
        async with Client.connected(url) as client:
            while time.perf_counter() < end:
                await client.call(sent)
                count += 1
        return count

    start = time.perf_counter()
    counts = await asyncio.gather(*(calls(start + seconds) for _ in range(CONNECTIONS)))
    return round(sum(counts) / (time.perf_counter() - start), 1)


async def measure(size: Size, samples: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    async with installation(size, pool=0) as opened:
        machines = opened.machines
        results["host"] = await host_facts(machines)
        settings = opened.settings.replace(listen="127.0.0.1:0")
        account = (await opened.accounts.default()).id
        _, key = await opened.accounts.create_key(account)
        async with running(settings, opened) as url, Client.connected(url) as client:
            many = [await machines.create(Properties(account=account)) for _ in range(4)]
            path = f"/v1/vms/{many[0].id}/exec-await"
            body = json.dumps({"command": "true", "terminal": None, "timeoutMs": None}).encode()
            sent = request(url, "POST", path, key, body)
            say("commands through the engine and over HTTP, in turns")
            await exec_overhead(client, sent, many[0], 10)
            results |= await exec_overhead(client, sent, many[0], samples)
            say("two hundred commands at once")
            results |= await many_at_once(url, key, many)
            say(f"a list of {LISTED} machines")
            listing = request(url, "GET", "/v1/vms", key)
            results["list_1000_ms"] = await list_many(client, listing, machines, account, 20)
            say("creates through the engine and over HTTP, in turns")
            results |= await create_overhead(client, url, key, account, machines, max(5, samples // 10))
        await clear(machines)
    say("a server in a process of its own")
    return results | await served(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--size", default="2x1Gx20G", help="size of the machines")
    parser.add_argument("--samples", type=int, default=400, help="commands to measure")
    arguments = parser.parse_args()
    results = run(measure(Size.parse(arguments.size), arguments.samples))
    report(results, as_json=arguments.json)


if __name__ == "__main__":
    main()
