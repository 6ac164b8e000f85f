"""The gate over HTTP, for Caddy alone: a listener on loopback of the taps' namespace."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Generator
from urllib.parse import parse_qs

import uvicorn
from starlette.types import Receive, Scope, Send

from stead.edge.certificates import CertificatePermission
from stead.edge.gate import Gate, GateRequest
from stead.edge.pages import Refusal
from stead.guest.watchdog import works_on
from stead.tasks import in_background

ASK_PATH = "/ask"
ADMIT_PATH = "/admit"
HOST_HEADER = "X-Stead-Host"
ERROR_HEADER = "X-Stead-Error"
CLIENT_HEADER = "X-Stead-Client"
UPSTREAM_HEADER = "X-Stead-Upstream"
_BACKLOG = 1024
_MAX_HOST = 255


class GateApp:
    def __init__(self, gate: Gate, permission: CertificatePermission) -> None:
        self._gate = gate
        self._permission = permission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == ADMIT_PATH:
            await self._admit(scope, receive, send)
        elif scope["path"] == ASK_PATH:
            names = parse_qs(scope["query_string"].decode("latin-1")).get("domain", [""])
            allowed = self._permission.allows(names[0])
            await _answer(send, 200 if allowed else 403)
        else:
            await _answer(send, 404)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: dict[bytes, str] = {name: value.decode("latin-1") for name, value in scope["headers"]}

        def header(name: str) -> str:
            return headers.get(name.lower().encode(), "")

        request = GateRequest(
            host=header(HOST_HEADER),
            browser="text/html" in header("Accept").lower(),
            error=header(ERROR_HEADER) or None,
            client=header(CLIENT_HEADER),
        )
        async with (
            in_background(_admit(self._gate, request), "admit a request") as admitting,
            in_background(_disconnected(receive), "watch for the end of a request") as leaving,
        ):
            await asyncio.wait({admitting, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not admitting.done():
                return
            decision = admitting.result()
        if isinstance(decision, Refusal):
            body, kind = decision.body(as_page=request.browser)
            await _answer(send, decision.status, [*decision.headers(), ("content-type", kind)], body)
        else:
            await _answer(send, 200, [(UPSTREAM_HEADER, decision)])


async def _admit(gate: Gate, request: GateRequest) -> str | Refusal:
    works_on(f"request for {request.host[:_MAX_HOST]}")
    return await gate.admit(request)


async def _disconnected(receive: Receive) -> None:
    """Caddy disconnects when the client does, unless it has not read the request's body to its end."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(
    send: Send, status: int, headers: list[tuple[str, str]] | None = None, body: bytes = b""
) -> None:
    found = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers or []]
    found.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": found})
    await send({"type": "http.response.body", "body": body})


class _GateServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are handled by the program that this server is a part of."""
        yield


@contextlib.asynccontextmanager
async def serving(
    gate: Gate, permission: CertificatePermission, listening: socket.socket
) -> AsyncIterator[None]:
    """Serve the gate during a block."""
    config = uvicorn.Config(
        GateApp(gate, permission),
        http="httptools",
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=1,
    )
    server = _GateServer(config)
    async with in_background(server.serve([listening]), "gate of the edge") as served:
        try:
            yield
        finally:
            server.should_exit = True
            await served
