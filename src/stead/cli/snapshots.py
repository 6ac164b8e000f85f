"""`stead snapshot`: saved VMs."""

from pathlib import Path
from typing import Annotated

import typer

from stead.cli.connection import connected
from stead.cli.creation import read_spec
from stead.cli.output import (
    Json,
    ago,
    bytes_text,
    local_time,
    print_facts,
    print_json,
    print_table,
    show_progress,
)
from stead.cli.references import SnapshotArgument, SnapshotArguments

app = typer.Typer(no_args_is_help=True, help="Snapshots: saved VMs to create others from.")


@app.command("create")
def create_snapshot(
    spec: Annotated[
        Path,
        typer.Option("--spec", metavar="FILE", help="The content, as JSON; - for standard input."),
    ],
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for the snapshot.")] = None,
    as_json: Json = False,
) -> None:
    """Build a snapshot from a spec and print its id. An existing snapshot of the same spec is reused.

    `stead vm snapshot` saves a running VM.
    """
    wanted = read_spec(spec)
    with connected() as stead, show_progress("building a snapshot") as report:
        created = stead.vms.snapshots.ensure(wanted, name=name, progress=report)
    if as_json:
        print_json(created)
    else:
        typer.echo(created.id)


@app.command("list")
def list_snapshots(
    everything: Annotated[bool, typer.Option("--all", help="Include deleted snapshots.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    as_json: Json = False,
) -> None:
    """List snapshots. `on disk` is what a snapshot occupies by itself."""
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
                each.size,
                bytes_text(each.size_bytes),
                each.source_vm_id,
                ago(each.created_at),
            )
            for each in found
        ]
        headings = ("id", "name", "state", "size", "on disk", "of VM", "created")
        print_table(headings, rows, "no snapshots")


@app.command("get")
def get_snapshot(snapshot: SnapshotArgument, as_json: Json = False) -> None:
    """Show a snapshot."""
    with connected() as stead:
        found = stead.vms.snapshots.get(snapshot)
    if as_json:
        print_json(found)
        return
    print_facts(
        [
            ("id", found.id),
            ("name", found.name),
            ("state", found.state),
            ("failure", found.failure_reason),
            ("size", found.size),
            ("on disk", bytes_text(found.size_bytes)),
            ("of VM", found.source_vm_id),
            ("build", found.build_id),
            ("created", local_time(found.created_at)),
        ]
    )


@app.command("rename")
def rename_snapshot(
    snapshot: SnapshotArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new name.")],
    as_json: Json = False,
) -> None:
    """Rename a snapshot."""
    with connected() as stead:
        found = stead.vms.snapshots.find(snapshot)
        stead.vms.snapshots.update(found.id, name=name)
    if as_json:
        print_json({"id": found.id, "name": name})
    else:
        typer.echo(f"renamed {found.id} to {name}")


@app.command("delete")
def delete_snapshots(snapshots: SnapshotArguments, as_json: Json = False) -> None:
    """Delete snapshots. VMs that were created from them keep running."""
    with connected() as stead:
        # All are resolved before the first is deleted.
        ids = list(dict.fromkeys(stead.vms.snapshots.find(each).id for each in snapshots))
        for snapshot_id in ids:
            stead.vms.snapshots.delete(snapshot_id)
            if not as_json:
                typer.echo(f"deleted {snapshot_id}")
    if as_json:
        print_json({"snapshots": [{"id": snapshot_id, "deleted": True} for snapshot_id in ids]})
