"""Mapped domains of real VMs: waking under load, moves, many mappings, VMs that end during a request."""

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx2
import pytest
import pytest_asyncio

from stead import AsyncStead
from stead.domains.domains import Domains, Target
from stead.machines import Machine, State
from stead.machines.events import EventKind, MachineEvent
from stead.machines.records import Properties
from support.installations import Server
from support.waiting import until

_PORT = 8000
_SERVER = f"""
import http.server, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\\r\\none\\r\\n")
            while not open("/srv/released").read():
                time.sleep(0.1)
            self.wfile.write(b"3\\r\\ntwo\\r\\n0\\r\\n\\r\\n")
        else:
            self.answer(0)

    def do_POST(self):
        open("/srv/posting", "w").close()
        self.answer(len(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, received):
        body = f"{{open('/srv/name').read()}} {{received}}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *values):
        pass

class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256

Server(("", {_PORT}), Handler).serve_forever()
"""
_UNIT = """
[Service]
ExecStart=python3 /srv/server.py
[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class EdgeClient:
    """The edge in front of the installation of this run, as clients see it."""

    server: Server

    @property
    def domains(self) -> Domains:
        return self.server.installation.domains

    @property
    def context(self) -> ssl.SSLContext:
        folder = self.server.installation.settings.data / "edge"
        return ssl.create_default_context(cafile=str(folder / "root.crt"))

    async def map(self, name: str, machine: Machine, port: int = _PORT) -> None:
        await self.domains.map(self.server.account, name, machine.id, port)

    async def unmap(self, name: str) -> None:
        await self.domains.unmap(self.server.account, name)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator["Client"]:
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(verify=self.context, timeout=240, limits=limits) as http:
            yield Client(http, self.server.https_port)


@dataclass(frozen=True)
class Client:
    """Keeps its connections open."""

    http: httpx2.AsyncClient
    port: int

    async def ask(self, name: str, method: str = "GET", body: bytes = b"") -> tuple[int, str]:
        """The status, and the text or the code of an error."""
        answer = await self.http.request(
            method,
            f"https://127.0.0.1:{self.port}/",
            content=body,
            headers={"Host": name},
            extensions={"sni_hostname": name},
        )
        return answer.status_code, answer.text if answer.status_code == 200 else answer.json()["code"]


@pytest_asyncio.fixture(scope="module")
async def vms(server: Server) -> AsyncIterator[tuple[Machine, Machine]]:
    """Two VMs that serve on the same port and tell their names: `one` and `two`, a fork of it."""
    one = await server.installation.machines.create(Properties(account=server.account))
    await one.files().write("/srv/server.py", _SERVER.encode())
    await one.files().write("/srv/released", b"")
    await one.files().write("/srv/name", b"one")
    await one.files().write("/etc/systemd/system/site.service", _UNIT.encode())
    assert (await one.exec("systemctl enable --now site")).ok
    listening = f"until curl -sf http://127.0.0.1:{_PORT}/; do sleep 0.2; done"
    assert (await one.exec(listening, timeout=120)).ok
    (two,) = await one.fork()
    await two.files().write("/srv/name", b"two")
    yield one, two
    left = {info.id for info in await server.installation.machines.list()}
    for machine in (one, two):
        if machine.id in left:
            await machine.delete()


@pytest.fixture(scope="module")
def edge_client(server: Server) -> EdgeClient:
    return EdgeClient(server)


async def test_a_hundred_requests_wake_a_sleeping_vm_once(
    edge_client: EdgeClient, vms: tuple[Machine, Machine], events: list[MachineEvent]
) -> None:
    one, _ = vms
    await edge_client.map("sleeping.style.dev", one)
    await one.suspend()
    async with edge_client.client() as client:
        requests = [
            client.ask("sleeping.style.dev", "POST", b"x" * 1000)
            if number % 2
            else client.ask("sleeping.style.dev")
            for number in range(100)
        ]
        answers = Counter(await asyncio.gather(*requests))
    assert answers == {(200, "one 0"): 50, (200, "one 1000"): 50}
    woken = [event.reason for event in events if event.kind is EventKind.WOKEN]
    assert woken == ["request for a mapped domain"]
    assert (await one.info()).state is State.RUNNING
    await edge_client.map("none.style.dev", one, 9)
    async with edge_client.client() as client:
        assert await client.ask("none.style.dev") == (502, "CONNECTION_REFUSED")


async def test_a_push_wakes_a_sleeping_vm_through_its_trigger(
    server: Server, vms: tuple[Machine, Machine], events: list[MachineEvent]
) -> None:
    """To a URL with the port of HTTPS, and to a name of a zone that is someone else's outside."""
    one, _ = vms
    async with AsyncStead(base_url=server.url, api_key=server.key) as stead:
        vm = await stead.vms.find(one.id)
        await stead.domains.mappings.create("hook.style.dev", vm=one.id, port=_PORT)
        repo = await stead.git.repos.create()
        endpoints = f"{await vm.url(_PORT)}/hook", "https://hook.style.dev/hook"
        triggers = [await repo.triggers.create(endpoint) for endpoint in endpoints]
        await one.suspend()
        await repo.commits.create("first", {"a.txt": "a"})

        async def delivered() -> bool:
            found = [(await repo.triggers.deliveries(trigger)).deliveries for trigger in triggers]
            assert not [each.error for page in found for each in page if each.error]
            return all(page and page[0].response for page in found)

        await until(delivered, 120)
        await repo.delete()
    woken = [event.reason for event in events if event.kind is EventKind.WOKEN]
    assert woken == ["request for a mapped domain"]


async def test_a_mapping_moves_between_vms_without_a_dropped_request(
    edge_client: EdgeClient, vms: tuple[Machine, Machine]
) -> None:
    one, two = vms
    await edge_client.map("moving.style.dev", one)
    seen: Counter[tuple[int, str]] = Counter()
    stopped = False

    async def keep_asking(method: str, body: bytes) -> None:
        async with edge_client.client() as client:
            while not stopped:
                seen[await client.ask("moving.style.dev", method, body)] += 1

    def asked(name: str) -> int:
        return sum(count for (_, text), count in seen.items() if text.startswith(name))

    async with asyncio.TaskGroup() as group:
        for method, body in (("GET", b""), ("POST", b"x" * 20_000), ("POST", b"y")):
            group.create_task(keep_asking(method, body))
        for number in range(8):
            target, name = (two, "two") if number % 2 == 0 else (one, "one")
            if number == 4:
                # The requests wait for the wake.
                await target.suspend()
            before = asked(name)
            await edge_client.map("moving.style.dev", target)
            await until(lambda before=before, name=name: asked(name) > before + 3, 240)  # type: ignore[misc]
        stopped = True
    assert {status for status, _ in seen} == {200}
    await edge_client.unmap("moving.style.dev")


async def test_a_change_of_one_of_500_mappings_ends_no_other_connection(
    edge_client: EdgeClient, vms: tuple[Machine, Machine]
) -> None:
    one, _ = vms
    names = [f"n{number}.style.dev" for number in range(500)]
    for start in range(0, 500, 100):
        targets = [Target(name, _PORT) for name in names[start : start + 100]]
        await edge_client.domains.map_all(edge_client.server.account, one.id, targets)
    async with contextlib.AsyncExitStack() as stack:
        held = []
        for name in names[::50]:
            connection = await asyncio.open_connection(
                "127.0.0.1", edge_client.server.https_port, ssl=edge_client.context, server_hostname=name
            )
            stack.callback(connection[1].close)
            held.append((name, *connection))
        for name, reader, writer in held:
            assert await _ask_again(name, reader, writer) == (200, b"one 0")
        streaming = held[3]
        _send(streaming[0], streaming[2], "/stream")
        await asyncio.wait_for(streaming[1].readuntil(b"\r\none\r\n"), 120)
        await edge_client.unmap(names[0])
        for name, reader, writer in held:
            if name != streaming[0]:
                status, body = await _ask_again(name, reader, writer)
                assert (status, body) == (200, b"one 0") if name != names[0] else status == 404
        await one.files().write("/srv/released", b"yes")
        await asyncio.wait_for(streaming[1].readuntil(b"\r\ntwo\r\n"), 120)
    for name in names[1:]:
        await edge_client.unmap(name)


def _send(name: str, writer: asyncio.StreamWriter, path: str = "/") -> None:
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {name}\r\n\r\n".encode())


async def _ask_again(
    name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[int, bytes]:
    """Another request on an open connection."""
    _send(name, writer)
    async with asyncio.timeout(120):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(head.split(b" ")[1]), await reader.readexactly(length)


@pytest.mark.slow
async def test_an_upload_to_a_vm_that_ends_gets_an_error_and_the_next_request_is_served(
    edge_client: EdgeClient, vms: tuple[Machine, Machine]
) -> None:
    """The end is a kill, after which the next request starts the VM, and then a deletion."""
    one, two = vms
    host = "two.style.dev"
    await edge_client.map(host, two)
    async with edge_client.client() as client:
        assert await client.ask(host) == (200, "two 0")
        upload = await _upload(edge_client, host, two)
        await two.kill()
        assert await _refusal(*upload) == (502, "BAD_GATEWAY")
        assert (await two.info()).state is State.STOPPED, "the request is not sent again"

        async def served() -> bool:
            answer = await client.ask(host)
            assert answer in {(200, "two 0"), (502, "CONNECTION_REFUSED")}
            return answer[0] == 200

        await until(served, 240)
        upload = await _upload(edge_client, host, two)
        await two.delete()
        assert await _refusal(*upload) in {(502, "BAD_GATEWAY"), (404, "DOMAIN_NOT_MAPPED")}
        await until(lambda: edge_client.domains.route(host) is None, 60)
        assert await client.ask(host) == (404, "DOMAIN_NOT_MAPPED")
        await edge_client.map(host, one)
        assert await client.ask(host) == (200, "one 0")


async def _upload(
    edge_client: EdgeClient, host: str, machine: Machine
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send half of a body, and wait until the server in the VM reads it."""
    assert (await machine.exec("sync; rm -f /srv/posting")).ok
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", edge_client.server.https_port, ssl=edge_client.context, server_hostname=host
    )
    writer.write(f"POST / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 200000\r\n\r\n".encode())
    writer.write(b"x" * 100_000)
    await writer.drain()
    assert (await machine.exec("until test -e /srv/posting; do sleep 0.1; done", timeout=60)).ok
    return reader, writer


async def _refusal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, str]:
    """Send the other half; the status and the code of the error."""
    async with asyncio.timeout(120):
        writer.write(b"x" * 100_000)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read(65536)
    writer.close()
    return int(head.split(b" ")[1]), json.loads(body)["code"]
