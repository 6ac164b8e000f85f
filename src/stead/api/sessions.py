"""What routes of terminals and of background processes share: ids, input, and the errors of sessions."""

import contextlib
import re
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import Path

from stead.api.sockets import GuestSocket
from stead.errors import GuestError, InvalidRequest
from stead.guest import sessions
from stead.guest.agent import Agent
from stead.guest.errors import (
    GuestSessionNotFound,
    InvalidSessionId,
    SessionExists,
    SessionLimitReached,
    SessionUserMismatch,
)
from stead.guest.sessions import MAX_SIZE, MAX_TERMINALS, Attachment, Session, SessionRequest
from stead.machines.start import Attached

_ID = re.compile(r"[a-zA-Z0-9._-]{1,64}")

SessionId = Annotated[str, Path(description="Session id.")]


def check_session_id(session_id: str) -> str:
    if not _ID.fullmatch(session_id):
        raise InvalidSessionId(session_id)
    return session_id


def clamped(cols: int, rows: int) -> tuple[int, int]:
    """A size that a terminal can have: hidden windows of browsers have 0 columns."""
    return min(max(cols, 1), MAX_SIZE), min(max(rows, 1), MAX_SIZE)


async def pass_input(socket: GuestSocket, attached: Attached, session: Attachment) -> None:
    """Pass on what the client sends until it disconnects.

    Input keeps the VM awake; control messages do not, as a browser sends its window's size by itself.
    """
    async for message in socket.messages():
        if isinstance(message, bytes):
            attached.touch()
            await session.write(message)
        else:
            await _control(session, message)


async def _control(session: Attachment, message: dict[str, Any]) -> None:
    """Carry out a control message of a client; unknown ones are ignored."""
    match message.get("type"):
        case "resize":
            await session.resize(*clamped(*_size_of(message)))
        case "signal":
            await session.signal(str(message.get("signal")))
        case "closeStdin":
            await session.close_stdin()


def _size_of(message: dict[str, Any]) -> tuple[int, int]:
    """The columns and rows of a `resize` message."""
    try:
        return int(message["cols"]), int(message["rows"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InvalidRequest("invalid resize message: cols and rows must be integers") from None


@contextlib.contextmanager
def session_errors(vm_id: str, session_id: str) -> Iterator[None]:
    """Names the session in errors of the guest."""
    try:
        yield
    except GuestError as error:
        match error.code:
            case "not_found":
                raise GuestSessionNotFound(vm_id, session_id) from None
            case "permission_denied":
                raise SessionUserMismatch(vm_id, session_id) from None
        raise


async def start_session(agent: Agent, vm_id: str, request: SessionRequest) -> Session:
    try:
        return await sessions.start(agent, request)
    except GuestError as error:
        match error.code:
            case "exists":
                raise SessionExists(vm_id, str(request.id)) from None
            case "session_cap":
                raise SessionLimitReached(vm_id, MAX_TERMINALS, str(error)) from None
        raise
