"""The MCP server and its two transports: standard input and output, and streamable HTTP."""

import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import httpx2
import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from stead.mcp import commands, files, repositories, vms
from stead.mcp.calls import Clients
from stead.sdk import AsyncStead, ServerUnreachable, SteadException, Unauthorized
from stead.sdk.requests import version
from stead.sdk.transport import LIMITS

PATH = "/mcp"
_INSTRUCTIONS = """\
Stead runs Linux VMs and hosts Git repositories. Create a VM with vm_create, run commands with exec, start \
servers with process_start, and get a URL of a port with port_url. A suspended VM wakes when a tool uses it. \
vm_fork copies a running VM with its memory. Delete VMs that are no longer needed with vm_delete."""


def build_server(clients: Clients) -> MCPServer[Clients]:
    """The server with all tools. They call the API with the client that `clients` has for each call."""

    @contextlib.asynccontextmanager
    async def lifespan(_: MCPServer[Clients]) -> AsyncIterator[Clients]:
        yield clients

    return MCPServer(
        "stead",
        title="Stead",
        instructions=_INSTRUCTIONS,
        version=version(),
        tools=[*vms.TOOLS, *commands.TOOLS, *files.TOOLS, *repositories.TOOLS],
        lifespan=lifespan,
        log_level="WARNING",
    )


@dataclass(frozen=True)
class OneCaller:
    """All calls have the same credentials."""

    stead: AsyncStead

    def client(self, headers: Mapping[str, str] | None) -> AsyncStead:
        return self.stead


@dataclass(frozen=True)
class CallersByToken:
    """Each call has the bearer token of its HTTP request. Connections are shared, credentials are not."""

    http: httpx2.AsyncClient
    url: str | None

    def client(self, headers: Mapping[str, str] | None) -> AsyncStead:
        token = bearer_token(headers or {})
        if token is None:
            raise ValueError("the request has no bearer token")
        return AsyncStead(token, base_url=self.url, http_client=self.http)


def bearer_token(headers: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


class RequireToken:
    """ASGI middleware: refuses requests whose token the API does not accept.

    The API checks the token again at every call. Here it is checked so that a client without access learns
    that when it connects.
    """

    def __init__(self, app: ASGIApp, callers: CallersByToken) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := await self._refusal(Headers(scope=scope))) is not None:
            status, text = refusal
            await _refuse(send, status, text)
        else:
            await self._app(scope, receive, send)

    async def _refusal(self, headers: Headers) -> tuple[int, str] | None:
        if bearer_token(headers) is None:
            return 401, "no token: send `Authorization: Bearer` with an API key or the token of an identity"
        try:
            await self._callers.client(headers).whoami()
        except Unauthorized as error:
            return 401, str(error)
        except ServerUnreachable as error:
            return 503, str(error)
        except (SteadException, ValueError) as error:
            return 502, str(error)
        return None


async def _refuse(send: Send, status: int, text: str) -> None:
    body = json.dumps(
        {"error": "invalid_token" if status == 401 else "unavailable", "error_description": text}
    )
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body.encode())).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer error="invalid_token"'))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body.encode()})


async def serve_stdio(stead: AsyncStead) -> None:
    """Serve one client over standard input and output, until it closes them.

    A key that the server refuses is an error at once: the client would start, and each of its calls fail.
    """
    try:
        await stead.whoami()
    except ServerUnreachable as error:
        print(f"stead mcp: {error}: tools will fail until it answers", file=sys.stderr)
    await build_server(OneCaller(stead)).run_stdio_async()


def http_app(http: httpx2.AsyncClient, url: str | None) -> ASGIApp:
    """The server as an ASGI application. It keeps no sessions: every request stands for itself."""
    callers = CallersByToken(http, url)
    app = build_server(callers).streamable_http_app(
        streamable_http_path=PATH,
        stateless_http=True,
        # DNS rebinding gains nothing where every request needs a token that no browser sends by itself; and
        # the names under which a proxy reaches this server are not known here.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return RequireToken(app, callers)


async def serve_http(host: str, port: int, url: str | None) -> None:
    """Serve any number of clients over HTTP, until SIGINT or SIGTERM."""
    logging.getLogger("mcp").setLevel(logging.WARNING)
    async with httpx2.AsyncClient(limits=LIMITS) as http:
        config = uvicorn.Config(
            http_app(http, url),
            host=host,
            port=port,
            log_level="warning",
            timeout_graceful_shutdown=5,
            lifespan="on",
        )
        await uvicorn.Server(config).serve()
