"""Signals: SIGTERM and SIGHUP end a command like Ctrl-C, with its cleanup."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

_ECHO = 3.0
"""Seconds in which a further signal counts as a duplicate of the first."""


@contextlib.contextmanager
def signals_as_exits() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that the block cleans up."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled(leave, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def first_signal_exits() -> Iterator[None]:
    """The first signal ends the block; duplicates of it do not interrupt the cleanup in the block."""
    first: float | None = None

    def leave(number: int, _: FrameType | None) -> None:
        nonlocal first
        if first is not None and time.monotonic() - first < _ECHO:
            return
        first = time.monotonic()
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with _handled(leave, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def ignore_repeated_signals() -> Iterator[None]:
    """For cleanup: ignore duplicates of a signal, which come to the process and to its group. A later signal
    ends the cleanup."""
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
