"""Routes of recordings: the output of commands, kept in the VM under a name.

The wire calls them terminals.
"""

import contextlib
from collections.abc import Iterator

from fastapi import APIRouter
from starlette.responses import Response

from stead.api.callers import CurrentCall, Guest, GuestAccess
from stead.api.large_answers import Items, Text, large_answer
from stead.api.wire.recordings import Recording, RecordingLine, RecordingList, RecordingLogs, RecordingOutput
from stead.errors import GuestError
from stead.guest import recordings
from stead.guest.errors import RecordingNotFound
from stead.machines.events import Use

router = APIRouter(prefix="/v1/vms/{vm_id}/terminals", tags=["recordings"])


@contextlib.contextmanager
def _naming_in_errors(guest: GuestAccess, name: str) -> Iterator[None]:
    try:
        yield
    except GuestError as error:
        if error.code == "not_found":
            raise RecordingNotFound(guest.machine.id, name) from None
        raise


@router.get("")
async def list_recordings(guest: Guest) -> RecordingList:
    """List the recordings of the Linux user; root sees all."""
    async with guest.machine.using(Use.TERMINAL) as agent:
        found = await recordings.find(agent, guest.user)
    return RecordingList(terminals=[Recording.of(each) for each in found])


@router.get("/{terminal}/logs", response_model=RecordingLogs)
async def recording_logs(guest: Guest, terminal: str, call: CurrentCall) -> Response:
    """Get a recording, by the `terminal` of its commands, as lines with times."""
    with _naming_in_errors(guest, terminal):
        async with guest.machine.using(Use.TERMINAL) as agent:
            lines = await recordings.logs(agent, terminal, guest.user, call.reserve)
    found = Items(RecordingLine, lines.most, lambda: map(RecordingLine.of, lines))
    return await large_answer(call, RecordingLogs(logs=[]), {"logs": found})


@router.get("/{terminal}/xterm-256color", response_model=RecordingOutput)
async def recording_output(guest: Guest, terminal: str, call: CurrentCall) -> Response:
    """Get a recording, by the `terminal` of its commands, as it was printed, with escape sequences."""
    with _naming_in_errors(guest, terminal):
        async with guest.machine.using(Use.TERMINAL) as agent:
            output = await recordings.output(agent, terminal, guest.user, call.reserve)
    return await large_answer(call, RecordingOutput(output=""), {"output": Text(output)})
