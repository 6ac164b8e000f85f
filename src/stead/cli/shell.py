"""`stead vm shell`, `attach` and `sessions`: interactive terminals in a VM."""

import contextlib
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected, run_connected
from stead.cli.output import Json, ago, fail, note, print_json, print_table, show_progress
from stead.cli.references import Vm
from stead.cli.standard_input import on_terminal
from stead.cli.terminal import say, terminal_size, terminal_type

if TYPE_CHECKING:
    from stead.cli.interaction import Interaction
    from stead.sdk import AsyncPtySession, AsyncStead, AsyncVm
    from stead.sdk.sockets import Closed

_EVICTED = 1001
"""The close code when the VM was suspended or ended, and when the server stops."""

User = Annotated[str | None, typer.Option("--user", "-u", help="The Linux user. Default: root.")]


def shell(
    vm: Vm,
    user: User = None,
    session: Annotated[
        str | None,
        typer.Option(
            "--session", "-s", metavar="ID", help="Attach to this session; open it if there is none."
        ),
    ] = None,
) -> None:
    """Open a login shell in a VM. A suspended or stopped VM is started first.

    Type ~. at the beginning of a line to detach, as in ssh: the shell continues, and `stead vm attach`
    returns to it. It also survives a dropped network and a suspended VM. The exit code is that of the shell.
    """
    _require_terminal(f"stead vm exec {vm} 'ls -l'")

    async def work(stead: "AsyncStead") -> int:
        found = await stead.vms.find(vm)
        return await _use_terminal(found if user is None else found.user(user), session, create=True)

    raise typer.Exit(run_connected(work))


def attach(
    vm: Vm,
    session: Annotated[
        str, typer.Argument(metavar="SESSION", help="The id, as `stead vm sessions` lists it.")
    ],
    user: User = None,
) -> None:
    """Return to a terminal session: its screen is drawn again, with the scrollback.

    Type ~. at the beginning of a line to detach. Several clients can attach to one session.
    """
    _require_terminal(f"stead vm sessions {vm}")

    async def work(stead: "AsyncStead") -> int:
        found = await stead.vms.find(vm)
        return await _use_terminal(found if user is None else found.user(user), session, create=False)

    raise typer.Exit(run_connected(work))


def sessions(
    vm: Vm,
    close: Annotated[
        list[str] | None,
        typer.Option("--close", metavar="ID", help="Kill the programs of this session; repeatable."),
    ] = None,
    user: User = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    as_json: Json = False,
) -> None:
    """List the terminal sessions of a VM, or close some. Sessions that ended are listed for a minute."""
    with connected() as stead:
        found = stead.vms.find(vm)
        pty = (found if user is None else found.user(user)).pty
        for each in close or ():
            pty.close(each)
            if not as_json:
                typer.echo(f"closed {each}")
        if close:
            if as_json:
                print_json({"closed": close})
            return
        listed = pty.list()
    if as_json:
        print_json({"sessions": listed})
    elif quiet:
        for info in listed:
            typer.echo(info.id)
    else:
        rows = [
            (
                info.id,
                "running" if info.running else f"exited {info.exit_code}",
                info.user or "root",
                info.attached_count,
                f"{info.cols}x{info.rows}",
                ago(info.created_at),
                info.exec or "login shell",
            )
            for info in listed
        ]
        headings = ("id", "state", "user", "attached", "size", "created", "program")
        print_table(headings, rows, "no terminal sessions")


def _require_terminal(instead: str) -> None:
    if not on_terminal() or not sys.stdout.isatty():
        fail(
            f"standard input and output must be a terminal. Without one: {instead}",
            code="NO_TERMINAL",
        )


async def _use_terminal(vm: "AsyncVm", session_id: str | None, *, create: bool) -> int:
    """Connect the local terminal with a session; returns the exit code of this command."""
    from stead.cli.interaction import Detached, Interaction, Signalled

    interaction = Interaction()

    async def disconnected(closed: "Closed") -> None:
        await report_outage(interaction, vm, closed)

    with show_progress(f"connecting to {vm.id}"):
        session = await _open(vm, session_id, create, disconnected)
    try:
        async with session:
            await interaction.converse(session, session)
    except Detached:
        user = f" --user {vm.linux_user}" if vm.linux_user else ""
        note(f"\ndetached from session {session.id}. To return: stead vm attach {vm.id} {session.id}{user}")
        return 0
    except Signalled as signalled:
        return 128 + signalled.number
    return session.exit_code or 0


async def _open(
    vm: "AsyncVm",
    session_id: str | None,
    create: bool,
    on_disconnect: "Callable[[Closed], Awaitable[None]]",
) -> "AsyncPtySession":
    from stead.sdk.errors import AlreadyExists

    cols, rows = terminal_size()
    if create:
        try:
            return await vm.pty.open(
                cols=cols,
                rows=rows,
                term=terminal_type(),
                session_id=session_id,
                on_disconnect=on_disconnect,
            )
        except AlreadyExists:
            pass
    return await vm.pty.attach(session_id or "", cols=cols, rows=rows, on_disconnect=on_disconnect)


async def report_outage(interaction: "Interaction", vm: "AsyncVm", closed: "Closed") -> None:
    """Say why the connection ended. A VM that was suspended stays so until the user presses a key; one that
    was stopped has ended its programs."""
    from stead.sdk.errors import ServerUnreachable, SessionClosed

    state: str | None = None
    if closed.code == _EVICTED:
        with contextlib.suppress(ServerUnreachable):  # The server restarts, and the VM may run.
            state = (await vm.info()).state
    if state in ("suspending", "suspended"):
        await interaction.wait_for_key("the VM was suspended: press a key to wake it, ~. to leave")
    elif state in ("stopped", "lost"):
        raise SessionClosed(f"the VM is {state}: {closed.reason}")
    else:
        say(f"{closed.reason or 'the connection was lost'}: connecting again; ~. leaves")
