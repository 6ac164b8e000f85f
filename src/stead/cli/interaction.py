"""A program in a VM and the local terminal or pipes: input, output, window size and signals."""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Protocol

from stead.cli.terminal import DetachKey, Screen, raw_mode, say, terminal_size

_CHUNK = 64 << 10
Work = Coroutine[Any, Any, None]


class RemoteTerminal(Protocol):
    """A program with a terminal in a VM."""

    async def write(self, data: str | bytes) -> None: ...

    async def resize(self, cols: int, rows: int) -> None: ...


class Detached(Exception):
    """The user left the program, which continues."""


class Signalled(Exception):
    """This process was told to end; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Interaction:
    """Runs some work until it ends, or until there is a reason to leave it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._leaving: asyncio.Future[None] = self._loop.create_future()
        self._started: set[asyncio.Task[None]] = set()
        self._key_pressed = asyncio.Event()

    def leave(self, why: Exception) -> None:
        if not self._leaving.done():
            self._leaving.set_exception(why)

    def start(self, work: Work) -> None:
        """Do something beside the work. If it fails, so does the work."""
        task = self._loop.create_task(work)
        self._started.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._started.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.leave(error)

    async def run(self, work: Work, handlers: dict[signal.Signals, Callable[[], None]]) -> None:
        """Run the work. Raises the reason to leave it: `Signalled` after SIGTERM or SIGHUP."""
        leaving = {
            number: lambda number=number: self.leave(Signalled(number))
            for number in (signal.SIGTERM, signal.SIGHUP)
        }
        with _handled(leaving | handlers):
            running = self._loop.create_task(work)
            try:
                await asyncio.wait({running, self._leaving}, return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
                else:
                    self._leaving.result()
            finally:
                for task in (running, *self._started):
                    task.cancel()
                self._leaving.cancel()

    async def converse(self, terminal: RemoteTerminal, output: AsyncIterator[bytes]) -> None:
        """Connect the local terminal with a program until it ends. Raises `Detached` after the detach key."""
        screen, detach_key = Screen(), DetachKey()

        async def typed(data: bytes) -> None:
            passed, detach = detach_key.feed(data)
            self._key_pressed.set()
            if passed:
                await terminal.write(passed)
            if detach:
                self.leave(Detached())
            elif not data:
                self.leave(Signalled(signal.SIGHUP))

        async def show() -> None:
            async for data in output:
                screen.feed(data)
                write_all(sys.stdout.fileno(), data)

        def resize() -> None:
            self.start(terminal.resize(*terminal_size()))

        with raw_mode(sys.stdin.fileno()):
            self.read(sys.stdin.fileno(), typed)
            try:
                await self.run(show(), {signal.SIGWINCH: resize})
            except BaseException:
                write_all(sys.stdout.fileno(), screen.undo())
                raise

    async def wait_for_key(self, text: str) -> None:
        """Say something and wait until the user presses a key, which goes to the program."""
        self._key_pressed.clear()
        say(text)
        await self._key_pressed.wait()

    def read(self, descriptor: int, deliver: Callable[[bytes], Work], *, first: bytes = b"") -> None:
        """Call a coroutine function with what can be read, after `first`, and with nothing at the end.

        A thread reads, because files cannot be polled, and because a terminal that is made non-blocking would
        be so for the user's shell too. It waits for each call, so that a slow program slows its input down.
        """

        def read_all() -> None:
            try:
                for data in _input(descriptor, first):
                    work = deliver(data)
                    try:
                        asyncio.run_coroutine_threadsafe(work, self._loop).result()
                    except Exception:
                        work.close()
                        raise
            except Exception as error:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self.leave, error)

        threading.Thread(target=read_all, daemon=True).start()


def _input(descriptor: int, first: bytes) -> Iterator[bytes]:
    """Input to its end, which is an empty piece. A terminal that is gone is at its end."""
    if first:
        yield first
    data = b" "
    while data:
        try:
            data = os.read(descriptor, _CHUNK)
        except OSError:
            if not os.isatty(descriptor):
                raise
            data = b""
        yield data


@contextlib.contextmanager
def _handled(handlers: dict[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
