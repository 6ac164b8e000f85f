"""Standard input of `stead vm exec`: what there is at the start, and whether more may come.

A small command is one request, with its standard input inside. That needs all of the input, and waiting for
the end of a pipe could last for ever: programs such as CI runners leave a pipe open that they neither write
to nor close. So nothing is waited for. Input that is complete at the start goes into the request; otherwise
the command starts at once, and the rest is passed on as it comes, as `ssh` does it.
"""

import os
import select
import sys
from dataclasses import dataclass

INLINE = 1 << 20
"""Bytes of standard input that are sent with the request."""
_CHUNK = 64 << 10


@dataclass(frozen=True)
class StandardInput:
    """Standard input as far as it was there at the start."""

    data: bytes = b""
    rest: int | None = None
    """The descriptor to read on from; None at the end of the input."""


def read_standard_input() -> StandardInput:
    """Read what there is without waiting. A terminal and a closed descriptor are no input."""
    descriptor = standard_input()
    if descriptor is None or os.isatty(descriptor):
        return StandardInput()
    data = bytearray()
    while len(data) <= INLINE and select.select([descriptor], [], [], 0)[0]:
        chunk = os.read(descriptor, _CHUNK)
        if not chunk:
            return StandardInput(bytes(data))
        data += chunk
    return StandardInput(bytes(data), descriptor)


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
