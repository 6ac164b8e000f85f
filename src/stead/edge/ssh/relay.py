"""Relays of SSH channels: each has an end at the client and one in the VM.

Nothing is queued here. While one end takes no data, because of its channel's window or because its TCP
connection is full, its peer is not read: asyncssh buffers at most one window of it, and the sender waits.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import asyncssh
from asyncssh.constants import MSG_IGNORE

_FAILED = 255
"""The exit code with which ssh itself reports an error."""
_READ_SIZE = 64 << 10
"""Bytes of a connection that are handled in one turn of the event loop: tiny packets take long."""
_STATUS_WAIT = 2.0
"""Seconds for which the end of a program's output is held back until its exit status is known."""
_MAX_VARIABLES = 100
_MAX_ENVIRONMENT = 64 << 10

Request = Callable[[asyncssh.SSHClientConnection], Awaitable[object]]
Ask = Callable[[Request], Awaitable[object]]
Start = Callable[[Coroutine[Any, Any, None], str], object]


class VmUnavailable(asyncssh.ChannelOpenError):
    """A request of a client was not sent to the VM."""


class Flow:
    """Back-pressure of one TCP connection, which asyncssh ignores: its peer may announce any window."""

    def __init__(self) -> None:
        self._paused: set[str] = set()
        """Why nothing more is sent."""
        self._ends: set[_End] = set()

    def watch(self, connection: Any) -> None:
        """Call it before data is sent."""
        connection.pause_writing = lambda: self.pause("full")
        connection.resume_writing = lambda: self.resume("full")
        connection._transport.max_size = _READ_SIZE
        connection.send_packet = _without_ignored(connection.send_packet)

    def add(self, end: "_End") -> None:
        self._ends.add(end)
        if self._paused:
            end.pause_peer("connection")

    def discard(self, end: "_End") -> None:
        self._ends.discard(end)

    def pause(self, why: str) -> None:
        self._paused.add(why)
        for end in self._ends:
            end.pause_peer("connection")

    def resume(self, why: str) -> None:
        self._paused.discard(why)
        if not self._paused:
            for end in tuple(self._ends):
                end.resume_peer("connection")


def _without_ignored(send_packet: Callable[..., None]) -> Callable[..., None]:
    """asyncssh sends an SSH_MSG_IGNORE before each packet, which hides the IVs of CBC ciphers.

    No CBC cipher is offered, and these packets cost the gateway a third of the CPU time of a copy.
    """

    def send(kind: int, *parts: bytes, **options: Any) -> None:
        if kind != MSG_IGNORE:
            send_packet(kind, *parts, **options)

    return send


class _End:
    """One end of a relayed channel. asyncssh calls the methods up to `connection_lost`."""

    def __init__(self, flow: Flow, on_lost: Callable[[], None] = lambda: None) -> None:
        self.peer: _End | None = None
        self.channel: Any = None
        self._flow = flow
        self._on_lost = on_lost
        self._stopped: set[str] = set()
        """Why it is not read."""
        self._early: list[tuple[bytes, int | None]] = []
        """Data that came before the peer was open: one piece, because reading stops with it."""
        self._ended = self._lost = False

    def connection_made(self, channel: Any) -> None:
        self.channel = channel
        self._flow.add(self)
        if self.peer is not None:
            self.peer.flush()

    def data_received(self, data: bytes, datatype: int | None) -> None:
        if self.peer is not None and self.peer.channel is not None:
            self.peer.write(data, datatype)
        else:
            self._early.append((data, datatype))
            self._stop("early")

    def eof_received(self) -> bool:
        self._ended = True
        if self.peer is not None and self.peer.channel is not None:
            self.peer.end()
        # The other direction stays open.
        return True

    def pause_writing(self) -> None:
        self.pause_peer("window")

    def resume_writing(self) -> None:
        self.resume_peer("window")

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._flow.discard(self)
        self._on_lost()
        if self.peer is not None and self.peer.channel is not None:
            self.peer.close()

    # Between the two ends

    def join(self, peer: "_End") -> None:
        """Begin to relay. Each end may be open or not."""
        self.peer, peer.peer = peer, self
        for end in (self, peer):
            end.flush()

    def flush(self) -> None:
        """Pass on what came before the peer was open."""
        if self.peer is None or self.peer.channel is None:
            return
        early, self._early = self._early, []
        for data, datatype in early:
            self.peer.write(data, datatype)
        self._go("early")
        if self._ended:
            self.peer.end()
        if self._lost:
            self.peer.close()

    def write(self, data: bytes, datatype: int | None) -> None:
        # What is sent to a channel that is being closed is dropped, as by sshd.
        with contextlib.suppress(OSError):
            self.channel.write(data, datatype)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.write_eof()

    def close(self) -> None:
        self.channel.close()

    def pause_peer(self, why: str) -> None:
        if self.peer is not None:
            self.peer._stop(why)

    def resume_peer(self, why: str) -> None:
        if self.peer is not None:
            self.peer._go(why)

    def _stop(self, why: str) -> None:
        self._stopped.add(why)
        if self.channel is not None:
            self.channel.pause_reading()

    def _go(self, why: str) -> None:
        if why in self._stopped:
            self._stopped.remove(why)
            if not self._stopped and self.channel is not None:
                self.channel.resume_reading()


class Tunnel(_End, asyncssh.SSHTCPSession[bytes], asyncssh.SSHUNIXSession[bytes]):
    """An end of a forwarded connection."""


class _InVm(_End, asyncssh.SSHClientSession[bytes]):
    """The program in the VM. The client learns how it ended after all of its output."""

    status: int | None = None
    signal: tuple[str, bool, str, str] | None = None

    def exit_status_received(self, status: int) -> None:
        self.status = status
        self._exited()

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self.signal = signal, core_dumped, msg, lang
        self._exited()

    def _exited(self) -> None:
        if self._ended and self.peer is not None and self.peer.channel is not None:
            self.peer.close()


class _Environment(dict[bytes, bytes]):
    """Variables that a client sends; what is too much is left out."""

    _size = 0

    def __setitem__(self, name: bytes, value: bytes) -> None:
        size = self._size + len(name) + len(value)
        if len(self) < _MAX_VARIABLES and size <= _MAX_ENVIRONMENT:
            self._size = size
            super().__setitem__(name, value)


class RelayedSession(_End, asyncssh.SSHServerSession[bytes]):
    """A shell, a command or a subsystem that a client asks for: the same in the VM."""

    def __init__(
        self,
        flow: Flow,
        vm_flow: Flow,
        ask: Ask,
        start: Start,
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(flow, on_lost)
        self._ask = ask
        self._start = start
        self._terminal: tuple[str, Mapping[int, int]] | None = None
        self._in_vm = _InVm(vm_flow)

    def connection_made(self, channel: Any) -> None:
        channel._env = _Environment()
        super().connection_made(channel)

    def pty_requested(self, term_type: str, term_size: Any, term_modes: Mapping[int, int]) -> bool:
        self._terminal = term_type, dict(term_modes)
        return True

    def shell_requested(self) -> bool:
        return self._begin()

    def exec_requested(self, command: str) -> bool:
        return self._begin(command)

    def subsystem_requested(self, subsystem: str) -> bool:
        return self._begin(subsystem=subsystem)

    def terminal_size_changed(self, width: int, height: int, pixwidth: int, pixheight: int) -> None:
        if self._in_vm.channel is not None:
            self._in_vm.channel.change_terminal_size(width, height, pixwidth, pixheight)

    def signal_received(self, signal: str) -> None:
        if self._in_vm.channel is not None:
            self._in_vm.channel.send_signal(signal)

    def break_received(self, msec: int) -> bool:
        if self._in_vm.channel is None:
            return False
        self._in_vm.channel.send_break(msec)
        return True

    def _begin(self, command: str | None = None, subsystem: str | None = None) -> bool:
        # The client gets its answer now, and what the VM says to it as an error of the session.
        self._start(self._open(command, subsystem), "open an SSH session")
        return True

    async def _open(self, command: str | None, subsystem: str | None) -> None:
        async def create(connection: asyncssh.SSHClientConnection) -> None:
            if self._lost:
                return
            options: dict[str, Any] = {"request_pty": False}
            if self._terminal is not None:
                options = {
                    "request_pty": "force",
                    "term_type": self._terminal[0],
                    "term_size": self.channel.get_terminal_size(),
                    "term_modes": self._terminal[1],
                }
            await connection.create_session(
                lambda: self._in_vm,
                command,
                subsystem=subsystem,
                env=self.channel.get_environment_bytes(),
                encoding=None,
                **options,
            )
            # Before anything else runs: a program may end at once.
            self.join(self._in_vm)

        try:
            await self._ask(create)
        except VmUnavailable as error:
            self.fail(error.reason)
        except asyncssh.ChannelOpenError as error:
            self.fail(f"the VM refused the session: {error.reason}")

    def end(self) -> None:
        """All output was passed on.

        OpenSSH's client closes the channel when both directions have ended, with or without an exit status.
        """
        if self._in_vm.status is not None or self._in_vm.signal is not None:
            self.close()
        else:
            asyncio.get_running_loop().call_later(_STATUS_WAIT, super().end)

    def fail(self, text: str) -> None:
        """End the session with an error message."""
        with contextlib.suppress(OSError):
            self.channel.write_stderr(f"stead: {text}\r\n".encode())
            self.channel.exit(_FAILED)

    def close(self) -> None:
        """Tell the client how the program in the VM has ended, after all of its output was passed on."""
        if self._in_vm.signal is not None:
            self.channel.exit_with_signal(*self._in_vm.signal)
        elif self._in_vm.status is not None:
            self.channel.exit(self._in_vm.status)
        else:
            self.channel.close()
