"""`stead vm exec`: run a command in a VM with its output, exit code and Ctrl-C as if it ran here."""

import posixpath
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperOption

from stead.cli.connection import WAIT_TIMED_OUT, connected, report_errors
from stead.cli.output import Json, fail, note, print_json, write_bytes
from stead.cli.references import Vm
from stead.cli.standard_input import StandardInput, on_terminal, read_standard_input

if TYPE_CHECKING:
    from stead.sdk import Vm as Handle
    from stead.sdk.models import Exited

_INTERACTIVE = frozenset(
    {"ash", "bash", "dash", "fish", "ksh", "node", "psql", "python", "python3", "sh", "sqlite3", "zsh"}
)
"""Programs that read commands from a terminal when they get no arguments, and end at once without one."""


@dataclass(frozen=True)
class RemoteCommand:
    """What to run: a command line for the shell, or a program with its arguments."""

    command: str | Sequence[str]
    user: str | None = None
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    timeout: float | None = None
    stdin: bytes | None = None


@dataclass(frozen=True)
class CommandResult:
    """How a command ended, and its output if that was collected instead of printed."""

    status_code: int
    signal: str | None
    timed_out: bool
    duration: float | None
    stdout: str = ""
    stderr: str = ""

    @property
    def exit_code(self) -> int:
        return WAIT_TIMED_OUT if self.timed_out else self.status_code & 0xFF


def run(vm: "Handle", wanted: RemoteCommand, *, collect: bool = False) -> CommandResult:
    """Run a command to its end and print its output as it arrives, or collect it."""
    from stead.sdk.models import Exited

    collected = {"stdout": bytearray(), "stderr": bytearray()}
    events = vm.exec_stream(
        wanted.command,
        cwd=wanted.cwd,
        env=wanted.env or None,
        stdin=wanted.stdin,
        timeout=wanted.timeout,
        user=wanted.user,
    )
    ended: Exited | None = None
    # Closing the stream ends the command, also after Ctrl-C.
    with events:
        for event in events:
            if isinstance(event, Exited):
                ended = event
            elif collect:
                collected[event.stream] += event.data
            else:
                write_bytes(event.stream, event.data)
    if ended is None:
        ended_early()
    return result_of(ended, collected)


def ended_early() -> NoReturn:
    fail("the connection to the VM ended before the command did", code="STREAM_ENDED")


def result_of(ended: "Exited", output: Mapping[str, bytes | bytearray]) -> CommandResult:
    """The result of a command whose output was collected."""
    texts = {name: data.decode(errors="replace") for name, data in output.items()}
    return CommandResult(ended.status_code, ended.signal, ended.timed_out, ended.duration, **texts)


class ExecCommand(TyperCommand):
    """Options after the command's first word belong to the command: `stead vm exec VM ls -l /srv`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._separated(args))

    def _separated(self, args: list[str]) -> list[str]:
        """The arguments with `--` before the command's first word, which is the second positional one."""
        takes_value = {
            name: not each.is_flag
            for each in self.params
            if isinstance(each, TyperOption)
            for name in (*each.opts, *each.secondary_opts)
        }
        positional = position = 0
        while position < len(args):
            word = args[position]
            if word == "--":
                return args
            if word.startswith("-") and word != "-":
                # `--user=root` and `-uroot` hold their value; an unknown option is an error of the parser.
                position += 1 + takes_value.get(word, False)
                continue
            positional += 1
            if positional == 2:
                return [*args[:position], "--", *args[position:]]
            position += 1
        return args


Command = Annotated[
    list[str],
    typer.Argument(
        metavar="COMMAND", help="A command line for the shell in quotes, or a program and its arguments."
    ),
]
User = Annotated[str | None, typer.Option("--user", "-u", help="The Linux user to run as. Default: root.")]
Cwd = Annotated[str | None, typer.Option("--cwd", help="The working directory.")]
Env = Annotated[
    list[str] | None,
    typer.Option("--env", "-e", metavar="NAME=VALUE", help="Set an environment variable; repeatable."),
]
Timeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0.001, help="End the command after this time, with exit code 124."),
]
Tty = Annotated[bool, typer.Option("--tty", "-t", help="Run it in a terminal: with -i in this one.")]


def exec_(
    vm: Vm,
    command: Command,
    user: User = None,
    cwd: Cwd = None,
    env: Env = None,
    timeout: Timeout = None,
    stdin: Annotated[
        bool | None,
        typer.Option(
            "--stdin/--no-stdin",
            "-i",
            help="Pass standard input on, from a terminal too, or not at all. Default: all but a terminal.",
        ),
    ] = None,
    tty: Tty = False,
    as_json: Json = False,
) -> None:
    """Run a command in a VM, as if it ran here. A suspended or stopped VM is started first.

    Put options of `vm exec` before the command; everything after its first word belongs to the command. The
    exit code is the command's: 127 if there is no such program, 126 if it cannot be executed, 124 after
    `--timeout`, 128 plus the signal number after a signal. Ctrl-C ends the command; with `-it`, every key
    goes to the command, and ~. at the beginning of a line leaves it running.
    """
    wanted = RemoteCommand(line_of(command), user, cwd, environment(env or []), timeout)
    if tty or stdin:
        from stead.cli.foreground import Foreground, run_in_foreground

        check_terminal(tty, bool(stdin), as_json)
        how = Foreground(tty=tty, stdin=bool(stdin), collect=as_json)
        finish(run_in_foreground(vm, wanted, how), timeout, as_json)
    words = _words(command)
    if stdin is None and on_terminal() and _is_interactive(words):
        fail(
            f"`{posixpath.basename(words[0])}` reads commands from a terminal:"
            f" stead vm exec -it {vm} {shlex.join(words)}, or stead vm shell {vm}",
            code="NO_TERMINAL",
        )
    with report_errors(""):
        given = StandardInput() if stdin is False else read_standard_input()
    if given.rest is not None:
        from stead.cli.piped import run_piped

        finish(run_piped(vm, wanted, given.data, given.rest, collect=as_json), timeout, as_json)
    with connected() as stead:
        handle = stead.vms.find(vm)
        ending = run(handle, replace(wanted, stdin=given.data or None), collect=as_json)
    finish(ending, timeout, as_json)


def line_of(command: Sequence[str]) -> str | Sequence[str]:
    """One word is a line for the shell; several are a program and its arguments."""
    return command[0] if len(command) == 1 else command


def check_terminal(tty: bool, stdin: bool, as_json: bool) -> None:
    """Raise if a terminal was requested and stdin is not one, or with `--json`."""
    if tty and stdin and not on_terminal():
        fail("standard input is not a terminal: use -i without -t", code="NO_TERMINAL")
    if tty and stdin and as_json:
        raise typer.BadParameter("a terminal has no JSON output: use it without -t", param_hint="--json")


def finish(ending: CommandResult, timeout: float | None, as_json: bool) -> NoReturn:
    """Print the result of a command, if asked, and end with its exit code."""
    if as_json:
        print_json(ending)
    elif ending.timed_out:
        note(f"the command reached its timeout of {timeout or 0:g} seconds and was ended")
    raise typer.Exit(ending.exit_code)


def _words(command: Sequence[str]) -> list[str]:
    """The program and its arguments; empty for a command line that the shell would refuse."""
    try:
        return shlex.split(command[0]) if len(command) == 1 else list(command)
    except ValueError:
        return []


def _is_interactive(words: Sequence[str]) -> bool:
    """Whether a program would read commands from a terminal. Without one it ends at once and silently."""
    if not words or posixpath.basename(words[0]) not in _INTERACTIVE:
        return False
    return all(word in ("-i", "-l", "-il", "-li", "--login") for word in words[1:])


def environment(pairs: Sequence[str]) -> dict[str, str]:
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"invalid variable {pair!r}: expected NAME=VALUE", param_hint="--env")
        variables[name] = value
    return variables
