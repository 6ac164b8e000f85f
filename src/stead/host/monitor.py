"""The monitor of a QEMU process (QMP): commands, events, and descriptors that are passed to it."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qemu.qmp import ConnectError, Message, QMPClient
from qemu.qmp.qmp_client import GreetingError, NegotiationError

from stead.deadlines import scaled
from stead.errors import StartFailed
from stead.logs import get_logger
from stead.processes import WatchedProcess

QMP_TIMEOUT = scaled(20.0)
_GREETINGS = 3
_MAX_MESSAGE = 2 << 20
"""The longest answer is a console of 64 KiB, in JSON."""
_EVENTS_PER_TURN = 32
_FREE_EVENTS = 1000
"""A guest can cause events at will: beyond these, all its events together are slowed down."""
_SLOWED = 0.005

log = get_logger("stead.vm")


@dataclass(frozen=True)
class Passed:
    """A descriptor to pass to a QEMU, and the label by which it is found there later."""

    descriptor: int
    label: str


class Monitor(QMPClient):
    """A QMP client without event queues, which have no bound: events go to `on_event` as they are read.

    Reading buffered messages does not yield to the event loop by itself, so a flood of events has to.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, _MAX_MESSAGE)
        self.on_event: Callable[[Message], None] = lambda _: None
        self.ended = asyncio.Event()
        """Everything that QEMU sent has been read."""
        self._seen = 0
        self._passing = asyncio.Lock()

    async def _event_dispatch(self, msg: Message) -> None:
        self.on_event(msg)
        self._seen += 1
        if self._seen == _FREE_EVENTS:
            log.warning("slowing down a flood of QEMU events", monitor=self.name, kind=str(msg["event"]))
        if self._seen % _EVENTS_PER_TURN == 0:
            await asyncio.sleep(0 if self._seen < _FREE_EVENTS else _SLOWED)

    async def _bh_recv_message(self) -> None:
        self.ended.clear()
        try:
            await super()._bh_recv_message()
        except BaseException:
            self.ended.set()
            raise

    async def add_descriptors(self, passed: Sequence[Passed]) -> str:
        """Pass descriptors of one file, each with another access mode; returns the name that opens it."""
        # QEMU takes the last descriptor that it received for the next `add-fd`.
        async with self._passing:
            where: dict[str, object] = {}
            for each in passed:
                self.send_fd_scm(each.descriptor)
                added: Any = await self.execute("add-fd", {"opaque": each.label, **where})
                where = {"fdset-id": int(added["fdset-id"])}
            return f"/dev/fdset/{where['fdset-id']}"

    async def remove_descriptors(self, label: str) -> None:
        """Let QEMU close the descriptors with this label; files that it opened through them stay open."""
        groups: Any = await self.execute("query-fdsets")
        for group in groups:
            for each in group["fds"]:
                if each.get("opaque") == label:
                    await self.execute("remove-fd", {"fdset-id": group["fdset-id"], "fd": each["fd"]})


async def connect(
    process: WatchedProcess,
    address: Path | socket.socket,
    last_words: Callable[[], str],
    timeout: float = QMP_TIMEOUT,
) -> Monitor:
    """Connect to the monitor, unless the process ends first."""
    monitor = Monitor(f"stead-{process.identity.pid}")
    connecting = asyncio.ensure_future(_greet(monitor, address))
    ending = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({connecting, ending}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            raise StartFailed(
                f"QEMU {ending.result()}: {last_words()}"
                if ending.done()
                else f"QEMU monitor did not answer within {timeout:g} s"
            )
        connecting.result()
    finally:
        for task in (connecting, ending):
            task.cancel()
        await asyncio.gather(connecting, ending, return_exceptions=True)
    return monitor


async def _greet(monitor: QMPClient, address: Path | socket.socket) -> None:
    """Connect; again if QEMU sent an event where the client expects the greeting or the first response.

    QEMU sends events to a new connection at any time, also before the greeting.
    """
    if isinstance(address, socket.socket):
        return await monitor.connect(address)
    for _ in range(_GREETINGS):
        try:
            return await monitor.connect(str(address))
        except ConnectError as error:
            if not isinstance(error.exc, GreetingError | NegotiationError):
                raise
    return await monitor.connect(str(address))
