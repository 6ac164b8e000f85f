"""A terminal that is closed and a job that is cancelled end a command as Ctrl-C does: cleanly."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

_ECHO = 3.0
"""Seconds in which a signal is taken for the one that was heard already."""


@contextlib.contextmanager
def signals_as_exits() -> Iterator[None]:
    """Have a block left by an exception, so that what it has to clean up is cleaned up."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled(leave, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """For cleaning up: signals often come twice, to a process and to its group. Whoever insists is heard."""
    began = time.monotonic()

    def insist(number: int, _: FrameType | None) -> None:
        if time.monotonic() - began > _ECHO:
            raise SystemExit(128 + number)

    with _handled(insist, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def _handled(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
