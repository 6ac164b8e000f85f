"""A person at a terminal: runs a command in a pseudo-terminal, types, and looks at the screen."""

import asyncio
import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from support.run_cli import PROGRAM, Shell
from support.waiting import until


class PseudoTerminal:
    """A command in a terminal of its own."""

    def __init__(self, leader: int, terminal: int, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._leader = leader
        self._terminal = terminal
        self.printed = bytearray()
        """All that the command has printed."""
        self._seen = 0
        self._came = asyncio.Event()
        asyncio.get_running_loop().add_reader(leader, self._read)

    def _read(self) -> None:
        try:
            self.printed += os.read(self._leader, 65536)
        except OSError:
            asyncio.get_running_loop().remove_reader(self._leader)
        self._came.set()

    def type(self, data: bytes) -> None:
        os.write(self._leader, data)

    async def expect(self, text: bytes, timeout: float = 60) -> bytes:
        """Wait until a text is printed after what was expected before; returns what came up to it."""
        try:
            async with asyncio.timeout(timeout):
                while (found := self.printed.find(text, self._seen)) < 0:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            raise AssertionError(f"no {text!r} in {bytes(self.printed[self._seen :])!r}") from None
        passed = bytes(self.printed[self._seen : found + len(text)])
        self._seen = found + len(text)
        return passed

    def resize(self, cols: int, rows: int) -> None:
        """Change the window; the kernel sends SIGWINCH to the command."""
        set_size(self._leader, cols, rows)

    @property
    def modes(self) -> list[object]:
        """The modes of the terminal: what raw mode changes, and an exit restores."""
        return list(termios.tcgetattr(self._terminal))

    async def raw(self, timeout: float = 60) -> None:
        """Wait until the command has set the terminal to raw mode: keys that come before are echoed."""
        await until(lambda: not termios.tcgetattr(self._terminal)[3] & termios.ECHO, timeout)

    async def ended(self, timeout: float = 60) -> int:
        """The exit code of the command."""
        return await asyncio.to_thread(self.process.wait, timeout)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._leader)
        os.close(self._leader)
        os.close(self._terminal)


def set_size(terminal: int, cols: int, rows: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


@contextlib.asynccontextmanager
async def in_terminal(
    command: Sequence[str | Path], environment: Mapping[str, str], *, cols: int = 80, rows: int = 24
) -> AsyncIterator[PseudoTerminal]:
    """Run a command in a terminal that it controls; at the end it is killed if it still runs."""
    leader, terminal = pty.openpty()
    set_size(leader, cols, rows)

    def control() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(  # noqa: ASYNC220
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env=environment,
        start_new_session=True,
        preexec_fn=control,
    )
    window = PseudoTerminal(leader, terminal, process)
    try:
        yield window
    finally:
        process.kill()
        await window.ended()
        window.close()


@contextlib.asynccontextmanager
async def typed(
    shell: Shell, *arguments: str | Path, cols: int = 80, rows: int = 24
) -> AsyncIterator[PseudoTerminal]:
    """Run the `stead` command in a terminal."""
    environment = shell.environment | {"TERM": "xterm-256color"}
    async with in_terminal([PROGRAM, *arguments], environment, cols=cols, rows=rows) as window:
        yield window
