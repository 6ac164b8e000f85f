"""Runs commands on the host, with deadlines and clean-up of the process group."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stead.deadlines import scaled
from stead.errors import HostError

_TIMEOUT = scaled(60.0)


@dataclass(frozen=True)
class Completed:
    stdout: bytes
    stderr: bytes


class CommandFailed(HostError):
    """A host command failed; the message has the end of its output."""

    def __init__(self, argv: Sequence[str], status: int, stderr: bytes) -> None:
        last = stderr.decode(errors="replace").strip().splitlines()[-3:]
        how = f"signal {-status}" if status < 0 else f"status {status}"
        super().__init__(f"{argv[0]} ended with {how}: {' | '.join(last) or 'no message'}")
        self.status = status
        self.stderr = stderr


async def run(
    *argv: str | os.PathLike[str],
    stdin: bytes = b"",
    timeout: float = _TIMEOUT,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
) -> Completed:
    """Run a command; on failure, timeout or cancellation its whole process group is killed.

    With `on_line`, each line of output (both streams) is also reported as it comes.
    """
    arguments = [os.fspath(argument) for argument in argv]
    try:
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(env) if env is not None else None,
            cwd=cwd,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise HostError(f"{arguments[0]} is not installed on this host (see `stead doctor`)") from error
    try:
        async with asyncio.timeout(timeout):
            if on_line is None:
                stdout, stderr = await process.communicate(stdin)
            else:
                stdout, stderr = await _communicate_lines(process, stdin, on_line)
    except TimeoutError as error:
        raise HostError(f"{arguments[0]} did not end within {timeout:g} s") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode:
        raise CommandFailed(arguments, process.returncode, stderr)
    return Completed(stdout, stderr)


async def _communicate_lines(
    process: asyncio.subprocess.Process, stdin: bytes, on_line: Callable[[str], None]
) -> tuple[bytes, bytes]:
    async def collect(stream: asyncio.StreamReader | None) -> bytes:
        assert stream is not None  # noqa: S101  # both were asked for as pipes
        lines: list[bytes] = []
        async for line in stream:
            lines.append(line)
            on_line(line.decode(errors="replace").rstrip("\n"))
        return b"".join(lines)

    assert process.stdin is not None  # noqa: S101
    process.stdin.write(stdin)
    process.stdin.close()
    stdout, stderr, _ = await asyncio.gather(collect(process.stdout), collect(process.stderr), process.wait())
    return stdout, stderr
