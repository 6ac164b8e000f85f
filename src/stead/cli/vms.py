"""`stead vm`: VMs."""

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, cast

import typer

from stead.cli import creation, files, forward, logs, processes, remote, shell, ssh
from stead.cli.connection import connected
from stead.cli.output import Json, ago, fail, local_time, print_facts, print_json, print_table, show_progress
from stead.cli.references import Vm, Vms, find_vms
from stead.cli.sizes import Cpu, Disk, Memory, SizeOption, wanted_size
from stead.cli.times import Expires, parse_lifetime

if TYPE_CHECKING:
    from stead.sdk import Vm as Handle
    from stead.sdk.models import Persistence, VmInfo, VmState
    from stead.sdk.vm_options import StartOptions

app = typer.Typer(no_args_is_help=True, help="Create, use, fork and suspend VMs.")
app.command("create")(creation.create)


@app.command("list")
def list_vms(
    state: Annotated[
        str | None, typer.Option(help="Only VMs in this state: running, suspended, stopped, ...")
    ] = None,
    search: Annotated[str | None, typer.Option(help="Only VMs with this text in their id or name.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Include deleted VMs that can be created again.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    as_json: Json = False,
) -> None:
    """List VMs with their state, size and address."""
    with connected() as stead:
        wanted = cast("VmState | None", state)  # The server knows the states.
        found = stead.vms.list(state=wanted, search=search, include_deleted=everything or None)
    if as_json:
        print_json(found)
    elif quiet:
        for each in found:
            typer.echo(each.id)
    else:
        rows = [
            (
                each.id,
                each.name,
                "deleted" if each.deleted else each.state,
                each.size,
                each.address,
                ago(each.created_at),
            )
            for each in found
        ]
        print_table(("id", "name", "state", "size", "address", "created"), rows, "no VMs")


@app.command("url")
def print_url(
    vm: Vm,
    port: Annotated[int, typer.Argument(metavar="PORT", min=1, max=65535, help="The port in the VM.")],
    as_json: Json = False,
) -> None:
    """Print a URL for a port of a VM: of a name in a preview zone, which is mapped unless there is one."""
    with connected() as stead:
        found = stead.vms.find(vm)
        url = found.url(port)
    if as_json:
        print_json({"vm_id": found.id, "port": port, "url": url})
    else:
        typer.echo(url)


@app.command("get")
def get_vm(vm: Vm, as_json: Json = False) -> None:
    """Show a VM. This does not wake it."""
    with connected() as stead:
        info = stead.vms.find(vm).info()
    if as_json:
        print_json(info)
        return
    print_facts(_facts(info))


def _facts(info: "VmInfo") -> list[tuple[str, object]]:
    idle = "never" if info.idle_timeout_seconds is None else f"after {info.idle_timeout_seconds} s idle"
    return [
        ("id", info.id),
        ("name", info.name),
        ("state", "deleted" if info.deleted else info.state),
        ("reason", None if info.reason == info.state else info.reason),
        ("size", info.size),
        ("address", info.address),
        *(("VPC", f"{nic.vpc} {nic.ipv4}") for nic in info.nics),
        ("created", _moment(info.created_at)),
        ("last traffic", _moment(info.last_network_activity) or "never"),
        ("suspends", idle),
        ("deleted", _deletion(info.persistence)),
        ("workdir", info.workdir),
        ("snapshot", info.snapshot_id),
        ("build", info.build_id),
    ]


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else f"{local_time(moment)} ({ago(moment)})"


def _deletion(persistence: "Persistence | None") -> str | None:
    """When the server deletes a VM by itself."""
    if persistence is None:
        return None
    match persistence.type:
        case "persistent":
            return "only on request"
        case "sticky":
            return f"when the host needs its disk space (priority {persistence.priority})"
        case "ephemeral":
            return (
                "when it stops" if persistence.delete_event == "OnStop" else "when it is suspended or stops"
            )


@app.command("rename")
def rename_vm(
    vm: Vm,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
    as_json: Json = False,
) -> None:
    """Rename a VM."""
    with connected() as stead:
        info = stead.vms.find(vm).rename(name)
    if as_json:
        print_json(info)
    else:
        typer.echo(f"renamed {info.id}" + (f" to {info.name}" if info.name else ""))


# State changes


_SIGNAL_HINT = "; to end a process of a VM: stead vm signal VM PROCESS"


def _each(
    vms: list[str],
    doing: str,
    done: str,
    action: "Callable[[Handle], object]",
    as_json: bool,
    *,
    hint: str = "",
) -> None:
    """Change VMs one after the other and print one line for each. All are found before the first is changed.

    `hint` is added to the error if a VM after the first one is not found.
    """
    from stead.sdk.errors import VmNotFound

    with connected() as stead:
        try:
            found = find_vms(stead, vms)
        except VmNotFound as error:
            if len(vms) < 2 or not hint:
                raise
            raise VmNotFound(error.message + hint, code=error.code, status=error.status) from None
        for vm in found:
            with show_progress(f"{doing} {vm.id}"):
                action(vm)
            if not as_json:
                typer.echo(f"{done} {vm.id}")
    if as_json:
        print_json({"vms": [{"id": vm.id, "state": done} for vm in found]})


@app.command()
def start(
    vms: Vms,
    idle_timeout: creation.IdleTimeout = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the services are ready.")] = False,
    as_json: Json = False,
) -> None:
    """Wake suspended VMs and boot stopped ones."""
    options: StartOptions = {"wait_for_ready_signal": wait or None}
    if idle_timeout is not None:
        options["idle_timeout_seconds"] = creation.seconds_or_never(idle_timeout)
    _each(vms, "starting", "running", lambda vm: vm.start(**options), as_json)


@app.command()
def stop(vms: Vms, as_json: Json = False) -> None:
    """Shut VMs down. The disk is kept, the memory is not."""
    _each(vms, "stopping", "stopped", lambda vm: vm.stop(), as_json)


@app.command()
def suspend(vms: Vms, as_json: Json = False) -> None:
    """Suspend VMs with their memory. The next command or connection wakes them."""
    _each(vms, "suspending", "suspended", lambda vm: vm.suspend(), as_json)


@app.command()
def kill(
    vms: Vms,
    signal: Annotated[str | None, typer.Option("--signal", "-s", hidden=True)] = None,
    as_json: Json = False,
) -> None:
    """Power VMs off without a shutdown; the disk is kept. `stead vm signal` ends a process of a VM."""
    if signal is not None:
        text = "`vm kill` powers VMs off; for a process: stead vm signal VM PROCESS --signal TERM"
        fail(text, code="USAGE", exit_code=2)
    _each(vms, "killing", "stopped", lambda vm: vm.kill(), as_json, hint=_SIGNAL_HINT)


@app.command()
def delete(vms: Vms, as_json: Json = False) -> None:
    """Delete VMs with their disks and memory. This cannot be undone."""
    _each(vms, "deleting", "deleted", lambda vm: vm.delete(), as_json)


@app.command("await")
def await_exit(
    vm: Vm,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="Fail after this time.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Wait until a VM no longer runs, and print the reason."""
    with connected() as stead:
        handle = stead.vms.find(vm)
        with show_progress(f"waiting until {handle.id} no longer runs"):
            status = handle.wait_for_exit(timeout=timeout)
    if as_json:
        print_json({"id": handle.id, "exit_status": status})
    else:
        typer.echo(status)


# Copies and sizes


@app.command()
def fork(
    vm: Vm,
    count: Annotated[
        int, typer.Option("--count", "-c", metavar="N", min=1, max=100, help="The number of forks.")
    ] = 1,
    name: Annotated[
        str | None,
        typer.Option("--name", "-n", help="The name; several forks are called NAME-1, NAME-2, ..."),
    ] = None,
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Delete a fork when it is suspended or stops.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Create VMs with the current memory, processes and disk of this one; print their ids."""
    with connected() as stead:
        handle = stead.vms.find(vm)
        with show_progress(f"forking {handle.id}"):
            children = handle.fork(count=count, name=name, persistence="ephemeral" if ephemeral else None)
    if as_json:
        print_json({"vm_id": handle.id, "forks": [{"id": each.id, "name": each.name} for each in children]})
        return
    for each in children:
        typer.echo(each.id)


@app.command()
def snapshot(
    vm: Vm,
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for the snapshot.")] = None,
    expires: Expires = "never",
    as_json: Json = False,
) -> None:
    """Save the current memory and disk of a VM as a snapshot; print its id. The VM keeps running."""
    lifetime = parse_lifetime(expires)
    with connected() as stead:
        handle = stead.vms.find(vm)
        with show_progress(f"saving {handle.id}"):
            saved = handle.snapshot(name=name, **lifetime)
    if as_json:
        print_json(saved)
    else:
        typer.echo(saved.id)


@app.command()
def resize(
    vm: Vm,
    size: SizeOption = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    as_json: Json = False,
) -> None:
    """Change the size of a VM. A running VM is rebooted. A disk can only grow."""
    wanted = wanted_size(size, cpu, memory, disk)
    if wanted is None:
        raise typer.BadParameter(
            "nothing to change: give --size, --cpu, --memory or --disk", param_hint="--size"
        )
    with connected() as stead:
        handle = stead.vms.find(vm)
        with show_progress(f"resizing {handle.id}"):
            handle.resize(wanted)
        info = handle.info()
    if as_json:
        print_json(info)
    else:
        typer.echo(f"{info.id} is {info.size}, {info.state}")


# Commands, files and logs

app.command("exec", cls=remote.ExecCommand)(remote.exec_)
app.command("run", cls=remote.ExecCommand)(processes.run)
app.command("ps")(processes.list_processes)
app.command("signal")(processes.signal_processes)
app.command("shell")(shell.shell)
app.command("attach")(shell.attach)
app.command("sessions")(shell.sessions)
app.command("forward")(forward.forward)
app.command("ssh", cls=ssh.SshCommand)(ssh.ssh)
app.add_typer(files.app, name="fs")
app.command("cp")(files.copy)
app.command("logs")(logs.logs)
app.command("console")(logs.console)
