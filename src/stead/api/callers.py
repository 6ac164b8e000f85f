"""Authentication and authorization of calls: API keys, identity tokens, permissions on VMs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated
from urllib.parse import parse_qs, urlsplit

from fastapi import Depends, Header, Path
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from stead.api.calls import Call
from stead.api.dependencies import IdentitiesDep, MachinesDep
from stead.api.errors import ApiError
from stead.errors import MachineNotFound, SnapshotNotFound
from stead.github.app import WEBHOOKS
from stead.identity.callers import Caller, Callers
from stead.identity.identities import Identities
from stead.identity.tickets import LIFETIME, Ticket
from stead.installation_parts import Installation
from stead.machines import Machine, MachineInfo, Machines
from stead.machines.snapshots import SnapshotInfo

TOKEN_HEADER = "X-Freestyle-Identity-Access-Token"  # noqa: S105  # a header's name
USER_HEADER = "X-Freestyle-Vm-Linux-User-Id"

VmId = Annotated[str, Path(description="VM id.")]


_DOCS = ("/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/favicon-32x32.png")
UNCOUNTED = frozenset({"/healthz", "/metrics"})
"""Answered without a place, whatever else the server does."""
PUBLIC = frozenset({"/healthz", "/metrics", "/openapi.json", "/.well-known/jwks.json", WEBHOOKS, *_DOCS})


class Authentication:
    """ASGI middleware: authenticates a call by API key or token before its body is read.

    A WebSocket is authenticated before the upgrade, by the same headers or by a ticket in its URL.
    """

    def __init__(self, app: ASGIApp, here: Installation) -> None:
        self._app = app
        self._here = here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["state"]["call"]
        if scope["type"] == "http" and scope["path"] in PUBLIC:
            if scope["path"] in UNCOUNTED:
                call.count_health()
            else:
                call.count_anonymous()
                await (call.admit_webhook() if scope["path"] == WEBHOOKS else call.admit_anonymous())
            await self._app(scope, receive, send)
            return
        try:
            caller = await self._authenticate(scope)
        except ApiError:
            call.count_anonymous()
            raise
        call.require(partial(check_credential, self._here.callers, scope["state"]["credential"]))
        if scope["type"] == "http":
            await call.admit(caller)
            await self._app(scope, receive, send)
            return
        call.count(caller)
        _check_origin(Headers(scope=scope), self._here.settings.origins)
        async with self._here.sockets.hold(caller.account, caller.identity):
            await self._app(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> Caller:
        """The caller, by API key or identity token, from either of the two headers; else by ticket."""
        headers, state = Headers(scope=scope), scope["state"]
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        secret = secret or headers.get(TOKEN_HEADER, "").strip()
        if not secret and scope["type"] == "websocket":
            state["ticket"] = ticket = self._use_ticket(scope)
            secret = "" if ticket is None else ticket.credential
        if not secret:
            wanted = f"no API key (Authorization: Bearer ...) and no identity token ({TOKEN_HEADER}) given"
            raise _unauthorized(scope, wanted)
        call: Call = state["call"]
        call.check_unproven(self._here.callers.was_valid(secret))
        caller = await self._here.callers.authenticate(secret)
        if caller is None:
            raise _unauthorized(scope, "unknown or revoked API key or token")
        state["caller"], state["credential"] = caller, secret
        return caller

    def _use_ticket(self, scope: Scope) -> Ticket | None:
        given = parse_qs(scope["query_string"].decode("latin-1")).get("ticket")
        if given is None:
            return None
        ticket = self._here.tickets.use(given[0])
        if ticket is None:
            raise _unauthorized(scope, f"unknown, used or expired ticket (valid once, for {LIFETIME:g} s)")
        if ticket.target != scope["path"]:
            raise ApiError("FORBIDDEN", f"this ticket is for {ticket.target}")
        return ticket


async def check_credential(callers: Callers, secret: str) -> None:
    """Raise an error if a key or token was revoked."""
    if await callers.authenticate(secret) is None:
        raise ApiError("UNAUTHORIZED_ERROR", "the API key or token was revoked")


def _check_origin(headers: Headers, allowed: Sequence[str]) -> None:
    """Browsers let any page open a WebSocket to any server, and name the page's origin."""
    origin = headers.get("origin")
    if origin is None or "*" in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc != headers.get("host"):
        raise ApiError("FORBIDDEN", f"origin {origin} not allowed to open WebSockets (STEAD_ORIGINS)")


def _unauthorized(scope: Scope, reason: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError("UNAUTHORIZED_ERROR", reason, headers=headers, route=scope["path"], reason=reason)


async def current_caller(connection: HTTPConnection) -> Caller:
    caller: Caller = connection.scope["state"]["caller"]
    return caller


AnyCaller = Annotated[Caller, Depends(current_caller)]


async def owner(caller: AnyCaller) -> Caller:
    """A caller with an API key; identity tokens may use VMs and not manage them."""
    if caller.identity is not None:
        raise ApiError("FORBIDDEN", "not allowed with an identity token: use an API key")
    return caller


Owner = Annotated[Caller, Depends(owner)]


async def owned_vm(vm_id: VmId, caller: Owner, machines: MachinesDep) -> MachineInfo:
    """A VM of the caller's account. VMs of other accounts are answered like ones that do not exist."""
    return await find_owned(machines, caller, vm_id)


async def find_owned(machines: Machines, caller: Caller, vm_id: str) -> MachineInfo:
    info = await machines.info(vm_id)
    if not info.belongs_to(caller.account):
        raise MachineNotFound(vm_id)
    return info


OwnedVm = Annotated[MachineInfo, Depends(owned_vm)]


async def usable_vm(
    vm_id: VmId,
    caller: AnyCaller,
    connection: HTTPConnection,
    machines: MachinesDep,
    identities: IdentitiesDep,
) -> MachineInfo:
    """A VM of the caller's account, granted to the caller's identity if it has one.

    The use of a deleted VM with `recreate` creates it again, which is for the account: an identity does not
    see it until then.
    """
    info = await find_owned(machines, caller, vm_id)
    if caller.identity is not None:
        if info.is_deleted:
            raise MachineNotFound(vm_id)
        await _check_grant(caller.identity, vm_id, identities)
        call_of(connection).require(partial(_check_grant, caller.identity, vm_id, identities))
    return info


async def _check_grant(identity: str, vm_id: str, identities: Identities) -> None:
    if await identities.permission(identity, vm_id) is None:
        raise MachineNotFound(vm_id)


UsableVm = Annotated[MachineInfo, Depends(usable_vm)]


@dataclass(frozen=True)
class GuestAccess:
    """A VM to work in, and the Linux user to act as; None is root, who sees what all users started."""

    info: MachineInfo
    machine: Machine
    user: str | None


async def guest(
    vm_id: VmId,
    caller: AnyCaller,
    connection: HTTPConnection,
    identities: IdentitiesDep,
    machines: MachinesDep,
    user: Annotated[
        str | None, Header(alias=USER_HEADER, description="Linux user to act as; default: root.")
    ] = None,
) -> GuestAccess:
    ticket: Ticket | None = connection.scope["state"].get("ticket")
    if ticket is not None:
        user = ticket.user
    info, user = await permitted_user(vm_id, caller, user, identities, machines)
    if caller.identity is not None:
        check = partial(permitted_user, vm_id, caller, user, identities, machines)
        call_of(connection).require(check)
    return GuestAccess(info, Machine(machines, vm_id), user)


async def permitted_user(
    vm_id: str, caller: Caller, user: str | None, identities: Identities, machines: Machines
) -> tuple[MachineInfo, str | None]:
    """The VM, and the Linux user to act as in it; an error if the caller may not."""
    info = await find_owned(machines, caller, vm_id)
    if caller.identity is not None:
        permission = await identities.permission(caller.identity, vm_id)
        if permission is None or info.is_deleted:
            raise MachineNotFound(vm_id)
        user = permission.user(user)
    return info, user or None


Guest = Annotated[GuestAccess, Depends(guest)]


async def owned_snapshot(snapshot_id: str, caller: Owner, machines: MachinesDep) -> SnapshotInfo:
    """A snapshot of the caller's account; a deleted one too."""
    info = await machines.snapshots.get(snapshot_id, deleted=True)
    if info.account != caller.account:
        raise SnapshotNotFound(snapshot_id)
    return info


OwnedSnapshot = Annotated[SnapshotInfo, Depends(owned_snapshot)]


def call_of(connection: HTTPConnection) -> Call:
    call: Call = connection.scope["state"]["call"]
    return call


async def current_call(connection: HTTPConnection) -> Call:
    return call_of(connection)


CurrentCall = Annotated[Call, Depends(current_call)]
