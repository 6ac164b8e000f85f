"""The edge without VMs: a real Caddy in a network namespace, and namespaces that stand for VMs."""

import asyncio
import contextlib
import json
import secrets
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as Endpoint
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from stead.addresses import GATEWAY, data_tap, machine_address
from stead.edge.edge import Edge, open_edge
from stead.edge.listeners import PublicSockets, bind_public
from stead.edge.routes import AwakeVm
from stead.errors import MachineNotFound
from stead.host.authority import Authority
from stead.host.commands import run
from stead.host.firewall import namespace_rules
from stead.machines.processes import Eviction, EvictionKind
from stead.settings import Settings
from stead.tasks import in_background
from support.links import Side, ip, namespace, plug_in
from support.waiting import until


@dataclass(frozen=True)
class Mapping:
    machine: str
    port: int
    domain: str
    account: str = "account"


@dataclass
class Mappings:
    """Host names that are mapped."""

    found: dict[str, Mapping] = field(default_factory=dict)
    lookups: int = 0

    def route(self, hostname: str) -> Mapping | None:
        self.lookups += 1
        return self.found.get(hostname) or self.found.get(f"*.{hostname.partition('.')[2]}")


@dataclass(eq=False)
class FakeVm:
    """A namespace behind a link that stands for a VM's tap."""

    id: str
    address: IPv4Address
    side: Side
    up: bool = True
    wakes: int = 0
    waking: asyncio.Event = field(default_factory=asyncio.Event)
    """A wake waits for it."""
    on_wake: Callable[[], Any] = lambda: None
    eviction: "asyncio.Future[Eviction]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def __post_init__(self) -> None:
        self.waking.set()

    def end_run(self) -> None:
        """As a suspend does."""
        self.up = False
        self.eviction.set_result(Eviction(EvictionKind.SUSPENDED, "the VM was suspended"))
        self.eviction = asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def serving(self, app: ASGIApp, port: int) -> AsyncIterator[None]:
        async with serving(app, await self.side.listener("0.0.0.0", port)):
            yield


class FakeVms:
    def __init__(self) -> None:
        self.found: dict[str, FakeVm] = {}

    def is_up(self, machine: str) -> bool:
        vm = self.found.get(machine)
        return vm is not None and vm.up

    async def wake(self, machine: str) -> AwakeVm:
        vm = self.found.get(machine)
        if vm is None:
            raise MachineNotFound(machine)
        if not vm.up:
            vm.wakes += 1
            await vm.waking.wait()
            vm.on_wake()
            vm.up = True
        return AwakeVm(vm.address, vm.eviction)

    async def ended(self, machine: str) -> None: ...


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, *sockets: socket.socket) -> AsyncIterator[None]:
    config = uvicorn.Config(
        app, loop="none", lifespan="off", log_config=None, ws="websockets-sansio", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    async with in_background(server._serve(list(sockets))) as served:
        await until(lambda: server.started, 60)
        try:
            yield
        finally:
            server.should_exit = True
            await served
            for each in sockets:
                each.close()


def echo_app(name: str) -> ASGIApp:
    """Says who it is and what it received."""

    async def echo(request: Request) -> Response:
        body = await request.body()
        return JSONResponse(
            {
                "name": name,
                "method": request.method,
                "path": request.scope["raw_path"].decode(),
                "headers": [[key.decode(), value.decode("latin-1")] for key, value in request.headers.raw],
                "length": len(body),
            }
        )

    async def events(request: Request) -> Response:
        async def stream() -> AsyncIterator[bytes]:
            yield b"data: first\n\n"
            await asyncio.sleep(60)

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def chat(websocket: WebSocket) -> None:
        await websocket.accept()
        async for message in websocket.iter_text():
            await websocket.send_text(f"{name}: {message}")

    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(
        routes=[
            Endpoint("/events", events),
            WebSocketRoute("/chat", chat),
            Endpoint("/{path:path}", echo, methods=methods),
        ]
    )


@dataclass(frozen=True)
class EdgeWithNamespaces:
    settings: Settings
    edge: Edge
    public: PublicSockets
    side: Side
    """The taps' namespace."""
    vms: FakeVms
    mappings: Mappings
    stack: contextlib.AsyncExitStack
    authority: Authority

    @property
    def root(self) -> Path:
        return self.settings.data / "edge" / "root.crt"

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cadata=self.authority.certificate.decode())

    @property
    def asked(self) -> int:
        """How often mappings were looked up: by the gate, or after a change."""
        return self.mappings.lookups

    def add_vm(self, machine: str) -> FakeVm:
        slot = len(self.vms.found)
        side = self.stack.enter_context(namespace(f"vm{secrets.token_hex(3)}"))
        address = machine_address(slot)
        plug_in(self.side.name, data_tap(slot), side, str(address))
        vm = self.vms.found[machine] = FakeVm(machine, address, side)
        return vm

    def map(self, host: str, machine: str, port: int = 80, account: str = "account") -> None:
        self.mappings.found[host] = Mapping(machine, port, host, account)
        self.edge.mappings_changed([host])

    def unmap(self, host: str) -> None:
        del self.mappings.found[host]
        self.edge.mappings_changed([host])

    async def curl(self, url: str, *options: str, port: int | None = None, timeout: float = 30) -> "Answer":
        """Real curl, which trusts the installation's CA alone."""
        target = port or self.public.https_port
        command = ["curl", "-sS", "-i", "--cacert", str(self.root), "--max-time", str(timeout)]
        done = await asyncio.create_subprocess_exec(
            *command,
            *("--connect-to", f"::127.0.0.1:{target}"),
            *options,
            url,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        stdout, stderr = await done.communicate()
        return Answer.parse(stdout, done.returncode or 0, stderr.decode())

    async def in_turn(self, *requests: Sequence[str], source: FakeVm | None = None) -> list[str]:
        """`STATUS CONNECTS` of requests of one curl, here or in a VM: 1 where it had to connect."""
        target = f"127.0.0.1:{self.public.https_port}" if source is None else f"{GATEWAY}:443"
        each = ["-sS", "--cacert", str(self.root), "--connect-to", f"::{target}", "-o", "/dev/null"]
        each += ["-w", "%{http_code} %{num_connects}\\n"]
        command = [] if source is None else ["ip", "netns", "exec", source.side.name]
        done = await asyncio.create_subprocess_exec(
            *(*command, "curl"),
            *[word for request in requests for word in ("--next", *each, *request)][1:],
            stdout=asyncio.subprocess.PIPE,
        )
        return (await done.communicate())[0].decode().splitlines()

    @contextlib.asynccontextmanager
    async def connected(
        self, server_name: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A TLS connection for HTTP/1.1."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.public.https_port, ssl=self.context, server_hostname=server_name
        )
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def raw(self, sent: bytes, server_name: str, timeout: float = 10) -> bytes:
        """Send bytes over TLS and read to the end, or to the time-out."""
        found = b""
        async with self.connected(server_name) as (reader, writer):
            writer.write(sent)
            await writer.drain()
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(timeout):
                    while data := await reader.read(65536):
                        found += data
        return found


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    exit_code: int
    error: str

    @classmethod
    def parse(cls, output: bytes, exit_code: int, error: str) -> "Answer":
        status, headers, body = 0, dict[str, str](), output
        while body.startswith(b"HTTP/"):
            head, _, body = body.partition(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            status = int(lines[0].split()[1])
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
            }
        return cls(status, headers, body, exit_code, error)

    def json(self) -> Any:
        return json.loads(self.body)

    def received(self) -> dict[str, list[str]]:
        """The headers that the echo in a VM received."""
        found: dict[str, list[str]] = {}
        for name, value in self.json()["headers"]:
            found.setdefault(name, []).append(value)
        return found


@contextlib.asynccontextmanager
async def edge_with_namespaces(
    before: Callable[[Side], contextlib.AbstractAsyncContextManager[dict[str, Any]]] | None = None,
    api: Callable[[socket.socket], contextlib.AbstractAsyncContextManager[object]] | None = None,
    **changes: Any,
) -> AsyncIterator[EdgeWithNamespaces]:
    """A running edge, with an API that echoes unless `api` serves another one on a socket.

    `before` runs in the taps' namespace before the edge is opened; yields changes of settings.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stead-test-", dir="/var/tmp")))
        folder.chmod(0o711)
        side = stack.enter_context(namespace(f"edge{secrets.token_hex(3)}"))
        ip("-n", side.name, "addr", "add", f"{GATEWAY}/32", "dev", "lo")
        rules = namespace_rules("up0", [], [], 65_536)
        await run("ip", "netns", "exec", side.name, "nft", "-f", "-", stdin=rules.encode())
        if before is not None:
            changes |= await stack.enter_async_context(before(side))
        (folder / "data").mkdir(mode=0o711)
        (folder / "data").chmod(0o711)
        settings = Settings(data=folder / "data", runtime=folder / "run", https_listen="127.0.0.1:0")
        settings = settings.replace(**({"http_listen": "127.0.0.1:0"} | changes))
        vms, mappings = FakeVms(), Mappings()
        public = stack.enter_context(bind_public(settings))
        edge = await stack.enter_async_context(open_edge(settings, vms, mappings, public, side.path))
        inner = await stack.enter_async_context(contextlib.AsyncExitStack())
        serve_api = api or (lambda listening: serving(echo_app("api"), listening))
        await inner.enter_async_context(serve_api(edge.api))
        yield EdgeWithNamespaces(settings, edge, public, side, vms, mappings, inner, Authority.open(settings))
