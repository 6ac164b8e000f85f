"""The connection into a VM, over suspends: what a client sends wakes the VM and is delivered then."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncssh
from asyncssh.constants import (
    MSG_CHANNEL_CLOSE,
    MSG_CHANNEL_DATA,
    MSG_CHANNEL_EOF,
    MSG_CHANNEL_EXTENDED_DATA,
    MSG_CHANNEL_OPEN,
    MSG_CHANNEL_REQUEST,
    MSG_GLOBAL_REQUEST,
)

from stead.edge.ssh.relay import Flow
from stead.edge.ssh.server_link import ServerLink, VmUnreachable
from stead.tasks import TaskSet, in_background

T = TypeVar("T")

_OF_CLIENT = frozenset(
    {
        MSG_GLOBAL_REQUEST,
        MSG_CHANNEL_OPEN,
        MSG_CHANNEL_DATA,
        MSG_CHANNEL_EXTENDED_DATA,
        MSG_CHANNEL_EOF,
        MSG_CHANNEL_CLOSE,
        MSG_CHANNEL_REQUEST,
    }
)
"""Messages that wake a VM. The others answer the guest or let it send more, which can wait while it sleeps.

Keepalives of clients are not among them: the gateway answers those itself.
"""
_MAX_HELD = 8 << 20
"""Bytes for a VM that sleeps or is being woken. Meanwhile channels are not read; only requests arrive."""


class VmLink:
    """A connection into a VM, by which all messages of one client go.

    Its TCP connection outlives suspends: the guest's half is in the saved memory, the host's half waits.
    Nothing is sent to a suspended VM: TCP would repeat it less and less often, up to every two minutes, and
    give the connection up after a quarter of an hour.
    """

    def __init__(
        self,
        server: ServerLink,
        vm: str,
        connection: asyncssh.SSHClientConnection,
        flow: Flow,
        tasks: TaskSet,
        end: Callable[[str], None],
    ) -> None:
        """`end` disconnects the client and tells it why."""
        self._server = server
        self._vm = vm
        self._flow = flow
        self._tasks = tasks
        self._end = end
        self._held = bytearray()
        self._waking = self._closed = False
        self._of_client = False
        """What is being sent wakes the VM."""
        self.connection = connection
        flow.watch(connection)
        patched: Any = connection
        self._send_packet, self._send = patched.send_packet, patched._send
        patched.send_packet, patched._send = self._on_packet, self._on_bytes
        server.on_awake = self._send_held

    def close(self) -> None:
        """The client has left: nothing wakes the VM from here on."""
        self._closed = True
        self.connection.abort()

    # What is sent

    def _on_packet(self, kind: int, *parts: bytes, **options: Any) -> None:
        self._of_client = kind in _OF_CLIENT
        if self._of_client:
            # Also if it is not sent now, because keys are being exchanged.
            if self._server.suspended.done():
                self._start_wake()
            else:
                self._server.touch()
        self._send_packet(kind, *parts, **options)
        self._of_client = False

    def _start_wake(self) -> None:
        if not self._waking:
            self._waking = True
            self._tasks.start(self._deliver(), f"wake VM {self._vm} for SSH")

    def _on_bytes(self, data: bytes) -> None:
        if not self._server.asleep:
            self._send(data)
        elif len(self._held) + len(data) > _MAX_HELD:
            self._end(f"more than {_MAX_HELD >> 20} MiB were sent to VM {self._vm} while it was suspended")
        else:
            self._held += data
            if self._of_client:
                self._start_wake()
            elif not self._waking:
                # It answers the guest, which another use may have woken.
                self._server.look()

    def _send_held(self) -> None:
        """The VM runs again."""
        if self._held and not self._closed:
            held, self._held = bytes(self._held), bytearray()
            self._send(held)

    # Waking

    async def _deliver(self) -> None:
        self._flow.pause("asleep")
        try:
            await self._wake()
        except VmUnreachable as error:
            self._end(str(error))
        finally:
            self._waking = False
            self._flow.resume("asleep")

    async def _wake(self) -> None:
        """Wait until the VM runs. Concurrent wakes of a VM are one."""
        while self._server.asleep:
            if self._closed:
                raise VmUnreachable("the client has left")
            await self._server.wake()

    async def ask(self, request: Callable[[asyncssh.SSHClientConnection], Awaitable[T]]) -> T:
        """The guest's answer to a request, such as to open a channel; a suspended VM is woken first.

        If it is suspended before it has answered, it is woken again. VmUnreachable when it does not wake.
        """
        await self._wake()
        async with in_background(_awaited(request(self.connection))) as answer:
            while True:
                either: set[asyncio.Future[Any]] = {answer, self._server.suspended}
                with self._server.hold():
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
                try:
                    await self._wake()
                except VmUnreachable as error:
                    # The request was sent and cannot be taken back.
                    self._end(str(error))
                    raise


async def _awaited(work: Awaitable[T]) -> T:
    return await work
