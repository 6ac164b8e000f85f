"""Runs of a fuzz target: seeded mutations of a corpus, with bounds on CPU time and memory."""

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from support import ROOT

CORPUS = ROOT / "tests/fuzz/corpus"
Feed = Callable[[bytes], None]
"""Gives one input to the parser. What it raises is a finding; it catches errors that the parser declares."""

_WARM_UP = 200
"""Inputs after which caches are filled and memory is compared with."""
_SPECIAL = (0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x0D, 0x20, 0x2E, 0x2F)
_MOST_MUTATIONS = 6
_LONGEST_REPEAT = 4096
_WALL_TIME = 60.0


@dataclass(frozen=True)
class Target:
    """A parser, with what a mutator needs to know about its input."""

    name: str
    opened: Callable[[], AbstractContextManager[Feed]]
    tokens: Sequence[bytes] = ()
    """Pieces of valid input, which random bytes rarely are."""
    longest: int = 16 << 10
    """Bytes of an input."""
    inputs: int = 2000
    """Inputs of a short run: a few seconds."""
    cpu: float = 2.0
    """Seconds of CPU time that one input may take. All of them take milliseconds."""
    growth_mib: int = 64
    """MiB by which the process may grow in a run, of any length."""

    @property
    def corpus(self) -> list[bytes]:
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]


class Finding(AssertionError):
    """An input that crashed or held the parser, or made it grow."""

    def __init__(self, target: Target, kind: str, data: bytes) -> None:
        shown = repr(data[:200]) + ("..." if len(data) > 200 else "")
        super().__init__(f"{target.name}: {kind} by {len(data)} bytes: {shown}")
        self.kind = kind
        self.data = data


class TooSlow(BaseException):
    """Not an Exception: no parser may catch it."""


@dataclass(frozen=True)
class Run:
    inputs: int
    seconds: float
    grown_mib: float


def fuzz(target: Target, *, seed: int, inputs: int | None = None, seconds: float | None = None) -> Run:
    """Feed the corpus and then mutations of it, up to a number of inputs or for a time. Raises `Finding`."""
    chance = random.Random(seed)
    corpus = target.corpus
    started, count, baseline = time.monotonic(), 0, 0.0
    with target.opened() as feed, _bounded_cpu(target.cpu) as restart_clock:
        while (inputs is None or count < inputs) and (
            seconds is None or time.monotonic() < started + seconds
        ):
            data = corpus[count] if count < len(corpus) else mutated(chance, corpus, target)
            restart_clock()
            feed_one(target, feed, data)
            count += 1
            if count == _WARM_UP:
                baseline = resident_mib()
            if count > _WARM_UP and count % 100 == 0 and resident_mib() - baseline > target.growth_mib:
                raise Finding(target, f"memory grew by more than {target.growth_mib} MiB", data)
    grown = resident_mib() - baseline if baseline else 0.0
    return Run(count, time.monotonic() - started, grown)


def feed_one(target: Target, feed: Feed, data: bytes) -> None:
    try:
        feed(data)
    except TooSlow:
        raise Finding(target, f"more than {target.cpu:g} s of CPU time", data) from None
    except Exception as error:
        raise Finding(target, f"{type(error).__name__}: {error}", data) from error


def mutated(chance: random.Random, corpus: Sequence[bytes], target: Target) -> bytes:
    """An input of the corpus with a few random changes."""
    data = bytearray(chance.choice(corpus))
    for _ in range(chance.randint(1, _MOST_MUTATIONS)):
        at = chance.randint(0, len(data))
        end = min(len(data), at + chance.choice((1, 2, 4, 8, 64)))
        match chance.randrange(9):
            case 0 if data:
                data[at % len(data)] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[at % len(data)] = chance.choice(_SPECIAL)
            case 2:
                data[at:at] = chance.randbytes(end - at or 1)
            case 3:
                del data[at:end]
            case 4:
                data[at:end] = data[at:end] * chance.randint(2, _LONGEST_REPEAT // (end - at or 1))
            case 5:
                del data[at:]
            case 6:
                other = chance.choice(corpus)
                cut = chance.randint(0, len(other))
                data[at:] = other[cut:]
            case 7 if target.tokens:
                data[at:at] = chance.choice(target.tokens)
            case _ if target.tokens:
                token = chance.choice(target.tokens)
                data[at : at + len(token)] = token
    return bytes(data[: target.longest])


@contextlib.contextmanager
def _bounded_cpu(seconds: float) -> Iterator[Callable[[], None]]:
    """Raise `TooSlow` in the main thread after this CPU time, unless the clock is restarted before."""

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, ring)
    try:
        yield lambda: signal.setitimer(signal.ITIMER_PROF, seconds) and None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


def in_event_loop(
    opened: Callable[[], AbstractAsyncContextManager[Callable[[bytes], Awaitable[None]]]],
) -> Callable[[], AbstractContextManager[Feed]]:
    """A target whose parser needs an event loop. What is raised in a task of its own is a finding too."""

    @contextlib.contextmanager
    def with_loop() -> Iterator[Feed]:
        unhandled: list[BaseException] = []

        def note(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
            error = context.get("exception")
            unhandled.append(error if isinstance(error, BaseException) else RuntimeError(context["message"]))

        with asyncio.Runner() as runner:
            runner.get_loop().set_exception_handler(note)
            stack = contextlib.AsyncExitStack()
            feed_async = runner.run(stack.enter_async_context(opened()))

            async def bounded(data: bytes) -> None:
                async with asyncio.timeout(_WALL_TIME):
                    await feed_async(data)
                if unhandled:
                    raise unhandled.pop()

            try:
                yield lambda data: runner.run(bounded(data))
            finally:
                runner.run(stack.aclose())

    return with_loop


@contextlib.asynccontextmanager
async def unix_server(
    path: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[None]:
    """A server on a Unix socket: TCP would run out of ports, which stay reserved after a connection."""
    server = await asyncio.start_unix_server(serve, path)
    try:
        yield
    finally:
        server.close()
