"""Standard input of `stead vm exec`: when to read it, and when to stop waiting for it.

The API takes a command's standard input as a part of the request, so it must be complete before the command
starts. A terminal, a file and a closed descriptor are easy. A pipe is not: the producer of a shell pipeline
may need a while before it writes, and a program such as Node's `child_process.exec` leaves a pipe that it
neither writes to nor closes. Waiting for the end of such a pipe would hang. The rule without `--stdin` or
`--no-stdin`:

- a terminal or a closed descriptor: the command gets no input;
- a file or a device: it is read to its end;
- a pipe or socket: wait a grace period for the first byte or the end. Once one of them is there, read to the
  end, however slow the producer is, so no byte is lost. Otherwise start the command without input. Shells
  make FIFOs, and there a producer is likely: they get a long grace period and a note. Programs make sockets.

With `-i` the command is a background process whose standard input can be written while it runs, and none of
this applies.
"""

import contextlib
import os
import select
import stat
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from stead.cli.output import fail, note

MAX_STDIN = 40 << 20
"""Bytes of standard input that fit into a request."""
_FIFO_GRACE = 2.0
_SOCKET_GRACE = 0.2
_HINT_AFTER = 3.0
_CHUNK = 1 << 20


@dataclass(frozen=True)
class StandardInput:
    """What a command gets as its standard input."""

    data: bytes | None = None
    skipped: int | None = None
    """The descriptor of an open pipe that had no data when the command started."""

    def warn_if_late(self) -> None:
        """After the command: data that came too late was not passed on, and the user has to know."""
        if self.skipped is not None and _has_data(self.skipped):
            note(
                "standard input received data after the command had started;"
                " the command did not get it: use --stdin"
            )


def read_standard_input() -> StandardInput:
    """Read standard input by the rule above."""
    descriptor = standard_input()
    if descriptor is None or os.isatty(descriptor):
        return StandardInput()
    mode = os.fstat(descriptor).st_mode
    is_fifo = stat.S_ISFIFO(mode)
    if (is_fifo or stat.S_ISSOCK(mode)) and not _ready(descriptor, _FIFO_GRACE if is_fifo else _SOCKET_GRACE):
        if is_fifo:
            note(
                "standard input is an open pipe without data: the command runs without input"
                " (--stdin passes it on as it comes, --no-stdin skips this check)"
            )
        return StandardInput(skipped=descriptor)
    return StandardInput(_read_to_end(descriptor) or None)


def on_terminal() -> bool:
    """Whether the user sits at a terminal and nothing is redirected into the command."""
    descriptor = standard_input()
    return descriptor is not None and os.isatty(descriptor)


def standard_input() -> int | None:
    """The descriptor; None if it is closed, because a socket of this process may have its number then."""
    if sys.stdin is None:
        return None
    try:
        return sys.stdin.fileno()
    except (OSError, ValueError):
        return None


def _ready(descriptor: int, timeout: float) -> bool:
    """Whether there is data, or the end, within a time."""
    return bool(select.select([descriptor], [], [], timeout)[0])


def _has_data(descriptor: int) -> bool:
    try:
        return _ready(descriptor, 0) and os.read(descriptor, 1) != b""
    except OSError:
        return False


def _read_to_end(descriptor: int) -> bytes:
    data = bytearray()
    with _hint():
        while chunk := os.read(descriptor, _CHUNK):
            data += chunk
            if len(data) > MAX_STDIN:
                fail(
                    f"standard input is larger than {MAX_STDIN >> 20} MiB:"
                    " copy it to the VM first with `stead vm cp - VM:PATH`",
                    code="STDIN_TOO_LARGE",
                )
    return bytes(data)


@contextlib.contextmanager
def _hint() -> Iterator[None]:
    """After a few seconds, say what the command is waiting for."""
    text = "waiting for the end of standard input; --no-stdin runs the command without it"
    timer = threading.Timer(_HINT_AFTER, note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
