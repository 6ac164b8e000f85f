"""Routes of background processes: programs that outlive the call that started them, and the server."""

import contextlib
from collections.abc import AsyncIterator
from signal import Signals
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request

from stead.api.bodies import MANY_VALUES, MAX_BODY, json_body
from stead.api.callers import CurrentCall, Guest, GuestAccess
from stead.api.declared import large_body
from stead.api.sessions import (
    SessionId,
    check_session_id,
    clamped,
    pass_input,
    session_errors,
    start_session,
)
from stead.api.sockets import Close, GuestSocket, Socket
from stead.api.wire import LARGEST, Nothing
from stead.api.wire.sessions import NewProcess, Process, ProcessList, ProcessOutput, SignalRequest
from stead.errors import InvalidRequest
from stead.guest import sessions
from stead.guest.agent import Agent
from stead.guest.errors import ProcessExited
from stead.guest.sessions import Attachment, Cut, SessionExited, SessionOutput, SessionRequest
from stead.machines.events import Use
from stead.machines.start import Attached

router = APIRouter(prefix="/v1/vms/{vm_id}/processes", tags=["processes"])

MAX_WAIT_MS = 60_000
_MAX_PAGE = 1 << 20
_MAX_COMMAND = 8 << 20
"""Bytes of a request with a command and its environment, of which Linux takes 2 MiB."""
_STREAMS = {"stdout": b"\x01", "stderr": b"\x02"}

_Offset = Annotated[
    int, Query(ge=0, le=LARGEST, description="Position in the output, both streams together.")
]


@contextlib.asynccontextmanager
async def _using(guest: GuestAccess, process_id: str) -> AsyncIterator[Agent]:
    """The agent, for a call about one process. Errors of the agent name the process."""
    with session_errors(guest.machine.id, process_id):
        async with guest.machine.using(Use.PROCESS) as agent:
            yield agent


@router.post("")
@large_body(_MAX_COMMAND, MANY_VALUES)
async def start_process(
    guest: Guest, wanted: Annotated[NewProcess, json_body(NewProcess)], call: CurrentCall
) -> Process:
    """Start a program in the background. It ends with the VM's run; suspend, snapshot and fork carry it."""
    chosen = None if wanted.id is None else check_session_id(wanted.id)
    cols, rows = clamped(wanted.cols, wanted.rows)
    request = SessionRequest(
        "process",
        chosen,
        wanted.argv,
        cwd=wanted.cwd or guest.info.workdir or "/",
        env=wanted.env or {},
        user=guest.user,
        pty=wanted.pty,
        stdin=wanted.stdin,
        cols=cols,
        rows=rows,
        timeout=None if wanted.timeout_ms is None else wanted.timeout_ms / 1000,
    )
    await guest.machine.ensure_up(Use.PROCESS)
    call.not_retryable()
    async with guest.machine.using(Use.PROCESS) as agent:
        return Process.of(await start_session(agent, guest.machine.id, request))


@router.get("")
async def list_processes(guest: Guest) -> ProcessList:
    """List the processes of the Linux user, oldest first; root sees all."""
    async with guest.machine.using(Use.PROCESS) as agent:
        found = await sessions.find(agent, "process", guest.user)
    return ProcessList(processes=[Process.of(each) for each in found])


@router.get("/{process_id}")
async def get_process(guest: Guest, process_id: SessionId) -> Process:
    """Get a process, running or exited."""
    async with _using(guest, process_id) as agent:
        return Process.of(await sessions.get(agent, process_id, guest.user))


@router.delete("/{process_id}")
async def remove_process(guest: Guest, process_id: SessionId) -> Process:
    """Kill a process with all its children and remove it with its output."""
    async with _using(guest, process_id) as agent:
        return Process.of(await sessions.close(agent, process_id, guest.user))


@router.post("/{process_id}/signal")
async def signal_process(guest: Guest, process_id: SessionId, wanted: SignalRequest) -> Process:
    """Send a signal to a process and its children. One that has exited is an error (409)."""
    if wanted.signal not in Signals.__members__:
        raise InvalidRequest(f"unknown signal {wanted.signal}: use a name such as SIGTERM")
    async with _using(guest, process_id) as agent:
        # The agent also accepts a signal for an exited process, and sends none.
        if (await sessions.get(agent, process_id, guest.user)).exited:
            raise ProcessExited(guest.machine.id, process_id)
        return Process.of(await sessions.signal(agent, process_id, wanted.signal, guest.user))


@router.get("/{process_id}/wait")
async def wait_for_process(
    guest: Guest,
    process_id: SessionId,
    timeout_ms: Annotated[int, Query(alias="timeoutMs", ge=0)] = MAX_WAIT_MS,
) -> Process:
    """Wait until a process has exited, at most `timeoutMs` and at most 60 s; answers with its state then."""
    async with _using(guest, process_id) as agent:
        timeout = min(timeout_ms, MAX_WAIT_MS) / 1000
        return Process.of(await sessions.wait(agent, process_id, timeout, guest.user))


_RAW_BODY = {
    "requestBody": {
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    }
}


@router.post("/{process_id}/stdin", openapi_extra=_RAW_BODY)
@large_body(MAX_BODY)
async def write_stdin(
    guest: Guest, process_id: SessionId, request: Request, call: CurrentCall, close: bool = False
) -> Nothing:
    """Write the body to a process's standard input, and close it with `close`.

    Answers when the process, or the pipe to it, has taken all bytes.
    """
    data = await request.body()
    async with _using(guest, process_id) as agent:
        call.not_retryable()
        await sessions.write(agent, process_id, data, guest.user, close=close)
    return Nothing()


@router.get("/{process_id}/output")
async def read_process_output(
    guest: Guest,
    process_id: SessionId,
    offset: _Offset = 0,
    limit: Annotated[int, Query(ge=1, le=_MAX_PAGE, description="Bytes at most.")] = _MAX_PAGE,
) -> ProcessOutput:
    """Read what a process printed from an offset on, without waiting for more.

    `cut` says which bytes are no longer held: about the last MiB is.
    """
    async with _using(guest, process_id) as agent:
        return ProcessOutput.of(await sessions.output(agent, process_id, offset, limit, guest.user))


@router.websocket("/{process_id}/attach")
async def attach_process(socket: Socket, process_id: SessionId, offset: _Offset | None = None) -> None:
    """Follow a process's output from an offset on and write to its standard input."""
    check_session_id(process_id)
    attached = await socket.attached(Use.PROCESS)
    with session_errors(socket.vm_id, process_id):
        async with sessions.attach(attached.agent, process_id, offset=offset, user=socket.user) as process:
            await socket.accept()
            await socket.send_json({"type": "process", **_json(process.session)})
            output = _output(socket, attached, process)
            await socket.relay(attached, output, pass_input(socket, attached, process))


async def _output(socket: GuestSocket, attached: Attached, process: Attachment) -> Close:
    async for event in process.events():
        attached.touch()
        match event:
            case SessionOutput(stream, data):
                await socket.send_bytes(_STREAMS[stream] + data)
            case Cut(start, end):
                await socket.send_json({"type": "cut", "from": start, "to": end})
            case SessionExited(session):
                await socket.send_json({"type": "exited", **_json(session)})
    return Close(reason="the process has exited")


def _json(session: sessions.Session) -> dict[str, object]:
    return Process.of(session).model_dump(mode="json", by_alias=True)
