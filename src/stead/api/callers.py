"""Authentication and authorization of calls: API keys, identity tokens, permissions on VMs."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Header, Path
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from stead.api.calls import Call
from stead.api.errors import ApiError
from stead.api.parts import IdentitiesDep, MachinesDep
from stead.errors import MachineNotFound, SnapshotNotFound
from stead.github.app import WEBHOOKS
from stead.identity.callers import Caller, Callers
from stead.machines import Machine, MachineInfo, Machines
from stead.machines.snapshots import SnapshotInfo

TOKEN_HEADER = "X-Freestyle-Identity-Access-Token"  # noqa: S105  # a header's name
USER_HEADER = "X-Freestyle-Vm-Linux-User-Id"

VmId = Annotated[str, Path(description="VM id.")]


_DOCS = ("/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/favicon-32x32.png")
PUBLIC = frozenset({"/healthz", "/metrics", "/openapi.json", "/.well-known/jwks.json", WEBHOOKS, *_DOCS})


class Authentication:
    """ASGI middleware: authenticates a call by API key or token before its body is read."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC:
            scope["state"]["caller"] = await self._authenticate(scope)
        await self._app(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> Caller:
        """The caller, by API key or identity token, from either of the two headers."""
        headers = Headers(scope=scope)
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        secret = secret or headers.get(TOKEN_HEADER, "").strip()
        if not secret:
            wanted = f"no API key (Authorization: Bearer ...) and no identity token ({TOKEN_HEADER}) given"
            raise _unauthorized(scope, wanted)
        caller = await self._callers.authenticate(secret)
        if caller is None:
            raise _unauthorized(scope, "unknown or revoked API key or token")
        return caller


def _unauthorized(scope: Scope, reason: str) -> ApiError:
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError("UNAUTHORIZED_ERROR", reason, headers=headers, route=scope["path"], reason=reason)


async def current_caller(request: Request) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
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
    if info.account != caller.account or info.purpose != "use":
        raise MachineNotFound(vm_id)
    return info


OwnedVm = Annotated[MachineInfo, Depends(owned_vm)]


async def usable_vm(
    vm_id: VmId, caller: AnyCaller, machines: MachinesDep, identities: IdentitiesDep
) -> MachineInfo:
    """A VM of the caller's account, granted to the caller's identity if it has one."""
    info = await find_owned(machines, caller, vm_id)
    if caller.identity is not None and await identities.permission(caller.identity, vm_id) is None:
        raise MachineNotFound(vm_id)
    return info


UsableVm = Annotated[MachineInfo, Depends(usable_vm)]


@dataclass(frozen=True)
class GuestAccess:
    """A VM to work in, and the Linux user to act as; None is root."""

    info: MachineInfo
    machine: Machine
    user: str | None


async def guest(
    vm_id: VmId,
    caller: AnyCaller,
    identities: IdentitiesDep,
    machines: MachinesDep,
    user: Annotated[
        str | None, Header(alias=USER_HEADER, description="Linux user to act as; default: root.")
    ] = None,
) -> GuestAccess:
    info = await find_owned(machines, caller, vm_id)
    if caller.identity is not None:
        permission = await identities.permission(caller.identity, vm_id)
        if permission is None:
            raise MachineNotFound(vm_id)
        user = permission.user(user)
    return GuestAccess(info, Machine(machines, vm_id), user or None)


Guest = Annotated[GuestAccess, Depends(guest)]


async def owned_snapshot(snapshot_id: str, caller: Owner, machines: MachinesDep) -> SnapshotInfo:
    """A snapshot of the caller's account; a deleted one too."""
    info = await machines.snapshots.get(snapshot_id, deleted=True)
    if info.account != caller.account:
        raise SnapshotNotFound(snapshot_id)
    return info


OwnedSnapshot = Annotated[SnapshotInfo, Depends(owned_snapshot)]


async def current_call(request: Request) -> Call:
    call: Call = request.scope["state"]["call"]
    return call


CurrentCall = Annotated[Call, Depends(current_call)]
