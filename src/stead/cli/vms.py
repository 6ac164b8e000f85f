"""`stead vm`: machines."""

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stead.cli import creation, files, logs, remote
from stead.cli.connection import connected
from stead.cli.output import Json, ago, print_facts, print_json, print_table, size_text, working
from stead.cli.references import Vm, Vms, find_vm, find_vms
from stead.cli.sizes import Cpu, Disk, Memory, SizeOption, wanted_size

if TYPE_CHECKING:
    from stead.sdk import Vm as Handle
    from stead.sdk.models import Persistence, Sizing, VmInfo

app = typer.Typer(no_args_is_help=True, help="Machines: make them, use them, put them to sleep.")
app.command("create")(creation.create)


@app.command("list")
def list_vms(
    state: Annotated[
        str | None, typer.Option(help="Only those that are running, suspended, stopped, ...")
    ] = None,
    search: Annotated[str | None, typer.Option(help="Only those with this in their id or name.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also deleted ones that can be made anew.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the ids.")] = False,
    as_json: Json = False,
) -> None:
    """Show the machines."""
    options: dict[str, Any] = {"state": state, "search": search, "include_deleted": everything or None}
    with connected() as stead:
        found = stead.vms.list(**options)
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
                _size(each.sizing),
                ago(each.created_at),
            )
            for each in found
        ]
        print_table(("id", "name", "state", "size", "created"), rows, "no machines")


@app.command("get")
def get_vm(vm: Vm, as_json: Json = False) -> None:
    """Show what is known of a machine; this does not wake it."""
    with connected() as stead:
        info = stead.vms.ref(find_vm(stead, vm)).info()
    if as_json:
        print_json(info)
        return
    print_facts(_facts(info))


def _facts(info: "VmInfo") -> list[tuple[str, object]]:
    idle = "never" if info.idle_timeout_seconds is None else f"after {info.idle_timeout_seconds} s"
    return [
        ("id", info.id),
        ("name", info.name),
        ("state", "deleted" if info.deleted else info.state),
        ("reason", None if info.reason == info.state else info.reason),
        ("size", _size(info.sizing)),
        ("created", _moment(info.created_at)),
        ("last traffic", _moment(info.last_network_activity)),
        ("sleeps", idle),
        ("kept", _kept(info.persistence)),
        ("workdir", info.workdir),
        ("snapshot", info.snapshot_id),
        ("build", info.build_id),
    ]


def _size(sizing: "Sizing | None") -> str:
    if sizing is None:
        return ""
    return size_text(sizing.vcpu_count, sizing.mem_size_mib, sizing.rootfs_size_mb)


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z} ({ago(moment)})"


def _kept(persistence: "Persistence | None") -> str | None:
    match persistence and persistence.type:
        case "persistent":
            return "until it is deleted"
        case "sticky":
            return f"until its room is needed (priority {persistence.priority if persistence else None})"
        case "ephemeral":
            event = persistence.delete_event if persistence else None
            return "until it is suspended or stops" if event == "OnSuspend" else "until it stops"
        case _:
            return None


# From one state to another


def _each(vms: list[str], doing: str, done: str, action: "Callable[[Handle], object]", as_json: bool) -> None:
    """Do something to machines, one after the other, and say so of each."""
    with connected() as stead:
        ids = find_vms(stead, vms)
        for vm_id in ids:
            with working(f"{doing} {vm_id}"):
                action(stead.vms.ref(vm_id))
            if not as_json:
                typer.echo(f"{done} {vm_id}")
    if as_json:
        print_json({"vms": [{"id": vm_id, "state": done} for vm_id in ids]})


@app.command()
def start(
    vms: Vms,
    idle_timeout: creation.IdleTimeout = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until its services are ready.")] = False,
    as_json: Json = False,
) -> None:
    """Wake machines that sleep, boot those that are stopped."""
    options: dict[str, Any] = {"wait_for_ready_signal": wait or None}
    if idle_timeout is not None:
        options["idle_timeout_seconds"] = creation.seconds_or_never(idle_timeout)
    _each(vms, "starting", "running", lambda vm: vm.start(**options), as_json)


@app.command()
def stop(vms: Vms, as_json: Json = False) -> None:
    """Shut machines down: their disks are kept, their memory is not."""
    _each(vms, "stopping", "stopped", lambda vm: vm.stop(), as_json)


@app.command()
def suspend(vms: Vms, as_json: Json = False) -> None:
    """Let machines sleep, memory and all; the next use wakes them."""
    _each(vms, "suspending", "suspended", lambda vm: vm.suspend(), as_json)


@app.command()
def kill(vms: Vms, as_json: Json = False) -> None:
    """Cut machines' power; their disks are kept."""
    _each(vms, "ending", "stopped", lambda vm: vm.kill(), as_json)


@app.command()
def delete(vms: Vms, as_json: Json = False) -> None:
    """Delete machines with everything they have."""
    _each(vms, "deleting", "deleted", lambda vm: vm.delete(), as_json)


@app.command("await")
def await_exit(
    vm: Vm,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", min=0.001)] = None,
    as_json: Json = False,
) -> None:
    """Wait until a machine is no longer running, and say why."""
    with connected() as stead:
        handle = stead.vms.ref(find_vm(stead, vm))
        with working(f"waiting for the end of {handle.id}"):
            status = handle.wait_for_exit(timeout=timeout)
    if as_json:
        print_json({"id": handle.id, "exit_status": status})
    else:
        typer.echo(status)


# Copies and sizes


@app.command()
def fork(
    vm: Vm,
    count: Annotated[int, typer.Option("--count", "-c", min=1, max=100, help="How many.")] = 1,
    ephemeral: Annotated[bool, typer.Option("--ephemeral", help="Delete them when they stop.")] = False,
    as_json: Json = False,
) -> None:
    """Make machines with the memory, processes and files that this one has now; print their ids."""
    with connected() as stead:
        handle = stead.vms.ref(find_vm(stead, vm))
        with working(f"forking {handle.id}"):
            children = handle.fork(count=count, persistence="ephemeral" if ephemeral else None)
    if as_json:
        print_json({"vm_id": handle.id, "forks": [{"id": each.id} for each in children]})
        return
    for each in children:
        typer.echo(each.id)


@app.command()
def snapshot(
    vm: Vm,
    name: Annotated[str | None, typer.Option("--name", "-n", help="A label.")] = None,
    as_json: Json = False,
) -> None:
    """Keep a machine as it is now, memory and disk, and print the snapshot's id. The machine goes on."""
    with connected() as stead:
        handle = stead.vms.ref(find_vm(stead, vm))
        with working(f"keeping {handle.id}"):
            taken = handle.snapshot(name=name)
    if as_json:
        print_json(taken)
    else:
        typer.echo(taken.id)


@app.command()
def resize(
    vm: Vm,
    size: SizeOption = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    as_json: Json = False,
) -> None:
    """Give a machine another size; one that runs is booted anew. A disk only grows."""
    wanted = wanted_size(size, cpu, memory, disk)
    if not wanted:
        raise typer.BadParameter("say what to change: --cpu, --memory, --disk or --size", param_hint="--size")
    amounts: dict[str, Any] = {"cpu": wanted.vcpus, "memory": wanted.memory_gb, "storage": wanted.disk_gb}
    with connected() as stead:
        handle = stead.vms.ref(find_vm(stead, vm))
        with working(f"resizing {handle.id}"):
            handle.resize(**amounts)
        info = handle.info()
    if as_json:
        print_json(info)
    else:
        typer.echo(f"{info.id} is {_size(info.sizing)}, {info.state}")


# Inside

app.command("exec", cls=remote.ExecCommand)(remote.exec_)
app.add_typer(files.app, name="fs")
app.command("cp")(files.copy)
app.command("logs")(logs.logs)
