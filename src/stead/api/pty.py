"""Routes of terminals: interactive PTY sessions that live in the VM, over WebSockets."""

from typing import Annotated

from fastapi import APIRouter, Query

from stead.api.callers import Guest
from stead.api.dependencies import ExitedDep, MachinesDep
from stead.api.sessions import (
    SessionId,
    check_session_id,
    clamped,
    pass_input,
    session_errors,
    start_session,
)
from stead.api.sockets import Close, GuestSocket, Socket
from stead.api.wire.sessions import ClosedPtySession, PtySession, PtySessionList, exit_code_of
from stead.guest import sessions
from stead.guest.errors import GuestSessionNotFound, SessionExpired
from stead.guest.execution import shell
from stead.guest.exited_sessions import ExitedSessions
from stead.guest.sessions import Attachment, Screen, SessionExited, SessionOutput, SessionRequest
from stead.machines import State
from stead.machines.events import Use
from stead.machines.start import Attached

router = APIRouter(prefix="/v1/vms/{vm_id}", tags=["terminals"])

_Cols = Annotated[int, Query(description="Columns of the client's window.")]
_Rows = Annotated[int, Query(description="Rows of the client's window.")]


@router.websocket("/pty")
async def open_terminal(
    socket: Socket,
    exited: ExitedDep,
    cols: _Cols = 80,
    rows: _Rows = 24,
    program: Annotated[str | None, Query(alias="exec")] = None,
    session_id: Annotated[str | None, Query(alias="sessionId")] = None,
    term: Annotated[str | None, Query(pattern=r"^[a-zA-Z0-9._+-]{1,64}$")] = None,
) -> None:
    """Start a terminal and attach to it. TERM is `term` in it, by default xterm-256color."""
    chosen = check_session_id(session_id) if session_id else None
    cols, rows = clamped(cols, rows)
    argv = shell(program) if program else None
    env = {"TERM": term} if term else {}
    request = SessionRequest(
        "terminal", chosen, argv, env=env, user=socket.user, pty=True, cols=cols, rows=rows
    )
    attached = await socket.attached(Use.TERMINAL)
    session = await start_session(attached.agent, socket.vm_id, request)

    async def undo() -> None:
        await sessions.close(attached.agent, session.id)

    exited.discard(socket.vm_id, session.id)
    # A client that disconnects before it knows the id cannot come back to the session.
    socket.call.on_undelivered(undo)
    await _attach(socket, attached, session.id, cols, rows, exited)


@router.websocket("/pty/sessions/{session_id}")
async def attach_terminal(
    socket: Socket, session_id: SessionId, exited: ExitedDep, cols: _Cols = 80, rows: _Rows = 24
) -> None:
    """Attach to a terminal: its scrollback and screen first, then live output."""
    check_session_id(session_id)
    attached = await socket.attached(Use.TERMINAL)
    try:
        await _attach(socket, attached, session_id, *clamped(cols, rows), exited)
    except GuestSessionNotFound:
        if (socket.vm_id, session_id) in exited:
            raise SessionExpired(socket.vm_id, session_id) from None
        raise


async def _attach(
    socket: GuestSocket, attached: Attached, session_id: str, cols: int, rows: int, exited: ExitedSessions
) -> None:
    with session_errors(socket.vm_id, session_id):
        async with sessions.attach(
            attached.agent, session_id, cols=cols, rows=rows, user=socket.user
        ) as terminal:
            await socket.accept()
            await socket.send_json({"type": "sessionInfo", "sessionId": session_id})
            socket.call.delivered()
            output = _output(socket, attached, terminal, exited)
            await socket.relay(attached, output, pass_input(socket, attached, terminal))


async def _output(
    socket: GuestSocket, attached: Attached, terminal: Attachment, exited: ExitedSessions
) -> Close:
    async for event in terminal.events():
        attached.touch()
        match event:
            case Screen(data, more):
                await socket.send_bytes(data, more=more)
            case SessionOutput(_, data):
                await socket.send_bytes(data)
            case SessionExited(session):
                exited.add(socket.vm_id, terminal.session.id)
                await socket.send_json({"type": "exited", "exitCode": exit_code_of(session)})
    return Close(reason="the program has exited")


@router.get("/pty/sessions")
async def list_pty_sessions(guest: Guest, machines: MachinesDep) -> PtySessionList:
    """List the terminals of the Linux user; root sees all. Exited ones are listed for about 60 s.

    Those of a suspended VM are listed without waking it.
    """
    if guest.info.state is State.SUSPENDED:
        known = await machines.suspended_terminals(guest.machine.id)
        if known is not None:
            own = [each for each in known if guest.user in (None, each.user)]
            return PtySessionList(sessions=[PtySession.of(each, suspended=True) for each in own])
    async with guest.machine.using(Use.TERMINAL) as agent:
        found = await sessions.find(agent, "terminal", guest.user)
    return PtySessionList(sessions=[PtySession.of(each) for each in found])


@router.delete("/pty/sessions/{session_id}")
async def close_pty_session(guest: Guest, session_id: SessionId, exited: ExitedDep) -> ClosedPtySession:
    """Kill the programs of a terminal and remove it."""
    check_session_id(session_id)
    with session_errors(guest.machine.id, session_id):
        async with guest.machine.using(Use.TERMINAL) as agent:
            closed = await sessions.close(agent, session_id, guest.user)
    exited.discard(guest.machine.id, session_id)
    return ClosedPtySession(session_id=closed.id, exit_code=exit_code_of(closed))
