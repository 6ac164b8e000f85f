"""The FastAPI application: routers, error handlers, middleware."""

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError, WebSocketRequestValidationError
from fastapi.routing import APIWebSocketRoute
from pydantic import ConfigDict
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from stead.api import (
    account,
    builds,
    creation,
    domains,
    errors,
    forward,
    github_sync,
    guests,
    identities,
    logs,
    metrics,
    networks,
    piped_exec,
    processes,
    pty,
    recordings,
    repo_search,
    repos,
    snapshots,
    sockets,
    ssh,
    systemd,
    tickets,
    triggers,
    unimplemented,
    vms,
    watching,
)
from stead.api.admission import Admission
from stead.api.background import AFTER_HEADER, ID_HEADER
from stead.api.callers import TOKEN_HEADER, USER_HEADER, AnyCaller, Authentication
from stead.api.calls import TRACE_HEADER, Calls
from stead.api.declared import BodyLimit, body_limits
from stead.api.dependencies import MachinesDep, SigningDep, SshDep
from stead.api.documentation import DESCRIPTION, Api, add_documentation
from stead.api.preflights import CountedPreflights
from stead.api.repeatable import KEY_HEADER
from stead.api.smart_http import SmartHttp, git_body_limit
from stead.api.wire import Wire
from stead.api.wire.unknown import HEADER as UNKNOWN_KEYS_HEADER
from stead.errors import SteadError
from stead.installation_parts import Installation, SshState

_HEADERS = (
    "authorization",
    "content-type",
    "user-agent",
    TOKEN_HEADER.lower(),
    USER_HEADER.lower(),
    AFTER_HEADER,
    KEY_HEADER.lower(),
    UNKNOWN_KEYS_HEADER,
    "x-freestyle-sdk",
    "x-freestyle-sdk-version",
    "x-freestyle-request-url",
)


# The order matters: /v1/vms/snapshots must not match /v1/vms/{vm_id}.
_ROUTERS = (
    creation.router,
    snapshots.router,
    builds.router,
    vms.router,
    guests.router,
    watching.router,
    recordings.router,
    systemd.router,
    identities.router,
    pty.router,
    processes.router,
    piped_exec.router,
    forward.router,
    tickets.router,
    ssh.router,
    repos.router,
    repo_search.router,
    triggers.router,
    github_sync.router,
    logs.router,
    account.router,
    domains.router,
    networks.router,
    unimplemented.router,
)


_ROUTES = [route for router in _ROUTERS for route in router.routes]
_declared_limit = body_limits(_ROUTES)


def body_limit(scope: Scope) -> BodyLimit:
    """What may be read into memory of the body of a request."""
    return git_body_limit(scope) or _declared_limit(scope)


class Health(Wire):
    status: str
    version: str
    ssh: SshState
    """State of the SSH gateway; a failed one is tried again."""


def create_app(installation: Installation | None = None) -> FastAPI:
    """The routes of an open installation; without one it can only make its OpenAPI description."""
    app = Api(
        title="Stead",
        version=version("stead"),
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_failures(),
    )
    app.state.installation = installation
    app.own_routes = _ROUTES
    for router in _ROUTERS:
        app.include_router(router)
    _add_upgrade_hints(app)
    app.include_router(sockets.router)
    _add_own_pages(app)
    app.add_exception_handler(errors.ApiError, errors.on_api_error)
    app.add_exception_handler(SteadError, errors.on_product_error)
    app.add_exception_handler(RequestValidationError, errors.on_invalid)
    app.add_exception_handler(WebSocketRequestValidationError, errors.on_invalid)
    app.add_exception_handler(HTTPException, errors.on_http_error)
    app.add_exception_handler(Exception, errors.on_anything)
    return app


def _add_upgrade_hints(app: FastAPI) -> None:
    """Answer a plain GET of a WebSocket: often a proxy on the way has removed the `Upgrade` header."""

    async def upgrade_required(caller: AnyCaller) -> None:
        text = "this path is a WebSocket: connect with a WebSocket client, and let proxies pass `Upgrade`"
        raise errors.ApiError("BAD_REQUEST", text, 426, headers={"Upgrade": "websocket"})

    websockets = (pty, processes, piped_exec, forward)
    for route in (each for module in websockets for each in module.router.routes):
        if isinstance(route, APIWebSocketRoute):
            app.add_api_route(route.path, upgrade_required, methods=["GET"], include_in_schema=False)


def _add_own_pages(app: FastAPI) -> None:
    @app.get("/healthz", tags=["server"])
    async def healthz(ssh: SshDep) -> Health:
        """Health check. `ssh` is the state of the SSH gateway: a server without it has the status `ok`."""
        return Health(status="ok", version=app.version, ssh=ssh.state)

    @app.get("/metrics", include_in_schema=False)
    async def prometheus(machines: MachinesDep) -> Response:
        return await metrics.exposition(machines)

    @app.get("/.well-known/jwks.json", tags=["server"])
    async def keys(signing: SigningDep) -> dict[str, Any]:
        """Get the public keys for webhook signatures, as a JWK set."""
        return signing.jwks()

    add_documentation(app)


class ErrorBody(Wire):
    """Every error: `code` for programs, `message` for people, and further fields for some codes."""

    code: str
    error: str
    message: str
    description: str

    model_config = ConfigDict(extra="allow")


def _failures() -> dict[int | str, dict[str, Any]]:
    answers = {"4XX": "The request was refused.", "5XX": "The server failed."}
    return {status: {"model": ErrorBody, "description": text} for status, text in answers.items()}


def with_middleware(app: FastAPI, here: Installation) -> tuple[ASGIApp, Calls]:
    """The routes with their middleware: authentication, git over HTTP, trace ids, limits, CORS."""
    settings = here.settings
    gate = Authentication(app, here)
    git = SmartHttp(gate, here.callers, here.repos, here.access, here.serving)
    admission = Admission.of(settings)
    calls = Calls(git, admission, body_limit)
    cors = CORSMiddleware(
        calls,
        allow_origins=settings.origins,
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=_HEADERS,
        expose_headers=[TRACE_HEADER, ID_HEADER],
        max_age=600,
    )
    return CountedPreflights(cors, admission), calls
