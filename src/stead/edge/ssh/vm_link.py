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

from stead.deadlines import scaled
from stead.edge.ssh.relay import Flow
from stead.edge.ssh.vm_login import VmLogin
from stead.errors import (
    GuestRestarted,
    GuestUnreachable,
    MachineNotFound,
    StartFailed,
    SteadError,
    WrongState,
)
from stead.machines import Machines
from stead.machines.events import Use
from stead.machines.processes import Eviction
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
_WAKE_TIMEOUT = scaled(180.0)
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
        machines: Machines,
        vm: str,
        login: VmLogin,
        flow: Flow,
        tasks: TaskSet,
        end: Callable[[str], None],
    ) -> None:
        """`end` disconnects the client and tells it why."""
        self._machines = machines
        self._vm = vm
        self._attached = login.attached
        self._flow = flow
        self._tasks = tasks
        self._end = end
        self._held = bytearray()
        self._waking = self._closed = False
        self.connection = login.connection
        flow.watch(login.connection)
        patched: Any = login.connection
        self._send_packet, self._send = patched.send_packet, patched._send
        patched.send_packet, patched._send = self._on_packet, self._on_bytes

    @property
    def ended(self) -> "asyncio.Future[Eviction]":
        """Done when the guest has ended otherwise than by a suspend."""
        return self._attached.boot.ended

    def close(self) -> None:
        """The client has left: nothing wakes the VM from here on."""
        self._closed = True
        self.connection.abort()

    # What is sent

    def _on_packet(self, kind: int, *parts: bytes, **options: Any) -> None:
        if kind in _OF_CLIENT:
            if not self._asleep():
                self._attached.touch()
            elif not self._waking:
                self._waking = True
                self._tasks.start(self._deliver(), f"wake VM {self._vm} for SSH")
        self._send_packet(kind, *parts, **options)

    def _on_bytes(self, data: bytes) -> None:
        if not self._asleep():
            self._send(data)
        elif len(self._held) + len(data) > _MAX_HELD:
            self._end(f"more than {_MAX_HELD >> 20} MiB were sent to VM {self._vm} while it was suspended")
        else:
            self._held += data

    def _asleep(self) -> bool:
        """Whether the VM is not running. If another use has woken it, what was held is sent now."""
        if not self._attached.eviction.done():
            return False
        try:
            attached = self._machines.reattached(self._vm, self._attached)
        except GuestRestarted as error:
            self._end(str(error))
            return True
        if attached is None:
            return True
        self._attached = attached
        if self._held:
            held, self._held = bytes(self._held), bytearray()
            self._send(held)
        return False

    # Waking

    async def _deliver(self) -> None:
        self._flow.pause("asleep")
        try:
            await self._wake()
        except SteadError as error:
            self._end(str(error))
        finally:
            self._waking = False
            self._flow.resume("asleep")

    async def _wake(self) -> None:
        """Wait until the VM runs. Concurrent wakes of a VM are one."""
        while self._asleep():
            if self._closed:
                raise GuestUnreachable("the client has left")
            try:
                async with asyncio.timeout(_WAKE_TIMEOUT):
                    await self._machines.attached_again(self._vm, self._attached, Use.SSH)
            except TimeoutError:
                raise StartFailed(f"VM {self._vm} did not wake within {_WAKE_TIMEOUT:g} s") from None
            except (WrongState, MachineNotFound, GuestRestarted) as error:
                # This connection cannot continue.
                self._end(str(error))
                raise

    async def ask(self, request: Callable[[asyncssh.SSHClientConnection], Awaitable[T]]) -> T:
        """The guest's answer to a request, such as to open a channel; a suspended VM is woken first.

        If it is suspended before it has answered, it is woken again. SteadError when it does not wake.
        """
        await self._wake()
        async with in_background(_awaited(request(self.connection))) as answer:
            while True:
                either: set[asyncio.Future[Any]] = {answer, self._attached.eviction}
                with self._attached.lease():
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
                try:
                    await self._wake()
                except SteadError as error:
                    # The request was sent and cannot be taken back.
                    self._end(str(error))
                    raise

    def send_held(self) -> None:
        """Send what was held back from the VM, if another use has woken it."""
        self._asleep()


async def _awaited(work: Awaitable[T]) -> T:
    return await work
