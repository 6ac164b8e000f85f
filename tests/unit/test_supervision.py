"""Supervision: what ends is started again with a growing delay, whatever goes wrong; with real processes."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import pytest

from stead.errors import HostError, SteadError
from stead.processes import ProcessId
from stead.supervision import Backoff, ProcessCommand, SupervisedProcess, keep_running, repeat
from support.waiting import until

QUICK = Backoff(shortest=0.01, longest=0.04, healthy=60.0)
NEVER_AGAIN = Backoff(shortest=3600.0, longest=3600.0, healthy=60.0)


# Without processes


def test_the_delay_doubles_until_it_has_served_long_enough() -> None:
    backoff = Backoff(shortest=0.1, longest=0.5, healthy=10.0)
    delays, last = [], None
    for served in (0.0, 0.0, 9.0, 0.0, 11.0, 0.0):
        last = backoff.next(last, served)
        delays.append(last)
    assert delays == [0.1, 0.2, 0.4, 0.5, 0.1, 0.2]


@contextlib.asynccontextmanager
async def kept(run: Callable[[Callable[[], None]], Awaitable[None]]) -> AsyncIterator[asyncio.Task[NoReturn]]:
    task = asyncio.create_task(keep_running("work", run, QUICK))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_repeated_work_survives_every_error(caplog: pytest.LogCaptureFixture) -> None:
    """An error that repeats is logged once, and again after a success."""
    ends = [RuntimeError("a defect"), OSError(errno.ENOSPC, "full"), OSError(errno.ENOSPC, "full")]
    outcomes: list[BaseException | None] = [*ends, asyncio.CancelledError(), None, ends[2], None]
    calls, waits = 0, list[float]()
    done = asyncio.Event()

    async def work() -> None:
        nonlocal calls
        calls += 1
        if calls > len(outcomes):
            done.set()
            await asyncio.Event().wait()
        if (error := outcomes[calls - 1]) is not None:
            raise error

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    task = asyncio.create_task(repeat("work", work, 5.0, sleep=sleep))
    async with asyncio.timeout(60):
        await done.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert waits == [5.0] * (len(outcomes) + 1)
    logged = [each for each in caplog.records if each.name == "stead.supervision"]
    errors = [each.__dict__["fields"]["error"] for each in logged if each.levelno == logging.ERROR]
    full = "[Errno 28] full"
    assert errors == ["RuntimeError('a defect')", full, "CancelledError()", full]


async def test_every_error_is_logged_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    """Also a cancellation of something that the work awaits, and an end without an error."""
    failures = [
        RuntimeError("a defect"),
        OSError(errno.ENOMEM, "no memory"),
        HostError("a reason"),
        MemoryError(),
        asyncio.CancelledError(),
        None,
    ]
    attempts = 0
    reached = asyncio.Event()

    async def work(serving: Callable[[], None]) -> None:
        nonlocal attempts
        attempts += 1
        if attempts > len(failures):
            reached.set()
            await asyncio.Event().wait()
        if (error := failures[attempts - 1]) is not None:
            raise error

    with caplog.at_level(logging.ERROR):
        async with kept(work) as task:
            await asyncio.wait_for(reached.wait(), 30)
            assert not task.done()
    assert caplog.text.count("work failed, restarting") == len(failures)
    assert "a reason" in caplog.text and "Traceback" in caplog.text


async def test_the_same_failure_to_start_is_an_error_once(caplog: pytest.LogCaptureFixture) -> None:
    """After it has served, it is one again."""
    attempts = 0
    reached = asyncio.Event()

    async def work(serving: Callable[[], None]) -> None:
        nonlocal attempts
        attempts += 1
        if attempts in (4, 5):
            serving()
        if attempts == 8:
            reached.set()
            await asyncio.Event().wait()
        raise HostError("the port is in use")

    with caplog.at_level(logging.INFO):
        async with kept(work):
            await asyncio.wait_for(reached.wait(), 30)
    assert caplog.text.count("work failed, restarting") == 3


async def test_a_cancellation_ends_it(caplog: pytest.LogCaptureFixture) -> None:
    begun = asyncio.Event()

    async def work(serving: Callable[[], None]) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with kept(work) as task:
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()


async def test_health_counts_from_when_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that takes long and then fails is no success."""
    loop = asyncio.get_running_loop()
    now, delays, ended = loop.time(), list[float](), asyncio.Event()

    async def sleep(delay: float) -> None:
        delays.append(delay)
        if len(delays) == 5:
            ended.set()
            await asyncio.Event().wait()

    async def work(serving: Callable[[], None]) -> None:
        nonlocal now
        if len(delays) == 3:
            serving()
        now += 100.0

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        patch.setattr(loop, "time", lambda: now)
        task = asyncio.create_task(keep_running("work", work, QUICK))
        await ended.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert delays == [0.01, 0.02, 0.04, 0.01, 0.02]


# With processes


class Supervised:
    """A supervised shell script. Each start appends its pid to a file; it is ready when it wrote `ready`."""

    def __init__(self, folder: Path, script: str, backoff: Backoff = QUICK, **options: Any) -> None:
        self.folder = folder
        self.script = script
        self.cleanups = 0
        self.on_ready: Callable[[], Coroutine[Any, Any, None]] = self._ready
        options.setdefault("start_timeout", 30.0)
        self.process = SupervisedProcess(
            "script", self.command, lambda: self.on_ready(), backoff, clean_up=self._clean_up, **options
        )

    def command(self) -> ProcessCommand:
        (self.folder / "ready").unlink(missing_ok=True)
        return ProcessCommand(
            ["sh", "-c", f"echo $$ >> pids; {self.script}"], {"PATH": os.environ["PATH"]}, self.folder
        )

    async def _ready(self) -> None:
        while not (self.folder / "ready").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    async def _clean_up(self) -> None:
        self.cleanups += 1

    @property
    def pids(self) -> list[int]:
        path = self.folder / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def all_ended(self) -> bool:
        return bool(self.pids) and all(ProcessId.of(pid) is None for pid in self.pids)

    async def started(self, times: int) -> None:
        async def reached() -> bool:
            return len(self.pids) >= times and self.process.serving

        await until(reached, 30)


SERVES = "touch ready; exec sleep 1000"


@contextlib.asynccontextmanager
async def supervised(folder: Path, script: str, **options: Any) -> AsyncIterator[Supervised]:
    made = Supervised(folder, script, **options)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    await made.process.start()
    try:
        yield made
    finally:
        await made.process.close()
    assert made.all_ended()
    assert made.process.pid is None and not made.process.serving
    assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is left"  # noqa: PTH208


async def test_a_killed_process_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with supervised(tmp_path, f"echo last words >&2; {SERVES}") as made:
        for times in (2, 3):
            assert made.process.serving and made.process.pid is not None
            os.kill(made.process.pid, signal.SIGKILL)
            await made.started(times)
        assert made.cleanups == 2
    assert made.cleanups == 3
    assert caplog.text.count("script ended by SIGKILL: last words") == 2


async def test_a_process_that_ends_by_itself_is_started_again(tmp_path: Path) -> None:
    async with supervised(tmp_path, "touch ready; sleep 0.2; exit 3") as made:
        await until(lambda: _many(made, 3), 30)


async def _many(made: Supervised, times: int) -> bool:
    return len(made.pids) >= times


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo no such option >&2; exit 2",
            "does not start: (exited with status 2|ended at once): no such option",
        ),
        ("kill -9 $$", "does not start: ended (by SIGKILL|at once): no output"),
        ("exec sleep 1000", "did not start in 0.5 s: no output"),
    ],
)
async def test_a_first_start_that_fails_is_an_error(tmp_path: Path, script: str, why: str) -> None:
    made = Supervised(tmp_path, script, start_timeout=0.5 if "0.5" in why else 30.0)
    with pytest.raises(HostError, match=why):
        await made.process.start()
    assert made.all_ended() and made.cleanups == 1
    await asyncio.sleep(0.1)
    assert len(made.pids) == 1, "it is not tried again"
    await made.process.close()


async def test_a_first_start_whose_readiness_fails_is_an_error(tmp_path: Path) -> None:
    made = Supervised(tmp_path, SERVES)

    async def broken() -> None:
        await made._ready()
        raise RuntimeError("refused its configuration")

    made.on_ready = broken
    with pytest.raises(RuntimeError, match="refused its configuration"):
        await made.process.start()
    assert made.all_ended()
    await made.process.close()


async def test_restarts_that_fail_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in another way: the process ends, is never ready, its readiness raises, it cannot be started."""
    async with supervised(tmp_path, SERVES, start_timeout=0.5) as made:
        tried = list[str]()
        failures = ("ends", "never ready", "readiness raises", "ENOENT", "ENOMEM", "command raises")
        plan = iter((*failures, "serves"))
        real, ready = made.command, made.on_ready

        def command() -> ProcessCommand:
            tried.append(next(plan))
            made.on_ready, made.script = ready, SERVES
            match tried[-1]:
                case "ends":
                    made.script = "exit 1"
                case "never ready":
                    made.script = "exec sleep 1000"
                case "readiness raises":
                    made.on_ready = _raising(ValueError("not JSON"))
                case "ENOENT":
                    return ProcessCommand(["/no/such/program"])
                case "ENOMEM":
                    raise OSError(errno.ENOMEM, "Cannot allocate memory")
                case "command raises":
                    raise KeyError("defect")
            return real()

        monkeypatch.setattr(made.process, "_command", command)
        assert made.process.pid is not None
        os.kill(made.process.pid, signal.SIGKILL)

        async def serves_again() -> bool:
            return tried[-1:] == ["serves"] and made.process.serving

        await until(serves_again, 30)
        assert len(tried) == 7


def _raising(error: Exception) -> Callable[[], Coroutine[Any, Any, None]]:
    async def ready() -> None:
        raise error

    return ready


async def test_a_clean_up_that_fails_is_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with supervised(tmp_path, SERVES) as made:
        real = made.process._clean_up

        async def once() -> None:
            monkeypatch.setattr(made.process, "_clean_up", real)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(made.process, "_clean_up", once)
        assert made.process.pid is not None
        os.kill(made.process.pid, signal.SIGKILL)
        await made.started(2)


async def test_a_missing_program_is_named(tmp_path: Path) -> None:
    process = SupervisedProcess(
        "server", lambda: ProcessCommand(["no-such-program"]), _raising(KeyError()), QUICK, start_timeout=30
    )
    with pytest.raises(HostError, match="no-such-program is not installed on this host"):
        await process.start()
    await process.close()


@pytest.mark.parametrize("program", ["sleep", "no-such-program"])
async def test_descriptors_that_are_handed_over_are_closed_here(program: str) -> None:
    """So what they stand for, such as a network device, ends with the process."""
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)

    async def ready() -> None:
        with pytest.raises(BlockingIOError):
            os.read(ours, 1)

    command = ProcessCommand([program, "1000"], handed_over=(theirs,))
    process = SupervisedProcess("server", lambda: command, ready, NEVER_AGAIN, start_timeout=30)
    with contextlib.suppress(HostError):
        await process.start()
    await process.close()
    assert os.read(ours, 1) == b"", "no writer is left"
    os.close(ours)


async def test_close_during_the_delay_starts_nothing(tmp_path: Path) -> None:
    async with supervised(tmp_path, SERVES, backoff=NEVER_AGAIN) as made:
        assert made.process.pid is not None
        os.kill(made.process.pid, signal.SIGKILL)
        await until(lambda: _is(made.process.pid, None), 30)
        assert not made.process.serving
    assert len(made.pids) == 1


async def _is(value: object, expected: object) -> bool:
    return value == expected


async def test_close_during_a_restart_ends_the_process(tmp_path: Path) -> None:
    async with supervised(tmp_path, SERVES) as made:
        made.script = "exec sleep 1000"
        assert made.process.pid is not None
        os.kill(made.process.pid, signal.SIGKILL)
        await until(lambda: _many(made, 2), 30)
    assert len(made.pids) == 2


async def test_close_during_the_first_start_ends_the_process(tmp_path: Path) -> None:
    made = Supervised(tmp_path, "exec sleep 1000")
    starting = asyncio.create_task(made.process.start())
    await until(lambda: _many(made, 1), 30)
    await made.process.close()
    with pytest.raises(SteadError):
        await starting
    assert made.all_ended()
    with pytest.raises(SteadError):
        await made.process.start()
    assert len(made.pids) == 1


async def test_a_cancelled_start_ends_the_process(tmp_path: Path) -> None:
    made = Supervised(tmp_path, "exec sleep 1000")
    starting = asyncio.create_task(made.process.start())
    await until(lambda: _many(made, 1), 30)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert made.all_ended()
    await made.process.close()


async def test_a_signal_reaches_the_process_that_runs(tmp_path: Path) -> None:
    # Not SIGHUP: under nohup it is ignored, and a shell cannot trap what was ignored when it began.
    reloading = "trap 'touch reloaded' USR1; touch ready; while :; do sleep 0.01; done"
    async with supervised(tmp_path, reloading, backoff=NEVER_AGAIN) as made:
        made.process.send(signal.SIGUSR1)
        await until((tmp_path / "reloaded").exists, 60)
    made.process.send(signal.SIGUSR1)  # nothing runs any more


async def test_a_process_is_asked_to_end_before_it_is_killed(tmp_path: Path) -> None:
    polite = "trap 'touch asked; exit' TERM; touch ready; while :; do sleep 0.01; done"
    async with supervised(tmp_path, polite, stop_timeout=30.0):
        pass
    assert (tmp_path / "asked").exists()


async def test_a_process_that_ignores_the_request_is_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path, f"trap '' TERM; {SERVES}", stop_timeout=0.1):
        pass


async def test_much_output_does_not_block_and_its_end_is_kept(tmp_path: Path) -> None:
    """More than a pipe holds, before it is ready and after."""
    flood = "seq 1 40000 >&2"
    async with supervised(tmp_path, f"{flood}; touch ready; {flood}; touch flooded; exec sleep 1000") as made:
        await until((tmp_path / "flooded").exists, 30)
        assert made.process._output is not None
        assert made.process._output.read_to_end() == "39998 | 39999 | 40000"


async def test_a_child_that_keeps_the_output_open_does_not_delay_a_restart(tmp_path: Path) -> None:
    script = "sleep 1000 & echo $! >> children; touch ready; exec sleep 1000"
    try:
        async with supervised(tmp_path, script) as made:
            assert made.process.pid is not None
            os.kill(made.process.pid, signal.SIGKILL)
            await made.started(2)
    finally:
        for pid in (tmp_path / "children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
