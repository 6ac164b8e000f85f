"""`stead snapshot`: kept machines."""

from pathlib import Path
from typing import Annotated

import typer

from stead.cli.connection import connected
from stead.cli.creation import read_spec
from stead.cli.output import Json, ago, print_facts, print_json, print_table, size_text, working
from stead.cli.references import SnapshotArgument, find_snapshot

app = typer.Typer(no_args_is_help=True, help="Snapshots: kept machines to make others from.")


@app.command("create")
def create_snapshot(
    spec: Annotated[
        Path,
        typer.Option("--spec", metavar="FILE", help="What it should hold, as JSON; - for standard input."),
    ],
    name: Annotated[str | None, typer.Option("--name", "-n", help="A label.")] = None,
    as_json: Json = False,
) -> None:
    """Build a snapshot from a spec, unless there is one of it already; print its id.

    `stead vm snapshot` takes one of a machine.
    """
    wanted = read_spec(spec)
    with connected() as stead, working("building a snapshot") as report:
        made = stead.vms.snapshots.ensure(wanted, name=name, progress=report)
    if as_json:
        print_json(made)
    else:
        typer.echo(made.id)


@app.command("list")
def list_snapshots(
    everything: Annotated[bool, typer.Option("--all", help="Show deleted ones too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the ids.")] = False,
    as_json: Json = False,
) -> None:
    """Show the snapshots."""
    with connected() as stead:
        found = stead.vms.snapshots.list(include_deleted=everything or None)
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
                size_text(each.vcpu_count, each.mem_size_mib, each.rootfs_size_mb),
                each.source_vm_id,
                ago(each.created_at),
            )
            for each in found
        ]
        print_table(("id", "name", "state", "size", "of machine", "created"), rows, "no snapshots")


@app.command("get")
def get_snapshot(snapshot: SnapshotArgument, as_json: Json = False) -> None:
    """Show what is known of a snapshot."""
    with connected() as stead:
        found = stead.vms.snapshots.get(find_snapshot(stead, snapshot))
    if as_json:
        print_json(found)
        return
    created = None if found.created_at is None else f"{found.created_at.astimezone():%Y-%m-%d %H:%M:%S %Z}"
    print_facts(
        [
            ("id", found.id),
            ("name", found.name),
            ("state", found.state),
            ("failure", found.failure_reason),
            ("size", size_text(found.vcpu_count, found.mem_size_mib, found.rootfs_size_mb)),
            ("of machine", found.source_vm_id),
            ("build", found.build_id),
            ("created", created),
        ]
    )


@app.command("rename")
def rename_snapshot(snapshot: SnapshotArgument, name: str, as_json: Json = False) -> None:
    """Give a snapshot another name."""
    with connected() as stead:
        snapshot_id = find_snapshot(stead, snapshot)
        stead.vms.snapshots.update(snapshot_id, name=name)
    if as_json:
        print_json({"id": snapshot_id, "name": name})
    else:
        typer.echo(f"{snapshot_id} is {name}")


@app.command("delete")
def delete_snapshots(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT")], as_json: Json = False
) -> None:
    """Delete snapshots. Machines that were made from them live on."""
    with connected() as stead:
        ids = [find_snapshot(stead, each) for each in snapshots]
        for snapshot_id in ids:
            stead.vms.snapshots.delete(snapshot_id)
            if not as_json:
                typer.echo(f"deleted {snapshot_id}")
    if as_json:
        print_json({"snapshots": [{"id": snapshot_id, "deleted": True} for snapshot_id in ids]})
