"""WebSockets between a client and a VM: both directions with back-pressure, and the reason when one closes.

Nothing is queued here. While the client does not read, nothing is read from the guest; while the guest takes
no input, nothing is read from the client.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, WebSocket

from stead.api.callers import CurrentCall, Guest, permitted_user
from stead.api.calls import GOING_AWAY, INTERNAL_ERROR, POLICY_VIOLATION, close_reason
from stead.api.dependencies import CallersDep, IdentitiesDep, MachinesDep
from stead.api.errors import ApiError
from stead.api.websocket_protocol import MORE
from stead.errors import GuestError, GuestUnreachable, InvalidRequest, SteadError
from stead.guest.agent import Pacer
from stead.logs import get_logger
from stead.machines.events import Use
from stead.machines.start import Attached
from stead.tasks import cancel_and_wait

router = APIRouter(include_in_schema=False)
log = get_logger("stead.access")

MAX_CONTROL = 4096
"""Bytes of a text message: a control message as JSON."""
_PERMISSION_CHECK = 30.0
"""Seconds between two checks that the caller may still use the VM."""
_CLOSE_TIMEOUT = 5.0
_EVICTION_GRACE = 5.0
_NORMAL = 1000


@dataclass(frozen=True)
class Close:
    """How a WebSocket ends: code and reason of its close frame."""

    code: int = _NORMAL
    reason: str = ""


class GuestSocket:
    """The WebSocket of a caller to a VM, authenticated and not yet accepted."""

    def __init__(
        self,
        websocket: WebSocket,
        guest: Guest,
        call: CurrentCall,
        callers: CallersDep,
        identities: IdentitiesDep,
        machines: MachinesDep,
    ) -> None:
        self.vm_id = guest.machine.id
        self.user = guest.user
        self.call = call
        self._machine = guest.machine
        self._websocket = websocket
        self._callers = callers
        self._identities = identities
        self._machines = machines

    async def attached(self, use: Use) -> Attached:
        """Wake the VM. It is not held awake: the relay touches it when bytes flow."""
        return await self._machine.attached(use)

    async def accept(self) -> None:
        await self._websocket.accept()

    async def send_bytes(self, data: bytes, *, more: bool = False) -> None:
        """Waits while the client does not read. With `more`, the next call continues the same message."""
        await self._websocket.send({"type": "websocket.send", "bytes": data, MORE: more})

    async def send_json(self, message: dict[str, Any]) -> None:
        await self._websocket.send_text(json.dumps(message))

    async def messages(self) -> AsyncGenerator[bytes | dict[str, Any], None]:
        """What the client sends until it disconnects: input as bytes, control messages as objects."""
        pacer = Pacer()
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            data, text = message.get("bytes"), message.get("text")
            if data:
                yield data
            elif text is not None:
                yield _control(text)
            await pacer.consumed(len(data or text or ""))

    async def relay(self, attached: Attached, *directions: Coroutine[Any, Any, Close | None]) -> None:
        """Run the directions until one of them ends, then close the WebSocket and say why.

        A direction that returns None has seen the client disconnect.
        """
        try:
            end = await _first(self._evicted(attached), *directions, self._permission_lost())
        except GuestUnreachable:
            end = await self._lost(attached)
        except (GuestError, InvalidRequest) as error:
            end = Close(POLICY_VIOLATION, str(error))
        if end is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await self._websocket.close(end.code, close_reason(end.reason))
        except TimeoutError:
            if self.call.connection is not None:
                await self.call.connection.cut()

    async def _evicted(self, attached: Attached) -> Close:
        return Close(GOING_AWAY, (await asyncio.shield(attached.eviction)).reason)

    async def _lost(self, attached: Attached) -> Close:
        """The guest closed the connection: because its VM has ended, or only that connection did."""
        try:
            async with asyncio.timeout(_EVICTION_GRACE):
                return await self._evicted(attached)
        except TimeoutError:
            return Close(INTERNAL_ERROR, "the connection into the VM was lost; attach again")

    async def _permission_lost(self) -> Close:
        """Watches for a revoked key or token, a withdrawn permission or a deleted VM."""
        credential = self._websocket.scope["state"]["credential"]
        while True:
            await asyncio.sleep(_PERMISSION_CHECK)
            try:
                caller = await self._callers.authenticate(credential)
                if caller is None:
                    return Close(POLICY_VIOLATION, "the API key or token was revoked")
                await permitted_user(self.vm_id, caller, self.user, self._identities, self._machines)
            except SteadError as error:
                return Close(POLICY_VIOLATION, str(error))
            except Exception as error:
                # A check that cannot be made, as without memory, proves nothing; it is made again.
                log.warning("cannot check a permission", vm=self.vm_id, error=repr(error))


Socket = Annotated[GuestSocket, Depends()]


async def _first(*works: Coroutine[Any, Any, Close | None]) -> Close | None:
    """The result of the first work that ends, in the order given if several do; the others are cancelled."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in tasks if task.done()]
        await cancel_and_wait(*tasks)
    return ended[0].result()


def _control(text: str) -> dict[str, Any]:
    if len(text) <= MAX_CONTROL:
        with contextlib.suppress(ValueError, RecursionError):
            message = json.loads(text)
            if isinstance(message, dict):
                return message
    raise InvalidRequest(
        f"invalid control message: must be a JSON object of at most {MAX_CONTROL} characters"
    )


@router.websocket("/{path:path}")
async def no_such_websocket(path: str) -> None:
    raise ApiError("NOT_FOUND", f"no WebSocket at this path: /{path}")
