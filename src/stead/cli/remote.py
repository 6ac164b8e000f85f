"""A command in a machine, as if it ran here: its output, its exit code, Ctrl-C."""

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected
from stead.cli.output import Json, fail, note, print_json
from stead.cli.references import Vm, find_vm

if TYPE_CHECKING:
    from stead.sdk import Vm as Handle

TIMED_OUT = 124
"""The exit code of a command whose time was up, as that of `timeout`."""
MAX_STDIN = 40 << 20
"""A command's standard input goes with the call, whole."""
_HINT_AFTER = 3.0


@dataclass(frozen=True)
class Command:
    """What to run: a line for the shell, or a program and its arguments."""

    command: str | Sequence[str]
    user: str | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    timeout: float | None = None
    stdin: bytes | None = None


@dataclass(frozen=True)
class Ending:
    """How a command ended, and what it printed if that was not passed on."""

    status_code: int
    signal: str | None
    timed_out: bool
    duration: float | None
    stdout: str = ""
    stderr: str = ""

    @property
    def exit_code(self) -> int:
        return TIMED_OUT if self.timed_out else self.status_code & 0xFF


def run(vm: "Handle", wanted: Command, *, collect: bool = False) -> Ending:
    """Run a command to its end. Its output comes out here as it is printed, unless it is to be collected."""
    from stead.sdk.models import Exited

    collected = {"stdout": bytearray(), "stderr": bytearray()}
    streams = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    events = vm.exec_stream(
        wanted.command,
        cwd=wanted.cwd,
        env=wanted.env or None,
        stdin=wanted.stdin,
        timeout=wanted.timeout,
        user=wanted.user,
    )
    ended: Exited | None = None
    # However this block is left, the command ends with it.
    with events:
        for event in events:
            if isinstance(event, Exited):
                ended = event
            elif collect:
                collected[event.stream] += event.data
            else:
                streams[event.stream].write(event.data)
                streams[event.stream].flush()
    if ended is None:
        fail("the machine broke off before the command had ended")
    texts = {name: data.decode(errors="replace") for name, data in collected.items()}
    return Ending(ended.status_code, ended.signal, ended.timed_out, ended.duration, **texts)


def exec_(
    vm: Vm,
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="A line for the shell; or a program and its arguments."),
    ],
    user: Annotated[str | None, typer.Option("--user", "-u", help="As which Linux user; else root.")] = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help="In which folder.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="A variable; repeatable.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, help="End it after this time, with exit code 124."),
    ] = None,
    stdin: Annotated[
        bool | None,
        typer.Option("--stdin/--no-stdin", help="Pass standard input on; else if it is not a terminal."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a command in a machine, as if it ran here. A machine that sleeps is woken.

    Put `--` before a command that has options of its own: `stead vm exec VM -- ls -l /`. The exit code is the
    command's, 128 and the signal's number for one that was ended by a signal. Ctrl-C ends the command.
    """
    variables = environment(env or [])
    wanted = sys.stdin is not None and not sys.stdin.isatty() if stdin is None else stdin
    with connected() as stead:
        handle = stead.vms.ref(find_vm(stead, vm))
        line = command[0] if len(command) == 1 else command
        given = standard_input() if wanted else None
        ending = run(handle, Command(line, user, cwd, variables, timeout, given), collect=as_json)
    if as_json:
        print_json(ending)
    elif ending.timed_out:
        note(f"the command was ended after {timeout:g} seconds")
    raise typer.Exit(ending.exit_code)


def environment(pairs: Sequence[str]) -> dict[str, str]:
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"a variable looks like NAME=VALUE, not {pair!r}", param_hint="--env")
        variables[name] = value
    return variables


def standard_input() -> bytes | None:
    """Everything on standard input; None if there is nothing."""
    if sys.stdin is None:
        return None
    with _patience():
        data = sys.stdin.buffer.read(MAX_STDIN + 1)
    if len(data) > MAX_STDIN:
        fail(
            f"standard input has more than {MAX_STDIN >> 20} MiB:"
            " copy it into the machine first, with `stead vm cp - VM:PATH`"
        )
    return data or None


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """A program may have left us a pipe that it never closes: whoever waits in vain is told for what."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:
        mode = 0
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        yield
        return
    text = "waiting for the end of standard input; with --no-stdin the command is run without"
    timer = threading.Timer(_HINT_AFTER, note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
