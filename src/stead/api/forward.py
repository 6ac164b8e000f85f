"""Port forwarding: one TCP connection to a port of a VM, loopback included, over a WebSocket."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path

from stead.api.sockets import Close, GuestSocket, Socket
from stead.errors import GuestError
from stead.guest import sessions
from stead.guest.errors import PortClosed
from stead.guest.sessions import TcpStream
from stead.machines.events import Use
from stead.machines.start import Attached

router = APIRouter(prefix="/v1/vms/{vm_id}", tags=["ports"])

_END = {"type": "eof"}


@router.websocket("/forward/{port}")
async def forward_port(socket: Socket, port: Annotated[int, Path(ge=1, le=65535)]) -> None:
    """Connect to a port of the VM. Binary messages are bytes; `{"type": "eof"}` ends one direction."""
    attached = await socket.attached(Use.FORWARD)
    try:
        async with sessions.connect(attached.agent, port) as stream:
            await socket.accept()
            ended = asyncio.Event()
            await socket.relay(
                attached,
                _from_guest(socket, attached, stream, ended),
                _from_client(socket, attached, stream, ended),
            )
    except GuestError as error:
        if error.code == "connection_refused":
            raise PortClosed(socket.vm_id, port) from None
        raise


async def _from_guest(
    socket: GuestSocket, attached: Attached, stream: TcpStream, client_ended: asyncio.Event
) -> Close:
    while data := await stream.read():
        attached.touch()
        await socket.send_bytes(data)
    await socket.send_json(_END)
    await client_ended.wait()
    return Close()


async def _from_client(
    socket: GuestSocket, attached: Attached, stream: TcpStream, ended: asyncio.Event
) -> None:
    async for message in socket.messages():
        attached.touch()
        if isinstance(message, bytes):
            await stream.write(message)
        elif message == _END:
            await stream.write_eof()
            ended.set()
