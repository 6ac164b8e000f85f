"""Supervision: what must run as long as the server is started again when it ends, with a growing delay.

Periodic work is repeated whatever it raises.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from stead.errors import HostError, ServerStopping, SteadError
from stead.logs import get_logger
from stead.processes import WatchedProcess, spawn
from stead.tasks import TaskSet, finished, in_background

log = get_logger("stead.supervision")

_KEPT_OUTPUT = 4096
_KEPT_LINES = 3
_LAST_READS = 32
"""So often the output of an ended process is read at most: children that it left may still write."""


@dataclass(frozen=True)
class Backoff:
    """Seconds before a restart: doubled from `shortest` to `longest`, until it has served for `healthy`."""

    shortest: float
    longest: float
    healthy: float

    def next(self, last: float | None, served: float) -> float:
        """The delay after it served for so many seconds; `last` is the delay before that."""
        if last is None or served > self.healthy:
            return self.shortest
        return min(2 * last, self.longest)


async def keep_running(
    name: str, run: Callable[[Callable[[], None]], Awaitable[None]], backoff: Backoff
) -> NoReturn:
    """Call `run` again whenever it returns or raises, whatever it raises, until this task is cancelled.

    `run` calls its argument when it serves: from then on its health is counted.
    """
    clock = asyncio.get_running_loop().time
    delay = None
    since: float | None = None

    def serving() -> None:
        nonlocal since
        since = clock()

    last = None
    while True:
        since = None
        error = await _failure_of(run(serving))
        delay = backoff.next(delay, 0.0 if since is None else clock() - since)
        last = _log_failure(f"{name} failed, restarting", error, last if since is None else None, delay)
        await asyncio.sleep(delay)


async def repeat(
    name: str,
    work: Callable[[], Awaitable[None]],
    every: float,
    *,
    at_once: bool = False,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> NoReturn:
    """Call `work` again and again, `every` so many seconds after its end, whatever it raises.

    The first call is after that time too, unless `at_once`. Only a cancellation of this task ends it.
    """
    last = None
    if not at_once:
        await sleep(every)
    while True:
        error = await _failure_of(work())
        last = None if error is None else _log_failure(f"{name} failed", error, last, every)
        await sleep(every)


def _log_failure(text: str, error: BaseException | None, last: str | None, seconds: float) -> str:
    """Log why something failed that is tried again in `seconds`, and return it."""
    unexpected = error is not None and not isinstance(error, SteadError | OSError)
    why = repr(error) if unexpected else str(error or "no error")
    # What fails in the same way again and again, such as a port in use, is an error once.
    write = log.debug if why == last else log.error
    write(text, error=why, seconds=seconds, exc_info=error if unexpected else None)
    return why


async def _failure_of(work: Awaitable[None]) -> BaseException | None:
    try:
        await work
    except asyncio.CancelledError as error:
        # Only a cancellation of this task ends it, not one of something that the work awaits.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error
    except Exception as error:
        return error
    return None


@dataclass(frozen=True)
class ProcessCommand:
    """How a process is started. Let it end with this one: `setpriv --pdeathsig=KILL`."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """PATH and LC_ALL are set unless they are here."""
    folder: Path = Path("/")
    descriptors: tuple[int, ...] = ()
    """File descriptors that it inherits."""
    handed_over: tuple[int, ...] = ()
    """File descriptors that it inherits and that are closed here, whether it starts or not."""


async def _nothing() -> None:
    pass


class SupervisedProcess:
    """A process that serves until `close`: whatever ends it, it is started again."""

    def __init__(
        self,
        name: str,
        command: Callable[[], ProcessCommand],
        ready: Callable[[], Coroutine[Any, Any, None]],
        backoff: Backoff,
        *,
        start_timeout: float,
        stop_timeout: float = 0.0,
        clean_up: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        """`ready` returns when a started process serves. `clean_up` removes what an ended one leaves;
        it may be called twice.

        With `stop_timeout`, `close` gives it so many seconds after SIGTERM before it is killed.
        """
        self._name = name
        self._command = command
        self._ready = ready
        self._backoff = backoff
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._clean_up = clean_up
        self._process: WatchedProcess | None = None
        self._output: _LastOutput | None = None
        self._serving = False
        self._closed = False
        self._tasks = TaskSet()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.identity.pid

    @property
    def serving(self) -> bool:
        """Whether it was ready and has not ended since."""
        return self._serving and self._process is not None and not self._process.ended

    async def start(self) -> None:
        """Start the process and wait until it is ready; raises HostError. Restarts raise nothing."""
        await self._start()
        self._tasks.start(keep_running(self._name, self._run, self._backoff), f"restart of {self._name}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it runs: one that starts later reads its files then."""
        if self._process is not None:
            self._process.send(number)

    async def close(self) -> None:
        """End the process for good."""
        self._closed = True
        await self._tasks.close()
        await finished(self._end(self._stop_timeout))

    async def _run(self, serving: Callable[[], None]) -> None:
        """Start the process unless it runs, and wait for its end."""
        if self._process is None:
            await self._start()
            log.info(f"{self._name} started again", pid=self.pid)
        serving()
        await self._failure()

    async def _failure(self) -> NoReturn:
        """Wait for the end of the process and raise it."""
        assert self._process is not None and self._output is not None  # noqa: S101  # it was started
        how = await self._process.wait()
        said = self._output.read_to_end()
        await finished(self._end())
        raise HostError(f"{self._name} {how}: {said}")

    async def _start(self) -> None:
        if self._closed:
            raise ServerStopping
        try:
            process, output = self._spawn()
        except HostError:
            await finished(self._end())
            raise
        self._process, self._output = process, output
        try:
            async with asyncio.timeout(self._start_timeout) as limit:
                await self._until_ready(process, output)
        except BaseException as error:
            said = output.read_to_end()
            await finished(self._end())
            if isinstance(error, TimeoutError) and limit.expired():
                text = f"{self._name} did not start in {self._start_timeout:g} s: {said}"
                raise HostError(text) from error
            raise
        self._serving = True

    def _spawn(self) -> "tuple[WatchedProcess, _LastOutput]":
        try:
            output = _LastOutput(self._name)
            try:
                command = self._command()
                try:
                    identity = spawn(
                        command.arguments,
                        environment=command.environment,
                        folder=command.folder,
                        descriptors=(*command.descriptors, *command.handed_over),
                        errors=output.write_end,
                    )
                finally:
                    for descriptor in command.handed_over:
                        os.close(descriptor)
                if identity is None:
                    raise ProcessLookupError
                return WatchedProcess(identity), output
            except BaseException as error:
                said = output.read_to_end()
                output.close()
                if isinstance(error, ProcessLookupError):
                    raise HostError(f"{self._name} does not start: ended at once: {said}") from None
                raise
            finally:
                os.close(output.write_end)
        except FileNotFoundError as error:
            raise HostError(f"{error.filename} is not installed on this host (see `stead doctor`)") from error
        except OSError as error:
            raise HostError(f"cannot start {self._name}: {error.strerror or error}") from error

    async def _until_ready(self, process: WatchedProcess, output: "_LastOutput") -> None:
        async with in_background(process.wait()) as ended, in_background(self._ready()) as ready:
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
            if process.ended:
                how, said = await process.wait(), output.read_to_end()
                raise HostError(f"{self._name} does not start: {how}: {said}")
            await ready

    async def _end(self, grace: float = 0.0) -> None:
        process, self._process = self._process, None
        self._serving = False
        if process is not None:
            if grace:
                process.send(signal.SIGTERM)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        await process.wait()
            process.kill()
            await process.wait()
        if self._output is not None:
            self._output.close()
        await self._clean_up()


class _LastOutput:
    """A pipe for what a process prints, of which the end is kept. It is read always, or it would fill."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._kept = b""
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._read)
        self._open = True

    def _read(self) -> bool:
        """Whether there was something to read."""
        try:
            piece = os.read(self._read_end, _KEPT_OUTPUT)
        except BlockingIOError:
            return False
        if not piece:
            self._loop.remove_reader(self._read_end)
            return False
        self._kept = (self._kept + piece)[-_KEPT_OUTPUT:]
        log.debug("process printed", process=self._name, text=piece.decode(errors="replace").strip())
        return True

    def read_to_end(self) -> str:
        """The last lines, after its writer has ended."""
        for _ in range(_LAST_READS):
            if not self._open or not self._read():
                break
        lines = self._kept.decode(errors="replace").strip().splitlines()[-_KEPT_LINES:]
        return " | ".join(lines) or "no output"

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
