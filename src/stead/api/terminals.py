"""Routes of named terminals: recorded output of commands, stored in the VM."""

import contextlib
from collections.abc import Iterator

from fastapi import APIRouter

from stead.api.callers import Guest, GuestAccess
from stead.api.errors import ApiError
from stead.api.wire.terminals import Terminal, TerminalLine, TerminalList, TerminalLogs, TerminalOutput
from stead.errors import GuestError
from stead.guest import terminals
from stead.machines.events import Use

router = APIRouter(prefix="/v1/vms/{vm_id}/terminals", tags=["terminals"])


@contextlib.contextmanager
def _naming_in_errors(guest: GuestAccess, name: str) -> Iterator[None]:
    try:
        yield
    except GuestError as error:
        if error.code == "not_found":
            raise ApiError(
                "NOT_FOUND", f"no terminal {name} in VM {guest.machine.id}", vmId=guest.machine.id
            ) from None
        raise


@router.get("")
async def list_terminals(guest: Guest) -> TerminalList:
    """List the terminals of the Linux user; root sees all."""
    async with guest.machine.using(Use.TERMINAL) as agent:
        found = await terminals.find(agent, guest.user)
    return TerminalList(terminals=[Terminal.of(each) for each in found])


@router.get("/{terminal}/logs")
async def terminal_logs(guest: Guest, terminal: str) -> TerminalLogs:
    """Get the recorded output of a terminal as lines with times."""
    with _naming_in_errors(guest, terminal):
        async with guest.machine.using(Use.TERMINAL) as agent:
            lines = await terminals.logs(agent, terminal, guest.user)
    return TerminalLogs(logs=[TerminalLine.of(line) for line in lines])


@router.get("/{terminal}/xterm-256color")
async def terminal_output(guest: Guest, terminal: str) -> TerminalOutput:
    """Get the recorded output of a terminal as it was printed, with escape sequences."""
    with _naming_in_errors(guest, terminal):
        async with guest.machine.using(Use.TERMINAL) as agent:
            output = await terminals.output(agent, terminal, guest.user)
    return TerminalOutput(output=output.decode(errors="replace"))
