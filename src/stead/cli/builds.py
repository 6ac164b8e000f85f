"""`stead build`: builds of VMs and snapshots from specs, while they run and afterwards."""

import re
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, cast

import typer

from stead.cli.connection import connected
from stead.cli.logs import print_entry
from stead.cli.output import Json, ago, local_time, note, print_facts, print_json, print_table
from stead.cli.references import SHORTEST

if TYPE_CHECKING:
    from stead.sdk import Stead
    from stead.sdk.models import Build, BuildPhase, BuildState, LogEntry

app = typer.Typer(no_args_is_help=True, help="Builds of VMs and snapshots: state, phases and logs.")

BuildArgument = Annotated[
    str,
    typer.Argument(
        metavar="BUILD", help=f"The build: its id, or an id prefix of {SHORTEST} or more characters."
    ),
]
_INTERVAL = 1.0
_START = "bld-"
_FULL_ID = re.compile(r"bld-[a-z0-9]{20}")
_PAGE = 100


@app.command("list")
def list_builds(
    state: Annotated[
        str | None, typer.Option(help="Only builds in this state: pending, running, succeeded or failed.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-l", min=1, max=1000, help="Maximum number.")] = 20,
    offset: Annotated[int, typer.Option(min=0, help="Skip this many.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the ids.")] = False,
    as_json: Json = False,
) -> None:
    """List builds, newest first."""
    with connected() as stead:
        wanted = cast("BuildState | None", state)  # The server knows the states.
        found = stead.vms.builds.list(state=wanted, limit=limit, offset=offset)
    if as_json:
        print_json(found)
        return
    if quiet:
        for each in found:
            typer.echo(each.id)
        return
    rows = [
        (
            each.id,
            each.state,
            ago(each.started_at),
            _duration(each.started_at, each.finished_at),
            _detail(each),
        )
        for each in found
    ]
    print_table(("id", "state", "started", "took", "phase or failure"), rows, "no builds")
    if (end := offset + len(found)) < found.total_count:
        note(f"{found.total_count - end} more: --offset {end}")


@app.command("get")
def get_build(build: BuildArgument, as_json: Json = False) -> None:
    """Show a build and its phases with their times."""
    with connected() as stead:
        build_id = _find(stead, build)
        found = stead.vms.builds.get(build_id)
        phases = stead.vms.builds.phases(build_id)
    if as_json:
        print_json({"build": found, "phases": phases})
        return
    print_facts(
        [
            ("id", found.id),
            ("state", found.state),
            ("phase", found.current_phase),
            ("failure", found.failure_reason),
            ("started", local_time(found.started_at)),
            ("finished", local_time(found.finished_at)),
            ("took", _duration(found.started_at, found.finished_at)),
        ]
    )
    if phases:
        typer.echo("")
        print_table(("phase", "state", "started", "took"), [_row(each) for each in phases], "")


@app.command("logs")
def build_logs(
    build: BuildArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the build has finished.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the log of a build.

    With `--follow`, the exit code is 1 if the build failed; with `--follow --json` each line is a JSON
    document.
    """
    with connected() as stead:
        build_id = _find(stead, build)
        if follow:
            failed = _follow(stead, build_id, as_json)
        else:
            _print_all(_lines(stead, build_id), as_json)
            failed = False
    if failed:
        raise typer.Exit(1)


def _follow(stead: "Stead", build_id: str, as_json: bool) -> bool:
    """Print lines as they appear. Whether the build failed."""
    from stead.sdk.log_deduplication import LogDeduplicator

    new = LogDeduplicator()
    while True:
        # The state first: lines that are read after a final state are all there are.
        build = stead.vms.builds.get(build_id)
        for entry in new.unseen(_lines(stead, build_id)):
            print_entry(entry, as_json)
        if build.finished:
            return build.state == "failed"
        time.sleep(_INTERVAL)


def _lines(stead: "Stead", build_id: str) -> "list[LogEntry]":
    found: list[LogEntry] = []
    token = None
    while True:
        page = stead.vms.builds.logs(build_id, page_size=1000, page_token=token)
        found += page
        token = page.next_page_token
        if token is None:
            return found


def _print_all(lines: "list[LogEntry]", as_json: bool) -> None:
    if as_json:
        print_json({"logs": lines})
        return
    for entry in lines:
        print_entry(entry, as_json)
    if not lines:
        note("no log lines")


def _find(stead: "Stead", reference: str) -> str:
    """The id of a build. An id prefix, with or without `bld-`, is searched among all builds."""
    if _FULL_ID.fullmatch(reference):
        return reference
    prefix = reference if reference.startswith(_START) else _START + reference
    long_enough = len(prefix) >= len(_START) + SHORTEST
    from stead.sdk.errors import AmbiguousName, BuildNotFound

    found: list[str] = []
    offset = 0
    while long_enough:
        page = stead.vms.builds.list(limit=_PAGE, offset=offset)
        found += [each.id for each in page if each.id.startswith(prefix)]
        offset += len(page)
        if not len(page) or offset >= page.total_count:
            break
    if not found:
        hint = "" if long_enough else f"; an id prefix needs at least {SHORTEST} characters"
        raise BuildNotFound(f"no build {reference!r}{hint}", code="BUILD_NOT_FOUND", status=404)
    if len(found) > 1:
        raise AmbiguousName("build", reference, [(each, None) for each in found])
    return found[0]


def _row(phase: "BuildPhase") -> tuple[object, ...]:
    started = None if phase.started_at is None else f"{phase.started_at.astimezone():%H:%M:%S}"
    return phase.name, phase.state, started, _duration(phase.started_at, phase.finished_at)


def _detail(build: "Build") -> str | None:
    """The phase that runs, or the first line of the failure: a table has one line for each build."""
    return build.current_phase or (build.failure_reason or "").partition("\n")[0]


def _duration(start: datetime | None, end: datetime | None) -> str:
    """How long something took, or has taken so far."""
    if start is None:
        return ""
    seconds = max(0.0, ((end or datetime.now(UTC)) - start).total_seconds())
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
