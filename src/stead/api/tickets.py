"""Tickets for WebSockets of web pages: a browser cannot send headers with one."""

import time
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import HTTPConnection

from stead.api.callers import AnyCaller, Guest
from stead.api.dependencies import TicketsDep
from stead.api.sessions import check_session_id
from stead.api.wire.sessions import NewTicket, TicketModel
from stead.identity.tickets import LIFETIME

router = APIRouter(prefix="/v1/vms/{vm_id}", tags=["terminals"])


async def _credential(connection: HTTPConnection) -> str:
    secret: str = connection.scope["state"]["credential"]
    return secret


@router.post("/tickets")
async def create_ticket(
    guest: Guest,
    caller: AnyCaller,
    tickets: TicketsDep,
    wanted: NewTicket,
    credential: Annotated[str, Depends(_credential)],
) -> TicketModel:
    """Create a ticket: it opens one WebSocket, once, within 60 s, with the caller's rights.

    Give it to a web page, which connects to `path` with `?ticket=...`. The Linux user is that of this call.
    """
    path = _path(guest.machine.id, wanted)
    ticket = tickets.create(caller.account, credential, path, guest.user)
    return TicketModel(ticket=ticket, expires_at=time.time() + LIFETIME, path=path)


def _path(vm_id: str, wanted: NewTicket) -> str:
    session = None if wanted.session_id is None else check_session_id(wanted.session_id)
    match wanted.kind:
        case "pty":
            return f"/v1/vms/{vm_id}/pty" if session is None else f"/v1/vms/{vm_id}/pty/sessions/{session}"
        case "process":
            return f"/v1/vms/{vm_id}/processes/{session}/attach"
        case "forward":
            return f"/v1/vms/{vm_id}/forward/{wanted.port}"
