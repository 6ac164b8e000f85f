"""`stead snapshot`: saved VMs."""

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stead.cli.connection import connected
from stead.cli.creation import log_reporter, read_spec
from stead.cli.output import (
    Json,
    ago,
    bytes_text,
    local_time,
    note,
    print_facts,
    print_json,
    print_table,
    show_progress,
    until,
)
from stead.cli.references import SnapshotArgument, SnapshotArguments
from stead.cli.times import Expires, parse_lifetime, parse_past

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk.models import SnapshotPurpose

app = typer.Typer(no_args_is_help=True, help="Snapshots: saved VMs to create others from.")


@app.command("create")
def create_snapshot(
    spec: Annotated[
        Path,
        typer.Option("--spec", metavar="FILE", help="The content, as JSON; - for standard input."),
    ],
    name: Annotated[str | None, typer.Option("--name", "-n", help="A name for the snapshot.")] = None,
    expires: Expires = "never",
    as_json: Json = False,
) -> None:
    """Build a snapshot from a spec and print its id. An existing snapshot of the same spec is reused.

    `stead vm snapshot` saves a running VM.
    """
    wanted = read_spec(spec)
    lifetime = parse_lifetime(expires)
    with connected() as stead, show_progress("building a snapshot") as line:
        progress = log_reporter(line, builds=True)
        created = stead.vms.snapshots.ensure(wanted, name=name, progress=progress, **lifetime)
    if as_json:
        print_json(created)
    else:
        typer.echo(created.id)


@app.command("list")
def list_snapshots(
    agents: Annotated[
        bool, typer.Option("--agents", help="List those that agents saved to resume their sessions.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="List all: also those of agents, and deleted ones.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    as_json: Json = False,
) -> None:
    """List snapshots, without those that agents saved. `on disk` is what a snapshot occupies by itself."""
    purpose: SnapshotPurpose = "agent" if agents else "use"
    with connected() as stead:
        found = stead.vms.snapshots.list(
            include_deleted=everything or None, purpose=None if everything else purpose
        )
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
                "" if each.deleted else until(each.expires_at),
            )
            for each in found
        ]
        headings = ("id", "name", "state", "size", "on disk", "of VM", "created", "expires")
        print_table(headings, rows, "no snapshots")
        if found.agent_count and not agents and not everything:
            note(f"not shown: {found.agent_count} saved by agents (stead snapshot list --agents)")


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
            ("expires", local_time(found.expires_at) or "never"),
            ("saved by", "an agent, to resume its session" if found.purpose == "agent" else None),
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


@app.command("extend")
def extend_snapshot(snapshot: SnapshotArgument, expires: Expires, as_json: Json = False) -> None:
    """Set when a snapshot expires, later or earlier than before. A time such as 7d is from now on."""
    lifetime = parse_lifetime(expires)
    with connected() as stead:
        found = stead.vms.snapshots.extend(snapshot, **lifetime)
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{found.id} expires {local_time(found.expires_at) or 'never'}")


@app.command("delete")
def delete_snapshots(
    snapshots: SnapshotArguments = None,
    agents: Annotated[
        bool,
        typer.Option("--agents", help="Delete all that agents saved: their sessions cannot be resumed then."),
    ] = False,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="With --agents: only those saved more than 2h or 7d ago, or before a date."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete snapshots. VMs that were created from them keep running."""
    if agents == bool(snapshots):
        raise typer.BadParameter("give either snapshots or --agents", param_hint="SNAPSHOT")
    if older_than is not None and not agents:
        raise typer.BadParameter("--older-than needs --agents", param_hint="--older-than")
    before = None if older_than is None else parse_past(older_than, "--older-than")
    with connected() as stead:
        # All are resolved before the first is deleted.
        ids = (
            _saved_by_agents(stead, before)
            if agents
            else list(dict.fromkeys(stead.vms.snapshots.find(each).id for each in snapshots or ()))
        )
        for snapshot_id in ids:
            with _gone_is_deleted() if agents else contextlib.nullcontext():
                stead.vms.snapshots.delete(snapshot_id)
            if not as_json:
                typer.echo(f"deleted {snapshot_id}")
    if as_json:
        print_json({"snapshots": [{"id": snapshot_id, "deleted": True} for snapshot_id in ids]})
    elif not ids:
        typer.echo("no snapshots to delete")


def _saved_by_agents(stead: "Stead", before: datetime | None) -> list[str]:
    """Without those that are being saved."""
    found = stead.vms.snapshots.list(purpose="agent", include_building=False)
    # A server without purposes lists all snapshots.
    saved = [each for each in found if each.purpose == "agent"]
    if before is not None:
        saved = [each for each in saved if each.created_at is not None and each.created_at < before]
    return [each.id for each in saved]


@contextlib.contextmanager
def _gone_is_deleted() -> Iterator[None]:
    """One that expires meanwhile, or that its agent replaces, is deleted as well."""
    from stead.sdk.errors import SnapshotAlreadyDeleted, SnapshotNotFound

    with contextlib.suppress(SnapshotAlreadyDeleted, SnapshotNotFound):
        yield
