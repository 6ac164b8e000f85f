"""The user's own terminal: raw mode, size, the detach key, and its state when a program has left it."""

import contextlib
import os
import re
import sys
import termios
import tty
from collections.abc import Iterator

_TERMS = frozenset(
    [
        "ansi",
        "linux",
        "rxvt",
        "rxvt-unicode",
        "rxvt-unicode-256color",
        "screen",
        "screen-256color",
        "tmux",
        "tmux-256color",
        "vt100",
        "vt220",
        "xterm",
        "xterm-256color",
        "xterm-color",
    ]
)
"""Types of terminals that the image describes."""
_ALTERNATE = re.compile(rb"\x1b\[\?(?:47|1047|1049)([hl])")
_LONGEST_SEQUENCE = 8
_RESET = b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1l\x1b>\x1b[?25h\x1b[0m"
"""Mouse reports, bracketed paste and application keys off, cursor on, no attributes."""


def terminal_type() -> str:
    """The type of this terminal for programs in a VM, or xterm-256color if the image does not describe it."""
    own = os.environ.get("TERM", "")
    return own if own in _TERMS else "xterm-256color"


def terminal_size() -> tuple[int, int]:
    """Columns and rows of the terminal, or 80 and 24."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            size = os.get_terminal_size(stream.fileno())
            if size.columns and size.lines:
                return size.columns, size.lines
    return 80, 24


@contextlib.contextmanager
def raw_mode(descriptor: int) -> Iterator[None]:
    """Pass every key on, Ctrl-C too, until the block ends, however it ends."""
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def say(text: str) -> None:
    """Print a message while the terminal is raw, where a newline does not return the cursor."""
    os.write(sys.stderr.fileno(), f"\r\n[{text}]\r\n".encode())


class DetachKey:
    """Finds `~.` at the beginning of a line in what the user types."""

    def __init__(self) -> None:
        self._at_line_start = True
        self._tilde = False

    def feed(self, typed: bytes) -> tuple[bytes, bool]:
        """What to pass on, and whether the user asked to detach."""
        passed = bytearray()
        for key in typed:
            if self._tilde:
                self._tilde = False
                if key == ord("."):
                    return bytes(passed), True
                passed += b"~" if key == ord("~") else b"~" + bytes([key])
            elif self._at_line_start and key == ord("~"):
                self._tilde = True
                continue
            else:
                passed.append(key)
            self._at_line_start = key in b"\r\n"
        return bytes(passed), False


class Screen:
    """Remembers what must be undone when a client leaves a program that still draws on the terminal."""

    def __init__(self) -> None:
        self._alternate = False
        self._tail = b""

    def feed(self, output: bytes) -> None:
        data = self._tail + output
        if found := _ALTERNATE.findall(data):
            self._alternate = found[-1] == b"h"
        self._tail = data[-_LONGEST_SEQUENCE:]

    def undo(self) -> bytes:
        """What resets the terminal, as far as a program may have changed it."""
        return (b"\x1b[?1049l" if self._alternate else b"") + _RESET
