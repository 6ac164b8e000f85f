"""Commands over a WebSocket: the client writes standard input while the command runs.

Unlike a background process, the command ends with its client, keeps its VM awake, and waits for a client that
does not read its output.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from pydantic import ValidationError

from stead.api.callers import Guest, GuestAccess
from stead.api.errors import ApiError, from_product
from stead.api.guests import command_options, exit_facts
from stead.api.sockets import Close, GuestSocket, Socket
from stead.api.wire.guests import Exec
from stead.errors import InvalidRequest, SteadError
from stead.guest.execution import Ended, Output
from stead.machines.events import Use

router = APIRouter(prefix="/v1/vms/{vm_id}", tags=["guests"])

WINDOW = 256 << 10
"""Bytes of input that the client may send before the command has taken them.

The server reads every message at once, so it sees a disconnect also while the command takes no input.
"""
_STREAMS = {"stdout": b"\x01", "stderr": b"\x02"}


@router.websocket("/exec")
async def exec_piped(socket: Socket, guest: Guest) -> None:
    """Run a command whose standard input the client writes while it runs.

    The first message, binary, is the command: the JSON that `exec-stream` takes. Further binary messages are
    standard input, which `{"type": "closeStdin"}` ends. The server answers with binary messages (1 or 2 for
    stdout or stderr, then the bytes), `{"type": "taken", "bytes": n}` for input that the command has taken,
    and `exit` or `error` at the end. The client may be up to 256 KiB ahead of `taken`. If it disconnects, the
    command is killed.
    """
    attached = await socket.attached(Use.COMMAND)
    await socket.accept()
    command = _PipedCommand(socket, guest)
    await socket.relay(attached, command.run(), command.receive())


class _PipedCommand:
    def __init__(self, socket: GuestSocket, guest: GuestAccess) -> None:
        self._socket = socket
        self._guest = guest
        self._first: asyncio.Future[bytes | dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._waiting = 0

    async def receive(self) -> None:
        """Queue the client's input until it disconnects."""
        async for message in self._socket.messages():
            if not self._first.done():
                self._first.set_result(message)
            elif isinstance(message, bytes):
                self._waiting += len(message)
                if self._waiting > WINDOW:
                    raise InvalidRequest(f"more than {WINDOW} bytes of input are waiting: wait for `taken`")
                self._input.put_nowait(message)
            elif message.get("type") == "closeStdin":
                self._input.put_nowait(b"")

    async def run(self) -> Close:
        first = await self._first
        try:
            wanted = _command(first)
            options = {**command_options(self._guest, wanted), "stdin": self._stdin()}
            async with contextlib.aclosing(self._guest.machine.stream(wanted.command, **options)) as events:
                async for event in events:
                    await self._send(event)
        except SteadError as error:
            await self._send_error(from_product(error))
        return Close(reason="the command has ended")

    async def _stdin(self) -> AsyncIterator[bytes]:
        while data := await self._input.get():
            yield data
            self._waiting -= len(data)
            await self._socket.send_json({"type": "taken", "bytes": len(data)})

    async def _send(self, event: Output | Ended) -> None:
        if isinstance(event, Output):
            await self._socket.send_bytes(_STREAMS[event.stream] + event.data)
        else:
            await self._socket.send_json(exit_facts(event))

    async def _send_error(self, failure: ApiError) -> None:
        await self._socket.send_json({"type": "error", "code": failure.code, "message": failure.message})


def _command(message: bytes | dict[str, Any]) -> Exec:
    """The command of the first message."""
    if not isinstance(message, bytes):
        raise InvalidRequest("the first message must be the command: JSON in a binary message")
    try:
        wanted = Exec.model_validate_json(message)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise InvalidRequest(f"invalid command: {where}: {problem['msg']}".replace(": :", ":")) from None
    if wanted.stdin is not None or wanted.terminal is not None:
        raise InvalidRequest("a piped command takes neither stdin nor terminal")
    return wanted
