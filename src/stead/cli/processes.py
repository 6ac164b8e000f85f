"""`stead vm run`, `stead vm ps`, and the output and signals of background processes."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli import remote
from stead.cli.connection import connected
from stead.cli.output import Json, ago, note, print_json, print_table, show_progress, write_bytes
from stead.cli.references import Vm

if TYPE_CHECKING:
    from stead.sdk import Vm as Handle
    from stead.sdk.models import OutputCut, ProcessEvent, ProcessInfo

_LONGEST_COMMAND = 60


def run(
    vm: Vm,
    command: remote.Command,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Leave it running in the background and print its id.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--id", metavar="ID", help="An id of your choice. Default: proc-1, proc-2, ..."),
    ] = None,
    user: remote.User = None,
    cwd: remote.Cwd = None,
    env: remote.Env = None,
    timeout: remote.Timeout = None,
    stdin: Annotated[
        bool,
        typer.Option("--stdin", "-i", help="Pass standard input on; with -d, leave it open for writing."),
    ] = False,
    tty: remote.Tty = False,
    as_json: Json = False,
) -> None:
    """Run a command as a background process of a VM. A suspended or stopped VM is started first.

    Without `--detach` its output is printed as it comes, and the exit code is the command's; if this command
    is ended, or the network drops, the process continues. `stead vm ps` lists it, `stead vm logs -f VM ID`
    follows it, `stead vm signal VM ID` ends it.
    """
    wanted = remote.RemoteCommand(remote.line_of(command), user, cwd, remote.environment(env or []), timeout)
    if not detach:
        from stead.cli.foreground import Foreground, run_in_foreground

        remote.check_terminal(tty, stdin, as_json)
        how = Foreground(tty=tty, stdin=stdin, collect=as_json, id=name, keep=True)
        remote.finish(run_in_foreground(vm, wanted, how), timeout, as_json)
    with connected() as stead:
        handle = stead.vms.find(vm)
        with show_progress(f"starting on {handle.id}"):
            process = handle.processes.start(
                wanted.command,
                id=name,
                cwd=cwd,
                env=wanted.env or None,
                stdin=stdin,
                pty=tty,
                timeout=timeout,
                user=user,
            )
    if as_json:
        print_json(process.last_info)
    else:
        typer.echo(process.id)


def list_processes(
    vm: Vm,
    user: remote.User = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    as_json: Json = False,
) -> None:
    """List the background processes of a VM, those that ended within a day too."""
    with connected() as stead:
        handle = stead.vms.find(vm)
        found = [each.last_info for each in (handle if user is None else handle.user(user)).processes.list()]
    if as_json:
        print_json({"processes": found})
    elif quiet:
        for info in found:
            typer.echo(info.id)
    else:
        rows = [
            (info.id, _state(info), info.pid, info.user, ago(info.created_at), _line(info)) for info in found
        ]
        print_table(("id", "state", "pid", "user", "started", "command"), rows, "no background processes")


def _state(info: "ProcessInfo") -> str:
    if info.running:
        return "running"
    return f"killed by {info.signal}" if info.signal else f"exited {info.exit_code}"


def _line(info: "ProcessInfo") -> str:
    """The command as it was typed: a line for the shell is run by `/bin/sh -c`."""
    shell = len(info.command) == 3 and info.command[:2] == ("/bin/sh", "-c")
    line = info.command[2] if shell else shlex.join(info.command)
    return line if len(line) <= _LONGEST_COMMAND else line[: _LONGEST_COMMAND - 1] + "…"


def print_output(vm: "Handle", process_id: str, *, follow: bool, as_json: bool) -> None:
    """Print the output of a process that the VM holds; with `follow`, what it prints until it ends too."""
    process = vm.processes.get(process_id)
    if follow:
        with process.stream(on_disconnect=lambda closed: note(f"{closed}: connecting again")) as stream:
            for event in stream:
                _print_event(event, as_json)
        return
    found = process.output()
    if as_json:
        facts = {"stdout": found.stdout, "stderr": found.stderr, "next_offset": found.next_offset}
        print_json({**facts, "cut": found.cut, "process": found.process})
        return
    if found.cut is not None:
        note(cut_text(found.cut))
    for chunk in found.chunks:
        write_bytes(chunk.stream, chunk.data)


def _print_event(event: "ProcessEvent", as_json: bool) -> None:
    from stead.sdk.models import Output, OutputCut

    match event:
        case Output(stream=stream, data=data, text=text):
            if as_json:
                print_json({"stream": stream, "text": text}, line=True)
            else:
                write_bytes(stream, data)
        case OutputCut():
            if as_json:
                print_json({"cut": event}, line=True)
            else:
                note(cut_text(event))
        case _ if as_json:
            print_json({"exited": event}, line=True)


def cut_text(cut: "OutputCut") -> str:
    return f"[{cut.end - cut.start} bytes of output are no longer held by the VM]"


def signal_processes(
    vm: Vm,
    processes: Annotated[
        list[str],
        typer.Argument(metavar="PROCESS", help="The id of a background process, as `stead vm ps` lists it."),
    ],
    signal: Annotated[str, typer.Option("--signal", "-s", help="TERM, KILL, HUP, USR1, ...")] = "TERM",
    as_json: Json = False,
) -> None:
    """Send a signal to background processes of a VM, and to the children of each: TERM ends them.

    A process that has exited is an error.
    """
    name = signal.upper() if signal.upper().startswith("SIG") else f"SIG{signal.upper()}"
    with connected() as stead:
        handle = stead.vms.find(vm)
        found = [handle.processes.get(each) for each in processes]
        for process in found:
            process.signal(name)
            if not as_json:
                typer.echo(f"sent {name} to {process.id}")
    if as_json:
        print_json({"processes": [{"id": each.id, "signal": name} for each in found]})
